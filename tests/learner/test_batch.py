from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.trainer_fixtures import group, random_groups, scored, segment, turn
from torch import tensor

from agentrl.config import AlgorithmConfig, Config, RewardConfig
from agentrl.errors import RunStopped
from agentrl.learner.algorithms import loss_weights, make_targets
from agentrl.learner.batch import assign_mini_batches, collate, count_mini_batches

PAD = 31


def targets_of(batch, old=None, values=None, reference=None, **keys):
    config = Config(algorithm=AlgorithmConfig(**keys))
    return make_targets(batch, config, old, values, reference)


def test_collate_pads_prompts_left_and_responses_right():
    a = scored([segment([1, 2, 3], ("A", [4, 5]), ("E", [6]), ("A", [7]))], 1.0)
    b = scored([segment([8], ("A", [9]))], 0.0)
    batch = collate([group(a), group(b)], PAD)
    assert batch.prompt_ids.tolist() == [[1, 2, 3], [PAD, PAD, 8]]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.response_ids.tolist() == [[4, 5, 6, 7], [9, PAD, PAD, PAD]]
    assert batch.response_lengths.tolist() == [4, 1]
    assert batch.response_mask.int().tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[-0.5, -0.625, 0, -0.875], [-1.125, 0, 0, 0]]
    assert batch.versions.tolist() == [[0, 0, -1, 0], [0, -1, -1, -1]]
    assert batch.token_rewards.tolist() == [[0, 0, 0, 1.0], [0, 0, 0, 0]]
    assert batch.turn.tolist() == [[-1] * 4] * 2  # written without turns
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.rollout.tolist() == [0, 1]
    assert batch.group.tolist() == [0, 1]
    assert batch.train.tolist() == [True, True]


def test_segments_become_rows_and_rollouts_stay_rollouts():
    two = scored([segment([1], ("A", [2])), segment([3], ("A", [4]))], 1.0)
    one = scored([segment([5], ("A", [6]))], 0.0)
    batch = collate([group(two, one)], PAD)
    assert batch.rollout.tolist() == [0, 0, 1]
    assert batch.group.tolist() == [0, 0]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.token_rewards.tolist() == [[0.0], [1.0], [0.0]]
    # The baseline is 1/2, not 2/3: a rollout of two segments is one rollout.
    targets = targets_of(batch, norm_adv_by_std=False)
    assert targets.advantages.tolist() == [[0.5], [0.5], [-0.5]]


def test_turn_rewards_are_at_the_last_token_of_the_turn():
    row = segment([1], ("A", [2, 3]), ("E", [4, 5]), ("A", [6, 7]))
    turns = [turn(0, 0, 2, turn=2.0, tool=1.0), turn(0, 4, 6, turn=4.0)]
    total = 1.0 + 0.5 * 6.0 + 0.25 * 1.0
    batch = collate(
        [group(scored([row], total, turns))], PAD, RewardConfig(turn_weight=0.5, tool_weight=0.25)
    )
    assert batch.token_rewards.tolist() == [[0.0, 1.25, 0.0, 0.0, 0.0, 3.0]]
    unweighted = collate([group(scored([row], 1.0, turns))], PAD)
    assert unweighted.token_rewards.tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]


def test_a_zeroed_rollout_loses_its_turn_rewards():
    row = segment([1], ("A", [2]), ("E", [3]), ("A", [4]), ("E", [5]))
    zeroed = scored([row], 0.0, [turn(0, 0, 1, turn=2.0), turn(0, 2, 3)])
    batch = collate([group(zeroed)], PAD, RewardConfig(turn_weight=1.0))
    assert batch.token_rewards.tolist() == [[2.0, 0.0, -2.0, 0.0]]


def interleaved(reward: float, *, late: bool = False):
    """A loop speaks, asks a sub-agent (row 1), goes on in row 0; `late`: asks it once more."""
    own = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5, 6]), ("E", [7]))
    spawned = segment([8], ("A", [9]), ("E", [10]), ("A", [11]))
    turns = [turn(0, 0, 2), turn(1, 0, 1, thread=1, turn=0.5), turn(0, 3, 5, turn=0.25)]
    again = turn(1, 2, 3, thread=1)
    return scored([own, spawned], reward, [*turns, again] if late else [again, *turns])


