import asyncio
import contextlib
import copy
import io
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from support.failing_engine import SAMPLING, TOKENIZER, FailingEngine, rows

from agentrl import registry
from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.control import EpisodeControl
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.errors import (
    EngineError,
    RequestRefused,
    RunStopped,
    ToolError,
    UserCodeError,
    UserError,
)
from agentrl.evaluate import evaluate, pass_at_k
from agentrl.http.pool import paused_time_limits
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer, reward
from agentrl.rollout import Rollouts, stop_if_too_many_dropped
from agentrl.testing import call
from agentrl.tools import LocalToolbox, tool
from agentrl.trajectory import Message, Sample
from agentrl.watchdog import Watchdog
from agentrl.workers import PerLoop

registry.load_file("shelf:calculator")


@pytest.fixture
def rollouts():
    opened = []

    def make(engine, **sections):
        config = Config.model_validate(sections)
        runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), config)
        opened.append(Rollouts(runtime, Scorer(config.reward), seed=0))
        return opened[-1]

    yield make
    for r in opened:
        r.close()


def test_groups_come_in_order_with_n_rollouts_each(rollouts):
    engine = FailingEngine([call("calculator", expression="3*4"), "#### 12"])
    groups = rollouts(engine).collect(rows(3), n=4, sampling=SAMPLING, step=7)
    assert [g.sample.id for g in groups] == ["r0", "r1", "r2"]
    assert [[s.reward for s in g.scored] for g in groups] == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
    assert [s.trajectory.rollout for s in groups[0].scored] == [0, 1, 2, 3]
    ids = {s.trajectory.episode_id for g in groups for s in g.scored}
    assert len(ids) == 12 and sorted(engine.begun) == sorted(engine.ended)


def test_a_turn_that_arrived_in_time_is_kept_while_its_episode_waits_to_continue(rollouts):
    """When many turns arrive at the same time, the last ones continue later."""

    class Crowded:
        def enter(self) -> asyncio.Future[None]:
            return asyncio.ensure_future(asyncio.sleep(1.2))

    r = rollouts(FailingEngine(["#### 12"]), rollout={"timeout_s": 1.0})
    object.__setattr__(r.runtime, "resumed", PerLoop(Crowded))
    [group] = r.collect(rows(1), n=2, sampling=SAMPLING, step=1)
    assert [s.trajectory.stop_reason for s in group.scored] == ["done"] * 2
    assert [len(s.trajectory.turns) for s in group.scored] == [1, 1]


@pytest.mark.timing
def test_progress_counts_what_has_ended_and_names_the_longest_wait(rollouts):
    class Uneven(FailingEngine):
        async def generate(self, *args, **kwargs):
            answer = await super().generate(*args, **kwargs)
            if "-1-2-" in kwargs["episode_id"]:  # row 1, rollout 2
                await asyncio.sleep(0.5)
            return answer

    r = rollouts(Uneven(["#### 12"]))
    assert r.progress() is None
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(r.collect, rows(3), n=4, sampling=SAMPLING, step=7)
        seen = []
        while not playing.done():
            seen.append(r.progress())
            time.sleep(0.02)
        (scored,) = {len(g.scored) for g in playing.result()}
    last = [progress for progress in seen if progress and progress.ended == 11][-1]
    wait = last.wait
    assert (last.total, wait.sample_id, wait.rollout, wait.state) == (12, "r1", 2, "generate")
    assert time.monotonic() - wait.since > 0.1 and scored == 4
    assert r.progress() is None


