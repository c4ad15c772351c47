"""Changes of a batch that must not change advantages or weights, for every estimator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.random_rollouts import ROLLOUT_GROUPS, Rollout, batch_of
from support.trainer_fixtures import config
from torch import Tensor

from agentrl import registry
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, Targets

ESTIMATORS = sorted(registry.advantage_estimators.shipped)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL = ("none", "k1", "k2", "k3")


def rewards_for(estimator: str, groups: list[list[Rollout]]) -> list[list[Rollout]]:
    """The groups with rewards that the estimator accepts: `maxrl` refuses negative ones."""
    if estimator != "maxrl":
        return groups
    return [[replace(r, reward=abs(r.reward)) for r in members] for members in groups]


def teacher_of(estimator: str) -> dict[str, str]:
    """The keys of a teacher, without which `opd` learns nothing."""
    if estimator != "opd":
        return {}
    return {"teacher__model": "policy", "teacher__prompt": "{prompt} hint"}


def plain_targets(batch: Batch, keys: dict) -> Targets:
    """Targets with values and old logprobs of 0; a teacher says what the engine said."""
    c = config(**keys, **teacher_of(keys["algorithm__adv_estimator"]))
    zeros = torch.zeros_like(batch.token_rewards)
    teacher = batch.rollout_logprobs if c.teacher.model else None
    return make_targets(batch, c, zeros, zeros, None, teacher_logprobs=teacher)


def targets_of(batch: Batch, keys: dict, seed: int, filler: float) -> Targets:
    """Targets of a batch in which `filler` stands wherever the policy did not choose.

    What models would say of the chosen tokens follows from the seed alone.
    """
    mask = batch.response_mask
    g = torch.Generator().manual_seed(seed)

    def outputs(shift: float) -> Tensor:
        chosen = torch.randn(int(mask.sum()), generator=g) + shift
        return torch.full(mask.shape, filler).masked_scatter(mask, chosen)

    values, old, reference, teacher = outputs(0), outputs(-2), outputs(-2), outputs(-2)
    c = config(**keys, **teacher_of(keys["algorithm__adv_estimator"]), data__batch_size=99)
    batch = replace(
        batch,
        token_rewards=torch.where(mask, batch.token_rewards, filler),
        rollout_logprobs=torch.where(mask, batch.rollout_logprobs, filler),
        baseline=torch.randn(len(batch.rewards), generator=g),
    )
    critic, taught = c.algorithm.critic, c.teacher.model
    return make_targets(
        *(batch, c, old, values if critic else None, reference),
        teacher_logprobs=teacher if taught else None,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    groups=ROLLOUT_GROUPS,
    seed=st.integers(0, 2**31),
    filler=st.sampled_from([float("nan"), float("inf"), 1e30, 0.0]),
    mode=st.sampled_from(MODES),
    kl=st.sampled_from(KL),
    white=st.booleans(),
    size=st.integers(0, 3),
)
@examples(60)
def test_observations_change_no_bit(estimator, groups, seed, filler, mode, kl, white, size):
    keys = {
        "algorithm__adv_estimator": estimator,
        "algorithm__loss_agg_mode": mode,
        "algorithm__mini_batch_size": size,
        "algorithm__gamma": 0.9,
        "algorithm__lam": 0.8,
        "algorithm__whiten_advantages": white,
    }
    groups = rewards_for(estimator, groups)
    if kl != "none" and estimator not in ("maxrl", "opd"):  # They refuse a KL penalty in rewards.
        keys |= {"algorithm__kl_type": "k1", "algorithm__kl_reward_coef": 0.25}
    bare, full = batch_of(groups, None), batch_of(groups, random.Random(seed))
    plain = targets_of(bare, keys, seed, 0.0)
    targets = targets_of(full, keys, seed, filler)
    here, there = full.action_mask, bare.action_mask
    assert torch.equal(targets.advantages[here], plain.advantages[there])
    assert targets.advantages[here].isfinite().all()
    assert torch.equal(targets.weights[here], plain.weights[there])
    assert not targets.weights[~here].any()
    assert (targets.returns is None) == (plain.returns is None)
    if targets.returns is not None and plain.returns is not None:
        assert torch.equal(targets.returns[here], plain.returns[there])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(groups=ROLLOUT_GROUPS, mode=st.sampled_from(MODES))
@examples(40)
def test_rollouts_that_do_not_train_change_nothing(estimator, groups, mode):
    keys = {"algorithm__adv_estimator": estimator, "algorithm__loss_agg_mode": mode}
    groups = rewards_for(estimator, groups)
    survivors = [[r for r in members if not r.masked] for members in groups]
    if not any(survivors):
        return
    full, rest = batch_of(groups, None), batch_of(survivors, None)
    trains, baseline = full.train, torch.arange(len(full.rewards)) / 8
    full = replace(full, baseline=baseline)
    rest = replace(rest, baseline=baseline[trains])
    targets, plain = plain_targets(full, keys), plain_targets(rest, keys)
    here, there = full.action_mask, rest.action_mask
    assert torch.equal(targets.advantages[here], plain.advantages[there])
    assert torch.equal(targets.weights[here], plain.weights[there])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(groups=ROLLOUT_GROUPS, seed=st.integers(0, 2**31))
@examples(40)
def test_the_order_within_a_group_does_not_matter(estimator, groups, seed):
    groups, rng = rewards_for(estimator, groups), random.Random(seed)
    orders = [rng.sample(range(len(members)), len(members)) for members in groups]
    shuffled = [[members[i] for i in o] for members, o in zip(groups, orders, strict=True)]

    def advantages_of(groups: list[list[Rollout]]) -> list[list[Tensor]]:
        """Each rollout's advantages, as one list, group by group."""
        batch = batch_of(groups, None)
        batch = replace(batch, baseline=batch.group / 4)
        keys = {"algorithm__adv_estimator": estimator, "algorithm__whiten_advantages": True}
        advantages = plain_targets(batch, keys).advantages
        mask = batch.action_mask
        rows_of = [batch.rollout == r for r in range(len(batch.rewards))]
        each = iter(advantages[rows][mask[rows]] for rows in rows_of)
        return [[next(each) for _ in members] for members in groups]

    for plain, advantages, order in zip(
        advantages_of(groups), advantages_of(shuffled), orders, strict=True
    ):
        for place, i in enumerate(order):
            torch.testing.assert_close(advantages[place], plain[i], atol=1e-4, rtol=1e-4)
