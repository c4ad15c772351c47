"""Running rewards: threads, the event loop and processes; rewards that hang or die; groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest
from support import hostile_functions as hostile
from support.failing_engine import SAMPLING, TOKENIZER, FailingEngine, rows
from support.trajectories import make_trajectory, row

from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config, RewardConfig, load_config
from agentrl.errors import (
    ConfigError,
    GraderCrash,
    Infrastructure,
    RegistryError,
    RunStopped,
    UserCodeError,
    UserError,
)
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer, check_graders, reward
from agentrl.rewards.executor import RewardExecutor
from agentrl.rollout import Rollouts
from agentrl.tools import LocalToolbox

MINE = """
from agentrl import reward
from support import hostile_functions as hostile

@reward("outside", process=True)
def outside(trajectory, **kwargs):
    returned = getattr(hostile, trajectory.final_text or "pid")(**kwargs)
    return {"score": 0.5, "pid": float(hostile.pid())}

@reward("late_is_wrong", process=True, late=-1.0)
def late_is_wrong(solution_str):
    if solution_str == "hang":
        hostile.match_slow_regex()
    return 1.0

@reward("best", group=True)
def best(trajectories, bonus=1.0):
    longest = max(len(t.final_text) for t in trajectories)
    return [bonus * (len(t.final_text) == longest) for t in trajectories]
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


@pytest.fixture
async def scorer():
    """`scorer(reward.key=value)`; closed at the end."""
    made = []

    def make(**config):
        made.append(Scorer(RewardConfig(**config)))
        return made[-1]

    yield make
    for s in made:
        await s.close()


async def test_a_plain_function_leaves_the_loop_alone(scorer):
    here = threading.get_ident()

    @reward("sleeper")
    def sleeper(trajectory):
        time.sleep(0.2)
        return float(threading.get_ident() != here)

    judge, ticks = scorer(function="sleeper"), 0
    scores = asyncio.gather(*(judge.score(make_trajectory(("assistant", "x"))) for _ in range(20)))
    while not scores.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert [s.reward for s in await scores] == [1.0] * 20 and ticks >= 5


async def test_a_reward_that_hangs_times_out_and_does_not_delay_others(scorer, monkeypatch):
    """At the deadline, other rewards get the slots, although the threads still run."""
    monkeypatch.setattr("agentrl.rewards.executor.THREADS", 2)
    woken = threading.Event()

    @reward("stuck")
    def stuck(solution_str):
        if solution_str == "hang":
            woken.wait()
        return 1.0

    judge = scorer(function="stuck", timeout_s=0.1)
    late = [
        asyncio.create_task(judge.score(make_trajectory(("assistant", "hang")))) for _ in range(6)
    ]
    await asyncio.sleep(0)
    assert (await judge.score(make_trajectory(("assistant", "x")))).reward == 1.0
    for task in late:
        with pytest.raises(Infrastructure, match=r"'stuck' of sample 'r7' took longer than rew"):
            await task
    woken.set()


async def test_the_key_of_the_deadline(scorer):
    @reward("sleeps_on")
    async def sleeps_on(trajectory):
        await asyncio.sleep(60)

    keys = ["reward.function=sleeps_on", "reward.timeout_s=0.05"]
    judge = Scorer(load_config(None, keys).reward)
    with pytest.raises(Infrastructure, match=r"reward\.timeout_s=0\.05"):
        await judge.score(make_trajectory())


async def test_an_async_reward_has_a_deadline_too(scorer):
    @reward("judge_that_sleeps")
    async def sleeps(trajectory):
        await asyncio.sleep(60)

    with pytest.raises(Infrastructure, match=r"reward\.timeout_s=0\.05"):
        await scorer(function="judge_that_sleeps", timeout_s=0.05).score(make_trajectory())


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_timeout_of_the_users_own_is_a_bug(scorer, asynchronous):
    def plain(trajectory):
        raise TimeoutError("mine")

    async def waits(trajectory):
        raise TimeoutError("mine")

    reward("own_timeout")(waits if asynchronous else plain)
    with pytest.raises(UserCodeError, match=r"raised TimeoutError: mine \(.*test_executor.py:"):
        await scorer(function="own_timeout").score(make_trajectory())


