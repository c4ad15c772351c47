"""Calling tools: the same answers in process and over HTTP, whatever a model or a tool does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import socket
import sys
import time
import uuid
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_server import TOKEN, row, serving_tools

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.errors import (
    ConfigError,
    DataError,
    RegistryError,
    ToolServerError,
    UserCodeError,
    UserError,
)
from agentrl.http import HttpClient
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.tools import HttpToolbox, LocalToolbox, tool
from agentrl.tools.payloads import to_result
from agentrl.tools.runner import CallLimits
from agentrl.tools.session import ToolHost, UnknownEpisode
from agentrl.trajectory import Message, Sample, ToolCall, ToolResult

ZOO = str(Path(__file__).parents[1] / "support" / "tool_zoo.py")


@pytest.fixture(scope="module")
def zoo():
    """The module of tools; nothing else is registered meanwhile."""
    with registry.tools.isolated(keep=()):
        module = registry.load_file(ZOO)
        yield module
        module.RELEASE.set()
        del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def url(zoo):
    """A tool server in a thread of this process."""
    with serving_tools() as url:
        yield url
        zoo.RELEASE.set()


async def ask(toolbox, name, arguments=None, *, tools=None, episode=None, **fields) -> ToolResult:
    """One call in an episode of its own; its result without the time it took."""
    sample = row(*(tools or (name,)), **fields)
    await toolbox.open(sample.id, sample)
    [result] = await toolbox.run([ToolCall(name, arguments or {})], sample.id, 0)
    await toolbox.close(sample.id)
    assert result.seconds >= 0
    return replace(result, seconds=0.0)


GOOD = [
    ("add", {"a": 1}, "3"),
    ("add", {"a": 1, "b": 40}, "41"),
    ("add", {"a": 1.0}, "3"),
    ("async_add", {"a": 1}, "3"),
    (
        "paint",
        {"color": "blue", "points": [{"x": 1}, {"x": 2, "y": 3}]},
        "BLUE Point Point 6",
    ),
    ("give", {"what": "text"}, "plain"),
    ("give", {"what": "none"}, ""),
    ("give", {"what": "bool"}, "true"),
    ("give", {"what": "int"}, "1" + "0" * 30),
    ("give", {"what": "float"}, "0.1"),
    ("give", {"what": "nan"}, "nan"),
    ("give", {"what": "content_json"}, '{"n":[1,null]}'),
    ("give", {"what": "numpy_int"}, "3"),
    ("give", {"what": "numpy_bool"}, "true"),
    ("give", {"what": "numpy_nan"}, "nan"),
    ("give", {"what": "numpy_array"}, "[[1,3],[2,4]]"),
    ("give", {"what": "numpy_json"}, '{"1":[0.1,0.5,3],"a":[0,1]}'),
    ("give", {"what": "list"}, '[1,"a",null,{"k":2}]'),
    ("give", {"what": "enum"}, '{"color":"red"}'),
    ("give", {"what": "model"}, '{"x":1,"y":0}'),
    ("give", {"what": "big"}, "{'n': 1" + "0" * 30 + "}"),
    ("give", {"what": "bytes"}, "ab\ufffd"),
    ("give", {"what": "surrogate"}, "a\ufffdb\ufffdc"),
    ("give", {"what": "surrogate_in_json"}, "{'a': '\\ud800'}"),
    ("wrapped", {"text": "abc"}, "ABC"),
    ("handmade", {"n": 3}, "3 {}"),
    ("handmade", {"n": 3, "m": [1]}, "3 {'m': [1]}"),
]


@pytest.mark.parametrize(("name", "arguments", "content"), GOOD)
async def test_good_calls(toolbox, name, arguments, content):
    assert await ask(toolbox, name, arguments) == ToolResult(content)


BAD = [
    (
        "add",
        {"a": "1"},
        "schema",
        "'a' must be an integer, got \"1\". Expected: add(a: integer, b:",
    ),
    ("add", {}, "schema", "'a' is required. Expected: add(a: integer, b: integer = 2)"),
    ("add", {"a": 1, "c": 1}, "schema", "unexpected argument 'c'"),
    ("add", {"a": True}, "schema", "'a' must be an integer, got true"),
    ("add", {"a": None}, "schema", "'a' must be an integer, got null"),
    ("paint", {"color": "green", "points": []}, "schema", "'color' must be one of \"red\", "),
    ("paint", {"color": "red", "points": [{"x": 1}, {}]}, "schema", "'points[1].x' is required"),
    ("handmade", {"n": -1}, "schema", "'n' must be at least 0, got -1"),
    ("add", {"a": float("nan")}, "bad_call", "NaN is not valid JSON"),
    ("add", {"a": 2**70}, "bad_call", "not valid JSON: Integer exceeds 64-bit range"),
    ("give", {"what": "\ud800"}, "bad_call", "the arguments are not valid JSON"),
    ("give", {"what": "x" * 300_000}, "bad_call", "too long: 300011 bytes"),
    ("fail", {"what": "value"}, "crash", "the tool failed: ValueError"),
    ("fail", {"what": "exit"}, "crash", "the tool failed: SystemExit"),
    ("fail", {"what": "interrupt"}, "crash", "the tool failed: KeyboardInterrupt"),
    ("fail", {"what": "timeout"}, "crash", "the tool failed: TimeoutError"),
    ("fail", {"what": "stop"}, "crash", "the tool failed: StopIteration"),
    ("fail", {"what": "cancelled"}, "crash", "the tool failed: CancelledError"),
    ("fail", {"what": "refused"}, "tool_error", "no such file: x\ufffd"),
    ("fail", {"what": "long"}, "tool_error", "xxx"),
    ("async_fail", {"what": "value"}, "crash", "the tool failed: ValueError"),
    ("async_fail", {"what": "exit"}, "crash", "the tool failed: SystemExit"),
    ("async_fail", {"what": "timeout"}, "crash", "the tool failed: TimeoutError"),
    ("async_fail", {"what": "cancelled"}, "crash", "the tool failed: CancelledError"),
    ("async_fail", {"what": "refused"}, "tool_error", "no such file: x\ufffd"),
    ("give", {"what": "nan_reward"}, "crash", "the tool failed: TypeError"),
    ("give", {"what": "nothing"}, "crash", "the tool failed: KeyError"),
    ("hang", {}, "timeout", "the tool timed out after 0.3 s"),
    ("async_hang", {}, "timeout", "the tool timed out after 0.3 s"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), BAD)
async def test_bad_calls_are_texts_the_model_reads(toolbox, name, arguments, error, message):
    result = await ask(toolbox, name, arguments)
    assert (result.ok, result.error, result.reward) == (False, error, None)
    assert message in result.content
    assert result.error == error and result.content.startswith("Error: ")
    assert error != "crash" or result.content.endswith(message)  # the type, and nothing of the text
    assert len(result.content) <= 300


async def test_results_of_the_tools_own_making(toolbox):
    assert await ask(toolbox, "give", {"what": "result"}) == ToolResult("own", reward=0.5)
    assert to_result({"a": torch.tensor([1.5])}) == ToolResult('{"a":[1.5]}')
    assert await ask(toolbox, "give", {"what": "numpy_reward"}) == ToolResult("x", reward=0.5)
    failed = await ask(toolbox, "give", {"what": "failed"})
    assert failed == ToolResult("own text", ok=False, error="tool_error")
    assert (await ask(toolbox, "give", {"what": "classed"})).error == "mine"


async def test_a_long_result_is_cut_in_the_middle(toolbox):
    result = await ask(toolbox, "flood")
    assert 262_144 <= len(result.content) < 262_250
    assert "[... 37857 characters omitted ...]" in result.content
    assert result.content.endswith("az")


async def test_malformed_and_unknown_calls(toolbox):
    sample = row("add", "paint")
    await toolbox.open(sample.id, sample)
    calls = [
        ToolCall("", '{"name": ad', error="not JSON: line 1 column 9" + "x" * 500),
        ToolCall("add", "[1]"),
        ToolCall("ad", {"a": 1}),
        ToolCall("give", {"what": "text"}),
        ToolCall("add", {"a": 1}),
    ]
    results = await toolbox.run(calls, sample.id, 0)
    assert [r.error for r in results] == [
        "bad_call",
        "bad_call",
        "unknown_tool",
        "unknown_tool",
        "",
    ]
    assert results[0].content.startswith("Error: invalid tool call: not JSON: line 1 column 9")
    assert "as a JSON object" in results[0].content
    assert len(results[0].content) <= 300
    assert "the arguments are not a JSON object" in results[1].content
    assert results[2].content == (
        "Error: unknown tool 'ad'. Did you mean 'add'? Available tools: add, paint"
    )
    # Registered, but not in this row.
    assert results[3].content == "Error: unknown tool 'give'. Available tools: add, paint"
    assert results[4].content == "3"


async def test_an_episode_without_tools_has_none_to_call(toolbox):
    [result] = await toolbox.run([ToolCall("add", {"a": 1})], "never-opened", 0)
    assert result == ToolResult(
        "Error: unknown tool 'add'. Available tools: none", ok=False, error="unknown_tool"
    )
    assert await toolbox.close("never-opened") == 0.0


async def test_schemas(toolbox):
    [add, write, truth] = toolbox.schemas(["add", "notebook", "add"])
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second", "default": 2},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert [f["function"]["name"] for f in (write, truth)] == ["write", "truth"]
    assert toolbox.schemas([]) == []
    with pytest.raises(RegistryError, match=r"no tool named 'ad'\. Did you mean 'add'"):
        toolbox.schemas(["ad"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b", "color", "points", "what"]), JSON, max_size=3
)
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["add", "async_add", "paint", "give", "wrapped", "handmade", "nope"]),
    ARGUMENTS | st.text(),
)


def test_any_calls_get_the_same_answers(url):
    """In process and over HTTP, and never an exception."""
    names = ("add", "async_add", "paint", "give", "wrapped", "handmade")
    with asyncio.Runner() as loop:
        boxes = LocalToolbox(), HttpToolbox(url, TOKEN)

        @settings(max_examples=60)
        @given(st.lists(CALLS, max_size=4))
        def same(calls):
            async def both():
                answers = []
                for box in boxes:
                    sample = row(*names)
                    await box.open(sample.id, sample)
                    results = await box.run(calls, sample.id, 0)
                    await box.close(sample.id)
                    answers.append([replace(r, seconds=0.0) for r in results])
                return answers

            local, remote = loop.run(both())
            assert local == remote
            assert len(local) == len(calls)
            for result in local:
                assert result.ok == (not result.error)
                json.dumps(result.content).encode()

        same()
        for box in boxes:
            loop.run(box.aclose())


async def test_each_episode_has_its_own_objects(toolbox, zoo):
    first, second = (
        row("notebook", ground_truth=answer, tools_kwargs={"notebook": {"create_kwargs": kwargs}})
        for answer, kwargs in (("42", {"capacity": 2}), ("43", {}))
    )
    for sample in (first, second):
        await toolbox.open(sample.id, sample)

    async def say(sample, turn, *lines):
        calls = [ToolCall("write", {"line": line}) for line in lines]
        return [r.content for r in await toolbox.run(calls, sample.id, turn)]

    assert await say(first, 0, "a", "b") == ["a", "a b"]
    assert await say(second, 0, "x") == ["x"]
    assert await say(first, 1, "c") == ["Error: full: 2 lines"]
    assert await say(second, 1, "y", "z") == ["x y", "x y z"]
    [result] = await toolbox.run([ToolCall("truth", {})], first.id, 2)
    assert result.content == "42"
    assert await toolbox.close(first.id) == 2.0
    assert await toolbox.close(first.id) == 2.0
    assert await toolbox.close(second.id) == 3.0
    assert zoo.CLOSED.count(f"notebook {first.id}") == 1
    assert zoo.CLOSED.count(f"notebook {second.id}") == 1


async def test_the_row_arrives_as_it_is(toolbox, zoo):
    sample = Sample(
        "the-row",
        (
            Message("system", "s"),
            Message("assistant", "a", (ToolCall("f", {"x": 1}, id="c1"),), ""),
        ),
        agent_name="react",
        data_source="d",
        ground_truth={"answer": [1, 2.5, None]},
        tools=("keep",),
        tools_kwargs={"keep": {"create_kwargs": {}}},
        interaction="i",
        interaction_kwargs={"k": "v"},
        extra={"split": "train", "ü": "\u2028"},
        row=7,
    )
    kept = []

    @tool(name="keep")
    class Keep:
        """Keeps the row."""

        def __init__(self, sample):
            kept.append(sample)

        def nothing(self) -> None:
            """Do nothing."""

    episode = uuid.uuid4().hex
    if isinstance(toolbox, HttpToolbox):
        toolbox._specs = None
    await toolbox.open(episode, sample)
    await toolbox.open(episode, sample)  # sent again
    assert kept == [sample]
    assert await toolbox.close(episode) == 0.0


@pytest.mark.timing
async def test_calls_run_concurrently_and_are_answered_in_order(toolbox):
    sample = row("nap", "async_add")
    await toolbox.open(sample.id, sample)
    naps = [0.4, 0.05, 0.3, 0.1, 0.2]
    calls = [ToolCall("nap", {"seconds": s}) for s in naps] + [ToolCall("async_add", {"a": 1})]
    began = time.monotonic()
    results = await toolbox.run(calls, sample.id, 0)
    assert time.monotonic() - began < sum(naps)
    assert [r.content for r in results] == [*(f"slept {s:g}" for s in naps), "3"]
    assert [r.seconds >= s for r, s in zip(results, naps, strict=False)] == [True] * 5


async def test_an_objects_calls_run_one_after_another(toolbox):
    sample = row("notebook", "nap")
    await toolbox.open(sample.id, sample)
    calls = [ToolCall("write", {"line": f"{i}", "seconds": 0.1 / (i + 1)}) for i in range(4)]
    calls.insert(2, ToolCall("nap", {"seconds": 0.2}))
    results = await toolbox.run(calls, sample.id, 0)
    assert [r.content for r in results] == ["0", "0 1", "slept 0.2", "0 1 2", "0 1 2 3"]
    # A long call takes longer to arrive, and is first all the same.
    sample = row("notebook")
    await toolbox.open(sample.id, sample)
    calls = [ToolCall("write", {"line": line}) for line in ("a" * 250_000, "b", "c")]
    results = await toolbox.run(calls, sample.id, 0)
    assert [len(r.content) for r in results] == [250_000, 250_002, 250_004]


def stuck(at: str, *more: str) -> Sample:
    return row("stuck", *more, tools_kwargs={"stuck": {"create_kwargs": {"at": at}}})


@pytest.mark.timing
async def test_an_object_that_hangs_says_so(toolbox, zoo):
    zoo.RELEASE.clear()
    sample = stuck("call")
    await toolbox.open(sample.id, sample)
    results = [
        (await toolbox.run([ToolCall("stuck", {"text": "x"})], sample.id, turn))[0]
        for turn in range(2)
    ]
    assert [r.error for r in results] == ["timeout", "timeout"]
    assert results[1].content == "Error: stuck is still running an earlier call that timed out"
    assert results[1].seconds < 0.1
    zoo.RELEASE.set()
    await asyncio.sleep(0.1)
    [result] = await toolbox.run([ToolCall("stuck", {"text": "y"})], sample.id, 2)
    assert result.content == "y"
    assert await toolbox.close(sample.id) == 1.0


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("init raises", "tool 'stuck': constructor raised ValueError: in init"),
        ("init", "tool 'stuck': constructor took more than 0.3 s"),
    ],
)
async def test_a_constructor_that_fails(toolbox, zoo, at, message):
    """The objects made before it are closed, and not asked for a reward."""
    zoo.RELEASE.clear()
    sample = row("notebook", "stuck", tools_kwargs={"stuck": {"create_kwargs": {"at": at}}})
    with pytest.raises(UserCodeError, match=message):
        await toolbox.open(sample.id, sample)
    assert await toolbox.close(sample.id) == 0.0
    assert zoo.CLOSED.count(f"notebook {sample.id}") == 1
    zoo.RELEASE.set()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("reward raises", r"tool 'stuck': reward\(\) raised ValueError: in reward"),
        ("reward", r"tool 'stuck': reward\(\) took more than 0.3 s"),
        ("reward nan", r"tool 'stuck': reward\(\) returned nan, expected a finite number"),
    ],
)
async def test_a_reward_that_fails(toolbox, zoo, at, message):
    """It is an error and never a 0, also when asked again; everything is closed all the same."""
    zoo.RELEASE.clear()
    sample = row("stuck", "notebook", tools_kwargs={"stuck": {"create_kwargs": {"at": at}}})
    await toolbox.open(sample.id, sample)
    for _ in range(2):
        with pytest.raises(UserCodeError, match=message):
            await toolbox.close(sample.id)
    assert zoo.CLOSED.count(f"notebook {sample.id}") == 1
    assert zoo.CLOSED.count(f"stuck {sample.id}") == 1
    zoo.RELEASE.set()


@pytest.mark.parametrize("at", ["close raises", "close"])
async def test_a_close_that_fails_is_logged(toolbox, zoo, caplog, at):
    zoo.RELEASE.clear()
    sample = stuck(at)
    await toolbox.open(sample.id, sample)
    assert await toolbox.close(sample.id) == 1.0
    assert "tool 'stuck': close()" in caplog.text
    zoo.RELEASE.set()


async def test_create_kwargs_that_the_constructor_refuses(toolbox):
    kwargs = {"notebook": {"create_kwargs": {"capasity": 3}}}
    sample = replace(row("notebook", tools_kwargs=kwargs), row=7)
    with pytest.raises(DataError, match=r"row 7 .*'capasity'\. Did you mean 'capacity'"):
        await toolbox.open(sample.id, sample)
    with pytest.raises(RegistryError, match="no tool named 'note'"):
        await toolbox.open("other", row("note"))


@pytest.mark.parametrize("value", [datetime(2024, 5, 1), math.inf, Decimal(1), ("a", 1)], ids=str)
async def test_a_tool_never_gets_another_value_than_the_row_has(toolbox, value):
    got = []

    @tool
    class Reader:
        """A reader."""

        def __init__(self, sample, data=None):
            got.extend([sample.extra["x"], data])

        def read(self) -> None:
            """Read."""

    kwargs = {"reader": {"create_kwargs": {"data": value}}}
    sample = row("reader", extra={"x": value}, tools_kwargs=kwargs)
    if isinstance(toolbox, LocalToolbox):
        await toolbox.open(sample.id, sample)
        assert got == [value, value]
        return
    with pytest.raises(DataError, match="values that JSON cannot hold"):
        await toolbox.open(sample.id, sample)
    with pytest.raises(DataError, match="values that JSON cannot hold"):
        await toolbox.open(sample.id, row("reader", tools_kwargs=kwargs))
    assert got == []


async def test_infrastructure_that_is_down_is_not_an_error_of_the_model(toolbox):
    with pytest.raises(ToolServerError, match="tool 'backend_down': the search index is down"):
        await ask(toolbox, "backend_down")


@pytest.mark.timing
async def test_one_call_that_cannot_be_answered_ends_the_others(toolbox):
    sample = row("nap", "backend_down")
    await toolbox.open(sample.id, sample)
    began = time.monotonic()
    with pytest.raises(ToolServerError):
        calls = [ToolCall("nap", {"seconds": 2.0}), ToolCall("backend_down", {})]
        await toolbox.run(calls, sample.id, 0)
    assert time.monotonic() - began < 1.0


async def test_idempotent_tools_are_tried_again(toolbox, zoo):
    key = uuid.uuid4().hex
    assert await ask(toolbox, "flaky", {"key": key}) == ToolResult("done")
    assert zoo.CALLED.count(key) == 3
    key = uuid.uuid4().hex
    assert await ask(toolbox, "once", {"key": key}) == ToolResult("1")


async def test_max_concurrency(toolbox, zoo):
    del zoo.CALLED[:]
    sample = row("narrow")
    await toolbox.open(sample.id, sample)
    calls = [ToolCall("narrow", {"seconds": 0.05})] * 6
    results = await toolbox.run(calls, sample.id, 0)
    assert {int(r.content) for r in results} <= {1, 2}


async def test_a_repeated_request_for_a_call_runs_it_once(toolbox, zoo):
    """While it runs, and after; another call under its key is refused."""
    key, sample = uuid.uuid4().hex, row("once", "add")
    await toolbox.open(sample.id, sample)
    call = ToolCall("once", {"key": key})
    answers = await asyncio.gather(*(toolbox.run([call], sample.id, 0) for _ in range(3)))
    answers.append(await toolbox.run([call], sample.id, 0))
    assert [r.content for [r] in answers] == ["1"] * 4
    assert zoo.CALLED.count(key) == 1
    [other] = await toolbox.run([call], sample.id, 1)
    assert other.content == "2"
    with pytest.raises(ToolServerError, match="call 0 of turn 0 was sent before as 'once'"):
        await toolbox.run([ToolCall("add", {"a": 1})], sample.id, 0)


async def test_a_bug_in_a_tool_is_logged_once(toolbox, caplog):
    name = f"buggy_{uuid.uuid4().hex[:8]}"

    @tool(name=name)
    def buggy() -> str:
        """Fail."""
        raise ZeroDivisionError("here")

    if isinstance(toolbox, HttpToolbox):
        toolbox._specs = None
    for _ in range(3):
        assert (await ask(toolbox, name)).error == "crash"
    logged = f"tool {name!r} failed (logged once per tool and type): ZeroDivisionError: here"
    assert caplog.text.count(logged) == 1
    assert caplog.text.count("Traceback") == 1


@pytest.mark.timing
async def test_hung_tools_end_at_their_deadlines_and_delay_no_other(toolbox, zoo):
    zoo.RELEASE.clear()
    sample = row("hang", "add")
    await toolbox.open(sample.id, sample)
    began = time.monotonic()
    hung = asyncio.create_task(toolbox.run([ToolCall("hang", {})] * 40, sample.id, 0))
    await asyncio.sleep(0.05)
    [result] = await toolbox.run([ToolCall("add", {"a": 1})], sample.id, 1)
    assert result.content == "3"
    assert {r.error for r in await hung} == {"timeout"}
    assert time.monotonic() - began < 2.0
    zoo.RELEASE.set()


async def test_closing_while_a_call_runs(toolbox, zoo):
    """An episode that gives up on its call may be closed; the object's end waits for the call."""
    sample = row("notebook")
    await toolbox.open(sample.id, sample)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await toolbox.run([ToolCall("write", {"line": "a", "seconds": 0.3})], sample.id, 0)
    closing = [asyncio.create_task(toolbox.close(sample.id)) for _ in range(2)]
    rewards = await asyncio.gather(*closing)
    assert rewards[0] == rewards[1]
    assert zoo.CLOSED.count(f"notebook {sample.id}") == 1


