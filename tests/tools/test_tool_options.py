"""Options of `@tool`, parameters that agentrl fills, and checks of arguments and results."""

from __future__ import annotations

import array
import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from support.tool_server import TOKEN, row, serving_tools

from agentrl import registry, sandbox
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.data.check import check_samples
from agentrl.errors import RegistryError, ToolServerError, UserCodeError, UserError
from agentrl.http import HttpClient
from agentrl.rewards.scorer import Scorer, check_graders
from agentrl.sandbox import Sandbox
from agentrl.testing import byte_tokenizer
from agentrl.tools import HttpToolbox, LocalToolbox, tool
from agentrl.tools.payloads import MAX_DEPTH, encode_arguments
from agentrl.tools.runner import CallLimits, ResultCache
from agentrl.trajectory import Message, Sample, ToolCall, ToolResult

PROCESSES = str(Path(__file__).parents[1] / "support" / "tool_processes.py")


pytestmark = pytest.mark.usefixtures("no_tools")


@pytest.fixture(scope="module")
def url():
    """Yield the URL of a tool server in a thread of this process.

    It serves all tools that are registered when a request arrives.
    """
    with serving_tools() as url:
        yield url


async def run(toolbox, *calls, tools=None, messages=(), **fields) -> list[ToolResult]:
    """Run calls, each (name, arguments), as one turn of a new episode; return their results."""
    sample = row(*(tools or dict.fromkeys(name for name, _ in calls)), **fields)
    await toolbox.open(sample.id, sample)
    made = [ToolCall(name, arguments) for name, arguments in calls]
    results = await toolbox.run(made, sample.id, 0, messages)
    await toolbox.close(sample.id)
    return [replace(r, seconds=0.0) for r in results]


# -- options --------------------------------------------------------------------------------------


def f():
    """F."""


class C:
    """C."""

    def go(self):
        """Go."""


REFUSED = [
    ({"timeout": float("nan")}, f, "timeout=nan must be greater than 0"),
    ({"retries": 2}, f, "retries=2 repeats failed calls: set idempotent=True"),
    ({"retries": -1, "idempotent": True}, f, "retries=-1 must be at least 0"),
    ({"rate_limit": -1.0}, f, "rate_limit=-1.0 must be at least 0"),
    ({"cache": True}, f, "cache=True skips repeated calls: set idempotent=True"),
    ({"cache": True, "idempotent": True}, C, "cache=True is for functions"),
    ({"scope": "turn"}, C, "scope='turn' must be one of episode, call"),
    ({"scope": "call"}, f, "scope='call' is for classes"),
    ({"process": True}, C, "process=True is for functions"),
    ({"process": True, "retries": 1, "timeout": 0}, f, "timeout=0 .*; retries=1 repeats"),
]


@pytest.mark.parametrize(("options", "target", "message"), REFUSED, ids=range(len(REFUSED)))
def test_impossible_options(options, target, message):
    with pytest.raises(UserError, match=message):
        tool(**options)(target)
    assert registry.tools.names() == []


def test_options_that_would_share_state_between_episodes():
    def reads(state, messages): ...

    with pytest.raises(
        UserError, match="shares results between episodes, but the function takes mess"
    ):
        tool(cache=True, idempotent=True)(reads)
    with pytest.raises(UserError, match="cannot pass messages and state to another process"):
        tool(process=True)(reads)
    with pytest.raises(UserError, match="at the top level of a file"):
        tool(process=True)(lambda_like)


def _local():
    def lambda_like():
        """F."""

    return lambda_like


lambda_like = _local()


@pytest.mark.parametrize(("options", "runs"), [({}, 3), ({"retries": 0}, 1), ({"retries": 1}, 2)])
async def test_retries(toolbox, options, runs):
    called = []

    @tool(idempotent=True, **options)
    async def broken() -> str:
        """Fail."""
        called.append(time.monotonic())
        raise ConnectionError("down")

    [result] = await run(toolbox, ("broken", {}))
    assert result.error == "crash"
    assert len(called) == runs
    pauses = [b - a for a, b in itertools.pairwise(called)]
    assert all(p >= least for p, least in zip(pauses, (0.19, 0.39), strict=False))


async def test_a_rate_limit_spreads_calls_and_takes_none_of_their_time(toolbox):
    began = []

    @tool(rate_limit=20, timeout=0.1)
    async def api() -> str:
        """Ask."""
        began.append(time.monotonic())
        return "yes"

    start_time = time.monotonic()
    results = await run(toolbox, *[("api", {})] * 8)
    assert [r.content for r in results] == ["yes"] * 8
    assert all(start >= start_time + i / 20 for i, start in enumerate(began))


