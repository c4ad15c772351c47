"""Runs reward functions, so that none of them delays the episodes that are being played.

agentrl's own functions that only read text are called directly, since they take microseconds. A
user's plain function runs in a thread, an async function on the event loop, and a function that may
hang or crash in a worker process (`@reward(..., process=True)`): each with the deadline
`reward.timeout_s`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.config import RewardConfig
from agentrl.errors import GraderCrash, Infrastructure, UserCodeError, user_code
from agentrl.http.pool import TimeLimit
from agentrl.workers import PerLoop, Processes, Threads, WorkerDied, WorkerError

THREADS = 32
"""The number of plain functions that run at once. A late function frees its slot, not its thread.
"""
MAX_THREADS = 1024
ASYNC_CALLS = 256
"""The number of async functions that run at once. A call that waits for a slot is not late."""


class RewardTimeout(Infrastructure):
    """A reward function did not return in time."""


class _Slots:
    """The threads and the free slots of one event loop."""

    def __init__(self):
        self.threads = Threads(MAX_THREADS, "reward")
        self.for_threads = asyncio.Semaphore(THREADS)
        self.for_async_calls = asyncio.Semaphore(ASYNC_CALLS)


class RewardExecutor:
    """Runs the reward functions of a run. It starts no thread or process before it needs one."""

    def __init__(self, config: RewardConfig):
        self._seconds = config.timeout_s
        self._workers = config.workers
        self._processes: Processes | None = None
        self._slots = PerLoop(_Slots, lambda slots: slots.threads.close())

    async def call(
        self,
        label: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_async: bool,
    ) -> Any:
        """Call a function on the event loop if it is async, else in a thread.

        An awaitable that a plain function returns is awaited.

        Raises:
            UserCodeError: the function raised.
            Infrastructure: the function raised it.
            RewardTimeout: the function did not return in time.
        """
        slots = self._slots.get()
        try:
            if is_async:
                async with slots.for_async_calls, TimeLimit(self._seconds):
                    with user_code(label):
                        return await function(*args, **kwargs)
            async with slots.for_threads:
                future = await slots.threads.start(partial(function, *args, **kwargs))
                async with TimeLimit(self._seconds):
                    with user_code(label):
                        value, error = await future
                        if error is not None:
                            raise error
                        return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            raise self._timeout(label) from None

    async def call_in_process(
        self,
        label: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function in a process that is killed at the deadline.

        Raises:
            RewardTimeout: the process was killed.
            GraderCrash: the process died.
            UserCodeError: the function raised.
            Infrastructure: the function raised it.
        """
        with user_code(label):
            try:
                return await self.pool().apply(function, args, kwargs, self._seconds)
            except TimeoutError as e:
                raise self._timeout(label) from e
            except WorkerDied as e:
                raise GraderCrash(f"{label}: {e}") from e
            except WorkerError as e:
                raise UserCodeError(f"{label} raised {e}") from e

    def close(self) -> None:
        """End the threads and processes; a later call starts new ones. Idempotent."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        for slots in self._slots.pop_all():
            slots.threads.close()

    def pool(self) -> Processes:
        """Return the worker processes of the run."""
        if self._processes is None:
            self._processes = Processes(self._workers)
        return self._processes

    def _timeout(self, label: str) -> RewardTimeout:
        return RewardTimeout(f"{label} took longer than reward.timeout_s={self._seconds:g}")
