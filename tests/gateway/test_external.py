"""The loop `external`: the user's own agent plays episodes, as a process or as a function."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.failing_engine import FailingEngine

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play, play_episode
from agentrl.config import AgentConfig, Config, RolloutConfig, load_config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import (
    ConfigError,
    EngineError,
    Infrastructure,
    RunStopped,
    UserCodeError,
    UserError,
)
from agentrl.gateway import agent as agent_module
from agentrl.gateway.agent import BASE_URLS, check_agent, describe_sample
from agentrl.metrics import rollout_metrics
from agentrl.preflight import describe_run, make_plan
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Group, Message, Sample

TOKENIZER = byte_tokenizer()
SAMPLE = Sample(
    "r0",
    (Message("user", "How much is 3*4?"),),
    agent_name="external",
    data_source="openai/gsm8k",
    ground_truth="12",
    extra={"level": 1, "answer": "12"},
)
TURNS = [call("calculator", expression="3*4"), "#### 12"]
# An agent with a calculator, by the standard library alone. `%s` is what it does at the end.
AGENT = """
import json, os, sys, time, urllib.error, urllib.request

def post(url, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=30))

def ask(messages):
    tool = {"name": "calculator", "parameters": {"type": "object", "properties": {}}}
    body = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]

def solve():
    messages = json.loads(os.environ["AGENTRL_SAMPLE"])["prompt"]
    while True:
        messages.append(ask(messages))
        calls = messages[-1].get("tool_calls")
        if not calls:
            return messages[-1]["content"]
        for c in calls:
            text = str(eval(json.loads(c["function"]["arguments"])["expression"]))
            messages.append({"role": "tool", "tool_call_id": c["id"], "content": text})

%s
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes an agent and returns the section `agent` that runs it."""

    def write(end: str = "solve()", **keys) -> AgentConfig:
        (tmp_path / "my_agent.py").write_text(AGENT % end)
        return AgentConfig(command=f"{sys.executable} {tmp_path}/my_agent.py", **keys)

    return write


@pytest.fixture
def function(tmp_path):
    """Return a function that writes a file and returns the section `agent` that calls its `run`."""

    def write(code: str, **keys) -> AgentConfig:
        path = tmp_path / f"functions_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return AgentConfig(python=f"{path}:run", **keys)

    return write


def run(agent: AgentConfig, turns=TURNS, *, engine=None, sample=SAMPLE, **rollout):
    config = Config(agent=agent, rollout=RolloutConfig(**rollout))
    return play(sample, engine or Scripted(turns, TOKENIZER), TOKENIZER, config=config)


def test_a_command_plays_an_episode(script):
    t = run(script())
    assert t.final_text == "#### 12" and t.stop_reason == "done" and t.scores is None
    assert [m.role for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert t.messages[0] is SAMPLE.prompt[0] and t.messages[2].content == "12"
    (segment,) = t.segments
    sampled = [i for i, m in zip(segment.response_ids, segment.response_mask, strict=True) if m]
    assert TOKENIZER.decode(sampled) == "<|im_end|>".join([*TURNS, ""])
    assert [r.content for r in t.turns[0].tool_results] == ["12"]


ASYNC = """
import httpx

