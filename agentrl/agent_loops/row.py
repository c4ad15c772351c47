"""A token row that only grows: the one place where a token gets its mask, logprob and version."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from agentrl.errors import EngineError
from agentrl.trajectory import Generation, Segment, float_array, token_array

# An array times n is memory copied; a list would be n objects looked at.
_SAMPLED, _UNSAMPLED, _NO_VERSION = token_array([1]), token_array([0]), token_array([-1])
_CERTAIN = float_array([0.0])


class Row:
    """What will be one segment: a prompt, then sampled and observed tokens in turn."""

    def __init__(self, prompt: array[int]):
        self.prompt = prompt
        self.ids = token_array(prompt)
        """Prompt and response in one array, as the engine is asked."""
        self.index = -1
        """Its place among the trajectory's segments, once something was sampled."""
        self._mask = token_array()
        self._logprobs = float_array()
        self._versions = token_array()

    def __len__(self) -> int:
        """Tokens of the response."""
        return len(self._mask)

    def extend(self, delta: Sequence[int], generation: Generation, max_tokens: int) -> None:
        """Add what was observed, and what the engine sampled after it: both, or nothing.

        Always checked, at the cost of the new tokens only: the engine continued this very row.

        Raises:
            EngineError: it continued another row, or answered something that cannot be.
        """
        n, prompt = len(generation.token_ids), len(self.ids) + len(delta)
        if generation.prompt_tokens != prompt:
            raise EngineError(
                f"the engine continued {generation.prompt_tokens} tokens, but the row has {prompt}"
            )
        if not (n == len(generation.logprobs) == len(generation.versions) and 0 < n <= max_tokens):
            raise EngineError(
                f"the engine answered {n} tokens, {len(generation.logprobs)} logprobs and"
                f" {len(generation.versions)} versions; at most {max_tokens} were asked for"
            )
        self._observe(delta)
        self.ids.extend(generation.token_ids)
        self._mask.extend(_SAMPLED * n)
        self._logprobs.extend(generation.logprobs)
        self._versions.extend(generation.versions)

    def _observe(self, ids: Sequence[int]) -> None:
        n = len(ids)
        self.ids.extend(ids)
        self._mask.extend(_UNSAMPLED * n)
        self._logprobs.extend(_CERTAIN * n)
        self._versions.extend(_NO_VERSION * n)

    def segment(self) -> Segment:
        """The row as it stands now, copied: whatever comes later is not in it."""
        return Segment(
            prompt_ids=self.prompt,
            response_ids=self.ids[len(self.prompt) :],
            response_mask=self._mask[:],
            logprobs=self._logprobs[:],
            versions=self._versions[:],
        )