async def test_time_in_the_queue_does_not_count(scorer, monkeypatch):
    monkeypatch.setattr("agentrl.rewards.executor.THREADS", 1)

    @reward("nap")
    def nap(trajectory):
        time.sleep(0.1)
        return 1.0

    judge = scorer(function="nap", timeout_s=0.4)
    await asyncio.gather(*(judge.score(make_trajectory()) for _ in range(8)))


async def test_fast_graders_run_on_the_event_loop(scorer):
    """A thread would cost more than they do."""
    judge = scorer()
    before = threading.active_count()
    score = judge.score(make_trajectory(("assistant", "#### 12")))
    with pytest.raises(StopIteration):  # it waits for nothing
        score.send(None)
    assert threading.active_count() == before


# -- in processes --------------------------------------------------------------------------------


async def test_a_reward_in_a_process(scorer, mine):
    judge = scorer(function=f"{mine}:outside", kwargs={"a": 1})
    add = make_trajectory(("assistant", "add"))
    first, second = [(await judge.score(add)).metrics["pid"] for _ in range(2)]
    assert first == second != hostile.pid()


@pytest.mark.parametrize(
    ("do", "error", "says"),
    [
        pytest.param(
            "hang",
            Infrastructure,
            r"took longer than reward\.timeout_s=0\.3",
            marks=pytest.mark.slow,  # `match_slow_regex` is harder to stop
        ),
        ("match_slow_regex", Infrastructure, r"took longer than reward\.timeout_s=0\.3"),
        ("exit_at_once", GraderCrash, "exit code 3"),
        ("crash", GraderCrash, "SIGSEGV"),
        ("allocate_8_gib", GraderCrash, "2048 MiB"),
    ],
)
async def test_what_happens_in_the_process_of_a_reward(scorer, mine, do, error, says):
    seconds = 0.3 if "0.3" in says.replace("\\", "") else 20
    judge = scorer(function=f"{mine}:outside", timeout_s=seconds, workers=1)
    with pytest.raises(error, match=says):
        await judge.score(make_trajectory(("assistant", do)))
    assert (await judge.score(make_trajectory())).reward == 0.5


async def test_an_error_in_the_process_of_a_reward_is_reported(scorer, mine):
    judge = scorer(function=f"{mine}:outside", workers=1)
    for do, error, says in (
        ("key_error", UserCodeError, r"raised KeyError: 'x' \(.*hostile_functions\.py:\d+\)"),
        ("is_down", Infrastructure, "the judge is down"),
        ("refuse", UserCodeError, "ToolError: not like that"),
    ):
        with pytest.raises(error, match=says):
            await judge.score(make_trajectory(("assistant", do)))
        assert (await judge.score(make_trajectory())).reward == 0.5


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
async def test_as_many_processes_as_reward_workers(scorer, mine, workers):
    judge = scorer(function=f"{mine}:outside", kwargs={"seconds": 0.2}, workers=workers)
    nap = make_trajectory(("assistant", "nap"))
    scored = await asyncio.gather(*(judge.score(nap) for _ in range(6)))
    assert len({s.metrics["pid"] for s in scored}) == workers


async def test_a_timeout_may_be_a_wrong_answer(scorer, mine):
    judge = scorer(function=f"{mine}:late_is_wrong", timeout_s=0.4)
    late, right = await asyncio.gather(
        judge.score(make_trajectory(("assistant", "hang"))),
        judge.score(make_trajectory(("assistant", "x"))),
    )
    assert (late.reward, late.metrics) == (-1.0, {"grader_timeout": 1.0})
    assert (right.reward, right.metrics) == (1.0, {"grader_timeout": 0.0})


def test_rewards_that_cannot_run_in_a_process_are_refused():
    with pytest.raises(RegistryError, match="is a class: process=True is for functions"):

        @reward("of_a_class", process=True)
        class OfAClass:
            def __call__(self, trajectory): ...

    with pytest.raises(RegistryError, match=r"late=0\.0, which needs process=True"):
        reward("late", late=0.0)(lambda trajectory: 1.0)

    @reward("within", process=True)
    def within(trajectory): ...

    with pytest.raises(ConfigError, match="at the top level of a separate file"):
        Scorer(RewardConfig(function="within"))


