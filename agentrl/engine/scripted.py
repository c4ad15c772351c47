"""A sampler that plays texts: for tests, of agentrl and of users' own environments."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import UserError
from agentrl.trajectory import Generation, float_array, token_array

Answers = Sequence[str] | Mapping[str, Sequence[str]] | Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Request:
    """What an episode asked for."""

    episode_id: str
    turn: int
    """0 for the episode's first."""
    prompt_ids: array[int]
    sampling: Sampling


class Scripted(Sampler):
    """A `Sampler` whose model is a script.

    A turn's text becomes tokens, then the end-of-turn token (the first of the request's
    `stop_ids`), unless the text holds a stop string or a stop token: there the turn ends, as a
    model's would. A turn longer than `max_tokens` is cut, with finish reason "length". Logprobs are
    0, the version 0.

    Example::

        Scripted(['<tool_call>{"name": "add", ...}</tool_call>', "#### 12"], tokenizer)
    """

    def __init__(self, answers: Answers, tokenizer: Any, *, max_length: int = 32768):
        """Take a script.

        Args:
            answers: one text a turn, the same for every episode; or such texts by episode id or by
                a piece of the prompt (a question), the first key that fits; or a function of the
                prompt's text and the turn's number, from 0.
            tokenizer: the policy's.
            max_length: the longest row this engine claims to take, in tokens.
        """
        self.max_length = max_length
        self.requests: list[Request] = []
        """Every request so far, in the order of arrival."""
        self.playing: set[str] = set()
        """Episodes that have begun and not ended."""
        self._answers = answers
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()

    def begin(self, episode_id: str) -> None:
        self.playing.add(episode_id)

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
    ) -> Generation:
        """See `Sampler`.

        Raises:
            UserError: the script has no text for this turn.
        """
        turn = self._turns[episode_id]
        self._turns[episode_id] += 1
        self.requests.append(Request(episode_id, turn, token_array(prompt_ids), sampling))
        ids, stopped = self._until_stop(self._text(episode_id, prompt_ids, turn), sampling)
        if not stopped:
            ids += sampling.stop_ids[:1]
        kept = ids[: sampling.max_tokens]
        return Generation(
            token_ids=token_array(kept),
            logprobs=float_array([0.0] * len(kept)),
            versions=token_array([0] * len(kept)),
            finish_reason="stop" if len(kept) == len(ids) else "length",
            prompt_tokens=len(prompt_ids),
        )

    def end(self, episode_id: str) -> None:
        self.playing.discard(episode_id)

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """Return 0 for each token: a script is certain of every one."""
        return float_array([0.0] * len(token_ids))

    def _text(self, episode_id: str, prompt_ids: array[int], turn: int) -> str:
        prompt = self._tokenizer.decode(list(prompt_ids))
        if callable(self._answers):
            return self._answers(prompt, turn)
        texts = self._answers
        if isinstance(texts, Mapping):
            fits = [texts[key] for key in texts if key == episode_id or key in prompt]
            if not fits:
                raise UserError(
                    f"the script has no answers for episode {episode_id!r}: none of its keys is the"
                    f" episode's id or occurs in its prompt. Keys: {', '.join(map(repr, texts))}."
                    f" Prompt: {prompt!r}"
                )
            texts = fits[0]
        if turn >= len(texts):
            raise UserError(
                f"the script has {len(texts)} answers for episode {episode_id!r}, which asked for"
                f" turn {turn + 1}. The prompt ends: {prompt[-200:]!r}"
            )
        return texts[turn]

    def _until_stop(self, text: str, sampling: Sampling) -> tuple[list[int], bool]:
        """A text's tokens up to the first that ends the turn, and whether one does."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        for end in range(1, len(ids) + 1):
            if ids[end - 1] in sampling.stop_ids:
                return ids[:end], True
            if sampling.stop:
                said = self._tokenizer.decode(ids[:end])
                if any(s in said for s in sampling.stop):
                    return ids[:end], True
        return ids, False
