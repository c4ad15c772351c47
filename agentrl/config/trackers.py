"""The names of trackers: `trainer.logger`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab", "clearml", "aim", "comet_ml")
"""The trackers that agentrl supports itself, through accelerate."""


def other_trackers() -> dict[str, EntryPoint]:
    """Return the trackers of installed packages: the entry points of the group `agentrl.trackers`.

    Each refers to a function (folder, config, resumed_step) that returns a
    `agentrl.observers.tracking.Sink`. A name of `TRACKERS` is not replaced.
    """
    points = entry_points(group="agentrl.trackers")
    return {point.name: point for point in points if point.name not in TRACKERS}
