"""The policy's context: a conversation as messages, and the token row that holds it.

A row only grows. `TokenRow.extend` is the only place where a token gets its mask, logprob and
version.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from agentrl.chat import ChatTemplate
from agentrl.errors import EngineError, UserCodeError
from agentrl.images import Image, RowImage
from agentrl.trajectory import (
    Generation,
    Message,
    Segment,
    float_array,
    short_array,
    token_array,
)

# An array times n copies memory. A list would create n references.
_SAMPLED, _UNSAMPLED, _NO_VERSION = token_array([1]), token_array([0]), token_array([-1])
_ZERO_LOGPROB = float_array([0.0])


class TokenRow:
    """A segment that still grows: a prompt, then observed and sampled tokens in turn."""

    def __init__(self, prompt: array[int], images: Sequence[RowImage] = ()):
        self.prompt = prompt
        self.images = tuple(images)
        """The images of the prompt and of the response, in order."""
        self.ids = token_array(prompt)
        """The prompt and the response in one array. The engine continues these ids."""
        self.index = -1
        """The index of the row among the trajectory's segments; -1 until a token was sampled."""
        self._mask = token_array()
        self._logprobs = float_array()
        self._versions = token_array()
        self._kept_ids, self._kept_counts = token_array(), token_array()
        self._experts = short_array()

    def __len__(self) -> int:
        """The number of response tokens."""
        return len(self._mask)

    @property
    def experts_from(self) -> int:
        """The first token whose experts no turn has returned."""
        return len(self.ids) - 1 if self._experts else 0

    def extend(
        self,
        delta: Sequence[int],
        generation: Generation,
        max_tokens: int,
        images: Sequence[RowImage] = (),
    ) -> None:
        """Append the observed tokens, with their images, and the tokens sampled after them.

        If an exception is raised, nothing is appended. The prompt length that the engine reports
        must be that of this row. The cost depends on the new tokens only.

        Raises:
            EngineError: the engine continued another row, or its answer is inconsistent.
        """
        n, prompt_length = len(generation.token_ids), len(self.ids) + len(delta)
        if generation.prompt_tokens != prompt_length:
            raise EngineError(
                f"the engine continued {generation.prompt_tokens} tokens, but the row has"
                f" {prompt_length}"
            )
        if not (n == len(generation.logprobs) == len(generation.versions) and 0 < n <= max_tokens):
            raise EngineError(
                f"the engine returned {n} tokens, {len(generation.logprobs)} logprobs and"
                f" {len(generation.versions)} versions; the request was for at most {max_tokens}"
            )
        check_kept(generation)
        inputs = prompt_length + n - 1 - self.experts_from
        if len(generation.experts) not in (0, inputs * generation.experts_width):
            raise EngineError(
                f"the engine returned {len(generation.experts)} experts for {inputs} tokens with"
                f" {generation.experts_width} each"
            )
        if images:
            self.images += tuple(images)
        self.ids.extend(delta)
        self._mask.extend(_UNSAMPLED * len(delta))
        self._logprobs.extend(_ZERO_LOGPROB * len(delta))
        self._versions.extend(_NO_VERSION * len(delta))
        self._kept_counts.extend(_UNSAMPLED * len(delta))
        self.ids.extend(generation.token_ids)
        self._mask.extend(_SAMPLED * n)
        self._logprobs.extend(generation.logprobs)
        self._versions.extend(generation.versions)
        self._kept_ids.extend(generation.kept_ids)
        self._kept_counts.extend(generation.kept_counts or _UNSAMPLED * n)
        self._experts.extend(generation.experts)

    def segment(self) -> Segment:
        """Return a copy of the row as it is now."""
        return Segment(
            prompt_ids=self.prompt,
            response_ids=self.ids[len(self.prompt) :],
            response_mask=self._mask[:],
            logprobs=self._logprobs[:],
            versions=self._versions[:],
            kept_ids=self._kept_ids[:],
            kept_counts=self._kept_counts[:] if self._kept_ids else token_array(),
            experts=self._experts[:],
            images=self.images,
        )


def check_kept(generation: Generation) -> None:
    """Check that each sampled token is one of those that were kept for it, if there are any.

    Raises:
        EngineError: it is not.
    """
    tokens, ids, counts = generation.token_ids, generation.kept_ids, generation.kept_counts
    if len(counts) not in (0, len(tokens)) or sum(counts) != len(ids):
        raise EngineError(
            f"the engine returned {len(ids)} kept tokens, and {len(counts)} counts of them with"
            f" the sum {sum(counts)}, for {len(tokens)} sampled tokens"
        )
    for token, count, end in zip(tokens, counts, accumulate(counts), strict=False):
        if token not in ids[end - count : end]:
            raise EngineError(f"the engine sampled the token {token}, but did not keep it")