async def test_a_call_that_cannot_start_is_not_an_error_of_the_model(zoo, monkeypatch):
    monkeypatch.setattr("agentrl.workers.threads.Threads.replace", lambda self, job: None)
    zoo.RELEASE.clear()
    box = LocalToolbox(CallLimits(threads=1, queue_seconds=0.2))
    sample = row("hang", "add")
    await box.open(sample.id, sample)
    [result] = await box.run([ToolCall("hang", {})], sample.id, 0)
    assert result.error == "timeout"
    message = r"'add': a call could not start within 0\.2 s .*Calls that hang: 1 of 'hang'"
    with pytest.raises(ToolServerError, match=message):
        await box.run([ToolCall("add", {"a": 1})], sample.id, 1)
    zoo.RELEASE.set()
    await asyncio.sleep(0.05)
    # It did not run, so the same call may be sent again.
    [result] = await box.run([ToolCall("add", {"a": 1})], sample.id, 1)
    assert result.content == "3"
    await box.aclose()


async def test_unused_sessions_are_closed(zoo, caplog):
    host = ToolHost(idle_seconds=0.2)
    reaper = asyncio.create_task(host.close_idle_sessions())
    sample = row("notebook", "nap")
    await host.open("left", sample, {})
    await host.open("used", row("nap"), {})
    running = asyncio.create_task(host.session("used").call(0, 0, "nap", {"seconds": 0.8}))
    await asyncio.sleep(0.6)
    assert len(host) == 1
    assert zoo.CLOSED.count(f"notebook {sample.id}") == 1
    assert "closing 1 idle sessions" in caplog.text
    assert (await running).ok
    with pytest.raises(UnknownEpisode):
        host.session("left")
    reaper.cancel()
    await host.aclose()
    assert len(host) == 0


