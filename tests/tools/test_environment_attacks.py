"""Attacks on environments: hanging methods, odd values, other programs' answers, mixed rows."""

import asyncio
import datetime
import gc
import json
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from fastapi import FastAPI

from agentrl import (
    Environment,
    Message,
    Reply,
    Sample,
    Scores,
    environment,
    load_config,
    load_samples,
    play,
)
from agentrl.config import Config
from agentrl.data import load_checked
from agentrl.errors import AgentRLError, DataError, UserCodeError
from agentrl.preflight.environment import EnvironmentCheck
from agentrl.registry import load_file
from agentrl.report.rescore import _score_group
from agentrl.rewards import Scorer
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import HttpToolbox, LocalToolbox
from agentrl.trajectory import Group

pytestmark = pytest.mark.usefixtures("no_tools")
TOKENIZER = byte_tokenizer()


def sample_of(name, **kwargs):
    prompt = (Message("user", "x"),)
    own = {name: {"create_kwargs": kwargs}} if kwargs else {}
    return Sample("a", prompt, "tool_agent", tools=(name,), tools_kwargs=own, environment=name)


def play_turns(sample, turns, toolbox=None):
    return play(sample, Scripted(turns, TOKENIZER), TOKENIZER, toolbox=toolbox)


# -- methods that hang ----------------------------------------------------------------------------


def test_the_reward_waits_for_a_call_that_passed_its_deadline():
    # "Those of one object run one after another": reward() must not run beside a call in a thread.
    events = []

    @environment("slow", timeout=0.3)
    class Slow(Environment):
        def act(self) -> str:
            """Act."""
            events.append("act")
            time.sleep(0.5)
            events.append("acted")
            return ""

        async def reward(self):
            events.append("reward")
            return 1.0

        def close(self):
            events.append("close")

    trajectory = play_turns(sample_of("slow"), [call("act"), "done"])
    assert trajectory.turns[0].tool_results[0].error == "timeout"
    assert events == ["act", "acted", "reward", "close"]


def test_no_reward_beside_a_call_that_never_ends():
    # Such an episode is dropped: its state may change while reward() reads it.
    gate = threading.Event()

    @environment("stuck", timeout=0.2)
    class Stuck(Environment):
        def act(self) -> str:
            """Act."""
            gate.wait(20)
            return ""

        async def reward(self):
            return 1.0

    try:
        with pytest.raises(UserCodeError, match="an earlier call that timed out still runs"):
            play_turns(sample_of("stuck"), [call("act"), "done"])
    finally:
        gate.set()


@pytest.mark.parametrize("hook", ["respond", "score"])
def test_close_ends_an_async_hook_at_once(hook, caplog):
    # The close of a cancelled episode waited 5 s, and closed the object beside the running hook.
    # asyncio complained of the hook's error, which nobody waits for any more.
    events = []

    @environment("slow")
    class Slow(Environment):
        async def respond(self, messages):
            await self.reward()

        async def reward(self):
            try:
                await asyncio.sleep(20)
            finally:
                events.append("ended")

        def close(self):
            events.append("closed")

    async def main():
        toolbox = LocalToolbox()
        await toolbox.open("e", sample_of("slow"))
        ask = toolbox.respond("e", 0, ()) if hook == "respond" else toolbox.score("e", ())
        task = asyncio.create_task(ask)
        await asyncio.sleep(0.05)
        task.cancel()
        start = time.monotonic()
        await toolbox.close("e")
        seconds = time.monotonic() - start
        await toolbox.aclose()
        return seconds

    assert asyncio.run(main()) < 2
    gc.collect()
    assert sorted(events) == ["closed", "ended"] and not caplog.records


# -- turns ----------------------------------------------------------------------------------------


def test_without_tools_a_call_is_a_text():
    # A game got no move, and the model read that a call was malformed.
    text = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'

    @environment("echo")
    class Echo(Environment):
        async def respond(self, messages):
            return Reply(messages[-1].content.upper(), done=len(messages) == 6)

        async def reward(self):
            return 1.0

    trajectory = play_turns(sample_of("echo"), [text, "</tool_call>", "end"])
    replies = [m.content for m in trajectory.messages if m.role == "user"][1:]
    assert replies == [text.upper(), "</TOOL_CALL>"]
    assert not any(turn.tool_calls for turn in trajectory.turns)


