"""The best validation of a run, and the end of a run that no longer improves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.errors import RunStopped
from agentrl.registry import did_you_mean

EARLY_STOP = "training/early_stop"
"""The metric: 1 in the last step of a run that `trainer.patience` ended."""


class Best:
    """Finds the best validation of a run, and ends a run that no longer improves.

    Its state is computed from `metrics.jsonl`, from which a resumed run removes later steps.
    """

    def __init__(self, metric: str, patience: int, n: int):
        """Start with an empty record.

        Args:
            metric: `trainer.keep_best`. Larger is better.
            patience: `trainer.patience`.
            n: `val.n`, which is in the name of the metric that patience has by default.
        """
        self._keep, self._patience = metric, patience
        self._metric = metric or (f"val/reward/mean@{n}" if patience else "")
        self._values: dict[int, float] = {}
        self._since = 0
        """The number of validations since the best one."""

    @property
    def is_over(self) -> bool:
        """True if the run ends because the metric has not improved."""
        return bool(self._patience) and self._since >= self._patience

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Count a step of the record; a step without the metric was not validated.

        Returns:
            Whether the step has a new highest value of `trainer.keep_best`.
        """
        value = metrics.get(self._metric)
        if value is None or value != value:
            return False
        is_best = all(value > other for other in self._values.values())
        self._values[step] = float(value)
        self._since = 0 if is_best else self._since + 1
        return is_best and bool(self._keep)

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the step with the highest value; None if no metric is kept, or no step has it."""
        known = [step for step in sorted(steps) if step in self._values]
        return max(known, key=self._values.__getitem__, default=None) if self._keep else None

    def check_metric(self, metrics: Mapping[str, Any]) -> None:
        """Check that a validation has the metric.

        Raises:
            RunStopped: the validation does not have it; the message lists the metrics it has.
        """
        if self._metric and self._metric not in metrics:
            key = "trainer.keep_best" if self._keep else "trainer.patience"
            raise RunStopped(
                f"{key}: validations have no metric {self._metric}."
                f"{did_you_mean(self._metric, list(metrics))} They have: {', '.join(metrics)}"
            )

    def describe_stop(self) -> str:
        """Return a line that says why the run ends here."""
        step, value = max(self._values.items(), key=lambda item: (item[1], -item[0]))
        return (
            f"the run ends early: {self._metric} has not risen above {value:.4g} (step {step}) in"
            f" {self._since} validations (trainer.patience={self._patience})"
        )
