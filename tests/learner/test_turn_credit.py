"""Credit of turns: small worlds by hand, and expected gradients by exact enumeration."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from support.trainer_fixtures import config, group, scored, segment, turn
from torch import Tensor, tensor
from torch.nn.functional import logsigmoid

from agentrl import Scores, registry, reward
from agentrl.config import RewardConfig
from agentrl.learner.algorithms import (
    make_targets,
    rewards_to_go,
    subtract_group_mean,
    subtract_mean_of_others,
)
from agentrl.learner.batch import Batch, collate
from agentrl.learner.losses import vanilla
from agentrl.rewards import Scorer

PAD = 0


def played(*earned: float, masked: bool = False):
    """A rollout of one row: two tokens a turn, an observation between; what its turns earned."""
    pieces, turns = [], []
    for k, value in enumerate(earned):
        pieces += [("A", [1, 2]), ("E", [3])]
        turns.append(turn(0, 3 * k, 3 * k + 2, turn=value))
    return scored([segment([1], *pieces)], sum(earned), turns, masked=masked)


def credit(*members) -> list[list[float]]:
    """The advantages of each rollout's turns; both tokens of a turn have the same."""
    batch = collate([group(*members)], PAD, RewardConfig(turn_weight=1.0))
    advantages = make_targets(
        batch, config(algorithm__name="turn_rloo", rollout__n=2), None, None, None
    ).advantages
    assert torch.equal(advantages[:, 0::3], advantages[:, 1::3])
    assert not advantages[:, 2::3].any()
    return [
        [round(a, 6) for a in row[: 3 * len(m.trajectory.turns) : 3].tolist()]
        for row, m in zip(advantages, members, strict=True)
    ]


# --- by hand --------------------------------------------------------------------------------------


def test_a_turn_is_compared_with_the_return_of_the_others_from_that_turn():
    # To go: 3 2 | 6 4 | 0 0
    assert credit(played(1, 2), played(2, 4), played(0, 0)) == [[0, 0], [4.5, 3], [-4.5, -3]]


def test_a_rollout_that_ended_counts_with_return_0():
    # To go: 3 2 5 | 1 | 4 4. The second and third turns of the first face what had ended, too.
    first, second, third = credit(played(-2, -3, 5), played(1), played(0, 4))
    assert first == [0 - 2.5, 2 - 2, 5 - 0]
    assert second == [1 - 2]
    assert third == [4 - 0.5, 4 - 1]


def test_earlier_rewards_do_not_count_for_a_turn():
    """The same total, but the second rollout had earned it when its second turn began."""
    assert credit(played(0, 1), played(1, 0)) == [[0, 1], [0, -1]]


def test_masked_rollouts_are_not_compared_and_a_single_rollout_learns_nothing():
    assert credit(played(1, 2), played(9, 9, masked=True)) == [[0, 0], [0, 0]]
    compared = credit(played(1, 2), played(9, 9, masked=True), played(0, 1))
    assert compared == [[2, 1], [0, 0], [-2, -1]]


def test_turns_in_several_rows_are_ordered_by_time():
    """The loop spoke, asked a sub-agent (row 1), went on in row 0: turns 0, 1, 2."""
    rows = [segment([1], ("A", [2]), ("E", [4]), ("A", [5])), segment([8], ("A", [9]))]
    turns = [turn(0, 0, 1, turn=1.0), turn(1, 0, 1, thread=1, turn=2.0), turn(0, 2, 3, turn=4.0)]
    batch = collate(
        [group(scored(rows, 7.0, turns), played(0, 0))], PAD, RewardConfig(turn_weight=1.0)
    )
    assert rewards_to_go(batch, batch.token_rewards).tolist() == [[7, 6, 4], [0, 0, 0]]
    keys = config(algorithm__name="turn_rloo", rollout__n=2)
    advantages = make_targets(batch, keys, None, None, None).advantages
    assert [advantages[0, 0], advantages[1, 0], advantages[0, 2]] == [7, 6, 4]


def test_without_turn_rewards_and_with_equal_turns_it_is_rloo():
    members = [scored([segment([1], ("A", [2]), ("E", [3]), ("A", [4]))], r) for r in (1.0, 0, 0)]
    batch = collate([group(*members)], PAD)
    by_turn, by_rollout = (
        make_targets(batch, config(algorithm__name=name), None, None, None).advantages
        for name in ("turn_rloo", "rloo")
    )
    assert by_rollout.any() and torch.equal(by_turn, by_rollout)