# -- odd values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # Other exceptions than UserCodeError have the status 500 in a tool server, which is an
        # `Infrastructure` error: the episode would be played three times, and only over HTTP.
        ("async def reward(self): return {'a': 1e308, 'b': 1e308}", "named finite numbers"),
        ("async def reward(self): return {1: 1.0, '1': 2.0}", "named finite numbers"),
        ("async def start(self): self.tools = 3", "tools=3 must be a list"),
        ("async def start(self): self.tools = [['go']]", r"tools=\[\['go'\]\] must be a list"),
        ("async def start(self): return [Message('user', 5)]", "must return a text"),
    ],
)
def test_odd_values_are_errors_of_the_environment(tmp_path, body, message):
    file = tmp_path / "odd.py"
    head = "from agentrl import Environment, Message, environment\n@environment('odd')\n"
    file.write_text(
        f"{head}class Odd(Environment):\n    def go(self) -> str:\n        'Go.'\n    {body}\n"
    )
    load_file(str(file))

    async def main():
        toolbox = LocalToolbox()
        try:
            await toolbox.open("e", sample_of("odd"))
            await toolbox.score("e", ())
        finally:
            await toolbox.aclose()

    with pytest.raises(UserCodeError, match=message):
        asyncio.run(main())


def test_a_score_of_a_turn_that_is_not_there_drops_the_episode():
    # Raised by the scorer, the same error stops the run.
    @environment("beyond")
    class Beyond(Environment):
        async def reward(self):
            return Scores(1.0, {7: 1.0})

    with pytest.raises(UserCodeError, match="scored turn 7 of sample 'a', which has 1 turn"):
        play_turns(sample_of("beyond"), ["done"])


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "1"}},
        {"tools_kwargs": {"calculator": {"create_kwargs": {}}}},
        {"tool_selection": ["calculator"]},
    ],
)
def test_verls_column_brings_no_second_world(tmp_path, extra):
    # "never both": the interaction was kept beside the environment, and the tools were ignored.
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "x", "environment": "e", "extra_info": extra}))
    with pytest.raises(DataError, match=r"cannot also have extra_info\."):
        load_samples(str(file))


def test_a_value_that_json_lacks_is_named_by_its_column(tmp_path):
    @environment("e")
    class E(Environment):
        def __init__(self, when):
            pass

    rows = [
        {
            "prompt": "x",
            "environment": "e",
            "environment_kwargs": {"when": datetime.date(2020, 1, 1)},
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 0, environment_kwargs\.when: is datetime"):
        load_checked(str(tmp_path / "rows.parquet"))


# -- other programs -------------------------------------------------------------------------------


@pytest.fixture
def program():
    """A program whose answers a test chooses: its URL, and the answers by route."""
    app, answers = FastAPI(), {"functions": ["guess"], "timeout": 5.0, "open_seconds": 0.0}

    def schema(name):
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}
        function = {"name": name, "description": name, "parameters": parameters}
        return {"type": "function", "function": function}

    @app.get("/tools")
    async def tools():
        spec = {
            "name": "number",
            "schemas": [schema(name) for name in answers["functions"]],
            "timeout": answers["timeout"],
            "stateful": True,
            "environment": ["reward"],
        }
        return {"tools": [spec]}

    @app.post("/sessions")
    async def start():
        await asyncio.sleep(answers["open_seconds"])
        return answers.get("open", {"opening": [], "tools": answers["functions"]})

    @app.post("/sessions/{episode}/calls")
    async def run(episode):
        return {"content": "called", "ok": True}

    @app.post("/sessions/{episode}/reward")
    async def reward(episode):
        return {"reward": 1.0, "parts": {}}

    @app.delete("/sessions/{episode}")
    async def close(episode):
        return {"reward": 0}

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", answers
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("name", ["start", "close", "reward", "tools", "_toolbox"])
def test_a_program_may_name_its_functions_as_it_likes(program, name):
    # A function `start` replaced the method that opens the session.
    url, answers = program
    answers["functions"] = [name]
    load_file(f"environment+{url}#alias_{name}")
    trajectory = play_turns(sample_of(f"alias_{name}"), [call(name, number=1), "done"])
    assert trajectory.turns[0].tool_results[0].content == "called"
    assert trajectory.scores == Scores(1.0)


@pytest.mark.parametrize("is_alias", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        {"opening": [{"role": "assistant", "content": "I"}], "tools": ["guess"]},
        {"opening": [{"role": "user", "content": 5}], "tools": ["guess"]},
        {"opening": [{"role": "nobody", "content": "x"}], "tools": ["guess"]},
        {"opening": None, "tools": None},
        {},
        [1],
    ],
)
def test_a_wrong_opening_of_a_program_drops_the_episode(program, answer, is_alias):
    # With `tools.transport=URL`, an assistant message was accepted, and a content that is no text
    # raised a TypeError, which stops a run.
    url, answers = program
    answers["open"] = answer
    toolbox, name = None, "number"
    if is_alias:
        name = f"alias_{abs(hash(str(answer)))}"
        load_file(f"environment+{url}#{name}")
    else:
        toolbox = HttpToolbox(url)
        toolbox.connect()
    with pytest.raises(UserCodeError, match=r"did not answer with|must return a text"):
        play_turns(sample_of(name), ["done"], toolbox)


