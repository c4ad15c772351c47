"""A learner whose models are replaced by tensors that hold gradients, one value for each token.

All the rest is real: targets, micro-batches, packing, importance weights, losses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.trainer.batch import Batch, Targets
from agentrl.trainer.dispatch import BROADCAST, dispatch
from agentrl.trainer.learner import Learner
from agentrl.trainer.packing import PackedRows
from agentrl.trainer.rank import LocalRankGroup, Rank

SAID = ("logprobs", "entropy", "values")


class Given(Rank):
    """A rank that reads (B, T) tensors instead of calling models. The batch must be `tagged`."""

    def __init__(self, config: Config, **said: Tensor):
        self.config = config
        self.device = torch.device("cpu")
        self.said = {name: x.clone().requires_grad_() for name, x in said.items()}
        self.policy: Any = SimpleNamespace(logprobs=self._logprobs, peft=None)
        self.critic: Any = SimpleNamespace(values=lambda packed: self._ask("values", packed))
        still = SimpleNamespace(step=lambda lr: 1.0, zero_grad=lambda: None)
        self.optimizers: Any = {"actor": still, "critic": still}

    @dispatch(BROADCAST)
    def vocabulary(self) -> int:
        """Any token will do: `tagged` ones are places."""
        return 2**31

    def _ask(self, name: str, packed: PackedRows) -> Tensor:
        return self.said[name].flatten()[packed.tokens]

    def _logprobs(self, packed: PackedRows, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        entropy = self._ask("entropy", packed)
        return self._ask("logprobs", packed), entropy if entropy_gradient else entropy.detach()


def tagged(batch: Batch) -> Tensor:
    """(B, T) `response_ids` that say which place each token has."""
    return torch.arange(batch.response_ids.numel()).view(batch.response_ids.shape)


def learned(
    batch: Batch, targets: Targets, config: Config, **said: Tensor
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One update on a `tagged` batch: its metrics, and the gradient to all that was said."""
    rank = Given(config, **said)
    metrics = Learner("", config, total_steps=1, group=LocalRankGroup(rank)).update(
        batch, targets, 1
    )
    gradients = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in rank.said.items()}
    return metrics, gradients
