"""The answers of a session that later requests name by their ids."""

from __future__ import annotations

from collections import OrderedDict

from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest

KEPT_BYTES = 2**23
"""The size of the requests whose conversations a session keeps. The oldest are forgotten first."""


class AnswerMemory:
    """The conversations that a request continues by the id of their last answer.

    Args:
        limit: the largest sum of the sizes of the requests that these conversations come from.
    """

    def __init__(self, limit: int = KEPT_BYTES):
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[str, tuple[tuple[ChatMessage, ...], int]] = OrderedDict()

    def keep(self, request: ChatRequest, answer: Answer) -> None:
        """Keep the conversation that an answer ends, if its client may continue it."""
        if request.kept is None:
            return
        message = ChatMessage("assistant", answer.text, answer.calls, reasoning=answer.reasoning)
        # Messages of conversations that are continued by an id are shared, the rest is not.
        size = len(request.body) + 64 * len(request.kept) + len(answer.text)
        _, old = self._kept.pop(answer.id, ((), 0))
        self._kept[answer.id] = (*request.kept, message), size
        self._size += size - old
        while self._size > self._limit and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self._size -= size

    def find(self, id: str) -> tuple[ChatMessage, ...] | None:
        """Return the conversation that ends with this answer; None if it is not kept."""
        return self._kept[id][0] if id in self._kept else None
