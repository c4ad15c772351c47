"""Other projects' parsers behind a cap, a deadline and a guard."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerBase

from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.chat.formats.adapters import MAX_TEXT, UNREAD, ForeignParser
from agentrl.chat.formats.strict_json import MAX_DEPTH
from agentrl.config import Config
from agentrl.errors import Infrastructure, UserError
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import ToolCall

READS_TEMPLATES = hasattr(PreTrainedTokenizerBase, "get_response_parser")
needs_templates = pytest.mark.skipif(
    not READS_TEMPLATES, reason="this version of transformers reads no response templates"
)
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "run")
]
ADD = ToolCall("add", {"a": 1})
DEEPEST = ToolCall("add", json.loads('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH))

# The surface of SGLang's parsers, on one that does whatever a text says.
FAKE = """
import json, os, sys, time
from types import SimpleNamespace

class Detector:
    bot_token = "<call>"

    def has_tool_call(self, text):
        return self.bot_token in text

class NoToken(Detector):
    bot_token = ""

    def has_tool_call(self, text):
        return "<call>" in text

def does(text):
    if "RAISE" in text:
        raise IndexError("of its own")
    if "QUIT" in text:
        sys.exit(3)
    if "CRASH" in text:
        os._exit(3)
    if "SLEEP" in text:
        time.sleep(60)
    if "PRINT" in text:
        print("to standard output", flush=True)
        os.write(1, b"{}\\n")
        assert sys.stdin.read() == ""
    while "LOOP" in text:
        pass
    if "HUGE" in text:
        return "{" + " " * 3_000_000 + "}"

class FunctionCallParser:
    ToolCallParserEnum = {"fake": Detector, "no_token": NoToken}

    def __init__(self, tools, tool_call_parser):
        self.tools = tools
        self.detector = self.ToolCallParserEnum[tool_call_parser]()

    def parse_non_stream(self, text):
        huge = does(text)
        known = {tool.function["name"] for tool in self.tools}
        calls = []
        for part in text.split("<call>")[1:]:
            name, _, parameters = part.partition("</call>")[0].partition(":")
            if name in known:
                calls.append(SimpleNamespace(name=name, parameters=huge or parameters))
        return text.partition("<call>")[0], calls
"""
PROTOCOL = """
from types import SimpleNamespace

class Tool:
    @staticmethod
    def model_validate(schema):
        return SimpleNamespace(**schema)
