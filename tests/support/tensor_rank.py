"""A rank whose models are replaced by tensors that require gradients, one value for each token.

The rest is the real learner: targets, micro-batches, packing, importance weights, losses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.learner.batch import Batch, Targets
from agentrl.learner.dispatch import BROADCAST, dispatch
from agentrl.learner.learner import Learned, Learner
from agentrl.learner.packing import Mode, PackedRows
from agentrl.learner.rank import LocalRankGroup, Rank


class TensorRank(Rank):
    """A rank that reads (B, T) tensors instead of calling models.

    The `response_ids` of its batches must be `token_positions`.
    """

    def __init__(self, config: Config, **outputs: Tensor):
        self.config = config
        self.device = torch.device("cpu")
        self._context = None
        self.outputs = {name: x.clone().requires_grad_() for name, x in outputs.items()}
        self.policy: Any = SimpleNamespace(logprobs=self._logprobs, peft=None)
        self.critic: Any = SimpleNamespace(values=lambda packed: self._output("values", packed))
        no_optimizer = SimpleNamespace(step=lambda lr: 1.0, zero_grad=lambda: None)
        self.optimizers: Any = {"actor": no_optimizer, "critic": no_optimizer}

    @dispatch(BROADCAST)
    def vocabulary(self, teacher: str = "") -> int:
        """Return a size above every token id, because the ids are positions."""
        return 2**31

    @dispatch(BROADCAST)
    def mode(self, teacher: str = "") -> tuple[Mode, str]:
        """Return the mode in which `packed.tokens` are the chosen tokens of flat rows."""
        return Mode.PACKED, ""

    def _output(self, name: str, packed: PackedRows) -> Tensor:
        return self.outputs[name].flatten()[packed.tokens]

    def _logprobs(self, packed: PackedRows, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        entropy = self._output("entropy", packed)
        return self._output("logprobs", packed), entropy if entropy_gradient else entropy.detach()


def token_positions(batch: Batch) -> Tensor:
    """Return (B, T) `response_ids` in which each token is its own index in the flat batch."""
    return torch.arange(batch.response_ids.numel()).view(batch.response_ids.shape)


def update_on_tensors(
    batch: Batch, targets: Targets, config: Config, **outputs: Tensor
) -> tuple[dict[str, float], dict[str, Tensor], Learned]:
    """Return the metrics of one update, the gradient of each model output, and what was learned."""
    rank = TensorRank(config, **outputs)
    learner = Learner("", config, total_steps=1, group=LocalRankGroup(rank))
    metrics, learned = learner.update(batch, targets, 1)
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in rank.outputs.items()
    }
    return metrics, gradients, learned