@pytest.mark.parametrize("late", [False, True])
def test_the_reward_of_interleaved_rows_is_at_the_end_of_the_last_turn(late):
    batch = collate([group(interleaved(2.0, late=late))], PAD, RewardConfig(turn_weight=1.0))
    paid = [[0, 0, 0, 0, 0.25, 0], [0.5, 0, 1.25, 0, 0, 0]]
    if not late:
        paid = [[0, 0, 0, 0, 1.5, 0], [0.5, 0, 0, 0, 0, 0]]
    assert batch.token_rewards.tolist() == paid
    order = [[0, 0, -1, 2, 2, -1], [1, -1, 3, -1, -1, -1]]
    if not late:
        order = [[1, 1, -1, 3, 3, -1], [2, -1, 0, -1, -1, -1]]
    assert batch.turn.tolist() == order
    unweighted = collate([group(interleaved(2.0, late=late))], PAD)
    assert unweighted.token_rewards.nonzero().tolist() == [[1, 2] if late else [0, 4]]


def test_the_reward_is_at_the_last_turn_that_sampled_a_token():
    rows = [segment([1]), segment([2], ("A", [3, 4])), segment([5], ("A", [6]))]
    turns = [turn(2, 0, 1, thread=2), turn(1, 0, 2, thread=1)]
    batch = collate([group(scored(rows, 1.0, turns))], PAD)
    assert batch.token_rewards.tolist() == [[0, 0], [0, 1.0], [0, 0]]
    # A turn without a sampled token carries nothing: the turn before it does.
    silent = [*turns, turn(0, 0, 0)]
    again = collate([group(scored(rows, 1.0, silent))], PAD)
    assert torch.equal(again.token_rewards, batch.token_rewards)


def test_ppo_reads_interleaved_rows_in_order_of_time():
    """As if the same tokens stood in one row; `turn` is what tells."""
    own = segment([1], ("A", [2, 3, 9, 5, 6]))
    turns = [turn(0, 0, 2), turn(0, 2, 3, turn=0.5), turn(0, 3, 5, turn=0.25)]
    one = collate([group(scored([own], 2.0, turns))], PAD, RewardConfig(turn_weight=1.0))
    row = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5, 6]))
    turns = [turn(0, 0, 2), turn(1, 0, 1, thread=1, turn=0.5), turn(0, 3, 5, turn=0.25)]
    rows = [row, segment([8], ("A", [9]))]
    two = collate([group(scored(rows, 2.0, turns))], PAD, RewardConfig(turn_weight=1.0))
    rows_at, columns = tensor([0, 0, 1, 0, 0]), tensor([0, 1, 0, 3, 4])
    values = torch.full((2, 5), float("nan"))
    values[rows_at, columns] = one_values = tensor([0.1, -0.2, 0.3, 0.7, -0.4])
    keys = {"name": "ppo", "gamma": 0.9, "lam": 0.8}
    expected = targets_of(one, values=one_values[None], **keys)
    targets = targets_of(two, values=values, **keys)
    assert targets.returns is not None and expected.returns is not None
    assert torch.equal(targets.returns[rows_at, columns], expected.returns[0])
    torch.testing.assert_close(targets.advantages[rows_at, columns], expected.advantages[0])


SIXTYFOURTHS = st.integers(-640, 640).map(lambda k: k / 64)


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 2), SIXTYFOURTHS), min_size=1, max_size=4
        ),
        min_size=1,
        max_size=3,
    ),
    SIXTYFOURTHS,
    st.sampled_from([0.0, 0.5, 2.0]),
)
@examples(150)
def test_token_rewards_sum_to_the_rollouts_reward(rows, reward, weight):
    """Any turns in any segments; the parts are exact in binary, so the sum must be."""
    segments, turns = [], []
    for s, row in enumerate(rows):
        pieces, at = [], 0
        for sampled, observed, earned in row:
            turns.append(turn(s, at, at + sampled, thread=s % 2, turn=earned))
            pieces += [("A", [1] * sampled), ("E", [2] * observed)]
            at += sampled + observed
        segments.append(segment([3], *pieces))
    one = scored(segments, reward, turns)
    batch = collate([group(one, one)], PAD, RewardConfig(turn_weight=weight))
    paid = torch.zeros(2).double().index_add(0, batch.rollout, batch.token_rewards.sum(1))
    carried = reward if one.trajectory.sampled_tokens else 0.0
    assert paid.tolist() == [carried, carried]
    assert not batch.token_rewards[~batch.response_mask].any()
    assert torch.equal(batch.turn >= 0, batch.response_mask)
    # Each sampled token stands in one row, once.
    assert batch.response_mask.sum() == 2 * one.trajectory.sampled_tokens


