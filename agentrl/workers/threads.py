"""Daemon threads for tools that are not async: bounded, and never in the way of an exit.

The loop's own executor will not do: six hung calls fill it on a small machine, nothing else that
needs it gets on (DNS included), and the interpreter waits for its threads at exit. Here a hung call
costs one thread of ours, which dies with the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a tool returned, or what it raised."""


class Threads:
    """At most `limit` functions at once, each in a thread of its own while it runs.

    Belongs to the event loop that starts functions.
    """

    def __init__(self, limit: int):
        self._places = asyncio.Semaphore(limit)
        self._running = 0
        self._threads = 0
        self._jobs: queue.SimpleQueue[
            tuple[asyncio.AbstractEventLoop, asyncio.Future[Outcome], Callable[[], Any]] | None
        ] = queue.SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Outcome], Outcome]] = deque()
        self._woken = False

    @property
    def has_room(self) -> bool:
        """Whether `start` would not have to wait."""
        return not self._places.locked()

    async def start(self, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        """Wait for a free thread and start the function there.

        The future may be cancelled; the thread stays taken until the function returns.
        """
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._running += 1
        if self._running > self._threads:
            self._threads += 1
            threading.Thread(target=self._work, name=f"tool-{self._threads}", daemon=True).start()
        self._jobs.put((loop, future, function))
        return future

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread; return its result or raise its exception."""
        result, error = await (await self.start(function))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let the threads end as they become free."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function = job
            outcome: Outcome
            try:
                outcome = function(), None
            except BaseException as e:  # SystemExit too: it would end the thread, not the process
                outcome = None, e
            self._done.append((future, outcome))
            # One wake-up serves all that are done by then. Two threads may both wake the loop; none
            # can be missed, as the flag falls before the queue is emptied.
            if not self._woken:
                self._woken = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop was closed while the function hung
                    return
            # Nothing of the last job stays alive while this thread waits for the next.
            del job, future, function, outcome

    def _deliver(self) -> None:
        self._woken = False
        while self._done:
            future, outcome = self._done.popleft()
            self._running -= 1
            self._places.release()
            if not future.done():
                future.set_result(outcome)