"""


def install(folder, source=FAKE):
    """A package named sglang; where the real one is installed, this one is found first."""
    for name, text in (
        ("srt/function_call/function_call_parser.py", source),
        ("srt/entrypoints/openai/protocol.py", PROTOCOL),
    ):
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def on_path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = install(tmp_path_factory.mktemp("fake"))
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def fake(on_path):
    with ForeignParser("sglang:fake", seconds=1.0) as parse:
        yield parse


def written(name, arguments):
    return f"<call>{name}:{arguments}</call>"


GOOD = written("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ("", []),
        ("text " + GOOD, [ADD]),
        (GOOD + written("run", "{}"), [ADD, ToolCall("run", {})]),
        (GOOD + written("rm", "{}"), [ADD, "1 of 2 calls"]),
        (written("rm", "{}"), ["1 of 1 calls"]),
        ("<call>cut", ["1 of 1 calls"]),
        (written("add", "{1"), ["invalid JSON"]),
        (written("add", "[1]"), ["must be a JSON object"]),
        (written("add", '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH), [DEEPEST]),
        (written("add", '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)), ["deeper than"]),
        (written("add", '{"a":' + "[" * 1000 + "]" * 1000 + "}"), ["deeper than"]),
        (written("add", '{"a": 1, "a": 2}'), ["duplicate key 'a'"]),
        (written("add", '{"a": 123456789012345678901}'), ["number out of range"]),
        (written("add", '{"a": NaN}'), ["invalid JSON"]),
        (written("add", '{"a": "\\ud800"}'), ["invalid JSON"]),
        (written("add", '{"a": "\ud800"}'), ["invalid JSON"]),
        (GOOD * 40, [ADD] * 32 + ["more than 32 calls"]),
        (f"<think>{GOOD}</think>3", []),
        (f"maybe {GOOD}</think>{GOOD}", [ADD]),
        (f"a <think>{GOOD}</think>{GOOD}<think>{GOOD}</think>", [ADD]),
        (f"<think>{GOOD}", ["never closed"]),
        ("<think>so", []),
        ("RAISE", ["the tool call cannot be read"]),
        ("QUIT", ["the tool call cannot be read"]),
        ("PRINT" + GOOD, [ADD]),
        ("x" * (MAX_TEXT + 1), [f"more than {MAX_TEXT} characters"]),
    ],
)
async def test_calls_of_a_foreign_parser_and_calls_that_it_drops(fake, text, expected):
    calls = await fake(text, SCHEMAS)
    assert len(calls) == len(expected), calls
    for parsed, want in zip(calls, expected, strict=True):
        if isinstance(want, str):
            assert want in parsed.error and isinstance(parsed.arguments, str)
        else:
            assert parsed == want


async def test_exceptions_of_a_foreign_parser_are_logged_and_hidden_from_the_model(on_path, caplog):
    with ForeignParser("sglang:fake") as parse:
        for text in ("RAISE", "RAISE"):
            (call,) = await parse(text, SCHEMAS)
            assert call.error == "the tool call cannot be read"
    (record,) = [r for r in caplog.records if "raised on a model turn" in r.message]
    assert "IndexError: of its own" in record.message


async def test_a_dropped_call_without_an_opening_tag_is_reported(on_path):
    with ForeignParser("sglang:no_token") as parse:
        assert "1 of 1" in (await parse(written("rm", "{}"), SCHEMAS))[0].error
        assert await parse(GOOD + written("run", "{}"), SCHEMAS) == [ADD, ToolCall("run", {})]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("SLEEP", "not parsed within 1 s"),
        ("LOOP", "not parsed within 1 s"),
        ("CRASH", "the parser crashed"),
        ("HUGE" + GOOD, "bytes"),
    ],
)
async def test_a_text_that_crashes_the_parser_fails_alone(fake, bad, error):
    before = fake.process
    gap, last, over = 0.0, time.monotonic(), False

    async def tick():
        nonlocal gap, last
        while not over:
            await asyncio.sleep(0.005)
            gap, last = max(gap, time.monotonic() - last), time.monotonic()

    ticking = asyncio.create_task(tick())
    results = await asyncio.gather(*(fake(text, SCHEMAS) for text in (GOOD, bad, GOOD, GOOD)))
    over = True
    await ticking
    assert [r for i, r in enumerate(results) if i != 1] == [[ADD]] * 3
    assert len(results[1]) == 1 and error in results[1][0].error
    assert gap < 0.7, "the event loop stood still"
    assert not before.running and fake.process is not before


async def test_a_parser_killed_from_outside_is_restarted(fake):
    os.kill(fake.process.pid, signal.SIGKILL)
    assert fake.process.wait(10)
    assert await fake(GOOD, SCHEMAS) == [ADD]


async def test_closing_ends_the_process(on_path):
    with ForeignParser("sglang:fake") as parse:
        assert parse.process.running
    assert not parse.process.running
    parse.close()
    slow = ForeignParser("sglang:fake", seconds=60.0)
    waiting = asyncio.create_task(slow("SLEEP", SCHEMAS))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    slow.close()
    assert time.monotonic() - start < 10
    assert (await waiting)[0].error and not slow.process.running
    with pytest.raises(RuntimeError):
        await parse(GOOD, SCHEMAS)


@pytest.mark.parametrize("doing", ["nothing", "LOOP"])
def test_the_process_dies_with_its_parent(on_path, doing):
    script = textwrap.dedent(
        f"""
        import asyncio, os, sys, threading, time
        sys.path[:] = {sys.path!r}
        from agentrl.chat.formats.adapters import ForeignParser

        async def main():
            parse = ForeignParser("sglang:fake", seconds=2.0)
            print(parse.process.pid, flush=True)
            if {doing!r} == "LOOP":
                task = asyncio.create_task(parse("LOOP", []))
                await asyncio.sleep(0.2)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
        """
    )
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    end = time.monotonic() + 10
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid):
    """Whether a process is there and is not a zombie that nobody waits for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_unusable_parsers_are_refused_at_once(on_path):
    with pytest.raises(UserError, match="no parser 'x'; it has: fake, no_token"):
        ForeignParser("sglang:x")
    with pytest.raises(UserError, match="unknown format 'vllm:x'"):
        ForeignParser("vllm:x")
    with pytest.raises(UserError, match="'hf' needs a tokenizer with a response template"):
        ForeignParser("hf", byte_tokenizer())
    known, other = ("response_template", "response_schema")[:: 1 if READS_TEMPLATES else -1]
    with pytest.raises(UserError, match=f"reads `tokenizer.{known}`, but .* has `{other}`"):
        ForeignParser("hf", SimpleNamespace(**{other: {"type": "object"}}))


@needs_templates
def test_a_broken_response_template_is_refused_at_once():
    broken = SimpleNamespace(response_template={"fields": {"content": 3}})
    with pytest.raises(UserError, match="Error"):
        ForeignParser("hf", broken)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[sglang\]"):
        ForeignParser("sglang:qwen25")


@pytest.fixture
def without_sglang(monkeypatch):
    """This Python has no sglang."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sglang" else find(name)
    )


def other_python(folder, source=FAKE):
    """A Python that has this package named sglang, and nothing else that is not its own."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="{install(folder, source)}" exec "{sys.executable}" -S "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