def test_a_rollout_without_sampled_tokens_counts_in_the_baseline_and_trains_nothing():
    silent = scored([segment([1], ("E", [2, 3]))], 1.0)
    empty = scored([segment([1])], 1.0)
    spoke = scored([segment([1], ("A", [4]))], 0.0)
    batch = collate([group(silent, empty, spoke)], PAD)
    targets = targets_of(batch, norm_adv_by_std=False)
    assert batch.action_mask.tolist() == [[False, False], [False, False], [True, False]]
    assert targets.weights.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert targets.advantages[2, 0].item() == pytest.approx(-2 / 3)
    alone = collate([group(empty)], PAD)
    assert not loss_weights(alone, "token-mean", 0, 1).any()


def test_a_masked_rollout_is_out_of_loss_and_baseline():
    rows = [scored([segment([1], ("A", [2]))], r) for r in (1.0, 0.0)]
    cut = scored([segment([1], ("A", [2, 3]))], 9.0, masked=True)
    batch = collate([group(*rows, cut)], PAD)
    targets = targets_of(batch, norm_adv_by_std=False)
    assert targets.advantages.tolist() == [[0.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]
    assert targets.weights.tolist() == [[0.5, 0.0], [0.5, 0.0], [0.0, 0.0]]


def test_values_that_are_not_finite_stop_the_run_and_are_named():
    with pytest.raises(RunStopped, match="reward of episode e is nan"):
        collate([group(scored([segment([1], ("A", [2]))], float("nan")))], PAD)
    bad = segment([1], ("A", [2]), ("E", [3]))
    bad.logprobs[1] = float("nan")  # not sampled: nobody reads it
    collate([group(scored([bad], 0.0))], PAD)
    bad.logprobs[0] = float("-inf")
    with pytest.raises(RunStopped, match="logprob of response token 0 of episode e is -inf"):
        collate([group(scored([bad], 0.0))], PAD)
    with pytest.raises(RunStopped, match="empty prompt"):
        collate([group(scored([segment([], ("A", [2]))], 0.0))], PAD)
    with pytest.raises(RunStopped, match="all rollouts of this step were dropped"):
        collate([group()], PAD)


# --- mini-batches -------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 100))
def test_mini_batches_are_neighbours_of_nearly_equal_size(rollouts, size):
    which = assign_mini_batches(rollouts, size)
    assert (which.diff() >= 0).all() and which[0] == 0
    sizes = which.bincount()
    assert len(sizes) == count_mini_batches(rollouts, size)
    assert sizes.max() - sizes.min() <= 1
    assert not size or sizes.max() <= size


def test_weights_hold_the_denominator_of_the_whole_mini_batch():
    batch = collate(random_groups(0, groups=4, n=4), PAD)
    weights = loss_weights(batch, "token-mean", 8, 1)
    first = batch.rollout < 8
    for rows in (first, ~first):
        tokens = batch.action_mask[rows].sum()
        assert weights[rows].sum().item() == pytest.approx(1.0)
        assert set(weights[rows].unique().tolist()) == {0.0, 1 / tokens.item()}


# --- algorithms ---------------------------------------------------------------------------------


def test_ppo_subtracts_the_kl_at_the_token_and_grpo_from_the_rollout():
    rows = [scored([segment([1], ("A", [2, 3]), ("E", [4]))], r) for r in (1.0, 0.0)]
    batch = collate([group(*rows)], PAD)
    old = tensor([[-1.0, -2.0, float("nan")]] * 2)
    reference = tensor([[-1.5, -2.0, float("nan")], [-1.0, -3.0, float("nan")]])
    keys = {"kl_reward_coef": 0.1, "kl_type": "k1", "norm_adv_by_std": False}
    grpo = targets_of(batch, old, None, reference, **keys)
    # rewards 1 - 0.1 * 0.5 and 0 - 0.1 * 1
    assert grpo.advantages[:, 0].tolist() == pytest.approx([0.525, -0.525])
    ppo = targets_of(batch, old, torch.zeros(2, 3), reference, **{**keys, "name": "ppo"})
    assert ppo.returns is not None
    torch.testing.assert_close(ppo.returns, tensor([[0.95, 1.0, 0.0], [-0.1, -0.1, 0.0]]))


def test_ppo_returns_reach_back_over_observations():
    row = segment([1], ("A", [2, 3]), ("E", [4, 5]), ("A", [6]), ("E", [7]))
    batch = collate([group(scored([row], 1.0), scored([row], 0.0))], PAD)
    values = torch.where(batch.action_mask, 0.5, float("nan"))
    targets = targets_of(batch, values=values, name="ppo", gamma=0.5)
    assert targets.returns is not None
    assert targets.returns[0].tolist() == [0.25, 0.5, 0.0, 0.0, 1.0, 0.0]
    advantages = targets.advantages[batch.action_mask]
    assert abs(advantages.mean().item()) < 1e-6
    assert not targets.advantages[~batch.action_mask].any()
