"""The context of the policy: a conversation as messages, and the token row that holds it.

A row only grows, and is the one place where a token gets its mask, logprob and version.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from agentrl.chat import ChatTemplate
from agentrl.errors import EngineError, UserCodeError
from agentrl.trajectory import Generation, Message, Segment, float_array, token_array

# An array times n is memory copied; a list would be n objects looked at.
_SAMPLED, _UNSAMPLED, _NO_VERSION = token_array([1]), token_array([0]), token_array([-1])
_CERTAIN = float_array([0.0])


class Row:
    """A segment that still grows: a prompt, then sampled and observed tokens in turn."""

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
        self.ids.extend(delta)
        self._mask.extend(_UNSAMPLED * len(delta))
        self._logprobs.extend(_CERTAIN * len(delta))
        self._versions.extend(_NO_VERSION * len(delta))
        self.ids.extend(generation.token_ids)
        self._mask.extend(_SAMPLED * n)
        self._logprobs.extend(generation.logprobs)
        self._versions.extend(generation.versions)

    def segment(self) -> Segment:
        """The row as it stands now, copied: whatever comes later is not in it."""
        return Segment(
            prompt_ids=self.prompt,
            response_ids=self.ids[len(self.prompt) :],
            response_mask=self._mask[:],
            logprobs=self._logprobs[:],
            versions=self._versions[:],
        )


class Context:
    """A conversation that grows, or is edited; what was observed waits for the next turn."""

    def __init__(
        self,
        template: ChatTemplate,
        opening: Sequence[Message],
        schemas: Sequence[Any],
        sampled: dict[int, array[int]],
        *,
        given: Sequence[Message],
        exact: bool,
    ):
        """Open it.

        Args:
            template: the policy's.
            opening: the first messages.
            schemas: the tools that the template shows.
            sampled: by `id`, the ids of all messages that were sampled in this attempt.
            given: those messages of the opening that are a dataset row's, and may speak of tags.
            exact: whether an opening is refused that cannot be encoded as the template renders it.
                What the policy wrote into one is not: the rollout would be lost instead of scored.
        """
        self.schemas = schemas
        self.messages: list[Message] = list(opening)
        self._template = template
        self._sampled = sampled
        self._opening = list(opening)
        self._given = set(map(id, given))
        self.row = Row(template.prompt(opening, schemas, self.is_given, exact=exact))
        self._waiting: list[Message] = []
        self._edited = False

    def observe(self, message: Message) -> None:
        """Somebody else has spoken."""
        self.messages.append(message)
        self._waiting.append(message)

    def spoke(self, row: Row, message: Message, ids: array[int]) -> None:
        """The policy has; the ids are in the row already, and so is what waited."""
        self.row, self._edited = row, False
        self._waiting.clear()
        self._sampled[id(message)] = ids
        self.messages.append(message)

    def is_given(self, message: Message) -> bool:
        """Whether a message is the dataset row's own."""
        return id(message) in self._given

    def edit(self, messages: Sequence[Message]) -> None:
        """The next turn sees these messages, in a row of its own.

        Raises:
            UserCodeError: an assistant message that was not said here, or one at the end.
        """
        examples = {id(m) for m in self._opening}
        for message in messages:
            if message.role == "assistant" and id(message) in self._sampled:
                examples.clear()  # the row's examples stand before whatever was sampled
            elif message.role == "assistant" and id(message) not in examples:
                raise UserCodeError(
                    "ep.branch takes the very messages that ep.generate() returned in this episode"
                    " (or that ep.messages holds), and the row's own examples before them. What the"
                    f" policy did not say goes into a user message: {message.content[:60]!r}"
                )
        if not messages or messages[-1].role == "assistant":
            raise UserCodeError("ep.branch: the last message must be one to answer (user, tool)")
        self.messages = list(messages)
        self._waiting.clear()
        self._edited = True

    def next(self, strip: bool) -> tuple[Row, array[int]]:
        """The row that the next turn is sampled in, and what is to be added to it before.

        Args:
            strip: earlier thinking goes where the template drops it, and a row begins there.
        """
        if self._edited:
            return self._anew(strip), token_array()
        if not len(self.row):
            return self.row, token_array()
        template, waiting = self._template, self._waiting
        history = self.messages[: len(self.messages) - len(waiting)]
        delta = template.delta(history, waiting, self.row.ids[-1])
        users = any(m.role == "user" for m in waiting)
        if strip and template.thinking.may_drop(later_user=users):
            anew = self._anew(strip)
            if anew.ids != self.row.ids + delta:
                return anew, token_array()
        return self.row, delta

    def _anew(self, strip: bool) -> Row:
        """A row whose prompt is the conversation as it stands now."""
        known = self._sampled
        sampled = {i: known[id(m)] for i, m in enumerate(self.messages) if id(m) in known}
        return Row(
            self._template.conversation(
                self.messages, self.schemas, sampled, strip=strip, given=self.is_given
            )
        )