def test_the_seconds_of_episodes_are_metrics(rollouts):
    engine = FailingEngine([call("calculator", expression="3*4"), "#### 12"])
    groups = rollouts(engine).collect(rows(2), n=2, sampling=SAMPLING, step=7)
    metrics = rollout_metrics(groups)
    spans = [[s for s in scored.trajectory.spans if s.name == "tools"]
             for group in groups for scored in group.scored]  # fmt: skip
    seconds = [sum(span.end - span.start for span in of_episode) for of_episode in spans]
    name = "timing_s/agent_loop/tool_calls"
    assert metrics[f"{name}/max"] == max(seconds) > 0
    assert metrics[f"{name}/mean"] == pytest.approx(sum(seconds) / 4)
    assert {"generate_sequences", "tool_calls", "reward"} <= {
        key.split("/")[2] for key in metrics if key.startswith("timing_s/agent_loop/")
    }


def test_spans_say_what_the_time_of_an_episode_was_spent_on(rollouts):
    """Each thing takes a nap. Two conversations ask the engine at the same time, so one waits."""
    nap = 0.05

    @tool(name="bed")
    class Bed:
        """A bed."""

        def __init__(self):
            time.sleep(nap)

        async def rest(self) -> str:
            """Rest."""
            await asyncio.sleep(nap)
            return "rested"

    @interaction("slow_user")
    class SlowUser(Interaction):
        async def respond(self, messages):
            await asyncio.sleep(nap)
            return Reply("Go on.")

    @reward("slow_reward")
    async def slow_reward(trajectory):
        await asyncio.sleep(nap)
        return 1.0

    @agent_loop("several_things")
    async def several_things(ep):
        await ep.generate()
        await ep.call_tools()
        await ep.interact()
        await asyncio.gather(ep.generate(), ep.spawn("critic").generate())

    class Slow(FailingEngine):
        async def generate(self, *args, **kwargs):
            with paused_time_limits() if not asked else contextlib.nullcontext():
                asked.append(time.time())
                await asyncio.sleep(nap)  # the first request waits for a connection
            await asyncio.sleep(nap)
            return await super().generate(*args, **kwargs)

    asked = []
    engine = Slow(lambda prompt, turn: call("rest") if turn == 0 else "ok")
    sample = replace(rows(1)[0], agent_name="several_things", tools=("bed",))
    sample = replace(sample, interaction="slow_user")
    before = time.time()
    playing = rollouts(engine, reward={"function": "slow_reward"})
    [group] = playing.collect([sample], n=1, sampling=SAMPLING, step=0)
    trajectory = group.scored[0].trajectory
    spans = {(s.name, s.thread, i): s for i, s in enumerate(trajectory.spans)}
    assert [*spans] == [
        ("open", 0, 0), ("queue", 0, 1), ("generate", 0, 2), ("tools", 0, 3), ("interaction", 0, 4),
        ("generate", 0, 5), ("queue", 1, 6), ("generate", 1, 7), ("reward", 0, 8),
    ]  # fmt: skip
    assert all(span.end - span.start >= nap * 0.9 for span in trajectory.spans)
    opening, queue, first, tools, replying, second, waiting, third, rewarding = trajectory.spans
    own = [opening, queue, first, tools, replying, second, rewarding]
    assert opening.start == 0.0 and queue.end == first.start
    assert all(a.end <= b.start for a, b in pairwise(own))
    # The spawned conversation waited while the engine answered the other one.
    assert second.start <= waiting.start and second.end <= waiting.end <= third.start
    clocks = 0.01  # the difference of two clocks
    assert queue.start - clocks < asked[0] - trajectory.started < queue.end + clocks
    assert before - clocks < trajectory.started < time.time() - rewarding.end + clocks


def test_all_episodes_begin_before_the_first_request(rollouts):
    engine = FailingEngine(["x"])
    order = []
    engine.begin = lambda e: order.append("begin")
    generate = engine.generate

    async def noted(*args, **kwargs):
        order.append("ask")
        return await generate(*args, **kwargs)

    engine.generate = noted
    rollouts(engine).collect(rows(4, "single_turn"), n=2, sampling=SAMPLING, step=0)
    assert order == ["begin"] * 8 + ["ask"] * 8


