"""The answers of a session that later requests name by their ids."""

from __future__ import annotations

from collections import OrderedDict

from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest

KEPT_BYTES = 2**26
"""The size of the messages that a session keeps. The oldest conversations are forgotten first, and
one with many images must outlast those of sub-agents."""
MESSAGE_BYTES = 256
"""The size of a message without text."""
PLACE_BYTES = 8
"""The size of a message's place in a conversation."""


class AnswerMemory:
    """The conversations that a request continues by the id of their last answer.

    Args:
        limit: about the largest size of their messages. Equal messages are kept, and count, once.
    """

    def __init__(self, limit: int = KEPT_BYTES):
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[str, tuple[ChatMessage, ...]] = OrderedDict()
        self._messages: dict[ChatMessage, tuple[ChatMessage, int]] = {}
        """For each message of these conversations: the one that is kept, and how often."""

    def keep(self, request: ChatRequest, answer: Answer) -> None:
        """Keep the conversation that an answer ends, if its client may continue it."""
        if request.kept is None or answer.id in self._kept:
            return
        answered = ChatMessage("assistant", answer.text, answer.calls, reasoning=answer.reasoning)
        self._kept[answer.id] = tuple([self._add(m) for m in (*request.kept, answered)])
        while self._size > self._limit and len(self._kept) > 1:
            for message in self._kept.popitem(last=False)[1]:
                self._remove(message)

    def find(self, id: str) -> tuple[ChatMessage, ...] | None:
        """Return the conversation that ends with this answer; None if it is not kept."""
        return self._kept.get(id)

    def _add(self, message: ChatMessage) -> ChatMessage:
        known, number = self._messages.get(message, (message, 0))
        self._messages[known] = known, number + 1
        self._size += PLACE_BYTES + (0 if number else _size_of(message))
        return known

    def _remove(self, message: ChatMessage) -> None:
        known, number = self._messages.pop(message)
        if number > 1:
            self._messages[known] = known, number - 1
        self._size -= PLACE_BYTES + (0 if number > 1 else _size_of(message))


def _size_of(message: ChatMessage) -> int:
    size = MESSAGE_BYTES + len(message.text) + len(message.reasoning)
    size += sum(len(call.arguments) for call in message.calls)
    return size + sum(len(image.data) for image in message.images)