# -- objects -------------------------------------------------------------------------------------


async def test_a_class_makes_one_object_for_the_run(scorer):
    seen = []

    @reward("counting")
    class Counting:
        def __init__(self, step=1.0):
            self.count, self.step = 0.0, step

        async def __call__(self, trajectory):
            self.count += self.step
            return self.count

        async def close(self):
            seen.append(self.count)

    judge = scorer(function="counting", kwargs={"step": 2})
    assert [(await judge.score(make_trajectory())).reward for _ in range(3)] == [2.0, 4.0, 6.0]
    await judge.close()
    assert seen == [6.0]
    with pytest.raises(ConfigError, match=r"unknown argument 'stap'. Did you mean 'step'"):
        scorer(function="counting", kwargs={"stap": 2})


@pytest.mark.parametrize(("error", "kind"), [(KeyError, UserCodeError), (UserError, UserError)])
def test_a_constructor_that_raises(error, kind):
    @reward("unmade")
    class Unmade:
        def __init__(self):
            raise error("no such thing")

        def __call__(self, trajectory): ...

    with pytest.raises(kind, match="no such thing"):
        Scorer(RewardConfig(function="unmade"))


# -- several -------------------------------------------------------------------------------------


def exact(solution_str, ground_truth):
    return {"score": solution_str.endswith(ground_truth), "acc": 1.0, "length": 3}


async def brief(trajectory, limit=5):
    return {"score": len(trajectory.final_text) <= limit, "acc": 0.0}


@pytest.fixture
def several():
    reward("exact")(exact)
    reward("brief")(brief)


async def test_the_outcome_is_the_weighted_sum(scorer, several):
    judge = scorer(functions={"exact": 1.0, "brief": 0.5, "grader": 2.0})
    scored = await judge.score(make_trajectory(("assistant", "so #### 12")))
    assert scored.rewards["outcome"] == 3.0 and scored.reward == 3.0
    assert scored.metrics == {
        "exact": 1.0, "acc": 1.0, "exact/length": 3.0, "brief": 0.0, "grader": 1.0
    }  # fmt: skip
    other = await judge.score(make_trajectory(("assistant", "12")))
    assert other.reward == 1.5


async def test_arguments_are_by_function(scorer, several):
    functions = {"exact": 1, "brief": 1, "grader": 0}
    kwargs = {"brief": {"limit": 99}, "grader": {"method": "flexible"}}
    scored = await scorer(functions=functions, kwargs=kwargs).score(
        make_trajectory(("assistant", "it is 12"))
    )
    assert scored.reward == 2.0
    assert (scored.metrics["brief"], scored.metrics["grader"]) == (1.0, 1.0)


async def test_functions_of_files_are_named_by_their_function(scorer, mine):
    scored = await scorer(functions={f"{mine}:best": 3.0}).score(
        make_trajectory(("assistant", "x"))
    )
    assert scored.reward == 3.0 and scored.metrics == {"best": 1.0}


@pytest.mark.timing
async def test_functions_wait_for_each_other_at_once(scorer):
    for name in ("one", "two", "three"):

        @reward(name)
        async def waits(trajectory):
            await asyncio.sleep(0.3)
            return 1.0

    began = time.monotonic()
    judge = scorer(functions={"one": 1, "two": 1, "three": 1})
    assert (await judge.score(make_trajectory())).reward == 3.0
    assert time.monotonic() - began < 0.8


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"functions": {"exac": 1}}, "reward.functions='exac': no reward named 'exac'. Did you"),
        ({"functions": {"exact": 1}, "kwargs": {"limit": 3}}, "reward.kwargs.limit: no such func"),
        ({"functions": {"brief": 1}, "kwargs": {"brief": 3}}, "reward.kwargs.brief=3 must be a ma"),
        (
            {"functions": {"brief": 1}, "kwargs": {"brief": {"limt": 3}}},
            "with reward.kwargs.brief={'limt': 3}: unknown argument 'limt'. Did you mean 'limit'",
        ),
        (
            {"functions": {"exact": 1, "{mine}:exact": 1}},
            "'exact' would be the name of two metrics",
        ),
    ],
)
def test_mistakes_in_several_functions(several, mine, config, says):
    with open(mine, "a") as f:
        f.write("def exact(trajectory):\n    return 0.0\n")
    functions = {k.format(mine=mine): w for k, w in config["functions"].items()}
    with pytest.raises(ConfigError) as caught:
        Scorer(RewardConfig(**{**config, "functions": functions}))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["reward.function=a", "reward.functions={b: 1}"], "Move a with a weight to"),
        (["reward.functions={a: 0, b: 0}"], "all weights are 0"),
    ],
)
def test_settings_that_contradict_several_functions(settings, says):
    with pytest.raises(ConfigError, match=says):
        load_config(overrides=settings)