def test_a_failed_episode_is_retried_with_another_id(rollouts):
    engine = FailingEngine(["#### 12"], failures=2, only=lambda e: "-0-0-0-" in e)
    groups = rollouts(engine).collect(rows(1, "single_turn"), n=3, sampling=SAMPLING, step=0)
    [group] = groups
    assert group.dropped == 0 and [s.reward for s in group.scored] == [1.0] * 3
    assert group.scored[0].trajectory.episode_id.endswith("+2")
    assert len(set(engine.begun)) == 5 and sorted(engine.begun) == sorted(engine.ended)


def test_a_row_whose_prompt_cannot_be_rendered_is_dropped_with_its_reason(caplog):
    """Before a run not every row is compared; one that shows only later does not end it."""
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = str(TOKENIZER.chat_template).replace(
        "'\\n' + message.content + '<|im_end|>",
        "'\\n' + (message.content | reverse if '!' in message.content else message.content)"
        " + '<|im_end|>",
    )
    config = Config()
    engine = Scripted(["#### 12"], tokenizer)
    runtime = Runtime(engine, ChatTemplate(tokenizer), LocalToolbox(), config)
    playing = Rollouts(runtime, Scorer(config.reward), seed=0)
    samples = rows(20, "single_turn")
    samples[3] = replace(samples[3], prompt=(Message("user", "! <|im_end|>"),))
    try:
        groups = playing.collect(samples, n=2, sampling=SAMPLING, step=0)
    finally:
        playing.close()
    assert [g.sample.id for g in groups] == [f"r{i}" for i in range(20) if i != 3]
    assert "row r3 (single_turn): agentrl cannot locate the content" in caplog.text


def test_infrastructure_failures_are_dropped_and_never_get_reward_0(rollouts):
    engine = FailingEngine(["#### 12"], failures=3, only=lambda e: e.startswith("train-0-0-0-"))
    groups = rollouts(engine).collect(rows(3, "single_turn"), n=8, sampling=SAMPLING, step=0)
    assert groups[0].dropped == 1 and len(groups[0].scored) == 7
    [cause] = groups[0].drop_causes
    assert cause.startswith("EngineError: ") and "is down" in cause
    assert groups[1].drop_causes == ()
    assert all(s.reward == 1.0 for s in groups[0].scored)
    metrics = rollout_metrics(groups)
    assert metrics["rollout/dropped"] == 1.0
    assert metrics["critic/score/mean"] == pytest.approx(7 / 23)


def test_an_engine_that_fails_for_a_while_drops_no_episode(rollouts, monkeypatch):
    monkeypatch.setattr("agentrl.player.RETRY_SECONDS", (0.2, 1.0))
    until = time.monotonic() + 0.8
    engine = FailingEngine(
        ["#### 12"], failures=10**9, only=lambda episode_id: time.monotonic() < until
    )
    groups = rollouts(engine).collect(rows(16, "single_turn"), n=4, sampling=SAMPLING, step=0)
    assert [len(g.scored) for g in groups] == [4] * 16 and not any(g.dropped for g in groups)
    tries = {s.trajectory.episode_id.partition("+")[2] for g in groups for s in g.scored}
    assert tries == {"2"}


def test_a_group_that_lost_too_many_is_left_out(rollouts):
    lost = tuple(f"train-0-1-{k}-" for k in range(3))
    engine = FailingEngine(["#### 12"], failures=10**9, only=lambda e: e.startswith(lost))
    groups = rollouts(engine).collect(rows(16, "single_turn"), n=8, sampling=SAMPLING, step=0)
    assert [g.sample.id for g in groups] == ["r0", *(f"r{i}" for i in range(2, 16))]


def test_a_dead_engine_stops_the_run_with_the_cause(rollouts):
    engine = FailingEngine(["#### 12"], failures=10**9)
    with pytest.raises(RunStopped, match=r"8 of 8 rollouts were dropped[^$]*is down"):
        rollouts(engine).collect(rows(2, "single_turn"), n=4, sampling=SAMPLING, step=0)