async def test_a_call_that_waits_too_long_for_the_rate_limit():
    @tool(rate_limit=5)
    def api() -> str:
        """Ask."""
        return "yes"

    box = LocalToolbox(CallLimits(queue_seconds=0.3))
    with pytest.raises(ToolServerError, match=r"could not start within .*rate_limit=5"):
        await run(box, *[("api", {})] * 4)
    await box.aclose()


async def test_equal_arguments_share_one_result(toolbox):
    called: Counter[str] = Counter()

    @tool(cache=True, idempotent=True, retries=0)
    async def look_up(word: str, k: int = 1) -> ToolResult:
        """Look it up."""
        called[word] += 1
        await asyncio.sleep(0.05)
        if word == "unknown":
            raise ValueError(word)
        return ToolResult(f"{word} {called[word]}", reward=0.5)

    same = [("look_up", {"word": "a", "k": 2}), ("look_up", {"k": 2, "word": "a"})]
    assert await run(toolbox, *same, ("look_up", {"word": "b"})) == [
        ToolResult("a 1", reward=0.5),
        ToolResult("a 1", reward=0.5),
        ToolResult("b 1", reward=0.5),
    ]
    assert await run(toolbox, same[0]) == [ToolResult("a 1", reward=0.5)]  # another episode
    assert await run(toolbox, ("look_up", {"word": "a"})) == [ToolResult("a 2", reward=0.5)]
    for _ in range(2):
        [failed] = await run(toolbox, ("look_up", {"word": "unknown"}))
        assert failed.error == "crash"
    [refused] = await run(toolbox, ("look_up", {"word": 1}))
    assert refused.error == "schema"
    assert called == {"a": 2, "b": 1, "unknown": 2}


async def test_a_cancelled_caller_leaves_a_shared_result_to_the_others():
    cache = ResultCache()
    runs = []

    async def find_out() -> ToolResult:
        runs.append(1)
        await asyncio.sleep(0.05)
        return ToolResult("found")

    first, second = (asyncio.create_task(cache.get_or_run(b"k", find_out)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).content == "found"
    assert (await cache.get_or_run(b"k", find_out)).seconds == 0.0
    assert len(runs) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), max_size=30))
def test_the_result_cache_is_bounded_and_drops_the_least_recently_used(lookups):
    cache = ResultCache(max_size=4000)
    model: dict[bytes, int] = {}

    async def play():
        for key, size in lookups:
            k = b"%d" % key

            async def find_out(size=size) -> ToolResult:
                return ToolResult("x" * size)

            result = await cache.get_or_run(k, find_out)
            assert len(result.content) == model.get(k, size)
            model[k] = model.pop(k, size)
            while sum(v + 501 for v in model.values()) > 4000:
                del model[next(iter(model))]
            assert [*cache._results] == [*model]

    asyncio.run(play())


LIVES: list[str] = []


@pytest.fixture
def dice():
    """Register a class tool that creates an object for each call.

    Returns:
        The `tools_kwargs` with which a method fails, by the method.
    """
    del LIVES[:]

    @tool(scope="call", timeout=0.5)
    class Dice:
        """Dice."""

        def __init__(self, sample, sides: int = 6, at: str = ""):
            self.id, self.sides, self.at = sample.id, sides, at
            LIVES.append("made")
            if at == "init":
                raise ValueError("no dice")
            if at == "slow init":
                time.sleep(0.8)

        async def throw(self, how: str = "") -> ToolResult:
            """Throw."""
            if how == "raise":
                raise ZeroDivisionError(how)
            if how:
                await asyncio.sleep(float(how))
            self.sides += 1
            return ToolResult(f"{self.id} {self.sides}", reward=1.0)

        def reward(self) -> float:
            LIVES.append("reward")
            if self.at == "reward":
                raise ValueError("no reward")
            return 0.25

        async def close(self) -> None:
            LIVES.append("close")

    return {n: {"dice": {"create_kwargs": {"at": n}}} for n in ("init", "slow init", "reward")}


async def test_an_object_for_each_call(toolbox, dice):
    kwargs = {"dice": {"create_kwargs": {"sides": 20}}}
    sample = row("dice", tools_kwargs=kwargs)
    await toolbox.open(sample.id, sample)
    assert LIVES == []
    calls = [ToolCall("throw", {}), ToolCall("throw", {"how": "raise"})]
    good, bad = await toolbox.run(calls, sample.id, 0)
    assert (good.content, good.reward) == (f"{sample.id} 21", 1.25)
    assert (bad.error, bad.reward) == ("crash", 0.25)
    [again] = await toolbox.run(calls[:1], sample.id, 1)
    assert again.content == f"{sample.id} 21"
    assert await toolbox.close(sample.id) == 0.0
    assert Counter(LIVES) == {"made": 3, "reward": 3, "close": 3}


