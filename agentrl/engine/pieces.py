"""Sample turns in pieces, so that their text can be shown while they are sampled."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.chat import ChatTemplate
from agentrl.engine.base import Sampler, Sampling
from agentrl.engine.remote.turns import join_parts
from agentrl.images import RowImage
from agentrl.trajectory import Generation

PIECE_TOKENS = 4
"""The tokens of a piece. Pieces cost little, because an engine continues a row from its cache."""


class SamplerInPieces(Sampler):
    """Samples each turn from an engine in pieces, and shows the text of each piece."""

    def __init__(
        self, engine: Sampler, template: ChatTemplate, show: Callable[[str, bool], object]
    ):
        """Create a sampler.

        Args:
            engine: samples the pieces.
            template: decodes them.
            show: called with the text of each piece, and with True if it is the last of its turn.
                The first text begins with the part of a thought that the prompt contains.
        """
        self._engine, self._template, self._show = engine, template, show
        self.max_length, self.is_concurrent = engine.max_length, engine.is_concurrent

    async def ready(self) -> None:
        await self._engine.ready()

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        self._engine.begin(episode_id, awaited=awaited)

    def end(self, episode_id: str) -> None:
        self._engine.end(episode_id)

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
        """Sample a turn, see `Sampler.generate`. Each piece has its own seed."""
        parts: list[Generation] = []
        row, shown, opening = prompt_ids, 0, self._template.thinking.opening(prompt_ids)
        left = min(sampling.max_tokens, self.max_length - len(prompt_ids))
        while True:
            limit = min(PIECE_TOKENS, left)
            part = await self._engine.generate(
                row,
                replace(sampling, max_tokens=limit),
                episode_id=episode_id,
                seed=seed + len(parts),
                deadline=deadline,
                images=images,
            )
            parts.append(part)
            row, left = row + part.token_ids, left - len(part.token_ids)
            turn = join_parts(parts)
            sampled = self._template.decode_turn(turn.token_ids)
            # The engine does not see a stop text that begins in an earlier piece.
            has_ended = part.finish_reason != "length" or any(s in sampled for s in sampling.stop)
            is_last = has_ended or left <= 0 or len(part.token_ids) < limit
            text = opening + sampled
            # U+FFFD at the end is an incomplete character: the next token may complete it.
            end = len(text if is_last else text.rstrip("\ufffd"))
            self._show(text[shown:end], is_last)
            shown = max(shown, end)
            if is_last:
                return turn
