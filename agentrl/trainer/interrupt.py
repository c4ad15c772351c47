"""Ctrl-C and SIGTERM: once, the run ends at a state it can save; twice, at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Turns the first signal into a request that `check` answers, the second into the end.

    Rollouts may be abandoned at any moment, an optimizer step may not: the trainer calls `check`
    where its state is whole.
    """

    def __init__(self) -> None:
        self.urgent = False
        """Whether there was a second signal."""
        self._asked = False
        self._abandonable = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        # Signals belong to the main thread; elsewhere (a notebook's worker) they are the host's.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """End here if a signal came.

        Raises:
            KeyboardInterrupt: it did.
        """
        if self._asked:
            raise KeyboardInterrupt

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """What runs in this block changes no state that is saved: a signal ends it at once."""
        self.check()
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.urgent, self._asked = self._asked, True
        if self.urgent or self._abandonable:
            raise KeyboardInterrupt
        print("\nstopping; once more to stop at once", flush=True)
