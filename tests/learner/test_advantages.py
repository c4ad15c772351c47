"""Advantages, as pure functions of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import tensor

from agentrl.learner.algorithms import (
    generalized_advantages,
    subtract_group_mean,
    subtract_mean_of_others,
    whiten,
)

NAN = float("nan")


def by_definition(rewards, values, gamma, lam, last=0.0):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, written out."""
    after = [*values[1:], last]
    delta = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, after, strict=True)]
    n = len(delta)
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def by_rows(rewards, values, mask, rollout, gamma, lam, bootstrap):
    """GAE of rollouts whose rows stand in the order in which they were sampled."""
    turn = torch.zeros_like(mask).long()
    return generalized_advantages(rewards, values, mask, rollout, turn, gamma, lam, bootstrap)


# --- groups -------------------------------------------------------------------------------------


def test_the_mean_of_the_group_is_subtracted():
    rewards = tensor([1.0, 0.0, 1.0, 0.0, 3.0, 5.0])
    of = tensor([0, 0, 0, 0, 1, 1])
    assert subtract_group_mean(rewards, of).tolist() == [0.5, -0.5, 0.5, -0.5, -1.0, 1.0]
    std = (4 * 0.25 / 3) ** 0.5
    expected = [0.5 / std, -0.5 / std, 0.5 / std, -0.5 / std, -(0.5**0.5), 0.5**0.5]
    actual = subtract_group_mean(rewards, of, by_std=True)
    torch.testing.assert_close(actual, tensor(expected), atol=1e-5, rtol=0.0)


def test_the_mean_of_the_others_is_subtracted():
    rewards, of = tensor([1.0, 0.0, 5.0, 3.0, 5.0]), tensor([0, 0, 0, 1, 1])
    expected = [1 - 2.5, 0 - 3.0, 5 - 0.5, 3 - 5, 5 - 3]
    torch.testing.assert_close(subtract_mean_of_others(rewards, of), tensor(expected))


@pytest.mark.parametrize("compare", [subtract_group_mean, subtract_mean_of_others])
def test_one_survivor_is_zero_and_groups_may_be_empty(compare):
    assert compare(tensor([7.0, 1.0, 3.0]), tensor([0, 2, 2]))[0] == 0
    assert compare(tensor([7.0]), tensor([3])).tolist() == [0.0]
    assert compare(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert compare(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


@given(
    st.floats(-1e6, 1e6, width=32),
    st.integers(1, 9),
    st.sampled_from(
        [
            subtract_group_mean,
            subtract_mean_of_others,
            lambda r, g: subtract_group_mean(r, g, by_std=True),
        ]
    ),
)
@examples(100)
def test_a_group_of_equals_is_exactly_zero(reward, n, compare):
    """Seven times 0.1 has a mean that is not 0.1: equality decides, not the difference."""
    rewards = torch.cat([torch.full((n,), reward), tensor([0.0, 1.0])])
    advantages = compare(rewards, tensor([0] * n + [1, 1]))
    assert advantages[:n].tolist() == [0.0] * n
    assert advantages[n:].abs().min() > 0


@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12))
@examples(100)
def test_they_sum_to_zero_in_every_group(pairs):
    rewards, of = tensor([r for r, _ in pairs]), tensor([g for _, g in pairs])
    for advantages in (subtract_group_mean(rewards, of), subtract_mean_of_others(rewards, of)):
        for g in range(4):
            assert abs(advantages[of == g].sum().item()) < 1e-4


