"""The training run: it plays rollouts, updates the learner, publishes the weights, records, saves.

`Trainer` is imported on first use: it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.callbacks import Observer
    from agentrl.config import Config
    from agentrl.trainer.display import Display
    from agentrl.trainer.trainer import Trainer

    OpenObservers = Callable[[Config], AbstractContextManager[tuple[Display, Sequence[Observer]]]]

__all__ = ["Trainer"]

default_observers: list[OpenObservers] = []
"""Opens the display and the observers of a run for which nobody has chosen any.

They are above this package, which imports none of them. `agentrl/__init__.py` adds the function.
"""


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from agentrl.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'agentrl.trainer' has no attribute {name!r}")
