"""Waiting for calls that have a deadline, for the price of one timer.

Nearly every call ends long before its deadline, so a timer of its own is set and taken back for
nothing, and costs more than running an async tool. Here all waits of one length share a timer.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

Waits = set[asyncio.Future[bool]]
"""Waits that can be called off together."""


def call_off(waits: Waits) -> None:
    """End the waits, and not what they wait for: only a job's own end says that it is over."""
    for waiter in waits:
        if not waiter.done():
            waiter.set_result(True)


class Deadline:
    """Waits of one length. Belongs to one event loop.

    Args:
        seconds: how long each may take.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._ends: dict[asyncio.Future[bool], float] = {}
        """Of each wait, in the order in which they end."""
        self._set = False

    async def wait(self, job: asyncio.Future[Any], waits: Waits | None = None) -> bool:
        """Return once the job is done, the time is over or the wait is called off.

        `job.done()` says whether it is done.

        Args:
            job: it runs on, whatever becomes of the wait.
            waits: where `call_off` finds this wait.

        Returns:
            Whether it was called off.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._ends[waiter] = loop.time() + self._seconds
        if not self._set:
            self._set = True
            loop.call_later(self._seconds, self._ring, loop)
        wake = functools.partial(_wake, waiter)
        job.add_done_callback(wake)
        if waits is not None:
            waits.add(waiter)
        try:
            return await waiter
        finally:
            del self._ends[waiter]
            job.remove_done_callback(wake)
            if waits is not None:
                waits.discard(waiter)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits whose time is over, and set the timer for the next."""
        now = loop.time()
        for waiter, end in self._ends.items():
            if end > now:
                loop.call_later(end - now, self._ring, loop)
                return
            _wake(waiter)
        self._set = False


def _wake(waiter: asyncio.Future[bool], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(False)
