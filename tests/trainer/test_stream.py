"""The groups that a step learns from, for rows with given rewards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.failing_engine import TOKENIZER
from support.trainer_fixtures import config, scored, segment, turn

from agentrl.agent_loops.attempt import Runtime, mix_seed
from agentrl.chat import ChatTemplate
from agentrl.data import RowOrder
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError, RunStopped, UserCodeError
from agentrl.preflight import Plan, describe_run
from agentrl.rewards import Scorer, reward
from agentrl.rollout import PlayedSample, Rollouts
from agentrl.tools import LocalToolbox
from agentrl.trainer.stream import RolloutStream, StepRollouts
from agentrl.trajectory import Generation, Group, Message, Sample, Scored, token_array

FILTER = {"algorithm__filter_groups": True}


def rollout(reward: float, *, turns: Sequence[float] = (), masked: bool = False) -> Scored:
    """A rollout of one sampled token a turn, each of which may have earned something."""
    pieces = [piece for k in range(len(turns) or 1) for piece in (("A", [5 + k]), ("E", [1]))]
    places = [turn(0, 2 * k, 2 * k + 1, turn=earned) for k, earned in enumerate(turns or [0.0])]
    return scored([segment([1, 2], *pieces)], reward, places, masked)


class Table:
    """Plays rows by a table: what each of a row's rollouts earns, or `Scored` ones."""

    def __init__(self, rewards: Mapping[int, Sequence[Any]], greedy: Mapping[int, float] = {}):
        self.rewards, self.greedy = rewards, greedy
        self.calls: list[tuple[list[int], list[int], bool]] = []

    def collect(
        self,
        samples: Sequence[Sample],
        *,
        n: int,
        earlier: Sequence[Sample],
        greedy: bool,
        **_: Any,
    ) -> list[Group]:
        self.calls.append(([s.row for s in samples], [s.row for s in earlier], greedy))
        groups = []
        for sample in samples:
            if sample.row in self.rewards:  # else it was lost
                made = [
                    r if isinstance(r, Scored) else rollout(r) for r in self.rewards[sample.row]
                ]
                best = rollout(self.greedy[sample.row]) if greedy else None
                groups.append(Group(sample, tuple(made), n - len(made), best))
        return groups


def collect(table: Table, rows: int, position: int = 0, **keys: Any) -> StepRollouts:
    keys = {"rollout__n": 2, "data__shuffle": False, **keys}
    stream = RolloutStream(
        config(**keys),
        [Sample(f"r{i}", (), row=i) for i in range(rows)],
        cast(Rollouts, table),
        total_steps=1,
    )
    return stream.take(position, step=position)


def rows_of(groups: Sequence[Group]) -> list[int]:
    return [g.sample.row for g in groups]


LIVE, DEAD = (0.0, 1.0), (1.0, 1.0)


def test_without_a_filter_a_step_is_one_round_of_any_groups():
    table = Table({0: DEAD, 1: LIVE, 3: DEAD, 4: LIVE})
    played = collect(table, 6, 1, data__batch_size=3, data__shuffle=True)
    taken = RowOrder(6, 0).take(1, 3)
    assert table.calls == [(taken, [], False)]
    assert rows_of(played.groups) == [row for row in taken if row in table.rewards]
    assert played.position == 4 and not played.evicted
    assert not any(name.startswith("training/filter_groups") for name in played.metrics())


def test_dead_groups_are_replaced_by_rows_further_on():
    table = Table({0: LIVE, 1: DEAD, 2: DEAD, 3: LIVE, 4: LIVE, 5: LIVE})
    played = collect(table, 6, data__batch_size=2, **FILTER)
    assert rows_of(played.groups) == [0, 3] and rows_of(played.evicted) == [1, 2]
    assert played.position == 4 and [call[:2] for call in table.calls] == [
        ([0, 1], []),
        ([2, 3], [0, 1]),
    ]
    assert {k: v for k, v in played.metrics().items() if "filter" in k} == {
        "training/filter_groups/rounds": 2,
        "training/filter_groups/live": 2,
        "training/filter_groups/dead": 2,
        "training/filter_groups/evicted_samples": 4,
    }
    score = played.metrics()["critic/score/mean"]
    assert score == (0.5 + 1 + 1 + 0.5) / 4, "of all that was played"
    assert played.metrics()["waste/dead_group_frac"] == 0.5


