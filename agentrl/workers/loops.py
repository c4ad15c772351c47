"""Helpers for event loops: one object per loop, and tasks that end together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