def test_equal_errors_of_many_episodes_are_one_line_with_their_number(rollouts, caplog):
    engine = FailingEngine(["#### 12"], failures=10**9)
    playing = rollouts(engine)
    with pytest.raises(RunStopped):
        playing.collect(rows(30, "single_turn"), n=4, sampling=SAMPLING, step=0)
    playing.close()
    first, count = [r.getMessage() for r in caplog.records if "is down" in r.getMessage()]
    assert first.startswith("row r0: ") and first.endswith(" (attempt 1 of 3)")
    assert count.startswith("the same error 359 times more: ")


def test_an_exception_of_a_loop_is_reported_once_and_stops_the_run(rollouts, caplog):
    @agent_loop("buggy")
    async def buggy(ep):
        await ep.generate()
        raise KeyError("oops")

    with caplog.at_level(logging.ERROR), pytest.raises(RunStopped, match="agent loop 'buggy'"):
        rollouts(FailingEngine(["a"])).collect(rows(2, "buggy"), n=2, sampling=SAMPLING, step=0)
    shown = [r.getMessage() for r in caplog.records]
    assert len(shown) == 1 and "row r0" in shown[0] and "test_rollout.py" in shown[0]


def raising(error, kind):
    """Registers a loop, interaction or reward that raises `error` in the first rollout of 24."""
    name = f"{kind}_{type(error).__name__}_{kind}"

    async def loop(ep):
        await ep.generate()
        if kind == "loop" and EpisodeControl(ep).attempt.rollout == 0:
            raise error

    async def respond(self, messages):
        if self.first:
            raise error
        return None

    def init(self, sample):
        self.first = not RAISED.get(name)
        RAISED[name] = True

    agent_loop(name)(loop)
    if kind == "interaction":
        interaction(name)(type(name, (Interaction,), {"respond": respond, "__init__": init}))
    return name