async def run(sample, base_url, api_key, model):
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers) as client:
        body = {"model": model, "messages": sample["prompt"]}
        answer = await client.post(base_url + "/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
"""
SYNC = ASYNC.replace("async ", "").replace("await ", "").replace("AsyncClient", "Client")


@pytest.mark.parametrize("code", [ASYNC, SYNC], ids=["async", "sync"])
def test_a_function_plays_an_episode(function, code):
    assert run(function(code), ["#### 12"]).final_text == "#### 12"


def test_the_environment_of_an_agent_is_an_allow_list(script, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("SEARCH_KEY", "k")
    end = f"solve(); open({str(tmp_path / 'env')!r}, 'w').write(json.dumps(dict(os.environ)))"
    run(script(end, env=["SEARCH_KEY", "MISSING"]))
    seen = json.loads((tmp_path / "env").read_text())
    assert "SECRET" not in seen and seen["SEARCH_KEY"] == "k" and seen["PATH"] == os.environ["PATH"]
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen["OPENAI_BASE_URL"] == seen["ANTHROPIC_BASE_URL"] + "/v1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"]
    assert "ANTHROPIC_AUTH_TOKEN" not in seen  # Anthropic's client warns if it has both.
    assert json.loads(seen["AGENTRL_SAMPLE"]) == describe_sample(SAMPLE)


def test_the_keys_of_an_agent_are_in_no_message(script, function, monkeypatch):
    monkeypatch.setenv("MY_SETTING", "hunter2")
    monkeypatch.setenv("SEARCH_TOKEN", "plain-words-9")
    end = "solve(); sys.exit('bad ' + os.environ['MY_SETTING'] + os.environ['OPENAI_API_KEY'])"
    error = "the agent exited with code 1: bad ******;"
    assert run(script(end, env=["MY_SETTING"])).error.startswith(error)
    code = "import os\ndef run(): raise OSError('bad ' + os.environ['SEARCH_TOKEN'])"
    config = Config(agent=function(code))
    engine = Scripted(TURNS, TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)
    playing = closing(Rollouts(runtime, Scorer(config.reward), seed=0))
    with playing as rollouts, pytest.raises(RunStopped, match=r"bad \*\*\*"):
        rollouts.collect([SAMPLE], n=1, sampling=Sampling(), step=0)


def test_an_agent_sees_only_the_named_keys(script, function):
    extra = {
        "answer": "3 times 4 is 12.\n#### 12",
        "options": ["72.0", "$12$"],
        "nested": {"truth": {"12": 1}},
        "level": [1],
    }
    sample = replace(SAMPLE, extra=extra)
    described = {
        "id": "r0",
        "row": 0,
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How much is 3*4?"}],
        "extra_info": {},
    }
    assert describe_sample(sample) == described
    described["extra_info"] = {"level": [1]}
    assert describe_sample(sample, ["level", "missing"]) == described
    end = f"assert json.loads(os.environ['AGENTRL_SAMPLE']) == {described!r}; solve()"
    assert run(script(end, extra_info=["level"]), sample=sample).final_text == "#### 12"
    check = f"    assert sample == {described!r}; sample['extra_info']['level'].clear()\n"
    code = ASYNC.replace("    headers =", check + "    headers =")
    agent = function(code, extra_info=["level"])
    for _ in range(2):
        assert run(agent, ["#### 12"], sample=sample).final_text == "#### 12"
    with pytest.raises(UserError, match=r"row 0 \(id 'r0'\), extra.level: is inf"):
        describe_sample(replace(SAMPLE, extra={"level": float("inf")}), ["level"])


def test_a_long_row_is_in_a_file(script, tmp_path):
    long = replace(SAMPLE, extra={"text": "ü" * 100_000})
    end = f"""
path = os.environ["AGENTRL_SAMPLE_FILE"]
row = open(path, encoding="utf-8").read()
assert json.loads(row)["extra_info"]["text"] == chr(252) * 100_000
assert "AGENTRL_SAMPLE" not in os.environ and os.stat(os.path.dirname(path)).st_mode & 0o77 == 0
open({str(tmp_path / "path")!r}, "w").write(path)
os.environ["AGENTRL_SAMPLE"] = row
solve()
"""
    assert run(script(end, extra_info=["text"]), sample=long).final_text == "#### 12"
    path = Path((tmp_path / "path").read_text())
    assert path.name == "sample.json" and not path.parent.exists()


@pytest.mark.parametrize(
    ("end", "outcome"), [("solve(); sys.exit(0)", 1.0), ("solve(); sys.exit(1)", 0.0)]
)
def test_the_exit_code_is_the_reward(script, end, outcome):
    assert run(script(end, reward="exit")).scores.outcome == outcome


@pytest.mark.parametrize("number", ["np.float32(0.5)", "np.int64(2)", "Fraction(1, 2)", "True"])
def test_any_real_number_is_the_reward_of_a_function(function, number):
    code = SYNC.replace("\n\ndef", "\nimport numpy as np\nfrom fractions import Fraction\n\ndef", 1)
    expected = float(eval(number, {"np": np, "Fraction": Fraction}))
    assert (
        run(function(f"{code}\n    return {number}\n", reward="post"), ["a"]).scores.outcome
        == expected
    )


def test_an_agent_posts_its_reward(script):
    """With its key, as `post` does."""
    end = """
try: urllib.request.urlopen(os.environ["AGENTRL_REWARD_URL"], b'{"reward": 1}')
except urllib.error.HTTPError as e: assert e.code == 401
else: sys.exit("no key was needed")
solve(); post(os.environ["AGENTRL_REWARD_URL"], {"reward": 0.25})
"""
    assert run(script(end, reward="post")).scores.outcome == 0.25


def test_a_model_with_a_shell_cannot_set_the_reward(script):
    end = """
try: post(os.environ["OPENAI_BASE_URL"] + "/reward", {"reward": 9})
except urllib.error.HTTPError as e: assert e.code == 403
else: sys.exit(3)
solve()
"""
    assert run(script(end)).scores is None


def test_a_function_returns_its_reward(function):
    code = SYNC + "        return 0.75\n"
    assert run(function(code, reward="post"), ["a"]).scores.outcome == 0.75


@pytest.mark.parametrize(
    ("end", "keys", "message"),
    [
        ("solve()", {"reward": "post"}, "without its reward"),
        ("solve(); sys.exit(2)", {"reward": "exit"}, "exited with code 2"),
        ("print('no key'); sys.exit(1)", {}, r"exited with code 1(.|\n)*no key"),
        ("print('hello')", {}, rf"without a request to {BASE_URLS}(.|\n)*hello"),
        ("sys.stdin.read(); os.abort()", {}, "exited with code -6, and printed nothing"),
        ("raise OSError('boom')", {}, "^the agent exited with code 1: OSError: boom;"),
        ("solve(); sys.exit(75)", {}, "exited with code 75"),
        ("solve(); os.kill(os.getpid(), 9)", {}, "exited with code -9"),
        ("solve(); ask([])", {}, "exited with code 1: urllib.error.HTTPError"),
        (
            "post(os.environ['OPENAI_BASE_URL'] + '/chat/completions',"
            " {'messages': [{'role': 'user', 'content': 'x'}], 'n': 2})",
            {},
            r"^[^\n]*its last refused request \(400\): n=2",
        ),
        (
            "os.environ['OPENAI_API_KEY'] = 'mine'\ntry: solve()\nexcept OSError: pass",
            {},
            f"without a request to {BASE_URLS}; [1-9] requests? had another key than",
        ),
        (
            "solve()\ntry: post(os.environ['AGENTRL_REWARD_URL'], {'reward': 'high'})\n"
            "except OSError: pass",
            {"reward": "post"},
            r"""without its reward.*\(400\): send .* not \{"reward": ?"high"\}""",
        ),
    ],
)
def test_an_agent_that_fails_gets_no_reward(script, end, keys, message):
    with pytest.raises(UserCodeError, match=message):
        run(script(end, **keys))


@pytest.mark.parametrize("reward", ["grader", "post"])
def test_an_error_after_an_answer_is_the_outcome_0(script, reward):
    t = run(script("solve(); [][0]", reward=reward))
    assert t.scores.outcome == 0 and t.stop_reason == "agent_error" and len(t.turns) == 2
    assert t.error.startswith("the agent exited with code 1: IndexError: list index out of range")
    assert all(sum(s.response_mask) for s in t.segments)
    with pytest.raises(UserCodeError, match="exited with code 1: IndexError"):
        run(script("solve(); [][0]", reward=reward, on_error="drop"))


def test_a_reward_that_was_posted_stays(script):
    end = 'solve(); post(os.environ["AGENTRL_REWARD_URL"], {"reward": 0.5}); 1 / 0'
    assert run(script(end, reward="post")).scores.outcome == 0.5


@pytest.mark.parametrize("code", [ASYNC, SYNC], ids=["async", "sync"])
def test_a_function_that_raises_after_an_answer_has_the_outcome_0(function, code):
    t = run(function(code + "        raise KeyError('sk-abcdefghijklmnopqrst')\n"), ["#### 12"])
    assert t.scores.outcome == 0 and "agent.python raised KeyError: '***'" in t.error
    lost = "    from agentrl.errors import Infrastructure\n    raise Infrastructure('no search')\n"
    with pytest.raises(Infrastructure, match="no search"):
        run(function(code + lost), ["#### 12"])


def test_a_client_that_does_not_wait_for_its_answer_is_no_mistake_of_the_policy(script):
    end = """
solve()
whole = urllib.request.urlopen
urllib.request.urlopen = lambda request, timeout: whole(request, timeout=0.05)
solve()
"""
    with pytest.raises(UserCodeError, match="exited with code 1: TimeoutError"):
        run(script(end), engine=SlowEngine(["#### 12"] * 9, TOKENIZER))


RAISES_AT_B = (
    ASYNC
    + """
        if answer.json()["choices"][0]["message"]["content"] == "b":
            raise KeyError("no_such_tool")
        return 1.0
"""
)


def collect(agent: AgentConfig, *steps: str) -> list[Group]:
    """Play a group in each step; each character is the answer of an episode, in any order."""
    config, answers = Config(agent=agent), iter("".join(steps))
    engine = Scripted(lambda prompt, turn: next(answers), TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)
    with closing(Rollouts(runtime, Scorer(config.reward), seed=0)) as rollouts:
        play = partial(rollouts.collect, [SAMPLE], sampling=Sampling())
        return [play(n=len(step), step=i)[0] for i, step in enumerate(steps)]


def test_episodes_of_failed_agents_train_with_the_others(function):
    first, second = collect(function(RAISES_AT_B, reward="post"), "abbb", "bb")
    assert sorted(s.reward for s in first.scored) == [0, 0, 0, 1] and not first.dropped
    assert rollout_metrics([first])["stop/agent_error"] == 0.75
    assert [s.reward for s in second.scored] == [0, 0]


@pytest.mark.parametrize("steps", [["bbbb"], ["a", "bbb", "bbb"]], ids=["first", "later"])
def test_a_run_whose_agents_all_fail_stops(function, steps, monkeypatch):
    monkeypatch.setattr("agentrl.rollout.MAX_AGENT_ERRORS", 6)
    number = len("".join(steps).replace("a", ""))
    message = rf"\(agent_name external\) failed in each of the last {number} episodes(.|\n)*Causes:"
    with pytest.raises(RunStopped, match=rf"{message}\n  {number} x agent.python raised KeyError"):
        collect(function(RAISES_AT_B, reward="post"), *steps)


def test_a_function_that_raises_fails(function):
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        run(function("def run(): 1 / 0"))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_an_async_function_that_raises_anything_fails_alone(function, end, message):
    slow = function(ASYNC + "    import asyncio; await asyncio.sleep(0.5)")
    bad = function(f"async def run(): {end}")
    agents = iter([slow, bad, slow])

    async def play_all():
        plays = []
        for i, agent in enumerate(agents):
            config = Config(agent=agent)
            engine = Scripted(["a"], TOKENIZER)
            engine.begin(f"e{i}")
            runtime = Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)
            plays.append(
                play_episode(
                    runtime, SAMPLE, episode_id=f"e{i}", rollout=i, seed=0, sampling=Sampling()
                )
            )
        return await asyncio.wait_for(asyncio.gather(*plays, return_exceptions=True), 20)

    first, failed, last = asyncio.run(play_all())
    assert first.final_text == last.final_text == "a"
    assert isinstance(failed, UserCodeError) and message in str(failed)


@pytest.mark.parametrize("seconds", [0.1, 99], ids=["it ends", "it is stopped"])
def test_a_daemon_of_an_agent_ends_with_it(script, tmp_path, seconds, monkeypatch):
    """The daemon has a session of its own and no variables."""
    monkeypatch.setattr(agent_module, "OVER_SECONDS", 0.5)
    end = f"""
solve()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        wait = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()));"
        wait += "time.sleep(60)"
        os.execve(sys.executable, [sys.executable, "-c", wait, {str(tmp_path / "pid")!r}], {{}})
    os._exit(0)
