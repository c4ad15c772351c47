"""Reads and writes `metrics.jsonl`, the record of a run.

It has one line per step, `{"step": 12, "data": {"critic/score/mean": 0.5, ...}}`, which is on disk
before the step's checkpoint is. So a resumed run finds every step up to its checkpoint, cuts what
follows, and writes each later step again: no step is missing and none is there twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import DataError, RunStopped
from agentrl.regular_files import atomic_file

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
TOKENIZER = "tokenizer"
FINAL = "model"
"""Results in a run's folder, apart from `config.yaml` and the checkpoints."""


class Record:
    """Writes one line per step to `metrics.jsonl`.

    Attributes:
        path: the file.
        last_step: the last step in the file; -1 if there is none.
        is_rewound: whether lines were removed when the file was opened.
    """

    def __init__(self, folder: Path, last_step: int = -1):
        """Open the record of a run, and remove the lines after a step.

        Args:
            folder: the run's folder.
            last_step: the last step to keep; -1: none.

        Raises:
            RunStopped: the folder cannot be written.
        """
        self.path, self.last_step = folder / METRICS, last_step
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.is_rewound = self._truncate()
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as e:
            raise RunStopped(f"cannot write {self.path}: {e.strerror}") from e

    def _truncate(self) -> bool:
        """Remove later lines, and an incomplete one, atomically; return whether there were any."""
        if not self.path.exists():
            return False
        kept = [line for step, _, line in metric_lines(self.path) if step <= self.last_step]
        if (content := b"".join(kept)) == self.path.read_bytes():
            return False
        with atomic_file(self.path) as staging:
            staging.write_bytes(content)
        return True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step: once, in order, and before its checkpoint is published.

        Args:
            step: the number of the step, larger than the last line's.
            metrics: all numbers of the step and of its validation. NaN and infinity become null.

        Raises:
            RunStopped: the file cannot be written, for example because the disk is full.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} was recorded after step {self.last_step}")
        self.last_step = step
        line = orjson.dumps(
            {"step": step, "data": dict(metrics)},
            default=float,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
        )
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as e:
            raise RunStopped(f"cannot write {self.path}: {e.strerror}") from e

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's folder: it has metrics or trajectories, and no model."""
    is_model = any((folder / f).is_file() for f in ("config.json", "adapter_config.json"))
    return not is_model and ((folder / METRICS).exists() or (folder / TRAJECTORIES).is_dir())


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
