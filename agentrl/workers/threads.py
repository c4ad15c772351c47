"""A bounded pool of daemon threads for functions that are not async.

The event loop's own executor is not used. On a small machine, six calls that hang would fill it.
Then nothing else that needs the executor would run (DNS included), and the interpreter would wait
for its threads at exit. In this pool, a call that hangs occupies one daemon thread, which ends with
the process, and `replace` starts another thread for the next calls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""The result of a function, and the exception that it raised or None."""


class Threads:
    """A pool of threads that runs at most `limit` functions at once. Belongs to one event loop.

    Args:
        limit: the maximum number of threads.
        name: the beginning of the threads' names.
    """

    def __init__(self, limit: int, name: str):
        self._name = name
        self._free_threads = asyncio.Semaphore(limit)
        self._running = 0
        self._threads = 0
        """The number of threads, without those that were replaced."""
        self._replaced: set[asyncio.Future[Outcome]] = set()
        self._jobs: queue.SimpleQueue[
            tuple[asyncio.AbstractEventLoop, asyncio.Future[Outcome], Callable[[], Any]] | None
        ] = queue.SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Outcome], Outcome]] = deque()
        self._wake_up_scheduled = False

    @property
    def has_room(self) -> bool:
        """True if a thread is free, so that `start` would not wait."""
        return not self._free_threads.locked()

    async def start(self, function: Callable[[], Any]) -> asyncio.Future[Outcome]:
        """Wait for a free thread and start the function there.

        The future may be cancelled. The thread stays busy until the function returns.
        """
        await self._free_threads.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._running += 1
        if self._running > self._threads:
            self._threads += 1
            name = f"{self._name}-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put((loop, future, function))
        return future

    @property
    def replaced(self) -> int:
        """The number of functions that still run in threads that were replaced."""
        return len(self._replaced)

    def replace(self, job: asyncio.Future[Outcome]) -> None:
        """Let another thread take the place of the one that runs a job, which nobody waits for.

        When the job ends after all, a thread ends.
        """
        if not job.done() and job not in self._replaced:
            self._replaced.add(job)
            self._running -= 1
            self._threads -= 1
            self._free_threads.release()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread; return its result or raise its exception."""
        result, error = await (await self.start(function))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let each thread end when it becomes free."""
        for _ in range(self._threads + self.replaced):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function = job
            outcome: Outcome
            try:
                outcome = function(), None
            except BaseException as e:  # SystemExit would end the thread, not the process
                outcome = None, e
            self._done.append((future, outcome))
            # One wake-up delivers all outcomes that are ready by then. Two threads may both wake
            # the loop. No outcome is lost: the flag is cleared before the queue is emptied.
            if not self._wake_up_scheduled:
                self._wake_up_scheduled = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # The loop was closed while the function ran.
                    return
            # Keep no reference to the last job while this thread waits for the next one.
            del job, future, function, outcome

    def _deliver(self) -> None:
        self._wake_up_scheduled = False
        while self._done:
            future, outcome = self._done.popleft()
            if future in self._replaced:
                self._replaced.discard(future)
                self._jobs.put(None)
            else:
                self._running -= 1
                self._free_threads.release()
            if not future.done():
                future.set_result(outcome)