async def test_the_object_of_a_call_is_always_closed(toolbox, dice):
    [late] = await run(toolbox, ("throw", {"how": "5"}), tools=["dice"])
    assert (late.error, late.reward, LIVES) == ("timeout", None, ["made", "close"])
    del LIVES[:]
    [broken] = await run(toolbox, ("throw", {}), tools=["dice"], tools_kwargs=dice["init"])
    assert broken.content == "Error: the tool failed: ValueError"
    assert LIVES == ["made"]
    with pytest.raises(UserCodeError, match=r"reward\(\) raised ValueError: no reward"):
        await run(toolbox, ("throw", {}), tools=["dice"], tools_kwargs=dice["reward"])
    assert LIVES[-1] == "close"


async def test_an_object_that_is_made_too_late_is_closed(toolbox, dice):
    [late] = await run(toolbox, ("throw", {}), tools=["dice"], tools_kwargs=dice["slow init"])
    assert (late.error, LIVES) == ("timeout", ["made"])
    await asyncio.sleep(0.6)
    assert LIVES == ["made", "close"]


async def test_a_cancelled_call_closes_its_object(dice):
    box = LocalToolbox()
    sample = row("dice")
    await box.open(sample.id, sample)
    task = asyncio.create_task(box.run([ToolCall("throw", {"how": "5"})], sample.id, 0))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert LIVES == ["made", "close"]
    await box.aclose()


async def test_a_repeated_request_runs_the_call_if_the_first_one_was_cancelled():
    runs = []

    @tool
    async def wait(key: str) -> str:
        """Wait, the first time.

        Args:
            key: a key
        """
        runs.append(key)
        if len(runs) == 1:
            await asyncio.sleep(1000)
        return f"run {len(runs)}"

    box = LocalToolbox()
    sample = row("wait")
    await box.open(sample.id, sample)
    call = [ToolCall("wait", {"key": "k"})]
    first, second, third = (asyncio.create_task(box.run(call, sample.id, 0)) for _ in range(3))
    while not runs:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first, second, third])
    assert first.cancelled() and runs == ["k", "k"]
    assert [t.result()[0].content for t in (second, third)] == ["run 2"] * 2
    await box.aclose()


async def test_a_repeated_request_can_be_cancelled_alone():
    go_on = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        await go_on.wait()
        return "done"

    box = LocalToolbox()
    sample = row("wait")
    await box.open(sample.id, sample)
    first, second = (
        asyncio.create_task(box.run([ToolCall("wait", {})], sample.id, 0)) for _ in range(2)
    )
    await asyncio.sleep(0.05)
    second.cancel()
    await asyncio.wait([second])
    go_on.set()
    assert second.cancelled() and (await first)[0].content == "done"
    await box.aclose()


# -- in a process ---------------------------------------------------------------------------------


async def test_a_tool_in_a_process_of_its_own(toolbox, tmp_path):
    registry.load_file(PROCESSES)
    results = await run(
        toolbox, *[("divide", {"a": 7, "b": b}) for b in (2, 1, 0)], ("whose", {}), ground_truth="x"
    )
    content, _, pid = results[0].content.partition(" in ")
    assert (content, results[0].reward) == ("3", 0.5)
    assert int(pid) != os.getpid()
    assert results[1] == ToolResult("Error: that is no division", ok=False, error="tool_error")
    assert results[2].content == "Error: the tool failed: ZeroDivisionError"
    assert results[3].content.endswith(" x")
    [alive] = await run(toolbox, ("dies_once", {"marker": str(tmp_path / "marker")}))
    assert alive.content == "alive"


async def test_a_process_that_ends_or_hangs_is_replaced(caplog):
    """The failure affects only the call that caused it."""
    registry.load_file(PROCESSES)
    box = LocalToolbox()
    await run(box, ("end", {"how": "not"}))
    ways = ["exit", "crash", "system exit", "hang", "not"]
    began = time.monotonic()
    results = await run(box, *[("end", {"how": how}) for how in ways])
    assert time.monotonic() - began < 30
    assert [r.error for r in results] == ["crash", "crash", "crash", "timeout", ""]
    assert "the worker process died: it ended with exit code 3" in results[0].content
    assert "SIGSEGV" in results[1].content
    assert results[2].content == "Error: the tool failed: SystemExit"
    assert results[3].content == "Error: the tool timed out after 1 s"
    assert [r.content for r in await run(box, *[("end", {"how": "not"})] * 4)] == ["not"] * 4
    await box.aclose()


