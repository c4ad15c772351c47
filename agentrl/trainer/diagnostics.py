"""What the tokens of a step were told, and how well the critic foresaw it."""

from __future__ import annotations

from torch import Tensor

from agentrl.trainer.batch import Batch, Targets
from agentrl.trainer.kl import ESTIMATORS


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


def rollout_kl(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor, kl_type: str) -> float:
    """The KL to the reference in nats a rollout: summed over its chosen tokens.

    The mean of the rollouts that train; 0 where none does.

    Args:
        batch: says which tokens are chosen.
        logprobs: (B, T), of the policy that is compared.
        reference_logprobs: (B, T).
        kl_type: the estimator, as `algorithm.kl_type` names it.
    """
    mask = batch.action_mask
    kl = ESTIMATORS[kl_type](logprobs[mask], reference_logprobs[mask])
    return kl.sum().item() / max(1, int(batch.train.sum()))


def _spread(name: str, x: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": x.mean().item(),
        f"{name}/max": x.max().item(),
        f"{name}/min": x.min().item(),
    }