async def test_closed_episodes_are_remembered_without_their_tasks(zoo):
    def tasks():
        gc.collect()
        return [o for o in gc.get_objects() if isinstance(o, asyncio.Task)]

    host, sample, before = ToolHost(), row("notebook"), tasks()
    for i in range(9):
        await host.open(str(i), sample, {})
    rewards = [await host.close(str(i)) for i in range(9)]
    assert [await host.close(str(i)) for i in range(9)] == rewards
    assert len(tasks()) < len(before) + 9
    await host.aclose()


async def test_ending_a_toolbox_closes_what_is_open(url, zoo):
    for box in (LocalToolbox(), HttpToolbox(url, TOKEN)):
        sample = row("notebook")
        await box.open(sample.id, sample)
        await box.aclose()
        assert zoo.CLOSED.count(f"notebook {sample.id}") == 1


def test_two_tools_with_a_function_of_the_same_name(zoo):
    @tool(name="diary")
    class Diary:
        """Another one that writes."""

        def write(self, line: str) -> str:
            """Write."""
            return line

    with pytest.raises(UserError, match="'notebook' and 'diary' both offer a function 'write'"):
        LocalToolbox().schemas(["notebook", "diary"])


async def test_an_unreachable_server():
    box = HttpToolbox("http://127.0.0.1:1")
    with pytest.raises(ToolServerError, match=r"GET http://127\.0\.0\.1:1/tools: "):
        await box.open("e", row("add"))
    assert await box.close("e") == 0.0
    with pytest.raises(ConfigError, match=r"no tool server at http://127\.0\.0\.1:1 .*serve"):
        box.schemas(["add"])
    with pytest.raises(ConfigError, match="not a server's URL: 'localhost:8900'"):
        HttpToolbox("localhost:8900")


