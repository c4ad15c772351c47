"""A sampler that plays a script: for tests of agentrl and of users' environments."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import UserError
from agentrl.images import RowImage
from agentrl.plural import plural
from agentrl.trajectory import Generation, float_array, token_array

Answers = Sequence[str] | Mapping[str, Sequence[str]] | Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of an episode."""

    episode_id: str
    turn: int
    """The number of the turn in its episode, from 0."""
    prompt_ids: array[int]
    sampling: Sampling
    images: tuple[RowImage, ...] = ()


def scripted_generation(
    turn: Sequence[int], prompt_ids: array[int], sampling: Sampling
) -> Generation:
    """Return a turn as an engine does that is certain of every token.

    Args:
        turn: the tokens of the turn, with the one that ends it. It is cut at `max_tokens`.
        prompt_ids: the prompt.
        sampling: the sampling of the request.
    """
    ids = token_array(turn[: sampling.max_tokens])
    return Generation(
        token_ids=ids,
        logprobs=float_array([0.0] * len(ids)),
        versions=token_array([0] * len(ids)),
        finish_reason="stop" if len(ids) == len(turn) else "length",
        prompt_tokens=len(prompt_ids),
    )


class Scripted(Sampler):
    """A `Sampler` that returns the texts of a script.

    The text of a turn is encoded. If it contains a stop string or a stop token, the turn ends
    there, as a model's turn would. Otherwise the end-of-turn token (the first of the request's
    `stop_ids`) is appended. A turn longer than `max_tokens` is cut, with finish reason "length".
    Logprobs are 0, the version is 0.

    Example::

        Scripted(['<tool_call>{"name": "add", ...}</tool_call>', "#### 12"], tokenizer)
    """

    def __init__(self, answers: Answers, tokenizer: Any, *, max_length: int = 32768):
        """Store the script.

        Args:
            answers: one text per turn, the same for every episode; or a mapping from an episode id
                or a part of the prompt (such as the question) to such texts, of which the first key
                that matches is used; or a function of the prompt's text and the number of the turn,
                from 0.
            tokenizer: the tokenizer of the policy.
            max_length: the longest row, in tokens, that this sampler reports.
        """
        self.max_length = max_length
        self.requests: list[Request] = []
        """All requests so far, in the order of arrival."""
        self.playing: set[str] = set()
        """Ids of the episodes that have begun and not ended."""
        self._answers = answers
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        self.playing.add(episode_id)

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
        """Return the tokens of the next text of the script.

        Raises:
            UserError: the script has no text for this turn.
        """
        turn = self._turns[episode_id]
        self._turns[episode_id] += 1
        request = Request(episode_id, turn, token_array(prompt_ids), sampling, tuple(images))
        self.requests.append(request)
        ids, stopped = self._until_stop(self._text(episode_id, prompt_ids, turn), sampling)
        if not stopped:
            ids += sampling.stop_ids[:1]
        return scripted_generation(ids, prompt_ids, sampling)

    def end(self, episode_id: str) -> None:
        self.playing.discard(episode_id)

    def _text(self, episode_id: str, prompt_ids: array[int], turn: int) -> str:
        prompt = self._tokenizer.decode(list(prompt_ids))
        if callable(self._answers):
            return self._answers(prompt, turn)
        texts = self._answers
        if isinstance(texts, Mapping):
            matches = [texts[key] for key in texts if key == episode_id or key in prompt]
            if not matches:
                raise UserError(
                    f"the script has no answers for episode {episode_id!r}: no key is the"
                    f" episode's id or a part of its prompt. Keys: {', '.join(map(repr, texts))}."
                    f" Prompt: {prompt!r}"
                )
            texts = matches[0]
        if turn >= len(texts):
            raise UserError(
                f"the script has {plural(len(texts), 'answer')} for episode {episode_id!r}, which"
                f" requested turn {turn + 1}. The prompt ends: {prompt[-200:]!r}"
            )
        return texts[turn]

    def _until_stop(self, text: str, sampling: Sampling) -> tuple[list[int], bool]:
        """Return a text's tokens up to the first that ends the turn, and whether there is one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        for end in range(1, len(ids) + 1):
            if ids[end - 1] in sampling.stop_ids:
                return ids[:end], True
            if sampling.stop:
                text_so_far = self._tokenizer.decode(ids[:end])
                if any(s in text_so_far for s in sampling.stop):
                    return ids[:end], True
        return ids, False