# --- by enumeration -------------------------------------------------------------------------------

GROUP, MOST_TURNS = 3, 3
EARNED = ((1.0, 0.0), (2.0, 0.0), (3.0, 4.0))
"""By turn, and by whether the policy stops there or goes on: who goes on earns more, but later."""
THETA = tensor([0.3, -0.4], dtype=torch.float64)
"""The policy: the logit of going on in the first turn, and in the others."""


def episodes() -> list[tuple[int, ...]]:
    """All there are: choices turn by turn, of which the first 0 is the last one."""
    every = product((0, 1), repeat=MOST_TURNS)
    return sorted({e[: e.index(0) + 1] if 0 in e else e for e in every})


def rollout_of(episode: tuple[int, ...]):
    """A turn is one token: the choice. What follows it was observed."""
    pieces, turns = [], []
    for k, choice in enumerate(episode):
        pieces += [("A", [choice]), ("E", [7])]
        turns.append(turn(0, 2 * k, 2 * k + 1, turn=EARNED[k][choice]))
    return scored([segment([1], *pieces)], sum(t.rewards["turn"] for t in turns), turns)


def marked_afterwards(episode: tuple[int, ...]):
    """The same rollout, whose turns a reward function scores when it has ended."""

    def marks(trajectory):
        chosen = [s.response_ids[t.start] for s in trajectory.segments for t in trajectory.turns]
        return Scores(0.0, turns={k: EARNED[k][choice] for k, choice in enumerate(chosen)})

    unmarked = rollout_of(episode).trajectory
    turns = tuple(replace(t, rewards={}) for t in unmarked.turns)
    with registry.rewards.isolated():
        reward("marks")(marks)
        scorer = Scorer(RewardConfig(function="marks", turn_weight=1.0))
    return asyncio.run(scorer.score(replace(unmarked, turns=turns)))


@dataclass(frozen=True)
class World:
    """Every group of three that can be, as one batch; every group is a mini-batch of its own."""

    batch: Batch
    of_group: Tensor
    """(G,) how likely each is."""
    truth: Tensor
    """The gradient of the expected reward."""


def logprobs(batch: Batch, theta: Tensor) -> Tensor:
    """(B, T) of each choice, NaN where something was observed."""
    logits = torch.where(batch.turn == 0, theta[0], theta[1])
    chosen = logsigmoid(torch.where(batch.response_ids == 1, logits, -logits))
    return torch.where(batch.response_mask, chosen, float("nan"))


@cache
def world(make=rollout_of) -> World:
    each = [make(episode) for episode in episodes()]
    groups = [group(*members) for members in product(each, repeat=GROUP)]
    batch = collate(groups, PAD, RewardConfig(turn_weight=1.0))
    batch = replace(
        batch, rewards=batch.rewards.double(), token_rewards=batch.token_rewards.double()
    )
    theta = THETA.clone().requires_grad_()
    single = collate([group(*each)], PAD)
    likely = logprobs(single, theta).nansum(1).exp()
    assert likely.sum().item() == pytest.approx(1.0, abs=1e-12)
    value = (likely * single.rewards.double()).sum()
    (truth,) = torch.autograd.grad(value, theta)
    of_group = torch.stack([p.prod() for p in torch.cartesian_prod(*[likely.detach()] * GROUP)])
    return World(batch, of_group, truth)


def share_of_the_gradient(make=rollout_of, **keys) -> list[float]:
    """The learner's expected gradient, as a share of the true one, by parameter."""
    made = world(make)
    batch, sizes = made.batch, {"data__batch_size": len(made.of_group), "rollout__n": GROUP}
    c = config(algorithm__mini_batch_size=GROUP, **sizes, **keys)
    targets = make_targets(batch, c, None, None, None)
    theta = THETA.clone().requires_grad_()
    now, mask = logprobs(batch, theta), batch.action_mask
    loss, _ = vanilla(now, now.detach(), targets.advantages, mask, c.algorithm)
    likely = made.of_group[batch.group][batch.rollout][:, None]
    (gradient,) = torch.autograd.grad((likely * targets.weights * loss).sum(), theta)
    return (-gradient / made.truth).tolist()


EXACT = pytest.approx([1.0, 1.0], abs=1e-10)


def test_the_exact_gradient_is_not_small():
    assert len(episodes()) == 4
    assert world().truth.abs().min() > 0.1
    assert world().of_group.sum().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", ["rloo", "turn_rloo"])