async def test_a_call_that_cannot_be_sent_to_a_process_frees_its_place(caplog):
    """The failed call has a result, and the next call gets its place."""
    registry.load_file(PROCESSES)
    box = LocalToolbox(CallLimits(processes=2, queue_seconds=5.0))
    wrong = await run(box, *[("offers_too_much", {"n": 1})] * 3)
    assert [r.error for r in wrong] == ["crash"] * 3
    assert wrong[0].content == "Error: the tool failed: TypeError"
    assert "offers_too_much() got an unexpected keyword argument 'n'" in caplog.text
    right = await run(box, *[("by_name", {"seconds": 3, "function": "f"})] * 3)
    assert [r.content for r in right] == ["f 3"] * 3
    await box.aclose()


# -- texts that the model must not read -----------------------------------------------------------


LEAKS = [
    ("leak_in_a_process", {"how": "theirs"}, "OSError"),
    ("leak_in_a_process", {"how": "ours"}, "DataError"),
    ("leak_in_a_thread", {"how": "theirs"}, "KeyError"),
    ("leak_in_a_thread", {"how": "ours"}, "UserCodeError"),
    ("leak_on_the_loop", {"how": "theirs"}, "ConnectionError"),
    ("leak_on_the_loop", {"how": "result"}, "TypeError"),
    ("leak_by_call", {}, "RuntimeError"),
    ("leak_by_episode", {}, "RuntimeError"),
]
OWNERS = ("leak_in_a_process", "leak_in_a_thread", "leak_on_the_loop", "leak_by_call")


async def test_the_text_of_an_exception_is_for_the_log(toolbox, caplog):
    """It may contain connection strings and paths, which the model could print."""
    registry.load_file(PROCESSES)
    results = await run(
        toolbox,
        *[(name, arguments) for name, arguments, _ in LEAKS],
        tools=(*OWNERS, "leak_by_episode"),
    )
    for (name, _, kind), result in zip(LEAKS, results, strict=True):
        assert result.content == f"Error: the tool failed: {kind}"
        assert f"tool {name!r} failed (logged once per tool and type): {kind}" in caplog.text
    for at, error in (("constructor", "crash"), ("close", "")):
        kwargs = {"leak_by_call": {"create_kwargs": {"at": at}}}
        [result] = await run(toolbox, ("leak_by_call", {}), tools_kwargs=kwargs)
        assert result.error == error and "hunter2" not in result.content
    assert caplog.text.count("hunter2") >= len(LEAKS)


# -- an episode that ends during a call -----------------------------------------------------------


@pytest.mark.parametrize("where", ["in_a_thread", "in_a_process", "on_the_loop"])
async def test_a_call_keeps_its_place_after_its_episode_ended(toolbox, tmp_path, where):
    """The result is returned at once. Until the call ends, no other call gets its place."""
    registry.load_file(PROCESSES)
    name, log = f"stay_{where}", tmp_path / "log"
    call, first, second = ToolCall(name, {"log": str(log)}), row(name), row(name)
    log.touch()

    async def noted(marks: str) -> None:
        async with asyncio.timeout(20):
            while len(log.read_text()) < len(marks):
                await asyncio.sleep(0.02)
        assert log.read_text() == marks

    for sample in (first, second):
        await toolbox.open(sample.id, sample)
    if where == "in_a_process":  # start both worker processes before the test
        await run(toolbox, *[("end", {"how": "not"})] * 2)
    running = asyncio.create_task(toolbox.run([call], first.id, 0))
    await noted("+")
    assert await toolbox.close(first.id) == 0.0
    with pytest.raises(ToolServerError, match="its episode ended during the call"):
        await running
    assert log.read_text() == "+"
    beside = asyncio.create_task(toolbox.run([call], second.id, 0))
    await noted("+-+")
    await toolbox.close(second.id)
    with pytest.raises(ToolServerError, match="its episode ended during the call"):
        await beside
    await noted("+-+-")


