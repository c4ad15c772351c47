"""Where a run's numbers go: always to `metrics.jsonl`, and to trackers if asked.

The file is the record: one line a step, `{"step": 12, "data": {"critic/score/mean": 0.5, ...}}`, on
the disk before the step's checkpoint is. A resumed run therefore finds every step up to its
checkpoint, cuts off what lies after it, and writes each later step once more: none is missing, none
is there twice. TensorBoard and wandb are conveniences; where they fail, training goes on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentrl.errors import ConfigError, RunStopped
from agentrl.registry import did_you_mean

METRICS = "metrics.jsonl"
Data = Mapping[str, float]


class Tracker:
    """Writes one line a step, and tells the trackers."""

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[str] = (),
        *,
        config: Mapping[str, Any] | None = None,
        resumed_step: int = -1,
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ):
        """Open the record of a run.

        Args:
            folder: the run's folder.
            loggers: any of "tensorboard", "wandb".
            config: shown by wandb.
            resumed_step: the step of the checkpoint that the run goes on from: later lines go. A
                fresh run keeps none.
            warn: told once for each tracker that fails.

        Raises:
            ConfigError: an unknown logger, or one that is not installed.
            RunStopped: the folder cannot be written.
        """
        check_loggers(loggers)
        self._path = folder / METRICS
        self._warn = warn
        self._last = resumed_step
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _keep_until(self._path, resumed_step)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as e:
            raise RunStopped(f"cannot write {self._path}: {e.strerror}") from e
        self._sinks: dict[str, Sink] = {}
        for name in loggers:
            with self._ends_at_a_failure(name):
                self._sinks[name] = SINKS[name](folder, config or {}, resumed_step)

    def log(self, step: int, data: Data) -> None:
        """Record a step: once, in order, and before its checkpoint is published.

        Args:
            step: later than the last one.
            data: all numbers of the step, those of its validation too. NaN and infinity become
                null in the file.

        Raises:
            RunStopped: the file cannot be written (the disk is full).
        """
        if step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}")
        self._last = step
        line = orjson.dumps(
            {"step": step, "data": dict(data)},
            default=float,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
        )
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as e:
            raise RunStopped(f"cannot write {self._path}: {e.strerror}") from e
        for name, sink in list(self._sinks.items()):
            with self._ends_at_a_failure(name):
                sink.log(step, data)

    def close(self) -> None:
        """Flush and close everything. Closing twice does nothing."""
        for name, sink in list(self._sinks.items()):
            with self._ends_at_a_failure(name):
                sink.close()
        self._sinks = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _ends_at_a_failure(self, name: str) -> Iterator[None]:
        """Warn if a tracker fails in the block, and use it no more."""
        try:
            yield
        except Exception as e:
            self._sinks.pop(name, None)
            self._warn(
                f"{name} failed and gets no more numbers ({type(e).__name__}: {e});"
                f" {self._path} has them all"
            )


def check_loggers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before anything is loaded.

    Raises:
        ConfigError: with the choices, or with the command that installs it.
    """
    for name in names:
        if name not in SINKS:
            raise ConfigError(
                f"trainer.logger: no tracker named {name!r}.{did_you_mean(name, SINKS)}"
                f" Choices: {', '.join(SINKS)} ({METRICS} is always written)"
            )
        spec = importlib.util.find_spec(name)
        # A spec without origin is a mere folder: wandb leaves one of its name where it ran.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"trainer.logger: {name} is not installed: pip install 'agentrl[{name}]'"
            )


def read_metrics(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Steps and their data, in order; a line that a kill cut short is left out.

    A file that does not exist has no steps. Values are numbers, or None for what was not finite.
    """
    return [(step, data) for step, data, _ in _lines(path)]


def _keep_until(path: Path, step: int) -> None:
    """Cut the file after `step`, and a torn line with it; nothing is ever half rewritten."""
    if not path.exists():
        return
    kept = b"".join(line for s, _, line in _lines(path) if s <= step)
    if kept == path.read_bytes():
        return
    staging = path.with_name(f".tmp-metrics-{os.getpid()}")
    with open(staging, "wb") as f:
        f.write(kept)
        f.flush()
        os.fsync(f.fileno())
    staging.rename(path)


def _lines(path: Path) -> list[tuple[int, dict[str, Any], bytes]]:
    """The whole lines: step, data and bytes. Each step's first line counts."""
    if not path.exists():
        return []
    lines: list[tuple[int, dict[str, Any], bytes]] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = orjson.loads(line)
            step, data = int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith(b"\n") and (not lines or step > lines[-1][0]):
            lines.append((step, data, line))
    return lines


class Sink(Protocol):
    """A tracker beside the file. Whatever it raises is reported once, and ends it."""

    def log(self, step: int, data: Data) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """Flush, and end."""
        ...


class _TensorBoard:
    """Event files in `folder/tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=resumed_step + 1, flush_secs=10
        )

    def log(self, step: int, data: Data) -> None:
        for key, value in data.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A wandb run named like the folder; `WANDB_PROJECT`, `WANDB_MODE` and the like are obeyed."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed_step: int):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb_run_id.txt"
        if resumed_step < 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "agentrl"),
            name=folder.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, data: Data) -> None:
        self._run.log({key: float(value) for key, value in data.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}