while not os.path.exists({str(tmp_path / "pid")!r}): time.sleep(0.01)
time.sleep({seconds})
"""
    run(script(end), timeout_s=5.0)
    assert not _is_running(int((tmp_path / "pid").read_text()))


def test_an_engine_failure_is_no_failure_of_the_agent(script):
    engine = FailingEngine(TURNS, failures=1)
    with pytest.raises(EngineError, match="is down"):
        run(script("\ntry: solve()\nexcept Exception: sys.exit(7)"), engine=engine)


def test_an_agent_ends_after_its_budget(script, monkeypatch, tmp_path):
    """It reads why, and is killed with its children if it does not end."""
    monkeypatch.setattr(agent_module, "OVER_SECONDS", 0.5)
    end = f"""
try:
    solve()
except urllib.error.HTTPError as e:
    error = json.load(e)["error"]
    text = json.dumps([e.code, error["code"], e.headers["x-should-retry"], error["message"]])
    child = os.fork()
    open({str(tmp_path)!r} + f"/{{bool(child)}}", "w").write(f"{{text}}\\n{{os.getpid()}}")
    time.sleep(60)
"""
    start = time.monotonic()
    t = run(script(end), max_turns=1)
    assert time.monotonic() - start < 10 and t.stop_reason == "turns" and len(t.turns) == 1
    for name in ("True", "False"):
        text, pid = (tmp_path / name).read_text().splitlines()
        assert json.loads(text)[:3] == [400, "episode_over", "false"] and "turns" in text
        assert not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_time_of_an_agent_is_limited(script):
    start = time.monotonic()
    t = run(script("solve(); time.sleep(60)"), timeout_s=2.0)
    assert t.stop_reason == "time" and len(t.turns) == 2 and time.monotonic() - start < 10


def test_an_agent_that_sends_nothing_until_its_time_is_over_gets_no_reward(script, function):
    message = rf"sent no request to {BASE_URLS} within rollout.timeout_s=1; .*\n  hello"
    with pytest.raises(UserCodeError, match=message):
        run(script("print('hello', flush=True); time.sleep(60)"), timeout_s=1.0)
    with pytest.raises(UserCodeError, match="sent no request"):
        run(function("async def run():\n  import asyncio; await asyncio.sleep(60)"), timeout_s=1.0)


def test_a_turn_that_a_budget_cuts_is_answered(script):
    t = run(script("assert solve() == '#### 1'"), ["#### 12"], max_turn_tokens=6)
    assert t.stop_reason == "turn_tokens" and t.final_text == "#### 1"


def test_agents_wait_for_free_slots(function, tmp_path):
    """The wait is not part of an episode's time."""
    code = SYNC + "    import time; time.sleep(0.4)\n"
    agent = function(code, slots=1)
    config = Config(agent=agent, rollout=RolloutConfig(timeout_s=1.2))
    engine = Scripted(["a"], TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)

    async def play_all():
        plays = []
        for i in range(4):
            engine.begin(f"e{i}")
            plays.append(
                play_episode(
                    runtime, SAMPLE, episode_id=f"e{i}", rollout=i, seed=0, sampling=Sampling()
                )
            )
        return await asyncio.gather(*plays)

    start = time.monotonic()
    trajectories = asyncio.run(play_all())
    assert time.monotonic() - start > 1.5
    assert [t.stop_reason for t in trajectories] == ["done"] * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "set agent.command"),
        ({"command": "no-such-program x"}, "there is no program 'no-such-program'"),
        ({"python": "missing.py:run"}, "missing.py"),
        ({"command": "ls", "env": ["HOME", "NO_SUCH_KEY"]}, "NO_SUCH_KEY, but this environment"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        check_agent(AgentConfig(**keys))


def test_functions_must_fit(function):
    with pytest.raises(ConfigError, match=r"missing argument 'url'.*sample, base_url, api_key"):
        check_agent(function("def run(url): ..."))
    check_agent(function("def run(**everything): ..."))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent.command=a", "agent.python=b.py:f"], "set one of them"),
        (["agent.python=b.py"], "must name a file and its function"),
        (["agent.python=b.py:f", "agent.reward=exit"], "has no exit code"),
        (["agent.command='a"], "agent.command"),
    ],
)
def test_mistakes_in_the_config(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=["data.train=x.jsonl", "model.path=m", *overrides])