def test_over_sampling_keeps_the_first_live_groups_and_drops_the_rest():
    table = Table({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE, 4: LIVE})
    played = collect(table, 5, data__batch_size=2, data__gen_batch_size=5, **FILTER)
    assert rows_of(played.groups) == [1, 2] and rows_of(played.evicted) == [0, 3, 4]
    assert len(table.calls) == 1 and played.position == 5


def test_with_too_few_live_groups_the_batch_is_smaller():
    table = Table({0: DEAD, 1: LIVE, 2: DEAD, 3: DEAD, 4: LIVE, 5: LIVE})
    keys = {"data__batch_size": 2, "algorithm__max_gen_batches": 2}
    played = collect(table, 6, **keys, **FILTER)
    assert rows_of(played.groups) == [1] and rows_of(played.evicted) == [0, 2, 3]
    assert played.position == 4


def test_without_live_groups_the_batch_has_dead_groups():
    table = Table(dict.fromkeys(range(6), DEAD))
    keys = {"data__batch_size": 2, "algorithm__max_gen_batches": 3}
    played = collect(table, 6, **keys, **FILTER)
    assert rows_of(played.groups) == [0, 1] and rows_of(played.evicted) == [2, 3, 4, 5]
    assert played.metrics()["training/filter_groups/live"] == 0


def test_dropped_groups_are_neither_dead_nor_live():
    played = collect(Table({1: LIVE, 3: LIVE}), 4, data__batch_size=2, **FILTER)
    assert rows_of(played.groups) == [1, 3] and not played.evicted and played.position == 4


@examples(60)
@given(
    st.lists(st.sampled_from([LIVE, DEAD, None]), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_exactly_the_first_live_groups_train_in_order(kinds, wanted, at_a_time, most, position):
    most = max(most, -(-wanted // at_a_time))
    rewards = {row: kind for row, kind in enumerate(kinds) if kind}
    table = Table(rewards)
    played = collect(
        table,
        len(kinds),
        position,
        data__batch_size=wanted,
        data__gen_batch_size=at_a_time,
        algorithm__max_gen_batches=most,
        algorithm__mini_batch_size=0,
        **FILTER,
    )
    places = range(position, position + at_a_time * most)
    stream = [place % len(kinds) for place in places]
    rounds = next(
        k
        for k in range(1, most + 1)
        if k == most or [kinds[row] for row in stream[: k * at_a_time]].count(LIVE) >= wanted
    )
    seen = [row for row in stream[: rounds * at_a_time] if kinds[row]]
    live = [row for row in seen if kinds[row] == LIVE]
    assert played.position == position + rounds * at_a_time and len(table.calls) == rounds
    assert rows_of(played.groups) == (live or seen)[:wanted]
    assert sorted(rows_of([*played.groups, *played.evicted])) == sorted(seen)


# -- what is dead ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "lives"),
    [
        ((0.1, 0.1, 0.1), False),  # whose mean rounds
        ((0.5, 0.5, 0.5000001), False),  # rounding
        ((0.5, 0.5, 0.500001), True),
        ((0.0, -0.0, 0.0), False),
        ((1.0,), False),
        ((0.0, 1.0, rollout(1.0, masked=True)), True),
        ((1.0, 1.0, rollout(0.0, masked=True)), False),
        ((rollout(0.0, masked=True), rollout(1.0, masked=True)), False),
    ],
)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_is_dead_if_its_training_rollouts_have_equal_rewards(estimator, rewards, lives):
    keys = {"data__batch_size": 1, "rollout__n": 3, "algorithm__max_gen_batches": 1}
    played = collect(Table({0: rewards}), 1, algorithm__adv_estimator=estimator, **keys, **FILTER)
    assert played.metrics()["training/filter_groups/live"] == lives


@pytest.mark.parametrize(("estimator", "lives"), [("turn_rloo", True), ("rloo", False)])
def test_different_turn_rewards_make_a_group_live_for_turn_estimators(estimator, lives):
    rewards = (rollout(1.0, turns=[1.0, 0.0]), rollout(1.0, turns=[0.0, 1.0]))
    keys = {"data__batch_size": 1, "algorithm__max_gen_batches": 1}
    played = collect(
        Table({0: rewards}),
        1,
        algorithm__adv_estimator=estimator,
        reward__turn_weight=1.0,
        **keys,
        **FILTER,
    )
    assert played.metrics()["training/filter_groups/live"] == lives


def test_remax_groups_are_dead_if_all_rewards_equal_the_greedy_reward():
    table = Table({0: DEAD, 1: DEAD, 2: LIVE}, greedy={0: 1.0, 1: 0.0, 2: 0.0})
    played = collect(table, 3, data__batch_size=3, algorithm__max_gen_batches=1,
                     algorithm__adv_estimator="remax", **FILTER)  # fmt: skip
    assert rows_of(played.groups) == [1, 2] and table.calls[0][2]
    assert [g.scored[0].reward for g in played.greedy] == [0.0, 0.0, 1.0]
    assert played.metrics()["reward/greedy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm__adv_estimator": "gae"}, "adv_estimator=gae"),
        ({"algorithm__adv_estimator": "reinforce_plus_plus"}, "with those of other prompts"),
        ({"algorithm__kl_reward_coef": 0.1}, "algorithm.kl_loss_coef"),
        (
            {"data__gen_batch_size": 3, "algorithm__max_gen_batches": 2},
            "is less than data.batch_size",
        ),
    ],
)
def test_settings_that_contradict_a_filter_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config(**keys, **FILTER)
    without = {k: v for k, v in keys.items() if k.startswith("algorithm__")}
    config(**without)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, None),
        ({**FILTER, "algorithm__max_gen_batches": 3}, "at most 3 x 16 prompts per step"),
        ({**FILTER, "data__gen_batch_size": 24}, "at most 4 x 24 prompts per step"),
        ({"algorithm__name": "remax"}, "plus one greedy rollout per prompt"),
    ],
)
def test_the_plan_reports_extra_rollouts_of_a_step(keys, message):
    c = config(data__train="rows.jsonl", **keys)
    plan = Plan(c, [Sample("r", (), row=0)], [], Scorer(c.reward))
    step, *beside = describe_run(plan).partition("a step: ")[2].splitlines()
    assert step.startswith("16 prompts x 8 rollouts = 128 trajectories")
    assert (message in beside[0]) if message else not beside


