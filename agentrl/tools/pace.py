"""At most so many calls a second: each has a moment of its own at which it starts."""

from __future__ import annotations

import asyncio
import time


class Pace:
    """The moments at which the calls of one tool start. Belongs to one event loop.

    Args:
        rate: calls a second. They are spread evenly: no burst follows a pause.
    """

    def __init__(self, rate: float):
        self._gap = 1.0 / rate
        self._next = 0.0

    @property
    def is_free(self) -> bool:
        """Whether a call may start at once."""
        return time.monotonic() >= self._next

    async def wait(self, at_most: float) -> None:
        """Wait for the next free moment, and take it.

        Raises:
            TimeoutError: at once, where it is more than `at_most` seconds away; nothing is taken.
        """
        now = time.monotonic()
        moment = max(now, self._next)
        if moment - now > at_most:
            raise TimeoutError
        self._next = moment + self._gap
        if moment > now:
            try:
                await asyncio.sleep(moment - now)
            except asyncio.CancelledError:
                if self._next == moment + self._gap:  # nobody has one behind it
                    self._next = moment
                raise