@pytest.mark.timing
async def test_an_async_call_of_an_object_does_not_delay_the_end_of_its_episode(toolbox):
    @tool
    class Slow:
        """Waits."""

        async def wait(self) -> str:
            """Wait."""
            try:
                await asyncio.sleep(60)
            finally:
                log.append("cancelled")

        async def close(self) -> None:
            log.append("closed")

    log, sample = [], row("slow")
    if isinstance(toolbox, HttpToolbox):
        toolbox._specs = None
    await toolbox.open(sample.id, sample)
    running = asyncio.create_task(toolbox.run([ToolCall("wait", {})], sample.id, 0))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    assert await toolbox.close(sample.id) == 0.0
    assert time.monotonic() - began < 2.0
    with pytest.raises(ToolServerError, match="its episode ended during the call"):
        await running
    assert log == ["cancelled", "closed"]


# -- parameters that agentrl fills ----------------------------------------------------------------


class Mood(TypedDict):
    calls: int


async def test_the_episodes_state_is_shared_and_in_order(toolbox):
    @tool
    async def add(n: int, state: dict[str, Any]) -> str:
        """Add."""
        before = list(state.setdefault("seen", []))
        await asyncio.sleep(0.03 / n)
        state["seen"] = [*before, n]
        return str(state["seen"])

    @tool
    def seen(state) -> list[int]:
        """Return the numbers that were added."""
        return state["seen"]

    @tool
    class Keeper:
        """Keeps."""

        def __init__(self, state, start: int = 7):
            state["seen"] = [start]

        def last(self, state) -> int:
            """The last."""
            return state["seen"][-1]

    calls = [("add", {"n": 1}), ("add", {"n": 2}), ("seen", {}), ("add", {"n": 3}), ("last", {})]
    tools = ["add", "seen", "keeper"]
    for _ in range(2):  # each episode has its own state
        results = await run(toolbox, *calls, tools=tools)
        assert [r.content for r in results] == [
            "[7, 1]", "[7, 1, 2]", "[7,1,2]", "[7, 1, 2, 3]", "3",
        ]  # fmt: skip


async def test_the_row_and_the_conversation(toolbox):
    @tool
    def told(messages: tuple[Message, ...], sample: Sample, k: int = 1) -> str:
        """Tell."""
        assert isinstance(messages, tuple)
        return f"{sample.ground_truth} {[(m.role, m.content) for m in messages[-k:]]}"

    @tool
    class Reader:
        """Reads."""

        def calls(self, messages) -> list[Any]:
            """The calls."""
            return [c.arguments for m in messages for c in m.tool_calls]

        def nothing(self, sandbox: bool = False) -> str:
            """Nothing."""
            return str(sandbox)

    turn = Message("assistant", "é <t>", (ToolCall("x", {"a": [1]}), ToolCall("y", {"a": 2**70})))
    results = await run(
        toolbox,
        ("told", {"k": 1}),
        ("calls", {}),
        ("nothing", {"sandbox": True}),
        tools=["told", "reader"],
        messages=[Message("user", "hi"), turn],
        ground_truth="42",
    )
    assert results[0].content == "42 [('assistant', 'é <t>')]"
    assert json.loads(results[1].content) == [{"a": [1]}, str({"a": 2**70})]
    assert results[2].content == "True"


async def test_only_tools_with_the_parameter_get_the_conversation(url, monkeypatch):
    @tool
    def quiet() -> str:
        """Quiet."""
        return "x"

    @tool
    def curious(messages) -> int:
        """Curious."""
        return len(messages)

    box = HttpToolbox(url, TOKEN)
    sent = []
    ask = box._request

    async def listened(method, path, body, *rest):
        sent.append(body)
        return await ask(method, path, body, *rest)

    monkeypatch.setattr(box, "_request", listened)
    messages = [Message("user", "hi")] * 3
    results = await run(box, ("quiet", {}), ("curious", {}), messages=messages)
    assert [r.content for r in results] == ["x", "3"]
    assert ["messages" in body for body in sent[-3:-1]] == [False, True]
    opened = next(body for body in sent if body and "sample" in body)
    assert opened["sample"] == {"tools": ("quiet", "curious")}
    await box.aclose()


async def test_the_sandbox_of_a_tool_is_the_current_one():
    @tool
    async def which(sandbox: Sandbox) -> str:
        """Which."""
        return f"{id(sandbox)}"

    box = LocalToolbox()
    [result] = await run(box, ("which", {}))
    assert result.content == str(id(sandbox.current()))
    await box.aclose()


def parameters(name: str) -> list[str]:
    [schema] = registry.tools.get(name).spec.schemas
    return [*schema["function"]["parameters"]["properties"]]