# -- rollouts that go on between the steps --------------------------------------------------------


class SlowEngine(Scripted):
    """Turns take lognormal times. Half of their tokens are of the version at the end of the turn.

    The answer says whether the reward is 1: for every second rollout of most rows.
    """

    def __init__(self, seconds: float, sigma: float):
        super().__init__(lambda prompt, turn: "ab", TOKENIZER)
        self.seconds, self.sigma = seconds, sigma
        self.version = 0
        self.seeds: dict[str, int] = {}
        self.fails = False

    async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline) -> Generation:
        self.seeds[episode_id] = seed
        start = self.version
        await asyncio.sleep(self.seconds * random.Random(seed).lognormvariate(0, self.sigma))
        if self.fails:
            raise EngineError("the engine is down")
        generation = await super().generate(
            prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
        )
        n = len(generation.token_ids)
        versions = [start] * (n // 2) + [self.version] * (n - n // 2)
        return replace(generation, versions=token_array(versions))


@reward("every_second_in_stream")
def every_second(trajectory) -> float:
    """Rows whose number is a multiple of 3 are dead."""
    return float(trajectory.rollout % 2 and trajectory.sample.row % 3 > 0)


@reward("raises_in_stream")
def raises(trajectory) -> float:
    if trajectory.sample.row == 5:
        raise ZeroDivisionError
    return 0.0


ROWS = 11


@contextmanager
def streaming(
    engine: Scripted, staleness: int, steps: int, **keys: Any
) -> Iterator[tuple[RolloutStream, Rollouts]]:
    keys = {
        "data__batch_size": 4,
        "rollout__n": 2,
        "reward__function": "every_second_in_stream",
        "trainer__max_staleness": staleness,
        **keys,
    }
    c = config(**keys)
    samples = [
        Sample(f"r{i}", (Message("user", f"{i}?"),), agent_name="single_turn", row=i)
        for i in range(ROWS)
    ]
    runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), c)
    rollouts = Rollouts(runtime, Scorer(c.reward), seed=c.trainer.seed)
    stream = RolloutStream(c, samples, rollouts, total_steps=steps)
    try:
        yield stream, rollouts
    finally:
        stream.close()
        rollouts.close()


