"""A request in flight, and who awaits its answer."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.engine.base import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """Who awaits an answer on some asyncio loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    @classmethod
    def here(cls) -> Caller:
        """A caller on the running loop."""
        loop = asyncio.get_running_loop()
        return cls(loop, loop.create_future())

    @property
    def gone(self) -> bool:
        """Whether it was cancelled or answered."""
        return self.future.done()

    def answer(self, outcome: Any) -> None:
        """Hand over a result, or an exception to raise; from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Any) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request in flight."""

    episode_id: str
    prompt: np.ndarray
    """int32: the whole row."""
    sampling: Sampling
    seed: int
    deadline: float
    caller: Caller
