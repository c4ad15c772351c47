"""Reads `metrics.jsonl`, the record of a run.

It has one line per step, `{"step": 12, "data": {"critic/score/mean": 0.5, ...}}`, which is on disk
before the step's checkpoint is. So a resumed run finds every step up to its checkpoint, cuts what
follows, and writes each later step again: no step is missing and none is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import DataError

METRICS = "metrics.jsonl"


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's folder: it has metrics or trajectories, and no model."""
    is_model = any((folder / f).is_file() for f in ("config.json", "adapter_config.json"))
    return not is_model and ((folder / METRICS).exists() or (folder / "trajectories").is_dir())


def read_metrics(
    path: Path, is_wanted: Callable[[str], bool] = lambda name: True
) -> list[tuple[int, dict[str, Any]]]:
    """Return the steps and their metrics, in order.

    A file that does not exist has no steps. A line that a kill cut short is left out. Values are
    numbers, or None for a number that was not finite.

    Args:
        path: the `metrics.jsonl` of a run.
        is_wanted: selects metrics by name. All metrics of a long run take much memory.
    """
    return [
        (step, {name: value for name, value in data.items() if is_wanted(name)})
        for step, data, _ in metric_lines(path)
    ]


def metric_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Yield step, data and bytes of the complete lines.

    If a step has several lines, the first one counts.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise DataError(f"{path} is not a regular file")
    last: int | None = None
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = orjson.loads(line)
                step, data = int(record["step"]), dict(record["data"])
            except (ValueError, KeyError, TypeError, OverflowError):
                continue
            if line.endswith(b"\n") and (last is None or step > last):
                last = step
                yield step, data, line