@given(
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@examples(100)
def test_columns_are_compared_one_by_one(pairs, rng):
    rewards, of = tensor([r for r, _ in pairs]), tensor([g for _, g in pairs])
    other = torch.full_like(rewards, rng.random())
    both = torch.stack([rewards, other], 1)
    for compare in (subtract_group_mean, subtract_mean_of_others):
        compared = compare(both, of)
        assert torch.equal(compared[:, 0], compare(rewards, of))
        assert not compared[:, 1].any()


# --- gae ----------------------------------------------------------------------------------------


def test_gae_equals_its_definition_with_observations_in_between():
    mask = tensor([[True, False, False, True, True, False]])
    rewards = tensor([[0.5, NAN, NAN, -1.0, 2.0, NAN]])
    values = tensor([[0.1, NAN, NAN, 0.2, 0.3, NAN]])
    advantages, returns = by_rows(
        rewards, values, mask, tensor([0]), gamma=0.9, lam=0.8, bootstrap=torch.zeros(1)
    )
    expected = by_definition([0.5, -1.0, 2.0], [0.1, 0.2, 0.3], 0.9, 0.8)
    torch.testing.assert_close(advantages[mask], tensor(expected))
    torch.testing.assert_close(returns[mask], tensor(expected) + values[mask])
    assert advantages[~mask].tolist() == [0.0] * 3


def test_gae_runs_through_all_segments_of_a_rollout():
    """The outcome is paid in the last row; with lambda 1 the first row's tokens hear of it."""
    mask = torch.ones(3, 2, dtype=torch.bool)
    rewards = tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 5.0]])
    values = torch.zeros(3, 2)
    rollout = tensor([0, 0, 1])
    _, returns = by_rows(rewards, values, mask, rollout, 1.0, 1.0, bootstrap=torch.zeros(2))
    assert returns.tolist() == [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]


def test_a_terminal_rollout_is_not_bootstrapped_and_a_cut_one_is():
    mask = torch.ones(2, 1, dtype=torch.bool)
    _, returns = by_rows(
        torch.zeros(2, 1), torch.zeros(2, 1), mask, tensor([0, 1]), 0.5, 1.0, tensor([0.0, 4.0])
    )
    assert returns.tolist() == [[0.0], [2.0]]


def test_gamma_zero_sees_only_the_tokens_own_reward():
    mask = tensor([[True, False, True]])
    advantages, _ = by_rows(
        tensor([[1.0, 9.0, 3.0]]),
        tensor([[0.5, 9.0, 0.25]]),
        mask,
        tensor([0]),
        0.0,
        0.9,
        torch.zeros(1),
    )
    assert advantages.tolist() == [[0.5, 0.0, 2.75]]


