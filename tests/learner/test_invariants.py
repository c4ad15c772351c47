"""Changes of a batch that must not change the update, for fixed outputs of the models.

The tests go through the whole learner. `test_advantages_invariants.py` tests the invariants of
estimators, `test_ranks.py` those of ranks.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.random_rollouts import ROLLOUT_GROUPS, batch_of
from support.tensor_rank import token_positions, update_on_tensors
from support.trainer_fixtures import config, group, scored, segment, turn
from torch import Tensor

from agentrl import registry
from agentrl.config import RewardConfig
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, Targets, collate
from agentrl.trajectory import Scored

# `maxrl` refuses negative rewards; `test_advantages_invariants.py` has its invariants.
ESTIMATORS = sorted(registry.advantage_estimators.shipped - {"maxrl", "opd"})
LOSSES = sorted(registry.policy_losses.shipped)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FILLERS = (float("nan"), float("inf"), 1e30, 0.0)

KEYS = st.fixed_dictionaries(
    {
        "algorithm__loss_agg_mode": st.sampled_from(MODES),
        "algorithm__mini_batch_size": st.integers(0, 3),
        "algorithm__tis_cap": st.sampled_from([0.0, 1.5]),
        "algorithm__tis_level": st.sampled_from(["token", "sequence"]),
        "algorithm__tis_mode": st.sampled_from(["truncate", "mask"]),
        "algorithm__reject_band": st.sampled_from([[], [0.8, 1.2]]),
        "algorithm__dual_clip": st.sampled_from([0.0, 1.5]),
        "algorithm__value_clip": st.sampled_from([0.0, 0.3]),
        "algorithm__entropy_coef": st.sampled_from([0.0, 0.25]),
        "algorithm__whiten_advantages": st.booleans(),
        "algorithm__kl_type": st.sampled_from(["k2", "k3"]),
        "algorithm__kl_loss_coef": st.sampled_from([0.0, 0.25]),
    }
)
"""Config keys of the algorithm, except the estimator and the policy loss."""


def model_outputs(
    batch: Batch, seed: int, filler: float = 0.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random outputs of the models and the engine, (B, T) each.

    The values of sampled tokens depend only on the seed. All other positions are `filler`.
    """
    mask, g = batch.response_mask, torch.Generator().manual_seed(seed)
    count = int(mask.sum())

    def laid(chosen: Tensor) -> Tensor:
        return torch.full(mask.shape, filler, dtype=dtype).masked_scatter(mask, chosen)

    def noise(size: float) -> Tensor:
        return size * torch.randn(count, generator=g, dtype=dtype)

    now = noise(1.0) - 3
    return {
        "logprobs": laid(now),
        "old": laid(now + noise(0.3)),
        "rollout": laid(now + noise(0.3)),
        "reference": laid(now + noise(0.3)),
        "entropy": laid(noise(1.0) + 3),
        "values": laid(noise(1.0)),
        "old_values": laid(noise(1.0)),
    }


def update(
    batch: Batch,
    keys: dict[str, object],
    seed: int,
    *,
    filler: float = 0.0,
    given_old: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Targets, dict[str, float], dict[str, Tensor]]:
    """Return the targets of a batch, and metrics and gradients of one update on it.

    The outputs of the models are those of `model_outputs`.
    """
    c = config(**keys, data__batch_size=99)
    outputs = model_outputs(batch, seed, filler, dtype)
    earned = torch.where(batch.response_mask, batch.token_rewards.to(dtype), filler)
    batch = replace(
        batch,
        response_ids=token_positions(batch),
        token_rewards=earned,
        rewards=batch.rewards.to(dtype),
        rollout_logprobs=outputs["rollout"],
        baseline=torch.arange(len(batch.rewards), dtype=dtype) / 8,
    )
    given_old = given_old or len(batch.rewards) > c.algorithm.mini_batch_size > 0
    targets = make_targets(
        batch,
        c,
        outputs["old"] if given_old else None,
        outputs["old_values"] if c.algorithm.critic else None,
        outputs["reference"],
    )
    models = {name: outputs[name] for name in ("logprobs", "entropy", "values")}
    metrics, gradients, _ = update_on_tensors(batch, targets, c, **models)
    return targets, metrics, gradients


