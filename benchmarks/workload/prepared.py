"""An engine that returns the prepared turns of conversations."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence

from agentrl.engine.base import Sampler, Sampling
from agentrl.images import RowImage
from agentrl.trajectory import Generation
from workload.conversations import Talk


class Prepared(Sampler):
    """A `Sampler` that returns the turns of a conversation in their order, whatever the prompt.

    Args:
        talk_of: returns the conversation of an episode, by the episode's id.
        seconds: how long a turn takes; it needs no CPU time.
    """

    max_length = 1 << 24
    is_concurrent = False

    def __init__(self, talk_of: Callable[[str], Talk], seconds: float = 0.0):
        self._talk_of, self._seconds = talk_of, seconds
        self._left: dict[str, Iterator[Generation]] = {}

    async def ready(self) -> None: ...

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        self._left[episode_id] = iter(self._talk_of(episode_id).turns)

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        await asyncio.sleep(self._seconds)
        turn = next(self._left[episode_id])
        return Generation(turn.token_ids, turn.logprobs, turn.versions, "stop", len(prompt_ids))

    def end(self, episode_id: str) -> None:
        self._left.pop(episode_id, None)
