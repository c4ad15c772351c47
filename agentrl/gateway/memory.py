"""The answers of a session that later requests name by their ids."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest

KEPT_BYTES = 2**23
"""The size of the messages that a session keeps. The oldest conversations are forgotten first."""
MESSAGE_BYTES = 256
"""The size of a message without text."""


class AnswerMemory:
    """The conversations that a request continues by the id of their last answer.

    Args:
        limit: about the largest size of their messages. Equal messages are kept, and count, once.
    """

    def __init__(self, limit: int = KEPT_BYTES):
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[str, tuple[tuple[ChatMessage, ...], int]] = OrderedDict()
        self._messages: WeakValueDictionary[int, ChatMessage] = WeakValueDictionary()
        """The messages of these conversations, by their hashes."""

    def keep(self, request: ChatRequest, answer: Answer) -> None:
        """Keep the conversation that an answer ends, if its client may continue it."""
        if request.kept is None or answer.id in self._kept:
            return
        answered = ChatMessage("assistant", answer.text, answer.calls, reasoning=answer.reasoning)
        messages, size = [], 8 * len(request.kept)
        for message in (*request.kept, answered):
            known = self._messages.get(hash(message))
            if known != message:
                self._messages[hash(message)] = known = message
                size += MESSAGE_BYTES + len(message.text) + len(message.reasoning)
                size += sum(len(call.arguments) for call in message.calls)
                size += sum(len(image.data) for image in message.images)
            messages.append(known)
        self._kept[answer.id] = tuple(messages), size
        self._size += size
        while self._size > self._limit and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self._size -= size

    def find(self, id: str) -> tuple[ChatMessage, ...] | None:
        """Return the conversation that ends with this answer; None if it is not kept."""
        return self._kept[id][0] if id in self._kept else None
