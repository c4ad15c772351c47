"""The mismatch of engine and trainer: how far apart their logprobs of the sampled tokens are.

Both hold the same weights when a step begins. So the mismatch measured there comes from different
arithmetic alone, and with `trainer.max_staleness` also from the age of the tokens. If it grows
further, one of them has other weights, another temperature or other input tokens. Then the samples
are not the policy's, and training goes wrong without any other sign.

The engine sampled the tokens. So the KL estimates here are of KL(engine || trainer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agentrl.config import AlgorithmConfig
from agentrl.errors import RunStopped
from agentrl.learner.batch import Batch
from agentrl.learner.losses import engine_weights, importance_ratios, k1, k3, rejected_rows

MEAN = "rollout_corr/logprob_diff_mean"
"""The mean of |log p_trainer - log p_engine|, which `MismatchGuard` checks."""

TURNS = ("turn_1", "turn_2", "turn_3", "turn_4plus")
"""The turns that have a mean of their own, `MEAN/TURN`; the last one includes all later turns."""


CURRENT = "current_version"
"""`MEAN/CURRENT` is the mean of the tokens that the current version of the policy sampled."""
MIN_CURRENT = 1000
"""The number of tokens that this mean needs."""


def mismatch_metrics(
    batch: Batch, old_logprobs: Tensor, mask: Tensor, version: int | None = None
) -> dict[str, float]:
    """Compare the trainer's logprobs with the engine's.

    Args:
        batch: has the engine's logprobs.
        old_logprobs: (B, T) the trainer's, at the start of the step.
        mask: (B, T) bool, the tokens to compare; nothing else is read.
        version: the version of the policy at the start of the step; None: all tokens have it.

    Returns:
        An empty dictionary for no token. Otherwise, over the tokens:

        - `rollout_corr/logprob_diff_mean`, `_max`: |difference|. The mean also for each of `TURNS`,
          and for the tokens `after_observation`, which follow a template, a tool or a user. If
          some tokens are of older versions, also for those of the `current_version`, if there are
          at least `MIN_CURRENT`.
        - `rollout_corr/kl`, `rollout_corr/k3_kl`: KL(engine || trainer) by two estimators.
        - `rollout_corr/rollout_is_eff_sample_size`: the effective sample size of the importance
          weights before any cap, as a share of the tokens;
          `rollout_corr/rollout_is_seq_eff_sample_size`: the same for whole rollouts.
        - `training/rollout_probs_diff_*`: differences of probabilities;
          `training/rollout_ratio_error_*`: |ratio - 1|.
    """
    old, engine = old_logprobs[mask].double(), batch.rollout_logprobs[mask].double()
    if not len(old):
        return {}
    # Flat from here on: rows are padded to the longest one.
    gaps = old - engine
    distance, turn = gaps.abs(), batch.turn[mask]
    metrics = {MEAN: distance.mean().item(), "rollout_corr/logprob_diff_max": distance.max().item()}
    subsets = {name: turn == k for k, name in enumerate(TURNS[:-1])}
    subsets[TURNS[-1]] = turn >= len(TURNS) - 1
    observed = nn.functional.pad(~batch.response_mask[:, :-1], (1, 0))
    subsets["after_observation"] = observed[mask]
    if version is not None:
        is_current = batch.versions[mask] == version
        if MIN_CURRENT <= int(is_current.sum()) < len(is_current):
            subsets[CURRENT] = is_current
    for name, in_subset in subsets.items():
        if in_subset.any():
            metrics[f"{MEAN}/{name}"] = distance[in_subset].mean().item()

    owner = batch.rollout.repeat_interleave(mask.sum(1))  # (N,)
    of_rollouts = gaps.new_zeros(len(batch.rewards)).index_add(0, owner, gaps)
    rollouts = owner.unique()
    probability_gaps, error = (old.exp() - engine.exp()).abs(), (old - engine).expm1().abs()
    return metrics | {
        "rollout_corr/kl": k1(engine, old).mean().item(),
        "rollout_corr/k3_kl": k3(engine, old).mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": _effective_sample_size(old - engine),
        "rollout_corr/rollout_is_seq_eff_sample_size": _effective_sample_size(
            of_rollouts[rollouts]
        ),
        "training/rollout_probs_diff_mean": probability_gaps.mean().item(),
        "training/rollout_probs_diff_max": probability_gaps.max().item(),
        "training/rollout_ratio_error_mean": error.mean().item(),
        "training/rollout_ratio_error_max": error.max().item(),
    }


def _effective_sample_size(log_weights: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2): 1 for equal weights, 1 / n if all but one are 0."""
    weights = (log_weights - log_weights.max()).exp()  # the scale does not matter
    return (weights.sum().square() / (len(weights) * weights.square().sum())).item()