RAISED: dict[str, bool] = {}
ODD = [SystemExit(3), TimeoutError("mine"), asyncio.CancelledError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", [*ODD, ToolError("no"), UserError("no"), ZeroDivisionError()])
@pytest.mark.parametrize("kind", ["loop", "interaction"])
def test_any_exception_of_user_code_drops_only_its_rollout(rollouts, kind, error, caplog):
    name = raising(error, kind)
    loop = name if kind == "loop" else "tool_agent"
    samples = rows(1, loop)
    if kind == "interaction":
        samples = [Sample(**{**_fields(s), "interaction": name}) for s in samples]
    [group] = rollouts(FailingEngine(["#### 12"])).collect(samples, n=24, sampling=SAMPLING, step=0)
    assert (len(group.scored), group.dropped) == (23, 1)
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("error", ODD)
def test_any_exception_of_a_reward_stops_the_run(rollouts, error):
    @reward("odd_reward")
    def odd(trajectory) -> float:
        raise error

    r = rollouts(FailingEngine(["a"]), reward={"function": "odd_reward"})
    with pytest.raises(UserCodeError, match=type(error).__name__):
        r.collect(rows(2, "single_turn"), n=2, sampling=SAMPLING, step=0)


def test_an_error_of_agentrl_in_a_loop_is_not_reported_as_a_bug_of_the_loop(rollouts, caplog):
    @agent_loop("asks_for_an_unknown_name")
    async def asks(ep):
        await ep.generate()
        registry.agent_loops.get("no_such_loop")

    with pytest.raises(RunStopped, match="Causes:\n  4 x RegistryError: "):
        rollouts(FailingEngine(["a"])).collect(
            rows(2, "asks_for_an_unknown_name"), n=2, sampling=SAMPLING, step=0
        )
    assert "raised" not in caplog.text


def test_a_request_that_every_engine_refuses_is_sent_once(rollouts):
    class Refusing(FailingEngine):
        async def generate(self, *args, episode_id, **kwargs):
            requests.append(episode_id)
            raise RequestRefused("token 99 is not in the vocabulary")

    requests = []
    with pytest.raises(RunStopped, match="2 x RequestRefused: token 99"):
        rollouts(Refusing(["a"])).collect(rows(1, "single_turn"), n=2, sampling=SAMPLING, step=0)
    assert len(requests) == 2


def test_an_exception_in_an_opening_is_reported_as_a_bug_of_the_loop(rollouts):
    @agent_loop("bad_opening", opening=lambda sample, schemas: 1 / 0)
    async def bad_opening(ep):
        await ep.generate()

    with pytest.raises(RunStopped, match=r"bad_opening[^$]*ZeroDivisionError"):
        rollouts(FailingEngine(["a"])).collect(
            rows(2, "bad_opening"), n=2, sampling=SAMPLING, step=0
        )


def test_a_loop_that_waits_forever_ends_at_its_time_limit(rollouts):
    @agent_loop("sleeper")
    async def sleeper(ep):
        await ep.generate()
        if EpisodeControl(ep).attempt.rollout == 0:
            await asyncio.sleep(1e9)

    r = rollouts(FailingEngine(["#### 12"]), rollout={"timeout_s": 0.3})
    [group] = r.collect(rows(1, "sleeper"), n=4, sampling=SAMPLING, step=0)
    assert [s.trajectory.stop_reason for s in group.scored] == ["time", "done", "done", "done"]


def test_an_engine_that_uses_all_the_time_ends_the_episode(rollouts):
    class Slow(FailingEngine):
        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            raise EngineError("the deadline passed")

    r = rollouts(Slow(["a"]), rollout={"timeout_s": 0.2})
    [group] = r.collect(rows(1, "single_turn"), n=2, sampling=SAMPLING, step=0)
    assert [s.trajectory.stop_reason for s in group.scored] == ["time", "time"]
    assert all(len(s.trajectory.segments[0].response_ids) == 0 for s in group.scored)


def test_a_spent_episode_cannot_be_caught_and_continued(rollouts):
    @agent_loop("stubborn")
    async def stubborn(ep):
        while True:
            try:
                await ep.generate()
            except Exception:
                continue

    r = rollouts(FailingEngine(["a"] * 20), rollout={"max_turns": 2})
    [group] = r.collect(rows(1, "stubborn"), n=2, sampling=SAMPLING, step=0)
    assert [s.trajectory.stop_reason for s in group.scored] == ["turns", "turns"]


def test_the_watchdog_sees_a_reward_that_hangs(rollouts, capfd, monkeypatch):
    @reward("slow_reward")
    async def slow(trajectory) -> float:
        await asyncio.sleep(0.8)
        return 1.0

    monkeypatch.setattr("agentrl.player.WATCHDOG_SECONDS", 0.2)
    r = rollouts(FailingEngine(["a"]), reward={"function": "slow_reward"})
    r.collect(rows(1, "single_turn"), n=1, sampling=SAMPLING, step=0)
    assert "turn 1  reward" in capfd.readouterr().err


def test_a_row_twice_in_a_step_is_played_with_other_seeds(rollouts):
    seeds = []

    class Seeing(FailingEngine):
        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            seeds.append(seed)
            return await super().generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )

    [row] = rows(1, "single_turn")
    rollouts(Seeing(["a"])).collect([row, row], n=2, sampling=SAMPLING, step=0)
    assert len(set(seeds)) == 4


def test_a_row_of_an_earlier_round_of_the_step_is_played_with_other_seeds(rollouts):
    seeds = []

    class Seeing(FailingEngine):
        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            seeds.append(seed)
            return await super().generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )

    one, other = rows(2, "single_turn")
    r = rollouts(Seeing(["a"]))
    r.collect([one, one, other], n=2, sampling=SAMPLING, step=0)
    at_once, seeds[:] = sorted(seeds), []
    r.collect([one], n=2, sampling=SAMPLING, step=0)
    r.collect([one, other], n=2, sampling=SAMPLING, step=0, earlier=[one])
    assert sorted(seeds) == at_once and len(set(seeds)) == 6


