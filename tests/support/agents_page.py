"""Writes the table of clients in docs/agents.md: `make docs`."""

from __future__ import annotations

from pathlib import Path

from support.proofs import read_proofs, read_versions, with_table

TESTS = Path(__file__).parents[1] / "gateway"
PAGE = TESTS.parents[1] / "docs" / "agents.md"
COLUMNS = (
    "streaming", "tools", "parallel calls", "thinking", "retry", "compaction", "sub-agents",
)  # fmt: skip
CLIENTS = (
    "openai/chat", "openai/responses", "anthropic/messages", "claude-agent-sdk/messages",
    "codex/responses", "openai-agents/responses", "openai-agents/chat", "pydantic-ai/chat",
    "langgraph/chat", "smolagents/chat", "mini-swe-agent/chat",
)  # fmt: skip
"""The names of the clients in the marks of tests, each with its API."""
LACKS = {
    ("openai-agents/chat", "thinking"): "not sent back",
    ("langgraph/chat", "thinking"): "not sent back",
    ("smolagents/chat", "thinking"): "not sent back",
    ("smolagents/chat", "compaction"): "not a feature",
    ("mini-swe-agent/chat", "streaming"): "not a feature",
    ("mini-swe-agent/chat", "compaction"): "not a feature",
    ("mini-swe-agent/chat", "sub-agents"): "not a feature",
}
"""The cells of features that a client does not have, so that no test can use them."""
APIS = {"chat": "chat completions", "responses": "Responses", "messages": "Messages"}


def page() -> str:
    """Return the page with the table."""
    versions = read_versions((TESTS / "packages").glob("*.txt"))
    versions["pydantic-ai"] = versions["pydantic-ai-slim"]
    rows = {}
    for row in CLIENTS:
        client, api = row.split("/")
        rows[row] = {
            "client": f"`{client}`", "tested with": versions.get(client, ""), "API": APIS[api],
        }  # fmt: skip
    proofs = read_proofs(TESTS.glob("test_*.py")) | LACKS
    return with_table(PAGE.read_text(), "clients", COLUMNS, rows, proofs)


if __name__ == "__main__":
    PAGE.write_text(page())