def importance_weight_metrics(
    batch: Batch, old_logprobs: Tensor, mask: Tensor, config: AlgorithmConfig
) -> dict[str, float]:
    """Return metrics of a step's importance weights, and the shares of weights that are cut.

    Args:
        batch: has the engine's logprobs.
        old_logprobs: (B, T) the trainer's, at the start of the step.
        mask: (B, T) bool, the tokens that have a weight: all sampled tokens of a row, or none.
        config: the section `algorithm`.

    Returns:
        An empty dictionary for no token or no weights. With `algorithm.tis_cap`, over the tokens,
        at the level of `algorithm.tis_level` and before the cap: `rollout_corr/rollout_is_mean`,
        `_max`, `_min`; `rollout_is_ratio_fraction_high`, `_low`, the shares above the cap and below
        `algorithm.tis_low` or the reciprocal of the cap. If weights can be 0,
        `rollout_rs_masked_fraction`, the share of tokens with the weight 0. With
        `algorithm.reject_band`, `rollout_rs_seq_masked_fraction`, the share of rows that are
        rejected.
    """
    if not config.weighs_tokens or not mask.any():
        return {}
    metrics = _ratio_metrics(batch, old_logprobs, mask, config) if config.tis_cap else {}
    # float64: float32 sums would depend on the width of the padded rows.
    old, engine = old_logprobs.double(), batch.rollout_logprobs.double()
    if config.tis_mode == "mask" or config.reject_band:
        masked = engine_weights(old, engine, mask, config)[mask] == 0
        metrics["rollout_corr/rollout_rs_masked_fraction"] = masked.float().mean().item()
    if config.reject_band:
        rejected = rejected_rows(old, engine, mask, config.reject_band)[mask.any(1)]
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = rejected.float().mean().item()
    return metrics


def _ratio_metrics(
    batch: Batch, old_logprobs: Tensor, mask: Tensor, config: AlgorithmConfig
) -> dict[str, float]:
    both = old_logprobs, batch.rollout_logprobs
    if config.tis_level == "token":
        old, engine = (x[mask] for x in both)
        ratios = importance_ratios(old, engine, torch.ones_like(old, dtype=torch.bool), "token")
    else:  # float64: float32 sums would depend on the width of the padded rows
        old, engine = (x.double() for x in both)
        ratios = importance_ratios(old, engine, mask, "sequence")[mask].float()
    high = (ratios > config.tis_cap).float().mean().item()
    low = (ratios < (config.tis_low or 1 / config.tis_cap)).float().mean().item()
    return {
        "rollout_corr/rollout_is_mean": ratios.mean().item(),
        "rollout_corr/rollout_is_max": ratios.max().item(),
        "rollout_corr/rollout_is_min": ratios.min().item(),
        "rollout_corr/rollout_is_ratio_fraction_high": high,
        "rollout_corr/rollout_is_ratio_fraction_low": low,
    }


def mean_drift(batch: Batch, drifts: Mapping[int, float]) -> float:
    """Return how far the policy has moved since it sampled the tokens of a batch, in nats.

    Args:
        batch: the step's rollouts.
        drifts: how far the policy moved with each version (`Publisher.drifts`).

    Returns:
        The mean over the tokens that train of the sum of `drifts` over all later versions; 0 if
        all tokens are of the last version, or there is none.
    """
    versions, counts = batch.versions[batch.action_mask].unique(return_counts=True)
    total = 0.0
    for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
        total += count * sum(drift for later, drift in drifts.items() if later > version)
    return total / max(1, int(counts.sum()))


MAX_GROWTH = 10.0
"""The largest mean difference of a step, as a multiple of the baseline noise."""
MIN_BASELINE_NOISE = 1e-3
"""The smallest baseline noise: arithmetic may differ by this much even if the difference at the
start was smaller."""


DRIFT_SHARE = 3.0
"""The mean difference of older tokens may be larger by this multiple of the drift of the fixed row
of `Publisher`: the policy moves further on tokens that it was trained on."""


@dataclass(slots=True)
class MismatchGuard:
    """Stops a run whose engine no longer samples from the policy that the trainer trains.

    guard = MismatchGuard(baseline_noise=0.009)
    learner.update(batch, targets, step, check=guard.check)
    """

    baseline_noise: float
    """The mean |difference| of logprobs at a time when engine and trainer hold the same weights."""
    drift: float = 0.0
    """The `mean_drift` of the step's tokens."""

    @property
    def limit(self) -> float:
        """The largest mean difference that is accepted of tokens of the current version."""
        return MAX_GROWTH * max(self.baseline_noise, MIN_BASELINE_NOISE)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check a step's `mismatch_metrics` before the update.

        The drift raises the limit of all tokens together. If enough tokens of the current version
        are among them, their mean must be within the limit without it.

        Raises:
            RunStopped: the mean difference exceeds the limit, or is NaN.
        """
        limit = self.limit + DRIFT_SHARE * self.drift
        mean, current = metrics.get(MEAN, 0.0), metrics.get(f"{MEAN}/{CURRENT}", 0.0)
        if mean <= limit and current <= self.limit:
            return
        if mean <= limit:
            mean, limit = current, self.limit
        turns = {turn: metrics[f"{MEAN}/{turn}"] for turn in TURNS if f"{MEAN}/{turn}" in metrics}
        worst = max(turns, key=turns.__getitem__, default="")
        where = (
            f" It is largest in {worst.replace('_', ' ').replace('plus', ' or later')}:"
            f" {turns[worst]:.3g}."
            if worst
            else ""
        )
        raise RunStopped(
            f"engine and trainer disagree: their logprobs of the tokens sampled in this step differ"
            f" by {mean:.3g} on average, where {self.baseline_noise:.3g} was measured at the start"
            f" (the limit is {limit:.3g}).{where} The step was not trained on."
            " Likely causes, the likeliest first: the engine does not have the trainer's weights"
            " (a weight sync failed or was late); it samples at another temperature, or prepends"
            " other tokens (its own chat template); it serves another model;"
            " an option of the engine changes its arithmetic (quantization, a KV cache with fewer"
            " bits, another attention backend)"
        )