def test_the_greedy_rollout_is_not_in_its_group(rollouts):
    seeds = {}

    class Seeing(FailingEngine):
        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            seeds[episode_id] = seed
            return await super().generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )

    engine = Seeing(["#### 12"])
    groups = rollouts(engine).collect(
        rows(2, "single_turn"), n=3, sampling=SAMPLING, step=0, greedy=True
    )
    assert [len(g.scored) for g in groups] == [3, 3] and len(set(seeds.values())) == 8
    best = [g.greedy for g in groups]
    assert [s.reward for s in best] == [1.0, 0.0]
    assert [s.trajectory.sampling["temperature"] for s in best] == [0.0, 0.0]
    sampled = {s.trajectory.sampling["temperature"] for g in groups for s in g.scored}
    assert sampled == {1.0} and len(engine.begun) == len(set(engine.begun)) == 8
    before = dict(seeds)
    seeds.clear()
    rollouts(engine).collect(rows(2, "single_turn"), n=3, sampling=SAMPLING, step=0)
    assert set(seeds.values()) < set(before.values()), "the others are played as without it"


def test_without_its_greedy_rollout_a_group_is_left_out(rollouts):
    engine = FailingEngine(["#### 12"], failures=9, only=lambda e: e.startswith("train-0-1-8-"))
    groups = rollouts(engine).collect(
        rows(4, "single_turn"), n=8, sampling=SAMPLING, step=0, greedy=True
    )
    assert [g.sample.id for g in groups] == ["r0", "r2", "r3"]


def test_a_raising_reward_stops_the_run(rollouts, tmp_path):
    (tmp_path / "bad.py").write_text("def compute_score(data_source, solution_str, ground_truth,"
                                     " extra_info=None):\n    return 1 / 0\n")  # fmt: skip
    r = rollouts(FailingEngine(["a"]), reward={"function": f"{tmp_path}/bad.py:compute_score"})
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        r.collect(rows(2, "single_turn"), n=2, sampling=SAMPLING, step=0)


def test_interactions_are_closed_however_the_episode_ends(rollouts):
    closed = []

    @interaction("closing")
    class Closing(Interaction):
        async def respond(self, messages):
            if closed:
                raise ValueError("broken")
            return Reply("", done=True)

        async def close(self):
            closed.append(1)

    samples = [Sample(**{**_fields(s), "interaction": "closing"}) for s in rows(1)]
    r = rollouts(FailingEngine(["a"]))
    r.collect(samples, n=1, sampling=SAMPLING, step=0)
    with pytest.raises(RunStopped):
        r.collect(samples, n=1, sampling=SAMPLING, step=1)
    assert len(closed) == 2


def _fields(s):
    return {name: getattr(s, name) for name in Sample.__slots__}


def test_seeds_depend_on_run_step_row_rollout_and_turn(rollouts):
    seen = {}

    class Seeing(FailingEngine):
        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            seen.setdefault(episode_id, []).append(seed)
            return await super().generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )

    answers = [call("calculator", expression="1+1"), "x"]
    r = rollouts(Seeing(answers))
    for step in (0, 1):
        r.collect(rows(2), n=2, sampling=SAMPLING, step=step)
    seeds = [s for turns in seen.values() for s in turns]
    assert len(seeds) == 16 == len(set(seeds))
    first, seen_before = dict(seen), sorted(seeds)
    seen.clear()
    r = rollouts(Seeing(answers))
    for step in (0, 1):
        r.collect(rows(2), n=2, sampling=SAMPLING, step=step)
    assert sorted(s for turns in seen.values() for s in turns) == seen_before
    assert not first.keys() & seen.keys(), "ids are new in every run, seeds are not"