def test_leaving_one_out_has_the_true_gradient(name):
    assert share_of_the_gradient(algorithm__name=name) == EXACT


def test_scores_of_turns_given_afterwards_have_the_true_gradient():
    assert torch.equal(world(marked_afterwards).truth, world().truth)
    assert share_of_the_gradient(marked_afterwards, algorithm__name="turn_rloo") == EXACT


def test_a_constant_scale_only_scales():
    keys = {"algorithm__loss_agg_mode": "seq-mean-token-sum-norm", "algorithm__loss_scale": 4}
    share = share_of_the_gradient(algorithm__name="turn_rloo", **keys)
    assert share == pytest.approx([0.25, 0.25], abs=1e-10)


def test_a_group_mean_of_three_has_two_thirds_of_the_gradient():
    share = share_of_the_gradient(algorithm__name="dr_grpo", algorithm__loss_scale=1)
    assert share == pytest.approx([2 / 3, 2 / 3], abs=1e-10)


def test_the_return_of_a_token_has_the_true_gradient_without_whitening():
    keys = {"algorithm__loss_agg_mode": "seq-mean-token-sum"}
    share = share_of_the_gradient(algorithm__adv_estimator="reinforce_plus_plus", **keys)
    assert share == EXACT


# --- what is known to be wrong: the test must be able to say so -----------------------------------


def at_turns(batch: Batch, of_turn: Tensor) -> Tensor:
    """(B, T) of (R, K)."""
    return of_turn[batch.rollout[:, None], batch.turn.clamp(min=0)]


def standing(batch: Batch) -> Tensor:
    """(R, K) whether each rollout took a turn."""
    ones = batch.response_mask.to(batch.token_rewards.dtype)
    took = replace(batch, token_rewards=ones)
    return rewards_to_go(took, ones) > 0


def normalized_and_summed(batch, token_rewards, values, c):
    """Each turn's reward against its index, over their std; then the sum of its turns."""
    to_go, standing_ = rewards_to_go(batch, token_rewards), standing(batch)
    earned = to_go - torch.cat([to_go[:, 1:], torch.zeros_like(to_go[:, :1])], 1)
    total = torch.zeros_like(batch.rewards)
    for k in range(earned.shape[1]):
        here = standing_[:, k]
        total[here] += subtract_group_mean(earned[here, k], batch.group[here], by_std=True)
    return total[batch.rollout][:, None].expand_as(token_rewards), None


def only_those_still_there(batch, token_rewards, values, c):
    """Reward-to-go against the others that took the turn; 0 where there is no other."""
    to_go, standing_ = rewards_to_go(batch, token_rewards), standing(batch)
    of_turn = torch.zeros_like(to_go)
    for k in range(to_go.shape[1]):
        here = standing_[:, k]
        of_turn[here, k] = subtract_mean_of_others(to_go[here, k], batch.group[here])
    return at_turns(batch, of_turn), None


@pytest.fixture
def wrong():
    """Registers an estimator for the length of a test."""

    def register(function) -> dict[str, str]:
        registry.advantage_estimator("wrong")(function)
        return {
            "algorithm__adv_estimator": "wrong",
            "algorithm__loss_agg_mode": "seq-mean-token-sum",
        }

    return register


def test_turns_normalized_by_themselves_and_summed_point_the_wrong_way(wrong):
    share = share_of_the_gradient(**wrong(normalized_and_summed))
    assert share == pytest.approx([-0.74, -0.33], abs=0.01)


def test_leaving_out_ended_rollouts_is_biased(wrong):
    """In the first turn all are there still: only the second parameter hears of it."""
    share = share_of_the_gradient(**wrong(only_those_still_there))
    assert share == pytest.approx([1.0, 0.73], abs=0.01)


@pytest.mark.parametrize(
    "keys, share",
    [
        ({"algorithm__loss_agg_mode": "token-mean"}, [0.57, 0.42]),
        ({"algorithm__loss_agg_mode": "seq-mean-token-mean"}, [0.72, 0.28]),
    ],
)
def test_a_mean_over_tokens_is_biased(keys, share):
    actual = share_of_the_gradient(algorithm__name="turn_rloo", **keys)
    assert actual == pytest.approx(share, abs=0.01)


def test_division_by_the_std_is_biased():
    keys = {"algorithm__loss_agg_mode": "seq-mean-token-sum"}
    share = share_of_the_gradient(algorithm__name="grpo", **keys)
    assert share == pytest.approx([0.70, 0.40], abs=0.01)
