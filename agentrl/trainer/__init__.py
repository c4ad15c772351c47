"""Everything with torch in it: from groups of trajectories to new weights."""

from agentrl.trainer.trainer import Trainer

__all__ = ["Trainer"]
