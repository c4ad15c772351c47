"""The training run: it plays rollouts, updates the learner, publishes the weights, records, saves.

`Trainer` is imported on first use: it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.trainer.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from agentrl.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'agentrl.trainer' has no attribute {name!r}")
