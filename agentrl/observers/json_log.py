"""The output of a command as JSON: one object per line, and nothing else on standard output.

docs/console.md describes the objects.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TextIO

import orjson

from agentrl.callbacks import Event
from agentrl.errors import Terminated
from agentrl.observers.console import Console

if TYPE_CHECKING:
    from agentrl.report.finding import Finding
    from agentrl.rollout import Progress


class JsonConsole(Console):
    """Prints one JSON object per line. Within its `with`, it alone writes to standard output.

    Whatever else is printed there, such as the output of a user's tools or of a server, goes to
    standard error. Warnings that `agentrl` logs become objects.
    """

    def __init__(self, out: TextIO | None = None):
        """Create a console; see `Display`."""
        super().__init__(out)
        self._resources = ExitStack()
        self._step = 0

    def on_begin(self, event: Event) -> None:
        self._step = event.step
        self._emit(
            "begin", step=event.step, total_steps=event.total_steps, folder=str(event.folder)
        )

    def on_step(self, event: Event) -> None:
        self._step = event.step
        self._emit(
            "step", step=event.step, total_steps=event.total_steps, metrics=dict(event.metrics)
        )

    def on_validation(self, event: Event) -> None:
        metrics = {key: value for key, value in event.metrics.items() if key.startswith("val")}
        self._emit("validation", step=event.step, metrics=metrics)

    def on_checkpoint(self, event: Event) -> None:
        self._emit("checkpoint", step=event.step, folder=str(event.checkpoint))

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

    def results(self, text: str) -> None:
        """Print nothing: the object "end" follows."""

    def __enter__(self) -> Self:
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