def g_bare(a: int, state, sample, messages, sandbox): ...
def g_typed(a: int, state: dict, sample: Sample, messages: list[Message], sandbox: Sandbox): ...
def g_optional(a: int, state: Mood | None = None, sample: Annotated[Any, 1] = None): ...
def g_not_there(a: int, sandbox: Nowhere, state: Nowhere[int]): ...  # noqa: F821
def g_own(state: str, sample: int, messages: list[str], sandbox: bool = True): ...
def g_mixed(*, state: str | None = None, sample): ...


@pytest.mark.parametrize(
    ("function", "models", "injected"),
    [
        (g_bare, ["a"], {"state", "sample", "messages", "sandbox"}),
        (g_typed, ["a"], {"state", "sample", "messages", "sandbox"}),
        (g_optional, ["a"], {"state", "sample"}),
        (g_not_there, ["a"], {"state", "sandbox"}),
        (g_own, ["state", "sample", "messages", "sandbox"], set()),
        (g_mixed, ["state"], {"sample"}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_parameters_of_the_model_and_injected_parameters(function, models, injected):
    tool(function)
    assert parameters(function.__name__) == models
    record = registry.tools.get(function.__name__)
    assert record.injected == injected
    assert not any(name in record.functions[0].parameters.usage for name in injected)
    assert {*record.spec.injected} == injected


async def test_a_handwritten_schema_may_offer_the_name_of_an_injected_parameter(toolbox):
    written = {"type": "object", "properties": {"state": {"type": "string"}}}

    @tool(schema={"function": {"name": "address", "parameters": written}})
    def address(state, sample):
        return f"{state} {sample.ground_truth}"

    [result] = await run(toolbox, ("address", {"state": "Ohio"}), ground_truth="1")
    assert result.content == "Ohio 1"


# -- checks of arguments and results --------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 2):
        value = [value]
    return {"x": value}


BAD_JSON: list[tuple[Any, str]] = [
    ({"x": float("nan")}, "NaN is not valid JSON"),
    ({"x": [1, {"y": float("-inf")}]}, "-Infinity is not valid JSON"),
    ({"x": "\ud800"}, "the arguments are not valid JSON"),
    ({"\udfff": 1}, "the arguments are not valid JSON"),
    ({"x": 2**64}, "exceeds 64-bit range"),
    ({"x": -(2**63) - 1}, "exceeds 64-bit range"),
    (nested(MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} levels deep"),
    (nested(5000), "the arguments are not valid JSON: "),
    ({1: 2}, "Dict key must be str"),
    ({"x": {1, 2}}, "not JSON serializable: set"),
    ({"x": b"x"}, "not JSON serializable: bytes"),
    ({"x": ToolResult("x")}, "not JSON serializable: ToolResult"),
    ({"x": "y" * 300_000}, "too long: 300008 bytes"),
    ("[1]", "the arguments are not a JSON object"),
    (None, "the arguments are not a JSON object"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_JSON, ids=range(len(BAD_JSON)))
async def test_arguments_that_no_tool_gets(toolbox, arguments, message):
    """The toolbox checks the arguments itself, whichever parser read the call."""
    reached = []

    @tool(schema={"function": {"name": "hungry", "parameters": {"type": "object"}}})
    def hungry(**anything):
        reached.append(anything)
        return "ok"

    good, bad = (
        {"x": nested(MAX_DEPTH - 1), "y": None, "z": [-(2**63), 2**64 - 1, 1e308]},
        arguments,
    )
    results = await run(toolbox, ("hungry", good), ("hungry", bad))
    assert reached == [good]
    assert results[0].content == "ok"
    assert results[1].error == "bad_call"
    assert message in results[1].content
    assert len(results[1].content.splitlines()) == 1


async def test_direct_requests_to_the_server_are_checked_too(url):
    @tool
    def hungry(x: Any) -> str:
        """Eat."""
        return "ok"

    box = HttpToolbox(url, TOKEN)
    sample = row("hungry")
    await box.open(sample.id, sample)
    async with HttpClient(url, token=TOKEN) as client:
        answers = []
        for i, depth in enumerate((MAX_DEPTH, MAX_DEPTH + 1)):
            body = {"turn": 0, "call_index": i, "name": "hungry", "arguments": nested(depth)}
            path, deadline = f"/sessions/{sample.id}/calls", time.monotonic() + 10
            answers.append((await client.request_json("POST", path, body, deadline=deadline))[1])
    assert [a["error"] for a in answers] == ["", "bad_call"]
    await box.aclose()


async def test_odd_names_of_calls(toolbox):
    tool(f)
    names: list[Any] = ["\ud800", "f\0", "x" * 100_000, "", None, 3, "os.system", "__class__"]
    results = await run(toolbox, *((n, {}) for n in names), ("f", {}), tools=["f"])
    assert [r.error for r in results[:-1]] == [
        "bad_call", "unknown_tool", "unknown_tool", "unknown_tool", "bad_call", "bad_call",
        "unknown_tool", "unknown_tool",
    ]  # fmt: skip
    assert all(len(r.content) <= 300 and r.content.isprintable() for r in results)
    assert results[-1].ok


async def test_a_bad_call_is_logged_in_one_line(toolbox):
    tool(f)
    sample = row("f")
    await toolbox.open(sample.id, sample)
    broken = ToolCall("f", "{", error="not JSON:\n  line 1\n\n  column 2")
    [result] = await toolbox.run([broken], sample.id, 0)
    assert result.content.startswith(
        "Error: invalid tool call: not JSON: line 1 column 2. Expected"
    )


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), ANY))
def test_encoded_arguments_are_decoded_unchanged(arguments):
    encoded = encode_arguments(ToolCall("f", arguments))
    if isinstance(encoded, bytes):
        assert json.loads(encoded, parse_constant=pytest.fail) == arguments
    else:
        assert encoded.error == "bad_call"


class Rude:
    def __str__(self):
        raise RuntimeError("no")


class RudeError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def endless():
    while True:
        yield "x" * 1000


def loop():
    value: list[Any] = []
    value.append(value)
    return value


RETURNED: dict[str, Any] = {
    "100 MB": lambda: "x" * 100_000_000,
    "100 MB of bytes": lambda: b"\xff" * 100_000_000,
    "lines": lambda: "line\n" * 1_000_000,
    "list of lines": lambda: ["line"] * 1_000_000,
    "binary": lambda: bytes(range(256)),
    "array": lambda: memoryview(array.array("B", b"abc")),
    "nul": lambda: "a\0b",
    "ansi": lambda: "\x1b[31mred\x1b[0m",
    "surrogate": lambda: "a\ud800b",
    "bidi": lambda: "\u202eabc\u2066",
    "none": lambda: None,
    "nan": lambda: {"a": float("nan")},
    "generator": endless,
    "iterator": lambda: map(str, [1]),
    "deep": lambda: nested(100_000),
    "itself": loop,
    "rude": Rude,
    "big number": lambda: 10**5000,
    "reward": lambda: ToolResult("x", reward=10**400),
    "class": lambda: ToolResult("x", ok=False, error="\ud800"),
    "numpy": lambda: ToolResult("x", reward=__import__("numpy").float64(0.5)),
}
CRASHES = {"generator", "iterator", "deep", "rude", "big number", "reward"}


@pytest.mark.parametrize("what", RETURNED)
async def test_any_return_value_of_a_tool_becomes_text(toolbox, what):
    """The text is bounded and valid UTF-8, and the episode continues."""

    @tool
    def give() -> Any:
        """Give."""
        return RETURNED[what]()

    @tool
    async def give_async() -> Any:
        """Give."""
        return RETURNED[what]()

    began = time.monotonic()
    results = await run(toolbox, ("give", {}), ("give_async", {}))
    assert time.monotonic() - began < 15
    for result in results:
        assert result.error == {"class": "\ufffd"}.get(what, "crash" * (what in CRASHES))
        assert len(result.content) < 262_300
        assert "\0" not in result.content
        result.content.encode()
    template = ChatTemplate(byte_tokenizer())
    begun = results[0].content[:2000]
    assert template.decode_plain(template.encode(begun)) == begun
    shown = {
        "nan": '{"a":null}',
        "none": "",
        "nul": "a\ufffdb",
        "array": "abc",
        "itself": "[[...]]",
    }
    assert results[0].content == shown.get(what, results[0].content)
    if what.startswith("100 MB"):
        assert "omitted ...]" in results[0].content


async def test_an_exception_whose_str_raises(toolbox):
    @tool
    def rude() -> str:
        """Rude."""
        raise RudeError

    [result] = await run(toolbox, ("rude", {}))
    assert result.content == "Error: the tool failed: RudeError"


# -- names ----------------------------------------------------------------------------------------


def named(name: str) -> Any:
    def function(a: int) -> int:
        """Do it."""
        return a

    function.__name__ = function.__qualname__ = name
    return function


BAD_NAMES = ["", "two words", "größe", "名前", "x" * 65, "1st", "a.b", "os.system", "../x", "a b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_template_shows(name):
    with pytest.raises(UserError, match=r"is not a valid tool name: .*letters, digits, _ and -"):
        tool(named(name))
    with pytest.raises(UserError, match="is not a valid tool name"):
        tool(type("Thing", (), {name or " ": named("x")}))
    schema = {"function": {"name": name or " ", "parameters": {"type": "object"}}}
    with pytest.raises(UserError, match="is not a valid tool name"):
        tool(schema=schema)(named("x"))
    assert registry.tools.names() == []


async def test_two_hundred_tools(toolbox):
    names = [f"tool_{i}" for i in range(200)]
    for name in names:
        tool(named(name))
    assert len(toolbox.schemas(names)) == 200
    calls = [(name, {"a": i}) for i, name in enumerate(names)]
    results = await run(toolbox, *calls, ("tol_7", {}), tools=names)
    assert [r.content for r in results[:-1]] == [str(i) for i in range(200)]
    assert results[-1].content.startswith("Error: unknown tool 'tol_7'. Did you mean 'to")
    assert len(results[-1].content) <= 300


class Tree(BaseModel):
    children: list[Tree]


def g_recursive(tree: Tree): ...


class Hooked:
    """A."""

    def pull(self):
        """Pull."""


def test_reserved_and_duplicate_names():
    with pytest.raises(UserError, match="'Tree' contains itself"):
        tool(g_recursive)
    for hook in ("opening", "reward", "close"):
        for bad in (lambda self, arm: 0, 0.5, classmethod(lambda cls, arm: 0)):
            with pytest.raises(UserError, match=f"{hook} is a method that agentrl calls without"):
                tool(type("Bandit", (Hooked,), {hook: bad}))
        for good in (lambda self, arm=1: 0, staticmethod(lambda: 0), lambda self, *a, **k: 0):
            tool(type("Bandit", (Hooked,), {hook: good}))
    with pytest.raises(UserError, match=r"offers two functions 'echo': its __call__ has the name"):
        tool(type("Echo", (), {"__call__": named("x"), "echo": named("y")}))
    tool(named("twice"))
    with pytest.raises(RegistryError, match="two definitions of the tool 'twice'"):
        tool(name="twice")(f)


# -- calls that hang ------------------------------------------------------------------------------

HUNG = """
import asyncio, sys, threading, time
from agentrl import tool
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Sample, ToolCall

@tool(timeout=0.5)
def hang() -> str:
    "Hang."
    threading.Event().wait()

@tool(timeout=2)
def quick() -> str:
    "Quick."
    return "here"

async def main():
    box, sample = LocalToolbox(), Sample("x", (), tools=("hang", "quick"))
    await box.open("x", sample)
    hung = asyncio.create_task(box.run([ToolCall("hang", {})] * 40, "x", 0))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    [result] = await box.run([ToolCall("quick", {})], "x", 1)
    print(result.content, time.monotonic() - began < 0.3, end=" ")
    print({r.error for r in await hung}, time.monotonic() - began < 2.0, flush=True)
    await box.close("x")
    await box.aclose()

asyncio.run(main())
"""


async def test_forty_hung_tools():
    """Each call ends at its deadline, other calls are served, and the process can exit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HUNG + "print('end', flush=True)", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"here True {'timeout'} True\n"
    assert await asyncio.wait_for(process.stdout.readline(), 5) == b"end\n"
    assert await asyncio.wait_for(process.wait(), 5) == 0


# -- names in rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["os.system", "../../x.py", "module:attr", "/etc/passwd", "a.py:f"]
)
def test_rows_can_name_registered_tools_only(name):
    """Code is loaded only from the files of the config."""
    sample = replace(row(name, interaction=name, data_source=name), agent_name=name)
    with pytest.raises(UserError) as e:
        check_samples([sample], "rows")
    for kind in ("tool", "agent loop", "interaction"):
        assert f"no {kind} named {name!r}" in str(e.value)
    with pytest.raises(UserError, match="data_source"):
        check_graders([sample], Scorer(Config().reward))


async def test_each_call_gets_the_rows_own_constructor_arguments(toolbox):
    @tool(scope="call")
    class Urn:
        """An urn."""

        def __init__(self, balls: list):
            self.balls = balls

        def draw(self) -> str:
            """Draw a ball."""
            return self.balls.pop()

    kwargs = {"urn": {"create_kwargs": {"balls": ["a", "b"]}}}
    results = await run(toolbox, ("draw", {}), ("draw", {}), tools=("urn",), tools_kwargs=kwargs)
    assert [r.content for r in results] == ["b", "b"]