def test_rows_without_a_grader_are_refused_if_the_reward_includes_it(several):
    scorer = Scorer(RewardConfig(functions={"exact": 1, "grader": 0.5}))
    with pytest.raises(UserError, match="no grader for data_source 'mine'"):
        check_graders([row(data_source="mine")], scorer)
    check_graders([row()], scorer)
    assert scorer.describe("openai/gsm8k") == "reward 1 x exact + 0.5 x gsm8k"
    check_graders([row(data_source="mine")], Scorer(RewardConfig(functions={"exact": 1})))


# -- groups --------------------------------------------------------------------------------------


async def test_a_group_reward_sees_all_of_a_sample(scorer, mine):
    judge = scorer(function=f"{mine}:best", kwargs={"bonus": 2.0})
    texts = ["a", "aaa", "aa", "aaa"]
    scored = await judge.score_all([make_trajectory(("assistant", t)) for t in texts])
    assert [s.reward for s in scored] == [0.0, 2.0, 0.0, 2.0]
    assert judge.has_group_reward and not scorer().has_group_reward


@pytest.mark.parametrize("returned", [1.0, None, [1.0], {"a": 1, "b": 2}, "ab", [1.0, "x"]])
async def test_a_group_reward_that_returns_something_else(scorer, returned):
    @reward("odd_group", group=True)
    def odd(trajectories):
        return returned

    with pytest.raises(UserCodeError, match=r"one score for each of the 2|a finite number"):
        await scorer(function="odd_group").score_all(
            [make_trajectory(("assistant", t)) for t in "ab"]
        )


def test_a_group_reward_must_take_the_list():
    @reward("no_list", group=True)
    def no_list(): ...

    with pytest.raises(ConfigError, match="must take the list of trajectories first"):
        Scorer(RewardConfig(function="no_list"))


@pytest.fixture
def rollouts():
    opened = []

    def make(engine, **sections):
        config = Config.model_validate(sections)
        runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), config)
        scorer = Scorer(config.reward, config.rollout.budget_policy)
        opened.append(Rollouts(runtime, scorer, seed=0))
        return opened[-1]

    yield make
    for r in opened:
        r.close()


def ranked(name, seen):
    @reward(name, group=True)
    def rank(trajectories):
        seen.append([t.rollout for t in trajectories])
        return [float(t.rollout) for t in trajectories]


def test_groups_are_scored_when_they_are_complete(rollouts):
    seen = []
    ranked("rank", seen)
    r = rollouts(FailingEngine(["a"]), reward={"functions": {"rank": 1.0, "grader": 1.0}})
    groups = r.collect(rows(2, "single_turn"), n=3, sampling=SAMPLING, step=0, greedy=True)
    assert sorted(seen) == [[0, 1, 2, 3]] * 2  # the greedy one is compared with the others
    assert [[s.reward for s in g.scored] for g in groups] == [[0.0, 1.0, 2.0]] * 2
    assert [g.greedy.reward for g in groups if g.greedy] == [3.0, 3.0]
    assert rollout_metrics(groups)["grader/rank"] == 1.0
    assert r._players.longest_wait() is None
    [alone] = r.collect(rows(1, "single_turn"), n=1, sampling=SAMPLING, step=0, tag="val")
    assert [s.reward for s in alone.scored] == [0.0]