def test_evaluation_is_the_same_twice_and_splits_by_loop(rollouts):
    config = Config.model_validate({"val": {"n": 4}})
    samples = rows(2) + rows(1, "single_turn")
    r = rollouts(FailingEngine(["#### 12"]))
    first = evaluate(r, samples, config.val)
    assert first.metrics == evaluate(r, samples, config.val).metrics
    assert first.metrics["val/reward/mean@4"] == pytest.approx(2 / 3)
    assert first.metrics["val/tool_agent/acc/pass@4"] == 0.5
    assert first.metrics["val/single_turn/acc/mean@4"] == 1.0
    assert first.metrics["val-core/openai/gsm8k/acc/mean@4"] == pytest.approx(2 / 3)
    assert first.metrics["val_greedy/reward/mean@1"] == pytest.approx(2 / 3)


def test_pass_at_k_is_the_unbiased_estimate(rollouts):
    answers = iter(["#### 12", "no", "no", "#### 12"])
    engine = Scripted(lambda prompt, turn: next(answers), TOKENIZER)
    [group] = rollouts(engine).collect(rows(1, "single_turn"), n=4, sampling=SAMPLING, step=0)
    assert [pass_at_k(group, k) for k in (1, 2, 4)] == [0.5, pytest.approx(5 / 6), 1.0]


@pytest.mark.parametrize("fault", ["none", "the thread died", "the toolbox raises"])
def test_closing_ends_the_parser_and_the_thread_whatever_fails(fault):
    closed = []

    class ClosedRuntime(Runtime):
        def close(self):
            closed.append(1)

    class BrokenToolbox(LocalToolbox):
        async def aclose(self):
            raise OSError("connection lost")

    toolbox = BrokenToolbox() if fault == "the toolbox raises" else LocalToolbox()
    runtime = ClosedRuntime(FailingEngine(["x"]), ChatTemplate(TOKENIZER), toolbox, Config())
    rollouts = Rollouts(runtime, Scorer(Config().reward), seed=0)
    if fault == "the toolbox raises":
        with pytest.raises(OSError, match="connection lost"):
            rollouts.close()
    else:
        if fault == "the thread died":
            rollouts._loop.stop()
        rollouts.close()
    assert closed == [1] and not rollouts._loop.is_alive


@pytest.mark.parametrize("error", [None, TimeoutError("of the work"), ValueError("of the work")])
def test_a_result_that_arrives_just_after_the_wait_is_returned(rollouts, monkeypatch, error):
    start = asyncio.run_coroutine_threadsafe

    def start_and_time_out(work, loop):
        future = start(work, loop)
        wait = future.result

        def result(timeout=None):
            if timeout is not None:
                with contextlib.suppress(Exception):
                    wait()
                raise TimeoutError
            return wait()

        future.result = result
        return future

    async def work():
        if error:
            raise error
        return "the result"

    running = rollouts(FailingEngine(["x"]))
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", start_and_time_out)
    if error is None:
        assert running.run(work()) == "the result"
    else:
        with pytest.raises(type(error), match="of the work"):
            running.run(work())
    monkeypatch.undo()


def test_the_watchdog_reports_what_each_episode_waits_for():
    class Stuck:
        episode_id, state, turns = "train-3-1", "tools http://127.0.0.1:9", [1, 2]
        since = time.monotonic()

    out = io.StringIO()
    dog = Watchdog(0.2, out)
    dog.add(Stuck())
    with dog.armed():
        time.sleep(0.6)
    dog.close()
    assert "no progress" in out.getvalue()
    assert "train-3-1  turn 2  tools http://127.0.0.1:9" in out.getvalue()


def test_the_watchdog_is_silent_while_episodes_progress():
    class Moving:
        episode_id, state, turns = "a", "generate", []

        @property
        def since(self):
            return time.monotonic()

    out = io.StringIO()
    dog = Watchdog(0.1, out)
    dog.add(Moving())
    with dog.armed():
        time.sleep(0.4)
    dog.close()
    assert out.getvalue() == ""