# --- observations -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    world=ROLLOUT_GROUPS,
    seed=st.integers(0, 2**31),
    filler=st.sampled_from(FILLERS),
    keys=KEYS,
    given_old=st.booleans(),
)
@examples(40)
def test_observations_change_no_bit_of_what_is_learned(
    estimator, loss, world, seed, filler, keys, given_old
):
    """Compares metrics, targets and gradients with and without observations in the rows."""
    keys |= {"algorithm__adv_estimator": estimator, "algorithm__policy_loss": loss}
    bare, full = batch_of(world, None), batch_of(world, random.Random(seed))
    plain, plain_metrics, plain_gradients = update(bare, keys, seed, given_old=given_old)
    targets, metrics, gradients = update(full, keys, seed, filler=filler, given_old=given_old)
    there, here = bare.action_mask, full.action_mask
    rounded, exact = split_metrics(metrics)
    plain_rounded, plain_exact = split_metrics(plain_metrics)
    assert exact == plain_exact
    assert rounded == pytest.approx(plain_rounded, rel=1e-5)
    assert torch.equal(targets.advantages[here], plain.advantages[there])
    assert torch.equal(targets.weights[here], plain.weights[there])
    for name, gradient in gradients.items():
        assert torch.equal(gradient[here], plain_gradients[name][there]), name
        assert gradient[here].isfinite().all(), name
        assert not gradient[~here].any(), name  # fails for NaN, too


