"""Tools of MCP servers: real ones, over pipes and HTTP, and some that mean no good."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from mcp import Client, MCPError

from agentrl import play, registry, tool
from agentrl.errors import ToolServerError, UserError
from agentrl.registry import load_file
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.tools.mcp import source
from agentrl.tools.mcp.address import Address, read_address
from agentrl.trajectory import Message, Sample, ToolCall

HERE = Path(__file__).parents[1] / "fixtures" / "mcp"


def named(file: str, *arguments: str, label: str = "") -> str:
    words = " ".join([sys.executable, str(HERE / file), *arguments])
    return f"mcp+stdio:{words}" + (f" #{label}" if label else "")


@pytest.fixture(autouse=True)
def nothing_stays(no_tools, monkeypatch):
    monkeypatch.setattr(source, "_loaded", {})
    yield
    for connection in source._loaded.values():
        connection.close()


def answers(*calls: ToolCall, turn: int = 0) -> list:
    async def run():
        toolbox = LocalToolbox()
        names = tuple(registry.tools.names())
        await toolbox.open("e", Sample("s", (), tools=names))
        try:
            return await toolbox.run(calls, "e", turn)
        finally:
            await toolbox.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("mcp+http://h:1/mcp", Address("mcp+http://h:1/mcp", url="http://h:1/mcp")),
        ("mcp+https://h/x#docs", Address("mcp+https://h/x", url="https://h/x", label="docs")),
        (
            "mcp+stdio:run 'a b' --c #me",
            Address("mcp+stdio:run 'a b' --c #me", command=("run", "a b", "--c"), label="me"),
        ),
    ],
)
def test_addresses(name, address):
    assert read_address(name) == address


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mcp+ftp://h/x", "expected mcp"),
        ("mcp+http://user:secret@h/x", "AGENTRL_MCP_TOKEN"),
        ("mcp+stdio:", "no command"),
        ("mcp+stdio:a 'b", "quotation"),
        ("mcp+http://h/x#a-b", "letters, digits"),
        ("mcp+http://127.0.0.1:9/mcp", "no MCP server at .*Is it running"),
        ("mcp+stdio:/no/such/program", "no MCP server at"),
    ],
)
def test_what_is_refused(name, why):
    with pytest.raises(UserError, match=why):
        load_file(name)


def test_a_servers_tools_are_called():
    load_file(named("honest.py"))
    assert registry.tools.names() == [
        "Honest_tools__add", "Honest_tools__die", "Honest_tools__look_up_word",
        "Honest_tools__refuse",
    ]  # fmt: skip
    shown = LocalToolbox().schemas(["Honest_tools__add"])[0]["function"]
    assert shown["description"] == "Add two numbers."
    assert shown["parameters"]["required"] == ["a"]
    results = answers(
        ToolCall("Honest_tools__add", {"a": 3}),
        ToolCall("Honest_tools__look_up_word", {"word": "red"}),
        ToolCall("Honest_tools__look_up_word", {"word": "green"}),
        ToolCall("Honest_tools__refuse", {}),
    )
    assert [r.error for r in results] == ["", "", "schema", "tool_error"]
    assert results[0].content == "4"
    assert '"means": "a colour"' in results[1].content
    assert "not today" in results[3].content


def test_a_server_that_died_is_started_again():
    load_file(named("honest.py", label="h"))
    with pytest.raises(ToolServerError, match="mcp"):
        answers(ToolCall("h__die", {}))
    assert answers(ToolCall("h__add", {"a": 1}))[0].content == "2"


def test_a_server_over_http():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(HERE / "honest.py"), str(port)], stderr=-3)
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        load_file(f"mcp+http://127.0.0.1:{port}/mcp#web")
        calls = [ToolCall("web__add", {"a": i}) for i in range(20)]
        assert [r.content for r in answers(*calls)] == [str(i + 1) for i in range(20)]
    finally:
        server.kill()
        server.wait()
    with pytest.raises(ToolServerError):
        answers(ToolCall("web__add", {"a": 1}))


def test_loading_a_server_twice_makes_one_connection():
    load_file(named("honest.py", label="h"))
    load_file(named("honest.py", label="h"))
    assert len(source._loaded) == 1


def test_a_call_that_fails_fails_no_other():
    load_file(named("hostile.py", "raises"))
    calls = [ToolCall("Hostile__say", {"slow": True}) for _ in range(3)]
    calls.insert(1, ToolCall("Hostile__say", {"bad": True}))
    assert [r.error for r in answers(*calls)] == ["", "crash", "", ""]


def test_the_exception_of_a_server_is_not_for_the_model(caplog):
    load_file(named("hostile.py", "raises"))
    [result] = answers(ToolCall("Hostile__say", {"bad": True}))
    assert result.content == "Error: the tool failed: MCPError"
    assert "Hostile__say" in caplog.text and "hunter2" in caplog.text


# -- servers that mean no good --------------------------------------------------------------------


def test_names_have_a_prefix_and_descriptions_are_cut():
    @tool
    def calculator(x: str) -> str:
        """Ours."""
        return "ours"

    load_file(named("hostile.py", "words"))
    assert registry.tools.names() == ["Hostile__calculator", "Hostile__submit", "calculator"]
    shown = LocalToolbox().schemas(["Hostile__submit"])[0]["function"]
    assert len(shown["description"]) <= 2000
    assert answers(ToolCall("calculator", {"x": "1"}))[0].content == "ours"


def test_ten_thousand_tools_are_too_many(caplog):
    with caplog.at_level(logging.WARNING):
        load_file(named("hostile.py", "many"))
    assert len(registry.tools.names()) == 256
    assert "are not used" in caplog.text


def test_costly_schemas_are_cut_or_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        load_file(named("hostile.py", "schemas"))
    assert registry.tools.names() == ["Hostile__elsewhere", "Hostile__same_name", "Hostile__slow"]
    for words in ("huge", "none", "has the same name as"):
        assert words in caplog.text
    began = time.monotonic()
    [result] = answers(ToolCall("Hostile__slow", {"text": "a" * 40 + "!"}))
    assert result.ok and time.monotonic() - began < 5
    assert "$ref" not in str(LocalToolbox().schemas(["Hostile__elsewhere"]))


def test_the_list_of_tools_is_fixed_for_the_run():
    load_file(named("hostile.py", "changes"))
    for turn in range(3):
        assert answers(ToolCall("Hostile__say", {}), turn=turn)[0].ok
    assert registry.tools.names() == ["Hostile__say"]
    [result] = answers(ToolCall("Hostile__other", {}))
    assert result.error == "unknown_tool"


def test_control_tokens_stay_text():
    load_file(named("hostile.py", "says"))
    tokenizer = byte_tokenizer()
    called = '<tool_call>{"name": "Hostile__say", "arguments": {}}</tool_call>'
    sample = Sample("s", (Message("user", "Go."),), "tool_agent", tools=("Hostile__say",))
    trajectory = play(sample, Scripted([called, "done"], tokenizer), tokenizer)
    [content] = [m.content for m in trajectory.messages if m.role == "tool"]
    assert "<|im_start|>system" in content and "[image omitted" in content
    assert trajectory.control_token_attempts > 0
    (row,) = trajectory.segments
    observed = [i for i, m in zip(row.response_ids, row.response_mask, strict=True) if not m]
    # ChatML's own frame around the result, once; none of the server's.
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert observed.count(start) == 2 and observed.count(end) == 1


def test_a_long_result_is_cut():
    load_file(named("hostile.py", "floods"))
    [result] = answers(ToolCall("Hostile__say", {}))
    assert len(result.content) < 300_000 and "omitted" in result.content


def test_a_hanging_server_is_a_timeout(monkeypatch):
    monkeypatch.setattr(source, "TIMEOUT", 1.0)
    load_file(named("hostile.py", "hangs"))
    began = time.monotonic()
    [result] = answers(ToolCall("Hostile__say", {}))
    assert result.error == "timeout" and time.monotonic() - began < 10


# -- ours as an MCP server ------------------------------------------------------------------------


TOOLS = """
from agentrl import tool

