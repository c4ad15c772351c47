"""Signals that stop a run: SIGINT and SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.errors import Terminated


class Interrupt:
    """Handles SIGINT and SIGTERM: the first signal is a request, the second one stops at once.

    Rollouts can be abandoned at any moment, an optimizer step cannot. So the trainer calls `check`
    where its state is consistent.
    """

    def __init__(self) -> None:
        self.is_urgent = False
        """True after a second signal."""
        self._request: KeyboardInterrupt | Terminated | None = None
        self._abandonable = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Stop here if a signal has arrived.

        Raises:
            KeyboardInterrupt: SIGINT has arrived.
            Terminated: SIGTERM has arrived.
        """
        if self._request is not None:
            raise self._request

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Let a signal stop the block at once. The block must not change state that is saved."""
        self.check()
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_urgent = self._request is not None
        self._request = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self.is_urgent or self._abandonable:
            raise self._request
        print("\nstopping; press Ctrl-C again to stop at once", flush=True)