def test_an_alias_waits_as_long_as_a_tool_server(program):
    # The time for a constructor and start() in the program; time in a queue does not count.
    url, answers = program
    answers.update(timeout=1.0, open_seconds=1.5)
    toolbox = HttpToolbox(url)
    toolbox.connect()
    assert play_turns(sample_of("number"), ["done"], toolbox).scores == Scores(1.0)
    load_file(f"environment+{url}#patient")
    assert play_turns(sample_of("patient"), ["done"]).scores == Scores(1.0)


# -- recorded episodes ----------------------------------------------------------------------------


def rescored(sample, trajectory, recorded, changed):
    async def both():
        first = await Scorer(load_config(None, recorded).reward).score(trajectory)
        stored = replace(first, trajectory=replace(first.trajectory, scores=None))
        scorer = Scorer(load_config(None, changed).reward)
        group = await _score_group(Group(sample, (stored,)), scorer, True)
        await scorer.close()
        return first, group.scored[0]

    return asyncio.run(both())


def test_rescoring_counts_the_scores_of_turns_once():
    @environment("turns")
    class Turns(Environment):
        async def reward(self):
            return Scores(1.0, {0: 0.5})

    sample = sample_of("turns")
    first, again = rescored(
        sample,
        play_turns(sample, ["done"]),
        ["reward.turn_weight=2"],
        ["reward.turn_weight=3"],
    )
    assert (first.reward, again.reward) == (2.0, 2.5) and again.rewards == first.rewards


def test_an_environment_without_reward_is_graded_again():
    # Its outcome is its grader's, so other arguments of the grader give another outcome.
    @environment("plain")
    class Plain(Environment):
        pass

    row = replace(sample_of("plain"), data_source="openai/gsm8k", ground_truth="7")
    flexible, strict = ["reward.kwargs.method=flexible"], ["reward.kwargs.method=strict"]
    first, again = rescored(row, play_turns(row, ["It is 7"]), flexible, strict)
    assert (first.rewards["outcome"], again.rewards["outcome"]) == (1.0, 0.0)


# -- check environment ----------------------------------------------------------------------------


def check(*samples):
    scorer = Scorer(Config().reward)
    checks = EnvironmentCheck(Config(), scorer, samples, byte_tokenizer()).run()
    return {c.name: c for c in asyncio.run(checks)}


def test_each_environment_of_mixed_rows_has_its_own_chance():
    # The mean over all rows was compared with the chance of the first row's environment.
    @environment("lucky")
    class Lucky(Environment):
        chance = 0.6

        def __init__(self):
            self.picked = None

        def pick(self, up: bool) -> str:
            """Pick."""
            self.picked = up if self.picked is None else self.picked
            return "ok"

        async def reward(self):
            return float(self.picked is True)

    @environment("hard")
    class Hard(Environment):
        def try_it(self) -> str:
            """Try."""
            return "ok"

        async def reward(self):
            return 0.0

    @environment("free")
    class Free(Hard):
        async def reward(self):
            return 0.3

    name = "random calls earn no more than chance"
    assert check(sample_of("hard"), sample_of("lucky"))[name].status == "passed"
    assert check(sample_of("lucky"), sample_of("free"))[name].status == "failed"


def test_each_environment_of_mixed_rows_must_close():
    @environment("sound")
    class Sound(Environment):
        async def reward(self):
            return 0.0

    @environment("broken")
    class Broken(Environment):
        async def reward(self):
            return 0.0

        def close(self):
            raise ValueError

    checks = check(sample_of("sound"), sample_of("broken"))
    assert checks["close() is called on every exit"].status == "failed"


@pytest.mark.parametrize("body", ["raise KeyError('x')", "return 5"])
def test_a_wrong_gold_is_an_error_with_its_place(body):
    # It ended with a traceback.
    space: dict = {"Environment": Environment}
    exec(
        "class Wrong(Environment):\n    async def reward(self): return 0.0\n"
        f"    @classmethod\n    def gold(cls, sample): {body}\n",
        space,
    )
    environment("wrong")(space["Wrong"])
    with pytest.raises(AgentRLError, match=r"gold\(\) of the environment 'wrong'|its solution is"):
        check(sample_of("wrong"))


def test_the_gold_of_an_alias_is_the_column_solution(program):
    url, _ = program
    load_file(f"environment+{url}#paid")
    row = replace(sample_of("paid"), extra={"solution": ["done"]})
    checks = check(row)
    assert checks["the gold solution earns the maximum"].status == "passed"
    assert checks["close() is called on every exit"].status == "passed"