def test_a_group_has_only_the_rollouts_that_were_not_dropped(rollouts):
    seen = []
    ranked("rank_survivors", seen)
    engine = FailingEngine(["a"], failures=3, only=lambda e: e.startswith("train-0-0-1-"))
    r = rollouts(
        engine,
        reward={"function": "rank_survivors"},
        rollout={"budget_policy": {"turns": "zero"}, "max_turns": 1},
    )
    groups = r.collect(rows(3, "single_turn"), n=8, sampling=SAMPLING, step=0)
    assert [0, 2, 3, 4, 5, 6, 7] in seen and len(seen) == 3
    assert [s.reward for s in groups[0].scored] == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert groups[0].dropped == 1


def test_a_failed_judge_is_retried_without_another_rollout(rollouts):
    attempts = Counter()

    @reward("shaky")
    async def shaky(trajectory):
        attempts[trajectory.episode_id] += 1
        if attempts[trajectory.episode_id] < 3:
            raise Infrastructure("the judge is down")
        return 1.0

    engine = FailingEngine(["a"])
    [group] = rollouts(engine, reward={"function": "shaky"}).collect(
        rows(1, "single_turn"), n=4, sampling=SAMPLING, step=0
    )
    assert [s.reward for s in group.scored] == [1.0] * 4
    assert {*attempts.values()} == {3} and len(engine.begun) == 4


@pytest.mark.parametrize("group", [False, True])
def test_a_judge_that_stays_down_drops_rollouts_without_a_reward_of_0(rollouts, group):
    @reward("down", group=group)
    def down(one_or_more):
        raise Infrastructure("the judge is down")

    engine = FailingEngine(["a"])
    r = rollouts(engine, reward={"function": "down"})
    with pytest.raises(RunStopped, match=r"2 of 2 rollouts were dropped.*\n.*the judge is down"):
        r.collect(rows(1, "single_turn"), n=2, sampling=SAMPLING, step=0)
    assert len(engine.begun) == 2 and r._players.longest_wait() is None


def test_a_crash_of_a_grader_is_no_reward_of_0(rollouts, mine):
    """F11 through a whole step: the answer that kills its grader is dropped, others are judged."""
    file = mine.replace("mine.py", "killer.py")
    with open(file, "w") as f:
        f.write(
            "import os\nfrom agentrl import reward\n"
            "@reward('killer', process=True)\n"
            "def killer(trajectory):\n"
            "    if trajectory.rollout == 3: os._exit(1)\n"
            "    return 1.0\n"
        )
    r = rollouts(FailingEngine(["a"]), reward={"function": f"{file}:killer"})
    [group] = r.collect(rows(1, "single_turn"), n=20, sampling=SAMPLING, step=0)
    assert [s.reward for s in group.scored] == [1.0] * 19 and group.dropped == 1


# -- load ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.load
async def test_hostile_answers_do_not_delay_good_ones():
    """L6: 1 000 calls, 2 workers, one in twenty hangs, crashes or eats all memory."""
    executor = RewardExecutor(RewardConfig(timeout_s=0.2, workers=2))
    bad = (
        hostile.match_slow_regex,
        hostile.crash,
        hostile.allocate_8_gib,
        hostile.hang,
        hostile.exit_at_once,
    )
    outcomes: Counter[str] = Counter()
    began = time.monotonic()

    async def call(i: int) -> None:
        function = bad[i // 20 % len(bad)] if i % 20 == 7 else None
        try:
            if function:
                await executor.call_in_process("hostile", function, (), {})
            else:
                assert await executor.call_in_process("good", hostile.add, (i,), {}) == i + 1
                outcomes["good"] += 1
        except Infrastructure as e:
            outcomes[type(e).__name__] += 1

    await asyncio.gather(*map(call, range(1000)))
    seconds = time.monotonic() - began
    executor.close()
    print(f"950 good calls in {seconds:.1f} s: {950 / seconds:.0f}/s")
    assert outcomes == {"good": 950, "RewardTimeout": 20, "GraderCrash": 30}
    assert 950 / seconds >= 25, "50/s on a quiet machine"