def test_gae_without_any_chosen_token_is_zero():
    empty = torch.zeros(2, 3)
    advantages, returns = by_rows(
        empty, empty, empty.bool(), tensor([0, 1]), 1.0, 1.0, bootstrap=torch.zeros(2)
    )
    assert not advantages.any() and not returns.any()


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),  # observations before the token
            st.floats(-2, 2, width=32),
            st.floats(-2, 2, width=32),
        ),
        min_size=1,
        max_size=10,
    ),
    trailing=st.integers(0, 3),
    filler=st.sampled_from([NAN, float("inf"), 1e30]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
@examples(150)
def test_observations_change_no_bit(steps, trailing, filler, gamma, lam):
    rewards, values, mask = [], [], []
    for gap, reward, value in steps:
        rewards += [filler] * gap + [reward]
        values += [filler] * gap + [value]
        mask += [False] * gap + [True]
    rewards += [filler] * trailing
    values += [filler] * trailing
    mask += [False] * trailing
    m = tensor([mask])
    args = (tensor([0]), gamma, lam, torch.zeros(1))
    with_gaps = by_rows(tensor([rewards]), tensor([values]), m, *args)
    bare = torch.ones(1, len(steps), dtype=torch.bool)
    without = by_rows(
        tensor([[r for _, r, _ in steps]]), tensor([[v for _, _, v in steps]]), bare, *args
    )
    for a, b in zip(with_gaps, without, strict=True):
        assert torch.equal(a[m], b[0])
        assert not a[~m].any()


def test_gae_walks_in_the_order_of_turns():
    """A loop spoke, asked a sub-agent (row 1), and went on in its own row."""
    mask = tensor([[True, True, False, True, True], [True, True, True, False, False]])
    turn = tensor([[0, 0, -1, 2, 2], [1, 1, 1, -1, -1]])
    rewards = tensor([[0.0, 1.0, NAN, 0.0, 8.0], [0.0, 0.0, 4.0, NAN, NAN]])
    advantages, returns = generalized_advantages(
        rewards, torch.zeros(2, 5), mask, tensor([0, 0]), turn, 0.5, 1.0, torch.zeros(1)
    )
    # In time: 0 1 | 0 0 4 | 0 8, halved at each step back.
    expected = tensor([[0.875, 1.75, 0, 4, 8], [1.5, 3, 6, 0, 0]])
    assert torch.equal(advantages, expected) and torch.equal(returns, expected)


@given(
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=7),
    seed=st.integers(0, 2**31),
)
@examples(150)
def test_the_rows_of_turns_change_no_bit(turns, seed):
    """Turns (row, tokens) of one rollout in any rows, against one row in the order of time.

    Another rollout's row stands beside them, so that none may take from a neighbour.
    """
    g = torch.Generator().manual_seed(seed)
    n = sum(length for _, length in turns)
    stream, other = torch.randn(2, n, generator=g), torch.randn(2, 1, 2, generator=g)
    laid = torch.full((2, 5, 30), NAN)
    mask, turn = torch.zeros(5, 30, dtype=torch.bool), torch.full((5, 30), -1)
    laid[:, 4, :2], mask[4, :2], turn[4, :2] = other[:, 0], True, 0
    ends, place, at = [0] * 4, [], 0
    for k, (row, length) in enumerate(turns):
        here = slice(ends[row], ends[row] + length)
        laid[:, row, here], mask[row, here], turn[row, here] = stream[:, at : at + length], True, k
        place += [(row, column) for column in range(here.start, here.stop)]
        at, ends[row] = at + length, here.stop + 1  # and an observation after it
    rows, columns = tensor(place).T
    rollout = tensor([0, 0, 0, 0, 1])
    several = generalized_advantages(
        laid[0], laid[1], mask, rollout, turn, 0.9, 0.8, torch.zeros(2)
    )
    alone = torch.ones(1, n, dtype=torch.bool)
    plain = by_rows(stream[:1], stream[1:], alone, tensor([0]), 0.9, 0.8, torch.zeros(1))
    beside = by_rows(
        other[0], other[1], torch.ones(1, 2).bool(), tensor([0]), 0.9, 0.8, torch.zeros(1)
    )
    for actual, expected, neighbour in zip(several, plain, beside, strict=True):
        assert torch.equal(actual[rows, columns], expected[0])
        assert torch.equal(actual[4, :2], neighbour[0])
        assert not actual[~mask].any()


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 7))
@examples(60)
def test_a_rollouts_neighbours_do_not_matter(seed, rollouts, width):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rollouts, width, generator=g)
    mask = torch.rand(rollouts, width, generator=g) < 0.6
    together = by_rows(
        rewards, values, mask, torch.arange(rollouts), 0.9, 0.8, torch.zeros(rollouts)
    )
    for r in range(rollouts):
        one = slice(r, r + 1)
        alone = by_rows(rewards[one], values[one], mask[one], tensor([0]), 0.9, 0.8, torch.zeros(1))
        assert torch.equal(together[0][one], alone[0])
        assert torch.equal(together[1][one], alone[1])


# --- whiten -------------------------------------------------------------------------------------


def test_whiten_of_nothing_one_and_two():
    x = tensor([[3.0, NAN, 5.0]])
    for mask, expected in (
        ([[False, False, False]], [[0.0, 0.0, 0.0]]),
        ([[True, False, False]], [[0.0, 0.0, 0.0]]),
        ([[True, False, True]], [[-(0.5**0.5), 0.0, 0.5**0.5]]),
    ):
        torch.testing.assert_close(whiten(x, tensor(mask)), tensor(expected))


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_whiten_of_equal_entries_is_zero(entry, n):
    assert whiten(torch.full((n,), entry), torch.ones(n, dtype=torch.bool)).tolist() == [0.0] * n


def test_whiten_reads_the_masked_entries_only():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mask = x > -0.5
    white = whiten(torch.where(mask, x, NAN), mask)
    assert abs(white[mask].mean().item()) < 1e-6
    assert abs(white[mask].var().item() - 1) < 1e-4
    assert not white[~mask].any()