async def test_the_parser_runs_in_the_environment_that_has_it(
    tmp_path, monkeypatch, without_sglang
):
    """There, no agentrl need be; and the working directory holds no modules."""
    python = other_python(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise ImportError")
    monkeypatch.chdir(elsewhere)
    lacks_agentrl = subprocess.run([python, "-P", "-c", "import agentrl"], capture_output=True)
    assert b"No module named 'agentrl'" in lacks_agentrl.stderr
    with ForeignParser("sglang:fake", python="../python", seconds=5.0) as parse:
        assert await parse(f"<think>{GOOD}</think>{GOOD}", SCHEMAS) == [ADD]
        assert "1 of 1 calls" in (await parse(written("rm", "{}"), SCHEMAS))[0].error
        assert "the parser crashed" in (await parse("CRASH", SCHEMAS))[0].error
        assert await parse(GOOD, SCHEMAS) == [ADD], "it was started again"


async def test_a_run_uses_the_python_of_its_servers_for_the_parser(tmp_path, without_sglang):
    config = Config.model_validate(
        {"rollout": {"tool_format": "sglang:fake", "python": other_python(tmp_path)}}
    )
    template = ChatTemplate(byte_tokenizer())
    runtime = Runtime(Scripted([], byte_tokenizer()), template, LocalToolbox(), config)
    try:
        assert await runtime.parse_calls(GOOD, SCHEMAS) == [ADD]
    finally:
        runtime.close()


def test_an_environment_without_it_is_named(tmp_path, without_sglang):
    with pytest.raises(UserError, match=r"rollout\.python=/no/python: cannot run it"):
        ForeignParser("sglang:fake", python="/no/python")
    python = other_python(tmp_path, "raise ImportError('no GPU here')")
    with pytest.raises(UserError, match=r"cannot import SGLang's parsers: ImportError: no GPU"):
        ForeignParser("sglang:fake", python=python)


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("raise ImportError('no GPU here')", UserError, "ImportError: no GPU here"),
        ("import os; os._exit(1)", Infrastructure, "did not start"),
    ],
)
def test_a_parser_that_does_not_import(tmp_path, monkeypatch, source, kind, says):
    monkeypatch.syspath_prepend(install(tmp_path, source))
    with pytest.raises(kind, match=says):
        ForeignParser("sglang:fake")


# transformers' response parsing, for real.


@pytest.fixture(scope="module")
def hf():
    from trl.chat_template_utils import qwen3_template

    tokenizer = SimpleNamespace(response_template=json.loads(json.dumps(qwen3_template)))
    with ForeignParser("hf", tokenizer, seconds=5.0) as parse:
        yield parse


WITH_A = call("add", a=1)


@needs_templates
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ("text " + WITH_A + WITH_A, [ADD, ADD]),
        (f"<think>{WITH_A}</think>3", []),
        (f"maybe {WITH_A}</think>{WITH_A}", [ADD]),
        (WITH_A + "<tool_call>{bad</tool_call>", [UNREAD]),
        ('<tool_call>{"name": "add", "argum', [UNREAD]),
        ("<tool_call>3</tool_call>", ['"name" must be']),
        (WITH_A.replace("1", "NaN"), ["invalid JSON"]),
        ("<tool_call>" + "[" * 20_000, [UNREAD]),
        ("<tool_call>" * 5_000, [UNREAD]),
    ],
)
async def test_transformers_response_parsing(hf, text, expected):
    calls = await hf(text, SCHEMAS)
    assert len(calls) == len(expected), calls
    for parsed, want in zip(calls, expected, strict=True):
        if isinstance(want, str):
            assert want in parsed.error and isinstance(parsed.arguments, str)
        else:
            assert parsed == want


@needs_templates
async def test_the_tools_schemas_reach_transformers():
    """Untyped values become what the tool's schema says they are."""
    from trl.chat_template_utils import qwen3_5_template

    schema = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    tokenizer = SimpleNamespace(response_template=qwen3_5_template)
    with ForeignParser("hf", tokenizer) as parse:
        assert await parse(text, [schema]) == [ADD]


@pytest.mark.sglang
@pytest.mark.slow
async def test_the_real_sglang_of_another_environment(sglang_python, on_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(on_path)])
    importlib.invalidate_caches()
    kimi = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    )
    with ForeignParser("sglang:kimi_k2", python=sglang_python, seconds=5.0) as parse:
        assert await parse(kimi, SCHEMAS) == [ADD]
        assert (await parse(kimi.replace('{"a": 1}', "{"), SCHEMAS))[0].error
        assert await parse(f"<think>{kimi}</think>3", SCHEMAS) == []
        start = time.monotonic()
        assert (await parse("<|tool_calls_section_begin|>" * 2_000, SCHEMAS))[0].error
        assert time.monotonic() - start < 8
