"""Helpers for event loops: a loop in a thread, one object per loop, tasks that end together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from agentrl.errors import RunStopped

T = TypeVar("T")

CANCEL_SECONDS = 1.0
"""The longest time for the tasks of a loop to end when they are cancelled, in seconds."""


class LoopThread:
    """An event loop that runs in a daemon thread until `stop`. Any thread may call the methods.

    Args:
        name: the thread's name.
        make: creates the loop.
    """

    def __init__(
        self, name: str, make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ):
        self._loop = make()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while the loop runs."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop.

        Raises:
            RunStopped: the loop has ended.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as e:  # The loop is closed.
            work.close()
            raise RunStopped(f"the thread {self._thread.name!r} has ended") from e

    def stop(self, seconds: float = 5.0) -> None:
        """Cancel the tasks that are left, close the loop and wait for its thread. Idempotent.

        Args:
            seconds: the longest wait; a task that blocks the loop may hold it for ever.
        """
        with contextlib.suppress(RuntimeError):  # It is closed.
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


class PerLoop(Generic[T]):
    """One object for each event loop, created by the first `get` in that loop.

    Example::

        self._slots = PerLoop(lambda: asyncio.Semaphore(8))
        ...
        async with self._slots.get():

    Args:
        make: creates an object.
        close: called with an object when its event loop is garbage collected.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], object] | None = None):
        self._make, self._close = make, close
        self._objects: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T] = (
            weakref.WeakKeyDictionary()
        )

    def get(self) -> T:
        """Return the running event loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._objects:
            self._objects[loop] = object_ = self._make()
            if self._close is not None:
                weakref.finalize(loop, self._close, object_)
        return self._objects[loop]

    def pop(self) -> T | None:
        """Remove the running event loop's object and return it; return None if there is none."""
        return self._objects.pop(asyncio.get_running_loop(), None)

    def pop_all(self) -> list[T]:
        """Remove the objects of all event loops and return them."""
        objects = [*self._objects.values()]
        self._objects.clear()
        return objects


class IterationLimit:
    """Limits how many tasks continue in one iteration of the event loop.

    A thousand tasks whose results arrive at the same time would all continue in one iteration, and
    timers, sockets and cancellations would wait until the last of them had run. Here they continue
    in several iterations, about in their order. A limit belongs to one event loop.

    Example::

        result = await request()
        if wait := limit.enter():
            await wait

    Args:
        number: the tasks of one iteration. Twice as many may continue if tasks arrive in the
            middle of one.
    """

    def __init__(self, number: int):
        self._number = self._remaining = number
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> asyncio.Future[None] | None:
        """Return None if the task may continue now, else a future that ends when it may."""
        loop = asyncio.get_running_loop()
        if self._remaining == self._number:
            loop.call_soon(self._begin)
        if self._remaining and not self._waiting:
            self._remaining -= 1
            return None
        future = loop.create_future()
        self._waiting.append(future)
        return future

    def _begin(self) -> None:
        """Let the next tasks continue. Runs in each iteration while tasks come."""
        self._remaining = self._number
        while self._waiting and self._remaining:
            future = self._waiting.popleft()
            if not future.done():  # Otherwise its task was cancelled.
                future.set_result(None)
                self._remaining -= 1
        if self._remaining < self._number:
            asyncio.get_running_loop().call_soon(self._begin)


async def run_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results in order.

    The first exception cancels the other coroutines. It is raised when all of them have ended. (A
    `TaskGroup` would raise an exception group.)
    """
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop, or asyncio's own where uvloop is not built."""
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
