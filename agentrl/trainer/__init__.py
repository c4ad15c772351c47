"""Everything with torch in it: from groups of trajectories to new weights.

`Trainer` is loaded when it is first used: a rank's process needs none.
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