async def test_a_server_that_was_restarted_is_asked_for_its_tools_again(url):
    """Without blocking the event loop; the known tools serve until the server answers."""
    box, sample = HttpToolbox(url, TOKEN), row("add")
    await box.open(sample.id, sample)
    schemas = box.schemas(["add"])
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # accepts, and never answers
        box.url, box._specs_are_stale = f"http://127.0.0.1:{hangs.getsockname()[1]}", True
        box._request_seconds = 0.5
        other, longest, last = row("add"), 0.0, time.monotonic()
        opening = asyncio.create_task(box.open(other.id, other))
        while not opening.done():
            assert box.schemas(["add"]) == schemas
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        with pytest.raises(ToolServerError, match="before the deadline"):
            await opening
        assert longest < 0.3
    box.url, box._request_seconds = url, 15.0
    await box.open(other.id, other)
    assert not box._specs_are_stale
    assert await box.close(other.id) == await box.close(sample.id) == 0.0
    await box.aclose()


async def test_a_tool_server_that_is_down_is_no_bug_of_the_loop():
    """Also for an episode that is the first to need the server's tools."""
    tokenizer = byte_tokenizer()
    runtime = Runtime(
        Scripted(["a"], tokenizer),
        ChatTemplate(tokenizer),
        HttpToolbox("http://127.0.0.1:1"),
        Config(),
    )
    with pytest.raises(ToolServerError, match=r"GET http://127\.0\.0\.1:1/tools"):
        await play_episode(
            runtime,
            replace(row("add"), agent_name="tool_agent"),
            episode_id="e",
            rollout=0,
            sampling=Sampling(),
            seed=0,
        )