class Context:
    """A conversation that grows or is edited.

    An observed message is rendered when the next turn is sampled.
    """

    def __init__(
        self,
        template: ChatTemplate,
        opening: Sequence[Message],
        schemas: Sequence[Any],
        turn_ids: dict[int, array[int]],
        foreign: Mapping[int, Message],
        images: Mapping[str, RowImage],
        *,
        row_messages: Sequence[Message],
        exact: bool,
    ):
        """Encode the opening.

        Args:
            template: the policy's chat template.
            opening: the first messages.
            schemas: the tools that the template shows.
            turn_ids: the token ids of the attempt's assistant messages, by `id(message)`.
            foreign: those of the messages that the policy did not sample, by `id(message)`.
            images: the images of the attempt that are prepared, by their keys.
            row_messages: the messages of the opening that come from the dataset row; these may
                contain thinking tags.
            exact: whether to raise `TemplateError` for an opening that cannot be encoded as the
                template renders it. Use False if the policy wrote the opening: an error would drop
                the rollout.
        """
        self.messages: list[Message] = list(opening)
        self._schemas = schemas
        self._template = template
        self._turn_ids = turn_ids
        self._foreign = foreign
        self._opening = list(opening)
        self._row_messages = set(map(id, row_messages))
        self._images = images
        self._pending: list[Message] = []
        self.unprepared = self._find_unprepared(opening)
        """The images that the attempt must prepare before `next_row`."""
        self._is_edited = bool(self.unprepared)
        if self._is_edited:  # a conversation of `ep.spawn`
            self.row = TokenRow(token_array())
        else:
            ids = template.prompt(opening, schemas, self.is_from_row, exact=exact)
            self.row = TokenRow(ids, self._images_of(opening))

    def observe(self, message: Message) -> None:
        """Add a message that the policy did not write."""
        self.messages.append(message)
        self._pending.append(message)
        if message.images:
            self.unprepared += self._find_unprepared([message])

    def add_turn(self, row: TokenRow, message: Message, ids: array[int]) -> None:
        """Add the policy's turn. `row` already contains its ids and the pending messages."""
        self.row, self._is_edited = row, False
        self._pending.clear()
        self._turn_ids[id(message)] = ids
        self.messages.append(message)

    def is_from_row(self, message: Message) -> bool:
        """Return whether a message comes from the dataset row."""
        return id(message) in self._row_messages

    def edit(self, messages: Sequence[Message], schemas: Sequence[Any]) -> None:
        """Replace the conversation. The next turn sees these messages, in a row of its own.

        Args:
            messages: the new conversation.
            schemas: the tools that the template shows in the new row.

        Raises:
            UserCodeError: an assistant message is not of this episode, or is the last one.
        """
        examples = {id(m) for m in self._opening}
        for message in messages:
            if message.role == "assistant" and id(message) in self._turn_ids:
                examples.clear()  # The dataset row's examples must precede all sampled messages.
            elif message.role == "assistant" and id(message) not in examples:
                raise UserCodeError(
                    "ep.branch takes only assistant messages that ep.generate() or ep.foreign()"
                    " returned in this episode (or that are in ep.messages), and before them the"
                    " row's own examples. For an assistant message that the policy did not write,"
                    f" use ep.foreign({message.content[:60]!r})"
                )
        if not messages or messages[-1].role == "assistant":
            raise UserCodeError("ep.branch: the last message must be a user or tool message")
        self.messages, self._schemas = list(messages), schemas
        self.unprepared = self._find_unprepared(messages)
        self._pending.clear()
        self._is_edited = True

    def next_row(self, strip: bool) -> tuple[TokenRow, array[int], Sequence[RowImage]]:
        """Return the row of the next turn, and the tokens and images to append before the turn.

        Args:
            strip: if the template drops earlier thinking here, start a new row without it.
        """
        row, delta = self._next_row(strip)
        is_new = row is not self.row or not len(row)
        return row, delta, () if is_new else self._images_of(self._pending)

    def _next_row(self, strip: bool) -> tuple[TokenRow, array[int]]:
        if self._is_edited:
            return self._new_row(strip), token_array()
        if not len(self.row):
            return self.row, token_array()
        template, pending = self._template, self._pending
        delta = self._delta()
        has_users = any(m.role == "user" for m in pending)
        if strip and template.thinking.may_drop(later_user=has_users):
            row = self._new_row(strip)
            if row.ids != self.row.ids + delta:
                return row, token_array()
        return self.row, delta

    def _delta(self) -> array[int]:
        """Return the tokens of the pending messages, and the header of the next turn."""
        template, messages = self._template, self.messages
        ids, last_id = token_array(), self.row.ids[-1]
        start = len(messages) - len(self._pending)
        history = messages[:start]
        for i in range(start, len(messages)):
            if id(messages[i]) in self._foreign:
                new = messages[start:i]
                ids.extend(template.delta(history, new, last_id))
                begin = template.append_foreign(ids, self._turn_ids[id(messages[i])])
                start, last_id = i + 1, ids[-1] if len(ids) > begin else -1
                history = [*template.delta_history([*history, *new]), messages[i]]
        ids.extend(template.delta(history, messages[start:], last_id))
        return ids

    def _new_row(self, strip: bool) -> TokenRow:
        """Return a row whose prompt is the conversation as it is now."""
        turn_ids = self._turn_ids
        indices = [i for i, m in enumerate(self.messages) if id(m) in turn_ids]
        ids = self._template.conversation(
            self.messages,
            self._schemas,
            {i: turn_ids[id(self.messages[i])] for i in indices},
            foreign={i for i in indices if id(self.messages[i]) in self._foreign},
            strip=strip,
            is_from_row=self.is_from_row,
        )
        return TokenRow(ids, self._images_of(self.messages))

    def _find_unprepared(self, messages: Iterable[Message]) -> list[Image]:
        return [i for m in messages if m.images for i in m.images if i.key not in self._images]

    def _images_of(self, messages: Iterable[Message]) -> list[RowImage]:
        return [self._images[image.key] for m in messages if m.images for image in m.images]
