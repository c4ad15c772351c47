"""Weights of tokens: what a sequence is, whose denominator it is, and what they sum to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.trainer_fixtures import config, group, random_groups, scored, segment

from agentrl.learner.algorithms import loss_weights, make_targets
from agentrl.learner.batch import assign_mini_batches, collate

PAD = 0
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def rollout(*rows: int, masked: bool = False):
    """Rows with so many sampled tokens, an observed one after the first of each."""
    pieces = [("A", [1]), ("E", [2])]
    made = [segment([1], *pieces, ("A", [1] * (n - 1))) if n else segment([1]) for n in rows]
    return scored(made, 1.0, masked=masked)


def weight(mode: str, *members, size: int = 0, scale: int = 5) -> list[float]:
    """The weight of each row's tokens."""
    batch = collate([group(*members)], PAD)
    weights = loss_weights(batch, mode, size, scale)
    assert not weights[~batch.action_mask].any()
    rows = zip(weights, batch.action_mask, strict=True)
    chosen = [row[mask].unique().tolist() for row, mask in rows]
    assert all(len(values) <= 1 for values in chosen)
    return [values[0] if values else 0.0 for values in chosen]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", [1 / 6, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 4, 1 / 8]),
        ("seq-mean-token-sum-norm", [1 / 10, 1 / 10]),
    ],
)
def test_two_tokens_and_four(mode, expected):
    assert weight(mode, rollout(2), rollout(4)) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_weights_count_rollouts_and_not_rows(mode):
    one = weight(mode, rollout(6), rollout(3))
    assert weight(mode, rollout(1, 3, 2), rollout(3)) == [one[0]] * 3 + [one[1]]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_do_not_train_are_in_no_denominator(mode):
    alone = weight(mode, rollout(2), rollout(4))
    assert weight(mode, rollout(2), rollout(7, masked=True), rollout(4)) == [alone[0], 0, alone[1]]


def test_a_rollout_without_tokens_counts_in_the_mean():
    """Else the mean over rollouts would depend on what they did."""
    for mode in MODES[1:]:
        two = weight(mode, rollout(2), rollout(4))
        three = weight(mode, rollout(2), rollout(4), rollout(0))
        assert three == pytest.approx([two[0] * 2 / 3, two[1] * 2 / 3, 0])


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_has_a_denominator_of_its_own(mode):
    members = [rollout(1), rollout(3), rollout(2), rollout(5, 4)]
    first, second = weight(mode, *members[:2]), weight(mode, *members[2:])
    assert weight(mode, *members, size=2) == first + second


@given(st.integers(0, 2**31), st.integers(0, 9), st.sampled_from(MODES))
@examples(60)
def test_means_sum_to_one(seed, size, mode):
    batch = collate(random_groups(seed, groups=3, n=3), PAD)
    weights = loss_weights(batch, mode, size, 5)
    step = assign_mini_batches(9, size)
    for m in range(int(step.max()) + 1):
        rows = step[batch.rollout] == m
        tokens, rollouts = batch.action_mask[rows].sum().item(), (step == m).sum().item()
        sums = {"seq-mean-token-sum": tokens / rollouts}
        sums["seq-mean-token-sum-norm"] = tokens / rollouts / 5
        assert weights[rows].sum().item() == pytest.approx(sums.get(mode, 1.0), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_has_zero_weights(mode):
    assert weight(mode, rollout(0)) == [0.0]
    assert weight(mode, rollout(3, masked=True)) == [0.0]


@pytest.mark.parametrize("scale, length", [(0, 40), (8, 8)])
def test_the_norm_is_loss_scale_or_the_maximum_length(scale, length):
    batch = collate([group(rollout(2), rollout(4))], PAD)
    keys = config(
        algorithm__name="dr_grpo", algorithm__loss_scale=scale, rollout__max_trajectory_tokens=40
    )
    weights = make_targets(batch, keys, None, None, None).weights
    assert weights[batch.action_mask].unique().tolist() == [1 / (2 * length)]