def test_overlapping_blocks_keep_the_watchdog_active_and_a_restart_delays_it():
    class Stuck:
        episode_id, state, turns = "e", "tools", []
        since = time.monotonic()

    out = io.StringIO()
    dog = Watchdog(0.4, out)
    dog.add(Stuck())
    with dog.armed():
        with dog.armed():
            time.sleep(0.3)
            dog.restart()
            time.sleep(0.3)
        assert out.getvalue() == ""
        time.sleep(0.4)
    dog.close()
    assert out.getvalue().count("no progress") == 1


# -- samples in the background --------------------------------------------------------------------


def test_a_started_sample_becomes_its_group(rollouts):
    engine = FailingEngine(["#### 12"])
    r = rollouts(engine)
    one, other = rows(2, "single_turn")
    futures = [
        r.start(s, n=3, sampling=SAMPLING, position=p) for p, s in enumerate([one, other], 40)
    ]
    played = [r.wait(future) for future in futures]
    assert [p.group.sample for p in played] == [one, other]
    assert [[s.reward for s in p.group.scored] for p in played] == [[1.0] * 3, [0.0] * 3]
    names = [name.rsplit("-", 2)[0] for name in engine.begun]
    assert names == [f"train-p40-0-{k}" for k in range(3)] + [f"train-p41-1-{k}" for k in range(3)]
    assert r.progress() is None


def test_a_started_sample_that_lost_too_many_has_no_group(rollouts):
    one = rows(1, "single_turn")[0]
    for n, exists in ((2, False), (4, True)):
        engine = FailingEngine(["a"], failures=10**6, only=lambda name: name.split("-")[3] == "1")
        r = rollouts(engine)
        played = r.wait(r.start(one, n=n, sampling=SAMPLING, position=0))
        assert (played.group is not None) == exists
        with pytest.raises(RunStopped, match=f"1 of {n} rollouts was dropped"):
            stop_if_too_many_dropped([played])
    greedy = FailingEngine(["a"], failures=10**6, only=lambda name: name.split("-")[3] == "2")
    r = rollouts(greedy)
    assert r.wait(r.start(one, n=2, sampling=SAMPLING, position=0, greedy=True)).group is None
    played = r.wait(r.start(one, n=1, sampling=SAMPLING, position=0, greedy=True))
    assert played.group.greedy is not None and len(played.group.scored) == 1


def test_progress_covers_all_samples_in_flight(rollouts):
    class Gated(FailingEngine):
        open = False

        async def generate(self, *args, **kwargs):
            while not self.open and kwargs["episode_id"].split("-")[3] == "1":
                await asyncio.sleep(0.01)
            return await super().generate(*args, **kwargs)

    engine = Gated(["a"])
    r = rollouts(engine)
    futures = [
        r.start(s, n=2, sampling=SAMPLING, position=p) for p, s in enumerate(rows(3, "single_turn"))
    ]
    end = time.monotonic() + 10
    while (p := r.progress()) is None or (p.ended, p.total) != (3, 6):
        assert time.monotonic() < end
        time.sleep(0.01)
    engine.open = True
    for future in futures:
        r.wait(future)
    assert r.progress() is None


def test_paused_time_limits_do_not_count_the_pause(rollouts):
    """Each episode has 0.8 s, and needs 0.4 s apart from a pause of 1 s."""

    class Waiting(FailingEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(0.3)
            while self.is_paused:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            return await super().generate(*args, **kwargs)

    for pauses in (True, False):
        engine = Waiting(["a"])
        engine.is_paused = True
        r = rollouts(engine, rollout={"timeout_s": 0.8})
        future = r.start(rows(1, "single_turn")[0], n=2, sampling=SAMPLING, position=0)
        while len(engine.begun) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        with r.paused_time_limits() if pauses else contextlib.nullcontext():
            time.sleep(1.0)
            engine.is_paused = False
        reasons = {s.trajectory.stop_reason for s in r.wait(future).group.scored}
        assert reasons == ({"done"} if pauses else {"time"})
