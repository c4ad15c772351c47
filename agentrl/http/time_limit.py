"""Time limits that pause while a request waits for a free connection.

The length of that wait depends on what else this process does, and says nothing about an episode, a
tool or a judge. So it counts against none of their limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Self

_active: ContextVar[tuple[TimeLimit, ...]] = ContextVar("active", default=())
"""The time limits whose blocks contain the running task."""


class TimeLimit:
    """A time limit like `asyncio.timeout`, plus the time that requests wait for a free connection.

    Tasks that are started within the block belong to it. Example::

        async with TimeLimit(60.0):  # raises TimeoutError after 60 s
            await client.request_json("GET", "/health", deadline=monotonic() + 5)

    Args:
        seconds: counted from the construction, also if the block is entered later.
    """

    __slots__ = ("_deadline", "_loop", "_since", "_timeout", "_token", "_waits")

    def __init__(self, seconds: float):
        self._deadline = time.monotonic() + seconds
        self._waits = 0
        self._since = 0.0
        """The start of the pause, if `_waits` is not 0."""

    @property
    def deadline(self) -> float:
        """Return when it ends, in `time.monotonic()` seconds. A pause makes it later."""
        return self._deadline + (time.monotonic() - self._since if self._waits else 0.0)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # The loop's clock need not be `time.monotonic`, so the time that is left is passed.
        self._timeout = asyncio.Timeout(self._loop.time() + self._deadline - time.monotonic())
        await self._timeout.__aenter__()
        self._token = _active.set((*_active.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        _active.reset(self._token)
        return await self._timeout.__aexit__(kind, e, tb)

    def _pause(self) -> None:
        if self._waits == 0:
            self._since = time.monotonic()
            self._reschedule(None)
        self._waits += 1

    def _resume(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            now = time.monotonic()
            self._deadline += now - self._since
            self._reschedule(self._loop.time() + self._deadline - now)

    def _reschedule(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # It has expired, or its block has ended.
            self._timeout.reschedule(when)


@contextlib.contextmanager
def paused_time_limits() -> Iterator[None]:
    """Pause, within this block, the time limits that contain the running task."""
    loop = asyncio.get_running_loop()
    # A thread that copied a task's context may run another loop.
    limits = [limit for limit in _active.get() if limit._loop is loop]
    for limit in limits:
        limit._pause()
    try:
        yield
    finally:
        for limit in limits:
            limit._resume()
