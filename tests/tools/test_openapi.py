"""The tool server against what `/openapi.json` says of it (schemathesis)."""

from __future__ import annotations

import re
import threading
from collections import Counter
from urllib.parse import quote

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from agentrl import registry
from agentrl.tools import tool
from agentrl.tools.serving.listen import ToolServer

TOKEN = "open-sesame"
EXAMPLES = settings.default.max_examples // 2
"""For each of six operations, and of wrong requests for each of three."""


@pytest.fixture(scope="module")
def url():
    """A server in this process."""
    with registry.tools.isolated(keep=()):

        @tool
        async def echo(value: int, text: str = "") -> str:
            """Say it."""
            return f"{value} {text}"

        @tool
        class Counts:
            """Counts."""

            def __init__(self, start: int = 0):
                self.n = start

            async def count(self) -> int:
                """Count."""
                self.n += 1
                return self.n

            def reward(self) -> float:
                return float(self.n)

        ready = threading.Event()
        server = ToolServer("127.0.0.1", 0, TOKEN, ready.set)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert ready.wait(20)
        yield server.url
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def client(url):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def schema(client):
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


ELSEWHERE = [
    # A row and a conversation have more to them than the schema says.
    positive_data_acceptance,
    # It takes a token that is given here for one it made up: see test_tools_server.py.
    ignored_auth,
]
OPERATIONS = {
    ("POST", "/sessions"),
    ("POST", "/sessions/{episode_id}/calls"),
    ("POST", "/sessions/{episode_id}/respond"),
    ("POST", "/sessions/{episode_id}/reward"),
    ("DELETE", "/sessions/{episode_id}"),
    ("GET", "/tools"),
    ("GET", "/health"),
    ("GET", "/metrics"),
}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda m: m.value)
def test_the_server_conforms_to_its_openapi_schema(schema, url, mode):
    """H12: nothing is the server's failure, and every answer is one that is described."""
    seen: set[tuple[str, str]] = set()
    statuses: Counter[int] = Counter()
    session = requests.Session()
    session.trust_env = False
    for result in schema.get_all_operations():
        operation = result.ok()
        seen.add((operation.method.upper(), operation.path))
        if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # takes nothing that could be wrong

        @settings(
            max_examples=EXAMPLES,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            response = case.call(
                base_url=url,
                session=session,
                headers={"authorization": f"Bearer {TOKEN}"},
            )
            statuses[response.status_code] += 1
            assert response.status_code < 500
            case.validate_response(response, excluded_checks=ELSEWHERE)

        check()
    assert seen == OPERATIONS
    assert sum(statuses.values()) > 2 * EXAMPLES
    assert len(statuses) > 2, statuses


NAMES = st.sampled_from(["echo", "count", "nothing", ""])
EPISODES = st.sampled_from(["a", "a b/ü", "..", "%2e", "x" * 256, "calls"])
BODIES = st.fixed_dictionaries(
    {
        "turn": st.integers(0, 2),
        "call_index": st.integers(0, 1),
        "name": NAMES,
        "arguments": st.sampled_from(
            [{}, {"value": 3}, {"value": "x"}, {"value": 3, "text": "ü\0"}]
        ),
    }
)


@settings(suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from(["open", "call", "close"]), EPISODES, BODIES)))
def test_sessions_in_any_order(client, schema, steps):
    """Calls that are well formed, in episodes that may be open, closed or neither."""
    # Clients take dots for a way up, so they are sent escaped.
    for what, episode, body in steps:
        path = f"/sessions/{quote(episode, safe='').replace('.', '%2e')}"
        if what == "open":
            sample = {"tools": ["echo", "counts"]}
            answer = client.post("/sessions", json={"episode_id": episode, "sample": sample})
            operation, known = schema["/sessions"]["POST"], {200, 404}
        elif what == "call":
            answer = client.post(f"{path}/calls", json=body)
            operation, known = schema["/sessions/{episode_id}/calls"]["POST"], {200, 404, 409}
        else:
            answer = client.delete(path)
            operation, known = schema["/sessions/{episode_id}"]["DELETE"], {200, 404}
        assert answer.status_code in known, (what, episode, answer.text)
        operation.validate_response(answer)


def test_metrics(client):
    """Return the number of calls since then, by tool and outcome."""

    def value(line: str) -> float:
        page = client.get("/metrics").text
        match = re.search(rf"^{re.escape(line)} (\S+)$", page, re.MULTILINE)
        return float(match[1]) if match else 0.0

    lines = {
        'agentrl_tool_calls_total{outcome="ok",tool="echo"}': 2,
        'agentrl_tool_calls_total{outcome="schema",tool="echo"}': 1,
        'agentrl_tool_calls_total{outcome="unknown_tool",tool=""}': 2,
        'agentrl_tool_calls_total{outcome="UnknownEpisode",tool=""}': 1,
        'agentrl_tool_execute_seconds_count{tool="echo"}': 2,
        'agentrl_tool_execute_seconds_bucket{le="+Inf",tool="echo"}': 2,
        'agentrl_tool_queue_seconds_bucket{le="1.0",tool="echo"}': 2,
        "agentrl_tool_sessions": 1,
        "agentrl_tool_calls_in_flight": 0,
    }
    before = {line: value(line) for line in lines}
    assert client.post(
        "/sessions", json={"episode_id": "m", "sample": {"tools": ["echo"]}}
    ).is_success
    for turn, (name, arguments, episode) in enumerate(
        [
            ("echo", {"value": 1}, "m"),
            ("echo", {"value": 2}, "m"),
            ("echo", {"value": "x"}, "m"),
            ("os.system", {}, "m"),
            ("count", {}, "m"),
            ("echo", {"value": 1}, "nobody"),
        ]
    ):
        body = {"turn": turn, "call_index": 0, "name": name, "arguments": arguments}
        client.post(f"/sessions/{episode}/calls", json=body)
    assert {line: value(line) - before[line] for line in lines} == lines
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "os.system" not in page.text
    assert client.delete("/sessions/m").json() == {"reward": 0.0}