@tool
def double(n: int) -> str:
    \"\"\"Double a number.

    Args:
        n: the number
    \"\"\"
    return str(2 * n)

@tool
class Pad:
    \"\"\"Lines.\"\"\"

    def __init__(self):
        self.lines = []

    def write(self, line: str) -> str:
        \"\"\"Write a line.\"\"\"
        self.lines.append(line)
        return " ".join(self.lines)

@tool
class Needs:
    \"\"\"A thing of a row.\"\"\"

    def __init__(self, database: str):
        self.database = database

    def ask(self) -> str:
        \"\"\"Ask it.\"\"\"
        return self.database

@tool
class Broken:
    \"\"\"Cannot be made.\"\"\"

    def __init__(self):
        raise RuntimeError("no database here")

    def use(self) -> str:
        \"\"\"Use it.\"\"\"
        return ""
"""


@contextmanager
def serving(tmp_path, token=""):
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    server = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "tools", "serve", str(file), "--port=0", "--mcp"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGENTRL_TOOLS_TOKEN": token},
    )
    try:
        assert server.stdout is not None
        yield re.search(r"http://\S+?(?=:? |$)", server.stdout.readline())[0].rstrip(":") + "/mcp"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_agentrls_tools_are_served_by_mcp(tmp_path, mode):
    async def talk(url):
        async with Client(url, mode=mode) as client:
            listed = {t.name: t for t in (await client.list_tools()).tools}
            assert sorted(listed) == ["double", "use", "write"]
            assert listed["double"].description == "Double a number."
            assert listed["double"].input_schema["required"] == ["n"]

            async def call(name, **arguments):
                result = await client.call_tool(name, arguments)
                return result.is_error, result.content[0].text

            assert await call("double", n=4) == (False, "8")
            assert await call("double", n="x") == (
                True,
                "Error: invalid arguments for double: 'n' must be an integer, got \"x\"."
                " Expected: double(n: integer)",
            )
            assert (await call("nope"))[0]
            with pytest.raises(MCPError) as failed:
                await call("use")
            assert failed.value.message == "the tool server failed: UserCodeError"
            lines = [await call("write", line=line) for line in "ab"]
            return [text for _, text in lines]

    with serving(tmp_path) as url:
        # A session keeps its object; the protocol without sessions has one for each call.
        assert asyncio.run(talk(url)) == (["a", "a b"] if mode == "legacy" else ["a", "b"])


def test_a_run_can_use_its_own_tools_over_mcp(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_MCP_TOKEN", "secret")
    with serving(tmp_path, token="secret") as url:
        load_file(f"mcp+{url}#own")
        assert answers(ToolCall("own__double", {"n": 21}))[0].content == "42"
        monkeypatch.setenv("AGENTRL_MCP_TOKEN", "wrong")
        with pytest.raises(UserError, match="no MCP server"):
            load_file(f"mcp+{url}#other")
