"""What the policy sees: a conversation as messages, and the token row that holds it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from agentrl.agent_loops.row import Row
from agentrl.chat import ChatTemplate
from agentrl.trajectory import Message, token_array


class Context:
    """A conversation that grows, or is edited; what was observed waits for the next turn."""

    def __init__(self, template: ChatTemplate, opening: Sequence[Message], schemas: Sequence[Any]):
        self.schemas = schemas
        self.messages: list[Message] = list(opening)
        self.row = Row(template.prompt(opening, schemas))
        self._template = template
        self._ids: dict[int, array[int]] = {}
        """Of messages that were sampled, by `id`: the attempt keeps them all alive."""
        self._waiting: list[Message] = []
        self._edited = False

    def observe(self, message: Message) -> None:
        """Somebody else has spoken."""
        self.messages.append(message)
        self._waiting.append(message)

    def spoke(self, message: Message, ids: array[int]) -> None:
        """The policy has; the ids are in the row already."""
        self._ids[id(message)] = ids
        self.messages.append(message)

    def edit(self, messages: Sequence[Message]) -> None:
        """The next turn sees these messages, in a row of its own."""
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

    def begun(self, row: Row) -> None:
        """A turn is sampled in this row: what waited is in it now."""
        self.row, self._edited = row, False
        self._waiting.clear()

    def _anew(self, strip: bool) -> Row:
        """A row whose prompt is the conversation as it stands now."""
        sampled = {i: self._ids[id(m)] for i, m in enumerate(self.messages) if id(m) in self._ids}
        ids = self._template.conversation(self.messages, self.schemas, sampled, strip=strip)
        return Row(ids)
