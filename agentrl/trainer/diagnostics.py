"""Numbers that tell whether a step was sound: engine against trainer, critic against returns."""

from __future__ import annotations

from torch import Tensor

from agentrl.trainer.batch import Batch, Targets


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, float]:
    """How far the engine's probabilities are from the trainer's, (N,) each.

    On the policy that sampled the tokens, `training/rollout_ratio_error_*` (|ratio - 1|) is what
    different arithmetic does, and nothing else: a larger one means that prompt, weights or
    temperature differ.
    """
    if not len(old_logprobs):
        return {}
    gap = old_logprobs - rollout_logprobs
    diff = (old_logprobs.exp() - rollout_logprobs.exp()).abs()
    error = gap.expm1().abs()
    return {
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_ratio_error_mean": error.mean().item(),
        "training/rollout_ratio_error_max": error.max().item(),
        "rollout_corr/kl": -gap.mean().item(),
    }


def target_metrics(batch: Batch, targets: Targets) -> dict[str, float]:
    """Mean, max and min of what the tokens are told, and how well the critic foresaw it."""
    mask = batch.action_mask
    if not mask.any():
        return {}
    metrics = _spread("critic/advantages", targets.advantages[mask])
    if targets.values is not None and targets.returns is not None:
        values, returns = targets.values[mask], targets.returns[mask]
        metrics |= _spread("critic/values", values) | _spread("critic/returns", returns)
        spread = returns.var(correction=0)
        metrics["critic/vf_explained_var"] = (
            (1 - (returns - values).var(correction=0) / spread).item() if spread > 0 else 0.0
        )
    return metrics


def _spread(name: str, x: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": x.mean().item(),
        f"{name}/max": x.max().item(),
        f"{name}/min": x.min().item(),
    }