async def test_a_server_that_lost_its_sessions(url):
    """If an open episode is lost, that is an infrastructure error, never a reward of 0."""
    box = HttpToolbox(url, TOKEN)
    sample = row("notebook")
    await box.open(sample.id, sample)
    async with HttpClient(url, token=TOKEN) as client:
        path = f"/sessions/{sample.id}"
        status, _ = await client.request_json("DELETE", path, deadline=time.monotonic() + 5)
    assert status == 200
    with pytest.raises(ToolServerError, match="is not open"):
        await box.run([ToolCall("truth", {})], sample.id, 0)
    box._episodes["other"] = box._episodes.pop(sample.id)
    with pytest.raises(ToolServerError, match="is not open"):
        await box.close("other")
    await box.aclose()


async def test_a_wrong_token(url):
    with pytest.raises(ToolServerError, match="the bearer token is missing or wrong"):
        await HttpToolbox(url, "wrong").open("e", row("add"))


async def test_a_dropped_connection_does_not_run_a_call_twice(url, zoo):
    """A proxy hands on every request and loses the first answer to a call."""
    port = int(url.rpartition(":")[2])
    dropped = []

    async def proxy(reader, writer):
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", port)

        async def back():
            while data := await upstream_reader.read(65536):
                if b'"seconds"' in data and not dropped:
                    dropped.append(data)
                    break
                writer.write(data)
            writer.close()

        task = asyncio.create_task(back())
        while data := await reader.read(65536):
            upstream.write(data)
        upstream.close()
        await task

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    front = server.sockets[0].getsockname()[1]
    box = HttpToolbox(f"http://127.0.0.1:{front}", TOKEN)
    key, sample = uuid.uuid4().hex, row("once")
    await box.open(sample.id, sample)
    [result] = await box.run([ToolCall("once", {"key": key})], sample.id, 0)
    assert result.content == "1"
    assert len(dropped) == 1
    assert zoo.CALLED.count(key) == 1
    await box.aclose()
    server.close()