def train(engine: SlowEngine, staleness: int, steps: int, **keys: Any) -> list[StepRollouts]:
    """Take the rollouts of all steps, as a trainer does whose update takes 10 ms."""
    position, taken = 0, []
    with streaming(engine, staleness, steps, **keys) as (stream, _):
        for step in range(steps):
            taken.append(stream.take(position, step))
            position = taken[-1].position
            time.sleep(0.01)
            engine.version = step + 1
            stream.advance(step + 1)
    assert not engine.playing
    return taken


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_every_draw_is_trained_once_in_order_however_long_it_takes(staleness):
    steps, engine = 12, SlowEngine(0.004, sigma=1.5)
    taken = train(engine, staleness, steps)
    synchronous = train(SlowEngine(0.0, sigma=0.0), 0, steps)
    assert [rows_of(t.groups) for t in taken] == [rows_of(t.groups) for t in synchronous]
    assert [row for t in taken for row in rows_of(t.groups)] == RowOrder(ROWS, 0).take(0, 4 * steps)
    assert all(len(g.scored) == 2 for t in taken for g in t.groups)
    assert len(engine.seeds) == 4 * steps * 2, "no draw is played twice, none after the last step"
    ages = [t.metrics()["staleness/max"] for t in taken]
    # On a busy machine the draws of a step may begin later, and are younger.
    assert all(age <= min(step, staleness) for step, age in enumerate(ages))
    assert max(ages) == staleness
    assert "staleness/max" not in synchronous[0].metrics()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_filter_reads_on_in_the_order_of_draws(staleness):
    steps, engine = 6, SlowEngine(0.002, sigma=1.0)
    taken = train(engine, staleness, steps, algorithm__max_gen_batches=3, **FILTER)
    draws = RowOrder(ROWS, 0).take(0, 200)
    read = [sorted(rows_of([*t.groups, *t.evicted])) for t in taken]
    position = 0
    for t, rows in zip(taken, read, strict=True):
        assert rows == sorted(draws[position : t.position])
        position = t.position
    live = [row for row in draws[:position] if row % 3]
    trained = [row for t in taken for row in rows_of(t.groups)]
    if staleness:  # Rounds end where they must; single draws need not.
        assert trained == live and len(trained) == 4 * steps
        assert max(t.metrics()["staleness/max"] for t in taken) == staleness
    assert all(len(t.groups) == 4 for t in taken)


@examples(40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**20))
def test_no_token_is_older_than_the_limit_whatever_is_dead(staleness, batch_size, rounds, seed):
    """The version that starts a draw is at most `staleness` steps before the step that takes it."""
    rng, steps = random.Random(seed), 7
    table = StartedTable({row: rng.choice([LIVE, DEAD, None]) for row in range(40)})
    c = config(
        data__shuffle=False,
        data__batch_size=batch_size,
        rollout__n=2,
        algorithm__mini_batch_size=0,
        algorithm__max_gen_batches=rounds,
        trainer__max_staleness=staleness,
        **FILTER,
    )
    samples = [Sample(f"r{i}", (), row=i) for i in range(40)]
    stream = RolloutStream(
        c,
        samples,
        cast(Rollouts, table),
        total_steps=steps,
    )
    position = 0
    for step in range(steps):
        table.version = step
        if step:
            stream.advance(step)
        played = stream.take(position, step)
        ages = [step - table.started[p] for p in range(position, played.position)]
        assert max(ages) <= staleness and min(ages) >= 0
        assert played.position - position <= rounds * batch_size
        position = played.position
    assert [*table.started] == list(range(len(table.started)))


class StartedTable(Table):
    """Plays a table's rows at once, and records the version that started each draw."""

    def __init__(self, rewards: Mapping[int, Any]):
        super().__init__(rewards)
        self.version = 0
        self.started: dict[int, int] = {}

    def stop_if_agents_fail(self, *_: Any) -> None:
        """No agent fails."""

    def reprefill_tokens(self) -> int:
        return 0

    def start(self, sample: Sample, *, n: int, position: int, **_: Any) -> Future[PlayedSample]:
        self.started[position] = self.version
        rewards = self.rewards[sample.row]
        results = [rollout(r) for r in rewards] if rewards else []
        future: Future[PlayedSample] = Future()
        future.set_result(PlayedSample(sample, n, results))
        return future

    def wait(self, future: Future[PlayedSample]) -> PlayedSample:
        return future.result()


def test_the_seeds_depend_on_the_position_only():
    engine = SlowEngine(0.0, sigma=0.0)
    train(engine, 2, 3)
    rows = RowOrder(ROWS, 0).take(0, 12)
    want = {
        (p, row, k): mix_seed(mix_seed(0, p), k, 0) for p, row in enumerate(rows) for k in range(2)
    }
    names = {tuple(name.split("-")[1:4]): seed for name, seed in engine.seeds.items()}
    got = {(int(p[1:]), int(row), int(k)): seed for (p, row, k), seed in names.items()}
    assert got.keys() == want.keys() and len({*got.values()}) == 24
    again = SlowEngine(0.001, sigma=1.0)
    train(again, 1, 3)
    assert sorted(again.seeds.values()) == sorted(engine.seeds.values())


