"""The output of a command as JSON: one object per line, and nothing else on standard output.

docs/console.md describes the objects.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from agentrl.config import Config
from agentrl.errors import Terminated
from agentrl.trainer.console import Activity, Console, Metrics

if TYPE_CHECKING:
    from agentrl.report.finding import Finding
    from agentrl.rollout import Progress


class JsonConsole(Console):
    """Prints one JSON object per line. Within its `with`, it alone writes to standard output.

    Whatever else is printed there, such as the output of a user's tools or of a server, goes to
    standard error. Warnings that `agentrl` logs become objects.
    """

    def __init__(self, out: TextIO | None = None):
        """Create a console; see `Console`."""
        super().__init__(out)
        self._resources = ExitStack()
        self._step = 0

    def begin(self, folder: Path, step: int, total: int, activity: Callable[[], Activity]) -> None:
        self._step = step
        self._emit("begin", step=step, total_steps=total, folder=str(folder))

    def step(self, step: int, total: int, metrics: Metrics) -> None:
        self._step = step
        self._emit("step", step=step, total_steps=total, metrics=dict(metrics))

    def validation(self, step: int, metrics: Metrics) -> None:
        self._emit("validation", step=step, metrics=dict(metrics))

    def checkpoint(self, step: int, folder: Path) -> None:
        self._emit("checkpoint", step=step, folder=str(folder))

    def finding(self, finding: Finding) -> None:
        self._emit("finding", **asdict(finding))

    def note(self, text: str) -> None:
        self._emit("note", text=text)

    def warning(self, text: str) -> None:
        self._emit("warning", text=text)

    @contextmanager
    def phase(
        self, name: str, progress: Callable[[], Progress | None] | None = None
    ) -> Iterator[None]:
        start = time.monotonic()
        self._emit("phase", name=name, status="started", seconds=0.0)
        status = "failed"
        try:
            yield
            status = "finished"
        finally:
            seconds = round(time.monotonic() - start, 3)
            self._emit("phase", name=name, status=status, seconds=seconds)

    def finish(self, folder: Path, history: Sequence[tuple[int, Metrics]], config: Config) -> None:
        """Print nothing: the object "end" follows."""

    def __enter__(self) -> JsonConsole:
        if self._out is sys.stdout:
            self._out = self._resources.enter_context(_own_stdout())
        self._resources.enter_context(_logged_warnings(self.warning))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        status = "finished"
        if isinstance(error, KeyboardInterrupt | Terminated):
            status = "interrupted"
        elif error is not None:
            status = "failed"
        text = f"{error}" or type(error).__name__ if error is not None else None
        try:
            self._emit("end", status=status, step=self._step, error=text)
        finally:
            self._resources.close()

    def _emit(self, event: str, **fields: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), **fields}
        # NaN and infinity, which JSON does not have, become null.
        text = orjson.dumps(line, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        # The escapes of `printable` are not JSON's.
        self._print("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else float(value)


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Yield standard output, to which nothing else can write until the end of the block.

    The file descriptor is replaced, too, for child processes and libraries in C.
    """
    sys.stdout.flush()
    number = os.dup(1)
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr), os.fdopen(number, "w", encoding="utf-8") as out:
        try:
            yield out
        finally:
            out.flush()
            os.dup2(number, 1)


@contextmanager
def _logged_warnings(warn: Callable[[str], None]) -> Iterator[None]:
    """Pass the warnings and errors that agentrl logs in the block to `warn`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(record.getMessage())

    handler, log = Handler(logging.WARNING), logging.getLogger("agentrl")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
