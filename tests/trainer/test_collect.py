"""The groups that a step learns from, for rows with given rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trainer_fixtures import config, scored, segment, turn

from agentrl.data import RowOrder
from agentrl.plan import Plan, describe_run
from agentrl.rewards import make_scorer
from agentrl.rollout import Rollouts
from agentrl.trainer.batch import collate
from agentrl.trainer.collect import Collector, StepRollouts
from agentrl.trajectory import Group, Sample, Scored

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


def collect(
    table: Table, rows: int, position: int = 0, *, turn_weight: float = 0.0, **keys: Any
) -> StepRollouts:
    keys = {"rollout__n": 2, "data__shuffle": False, **keys}
    collector = Collector(
        config(**keys),
        [Sample(f"r{i}", (), row=i) for i in range(rows)],
        cast(Rollouts, table),
        lambda groups: collate(groups, 0, turn_weight=turn_weight),
    )
    return collector.collect(position, step=position)


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


@settings(max_examples=60)
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
        ((0.5, 0.5, 0.5000001), True),
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
        turn_weight=1.0,
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
    plan = Plan(c, [Sample("r", (), row=0)], [], make_scorer(c.reward))
    step, *beside = describe_run(plan).partition("a step: ")[2].splitlines()
    assert step.startswith("16 prompts x 8 rollouts = 128 trajectories")
    assert (message in beside[0]) if message else not beside
