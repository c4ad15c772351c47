"""The output that the trainer makes itself: notes, warnings, and phases that take long.

Steps, validations and results are shown by observers (`agentrl.callbacks.Observer`). A console of
`agentrl.observers` is both.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from agentrl.terminal import echo, printable

if TYPE_CHECKING:
    from agentrl.rollout import Progress

PHASE_SECONDS = 2.0
"""A phase that takes longer is shown."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The part of a step that runs now.

    Attributes:
        part: its name, as in `timing_s/*`; "" between two parts.
        seconds: the time since the part began.
        progress: the progress of the episodes; None if none is being played.
    """

    part: str
    seconds: float
    progress: Progress | None


class Display:
    """Prints notes, warnings and phases as lines."""

    def __init__(self, out: TextIO | None = None):
        """Create a display.

        Args:
            out: the stream; standard output by default.
        """
        self._out = out or sys.stdout

    def note(self, text: str) -> None:
        """Print a line that stays visible."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print a line that stays visible, to standard error."""
        echo(text, err=True)

    @contextmanager
    def phase(
        self, name: str, progress: Callable[[], Progress | None] | None = None
    ) -> Iterator[None]:
        """Show that the block runs, if it takes longer than `PHASE_SECONDS`.

        Args:
            name: what the block does, such as "load the model".
            progress: returns the progress of the episodes that the block plays. Another thread
                calls it.
        """
        start = time.monotonic()
        timer = threading.Timer(PHASE_SECONDS, self._print, [f"{name}: started"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if (seconds := time.monotonic() - start) >= PHASE_SECONDS:
            self._print(f"{name}: {seconds:.1f} s")

    def follow(self, activity: Callable[[], Activity]) -> None:
        """Show what the run does, from now on. Another thread calls `activity`. Lines show none."""

    def close(self) -> None:
        """End a display that redraws itself. Later lines are printed below it. Idempotent."""

    def _print(self, text: str) -> None:
        line = f"{printable(text)}\n"
        self._out.write(line)  # one call, because the timer of a phase prints, too
        self._out.flush()