def test_rows_are_checked_with_their_agent(tmp_path, function):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "Q"}], "agent_name": "external", "level": 1}
    rows.write_text(json.dumps(row) + "\n")

    def plan(*overrides):
        return make_plan(load_config(overrides=[f"data.train={rows}", "model.path=m", *overrides]))

    with pytest.raises(UserError, match=r"set agent.command(.|\n)*no data_source"):
        plan()
    with pytest.raises(UserError, match="cannot be repeated bit for bit"):
        plan("agent.command=ls -l", "rollout.deterministic=true")
    with pytest.raises(UserError, match=r"no such file|missing.py"):
        plan("agent.python=missing.py:run")
    with pytest.raises(UserError, match=r"names levl, but no row .*\. Keys of the rows: level"):
        plan("agent.command=ls -l", "agent.extra_info=[levl]")
    agent = ("agent.command=ls -l", "agent.reward=post", "agent.extra_info=[level]")
    assert len((made := plan(*agent)).train) == 1
    assert "played by ls -l (at most 16 at the same time)" in describe_run(made)
    for code, limit in ((SYNC, "at most 16"), (ASYNC, "any number")):
        made = plan(f"agent.python={function(code).python}", "agent.reward=post")
        assert f"({limit} at the same time)" in describe_run(made)