def split_metrics(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics that may differ by rounding, and the metrics that must be equal.

    The importance weights are summed over a row, and the rounding of this sum depends on the width
    of the row. Metrics that distinguish tokens after an observation from others are left out.
    """
    kept = {name: value for name, value in metrics.items() if "diff_mean/" not in name}
    rounded = {name for name in kept if "/rollout_is_" in name}
    return {n: kept[n] for n in rounded}, {n: v for n, v in kept.items() if n not in rounded}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_such_a_batch_has_large_gradients(estimator):
    """If all gradients were 0, the tests above would show nothing.

    The test also checks that the metric of the entropy is the mean over the sampled tokens.
    """
    rows = [segment([1], ("A", [1, 1]), ("E", [2]), ("A", [1])) for _ in range(4)]
    turns = [[turn(0, 0, 2, turn=r), turn(0, 3, 4)] for r in (0.25, 1.0, 0.5, 0.75)]
    members = [
        scored([row], r + 1.0, t) for r, (row, t) in enumerate(zip(rows, turns, strict=True))
    ]
    batch = collate([group(*members)], 0, RewardConfig(turn_weight=1.0))
    keys = {"algorithm__adv_estimator": estimator, "algorithm__entropy_coef": 0.1}
    _, metrics, gradients = update(batch, keys, 0)
    entropy = model_outputs(batch, 0)["entropy"][batch.action_mask].mean()
    assert metrics["actor/entropy"] == pytest.approx(entropy.item(), rel=1e-6)
    learns = ("logprobs", "entropy", "values") if estimator == "gae" else ("logprobs", "entropy")
    for name in learns:
        assert (gradients[name] != 0)[batch.action_mask].float().mean() > 0.5, name


# --- the way rows are laid out ------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@given(
    estimator=st.sampled_from(ESTIMATORS),
    world=ROLLOUT_GROUPS,
    seed=st.integers(0, 2**31),
    keys=KEYS,
    budget=st.integers(1, 40),
)
@examples(40)
def test_the_micro_batch_size_changes_nothing(loss, estimator, world, seed, keys, budget):
    """Compares gradients and metrics. Metrics are means over tokens, not over micro-batches."""
    keys |= {"algorithm__adv_estimator": estimator, "algorithm__policy_loss": loss}
    batch = batch_of(world, random.Random(seed))
    _, whole, gradients = update(batch, keys, seed, dtype=torch.float64)
    keys |= {"optim__micro_batch_tokens": budget}
    _, cut, cut_gradients = update(batch, keys, seed, dtype=torch.float64)
    assert cut.pop("perf/micro_batches") >= whole.pop("perf/micro_batches")
    assert cut == pytest.approx(whole, rel=1e-12, abs=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(cut_gradients[name], gradient, atol=1e-13, rtol=1e-12)


def in_rows(rng: random.Random, reward: float, rows: int) -> Scored:
    """Return a rollout of four turns that alternate between this number of rows."""
    pieces: list[list[tuple[str, list[int]]]] = [[] for _ in range(rows)]
    turns = []
    for k in range(4):
        row, size = pieces[k % rows], rng.randint(1, 3)
        at = sum(len(ids) for _, ids in row)
        turns.append(turn(k % rows, at, at + size, turn=rng.random()))
        row.append(("A", [1] * size))
    return scored([segment([1], *row) for row in pieces], reward, turns)


@pytest.mark.parametrize(
    "loss", [name for name in LOSSES if name != "gspo"]
)  # its ratio is that of a row
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("mode", MODES)
def test_baselines_and_weights_count_rollouts_and_not_rows(estimator, loss, mode):
    """The same turns in one row, or interleaved in two rows, have equal gradients of each token."""
    c = config(
        algorithm__adv_estimator=estimator,
        algorithm__policy_loss=loss,
        algorithm__loss_agg_mode=mode,
        algorithm__tis_cap=0,
    )
    by_rows = []
    for rows in (1, 2):
        rng = random.Random(0)
        members = [in_rows(rng, reward, rows) for reward in (0.0, 1.0, 0.25, 2.0)]
        batch = collate([group(*members)], 0, RewardConfig(turn_weight=1.0))
        mask, order = batch.action_mask, time_of(batch)
        draws = torch.randn(4, len(order), generator=torch.Generator().manual_seed(0)) / 8
        now, old, values, before = (
            torch.zeros(mask.shape).masked_scatter(mask, draw[order]) for draw in draws
        )
        batch = replace(batch, response_ids=token_positions(batch), baseline=torch.arange(4) / 8)
        targets = make_targets(batch, c, old, before if c.algorithm.critic else None, None)
        outputs = {"logprobs": now, "entropy": torch.zeros_like(now), "values": values}
        _, gradients, _ = update_on_tensors(batch, targets, c, **outputs)
        in_time = {n: x[mask][order.argsort()] for n, x in gradients.items()}
        by_rows.append(in_time)
    assert by_rows[0]["logprobs"].any()
    for name, gradient in by_rows[0].items():
        torch.testing.assert_close(by_rows[1][name], gradient, atol=1e-7, rtol=1e-5, msg=name)


def time_of(batch: Batch) -> Tensor:
    """Return when each sampled token was sampled, as a rank: (N,), in the order of the rows."""
    row, column = batch.action_mask.nonzero(as_tuple=True)
    keys = (batch.rollout[row] * 100 + batch.turn[row, column]) * 100 + column
    return keys.argsort().argsort()


# --- ends, and almost nothing -------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_rollout_that_ran_out_of_its_budget_has_ended_and_is_not_bootstrapped(lam):
    """The value after the last token is 0, whatever the critic returns and why ever it ended."""
    rows = [segment([1], ("A", [1, 1]), ("E", [2, 2]), ("A", [1]), ("E", [3, 3])) for _ in range(2)]
    done, cut = (scored([row], 0.75) for row in rows)
    cut = replace(cut, trajectory=replace(cut.trajectory, stop_reason="trajectory_tokens"))
    batch = collate([group(done, cut)], 0)
    c = config(algorithm__name="ppo", algorithm__lam=lam, algorithm__whiten_advantages=False)
    values = torch.full(batch.response_mask.shape, 9.0)
    values[:, 4] = 0.5
    targets = make_targets(batch, c, None, values, None)
    assert targets.returns is not None
    assert targets.returns[:, 4].tolist() == [0.75, 0.75]
    assert targets.advantages[:, 4].tolist() == [0.25, 0.25]
    assert torch.equal(targets.advantages[0], targets.advantages[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_batches_of_zero_one_and_two_tokens_are_whitened(estimator, count):
    sizes = [1] * count + [0] * (3 - count)
    members = [
        scored([segment([1], ("A", [1] * n), ("E", [2]))], float(r)) for r, n in enumerate(sizes)
    ]
    keys = {"algorithm__adv_estimator": estimator, "algorithm__whiten_advantages": True}
    batch = collate([group(*members)], 0)
    targets, metrics, gradients = update(batch, keys, 0, filler=float("nan"))
    mask = batch.action_mask
    assert targets.advantages[mask].isfinite().all()
    assert all(g.isfinite().all() for g in gradients.values())
    assert all(map(math.isfinite, metrics.values()))
    if count < 2:
        assert not targets.advantages[mask].any()