def test_a_run_that_resumes_starts_at_its_position():
    engine = SlowEngine(0.0, sigma=0.0)
    with streaming(engine, 2, 6) as (stream, _):
        engine.version = 4
        taken = stream.take(16, 4)
    assert rows_of(taken.groups) == RowOrder(ROWS, 0).take(16, 4)
    assert {int(name.split("-")[1][1:]) for name in engine.seeds} <= {*range(16, 24)}
    assert taken.metrics()["staleness/max"] == 0


def test_an_error_of_a_reward_in_the_background_ends_the_take_of_its_step():
    with streaming(SlowEngine(0.0, 0.0), 2, 4, reward__function="raises_in_stream") as (stream, _):
        at = RowOrder(ROWS, 0).take(0, ROWS).index(5) // 4
        for step in range(at):
            stream.take(4 * step, step)
            stream.advance(step + 1)
        with pytest.raises(UserCodeError, match="raises_in_stream"):
            stream.take(4 * at, at)


def test_rollouts_that_are_dropped_count_in_the_step_that_takes_them():
    engine = SlowEngine(0.0, 0.0)
    with streaming(engine, 1, 4) as (stream, _):
        stream.take(0, 0)
        time.sleep(0.3)  # until the draws of the next step have ended
        engine.fails = True
        stream.advance(1)
        assert len(stream.take(4, 1).groups) == 4
        with pytest.raises(RunStopped, match="8 of 8 rollouts were dropped"):
            stream.take(8, 2)


def test_closing_cancels_the_rollouts_in_flight():
    engine = SlowEngine(60.0, 0.0)
    with streaming(engine, 1, 4) as (stream, rollouts):
        stream._start_draws(0)
        while len(engine.seeds) < 16:
            time.sleep(0.01)
        assert len(engine.playing) == 16 and rollouts.progress() is not None
        start = time.monotonic()
    assert not engine.playing and time.monotonic() - start < 5


@pytest.mark.timing
def test_the_side_that_waits_is_measured():
    engine = SlowEngine(0.05, sigma=0.0)
    with streaming(engine, 1, 9) as (stream, _):
        first = stream.take(0, 0).metrics()
        time.sleep(0.3)
        stream.advance(1)
        slow_learner = stream.take(4, 1).metrics()
        stream.advance(2)
        fast_learner = stream.take(8, 2).metrics()
    assert first["async/wait_engines"] > 0.04 and first["async/wait_learner"] < 0.04
    assert slow_learner["async/wait_engines"] < 0.04 and slow_learner["async/wait_learner"] > 0.2
    assert fast_learner["async/wait_engines"] > 0.02
    assert 7 < first["async/in_flight"] <= 8


@pytest.mark.parametrize(("limit", "groups"), [(6, 3), (7, 3), (2, 1)])
def test_the_episodes_in_flight_are_limited_to_whole_groups_in_the_order_of_draws(limit, groups):
    steps, most = 4, 0
    engine = SlowEngine(0.005, sigma=1.0)
    generate, begun = engine.generate, []

    async def counted(*args, **kwargs):
        nonlocal most
        most = max(most, len(engine.playing))
        begun.append(int(kwargs["episode_id"].split("-")[1][1:]))
        return await generate(*args, **kwargs)

    engine.generate = counted
    taken = train(engine, 2, steps, rollout__max_in_flight=limit)
    assert most == 2 * groups
    first_of_each = [p for i, p in enumerate(begun) if p not in begun[:i]]
    assert first_of_each == [*range(4 * steps)]
    assert [row for t in taken for row in rows_of(t.groups)] == RowOrder(ROWS, 0).take(0, 4 * steps)
    assert all(t.metrics()["async/in_flight"] <= groups for t in taken)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer__max_staleness": 0, "rollout__max_in_flight": 9}, "has no effect with"),
        ({"trainer__max_staleness": 1, "rollout__max_in_flight": 3}, "less than the 4 rollouts"),
        (
            {
                "trainer__max_staleness": 1,
                "rollout__max_in_flight": 4,
                "algorithm__adv_estimator": "remax",
            },
            "Set it to 5 or more",
        ),
    ],
)
def test_limits_that_hold_no_group_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config(rollout__n=4, **keys)