def test_an_agent_without_rows_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "Q"}], "data_source": "openai/gsm8k"}
    rows.write_text(json.dumps(row | {"ground_truth": "1"}) + "\n")
    overrides = [f"data.train={rows}", "model.path=m", "agent.command=ls -l"]
    message = "agent.command is set, but no row has agent_name external: they have single_turn"
    with pytest.raises(UserError, match=message):
        make_plan(load_config(overrides=overrides))
    make_plan(load_config(overrides=[*overrides, "data.agent_name=external"]))


def test_the_loop_is_known_before_it_is_imported():
    assert "external" in registry.agent_loops.names()
    assert not registry.agent_loops.get("external").awaited


def test_clients_that_disconnect_leave_no_trace(function, capfd):
    """They leave in the middle of a body, of an answer, and before the agent ends."""
    code = """
import asyncio, json, urllib.parse

async def run(sample, base_url, api_key):
    url = urllib.parse.urlsplit(base_url)
    body = json.dumps({"messages": sample["prompt"]})
    head = f"POST {url.path}/chat/completions HTTP/1.1\\\\r\\\\nHost: a\\\\r\\\\n"
    head += f"Authorization: Bearer {api_key}\\\\r\\\\nContent-Length: "

    async def send(length):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"{head}{length}\\\\r\\\\n\\\\r\\\\n{body}".encode())
        await writer.drain()
        return reader, writer

    for missing in (5, 0):
        _, writer = await send(len(body) + missing)
        await asyncio.sleep(0.05)
        writer.close()
    reader, writer = await send(len(body))
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    global left
    left = await send(len(body))
    await asyncio.sleep(0.05)
""".replace("\\\\", "\\")
    t = run(function(code), engine=SlowEngine(["a"] * 9, TOKENIZER))
    sampled = sum(turn.end - turn.start for turn in t.turns)
    assert sampled == sum(sum(s.response_mask) for s in t.segments) and sampled
    assert "Exception" not in capfd.readouterr().err


class SlowEngine(Scripted):
    """Each turn takes a while."""

    async def generate(self, *args, **kwargs):
        await asyncio.sleep(0.2)
        return await super().generate(*args, **kwargs)
