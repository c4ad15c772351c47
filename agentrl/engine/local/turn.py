"""A request in flight, and who awaits its answer."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.engine.base import Sampling
from agentrl.errors import EngineError, UserError


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


def checked_row(
    token_ids: array[int], what: str, *, limit: int, max_length: int, vocabulary: int
) -> np.ndarray:
    """int32, a copy.

    Raises:
        EngineError: not 1 to `limit` tokens, or none of the vocabulary's.
    """
    row = np.array(token_ids, dtype=np.int32)
    if not 0 < len(row) <= limit:
        raise EngineError(
            f"{what}: {len(row)} tokens, but must be 1 to {limit}"
            f" (the model's longest row is {max_length})"
        )
    if row.min() < 0 or row.max() >= vocabulary:
        raise EngineError(
            f"{what}: token ids from {row.min()} to {row.max()}, but the model's vocabulary has"
            f" {vocabulary}"
        )
    return row


def check_sampling(sampling: Sampling, what: str) -> None:
    """Refuse what no turn can be sampled by.

    Raises:
        EngineError: no token may be sampled.
        UserError: `stop` is not a tuple of texts that hold something.
    """
    if sampling.max_tokens < 1:
        raise EngineError(f"{what}: max_tokens={sampling.max_tokens}, not >= 1")
    # Loops may pass anything; an empty text would end every turn, a bare one at any of its letters.
    if not isinstance(sampling.stop, tuple) or not all(
        isinstance(text, str) and text for text in sampling.stop
    ):
        raise UserError(
            f"{what}: stop={sampling.stop!r} must be a tuple of non-empty strings; () for none"
        )
