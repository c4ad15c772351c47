"""A client for language models that answer with text: a judge, a simulated user.

The model is served at a URL with OpenAI's `/chat/completions`, or it is the run's own engine. Both
implement the protocol `Chat`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.errors import ChatRefused, Infrastructure
from agentrl.http.client import HttpClient
from agentrl.trajectory import Message

RETRY_STATUSES = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which the request is sent again."""
REFUSED_STATUSES = (400, 413, 422)
"""Statuses with which a server rejects a request: it is too long, or its content is refused."""


class NoText(Infrastructure):
    """The model's message has no text: its reasoning used all tokens, or it refused to answer."""


class Chat(Protocol):
    """A model that returns the next message of a conversation."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        deadline: float,
        max_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the model's answer.

        Args:
            messages: the conversation; the model's own messages have the role `assistant`.
            deadline: `time.monotonic()` seconds at which to give up.
            max_tokens: the longest answer, in tokens.
            temperature: the sampling temperature.
            stop: strings that end the answer; they are not part of it.

        Raises:
            Infrastructure: no answer, or none before the deadline.
            ChatRefused: the server rejected this request.
            NoText: the model's message has no text.
        """
        ...


class OpenAIChat:
    """A model behind an OpenAI-compatible server.

    It belongs to the event loop of its first request.

    Args:
        url: the URL up to and including `/v1`, such as `http://127.0.0.1:30000/v1`.
        model: the model's name on the server.
        token: the bearer token, if the server needs one.
    """

    def __init__(self, url: str, model: str, token: str = ""):
        self._client = HttpClient(url, token=token)
        self._url, self._model = url, model

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        deadline: float,
        max_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the model's answer. A status in `RETRY_STATUSES` is retried twice."""
        body = {
            "model": self._model,
            "messages": [m.as_dict() for m in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            **({"stop": list(stop)} if stop else {}),
        }
        for pause in (0.5, 1.0, math.inf):
            status, answer = await self._client.request_json(
                "POST", "/chat/completions", body, deadline=deadline, retries=1
            )
            if status not in RETRY_STATUSES or time.monotonic() + pause > deadline:
                return self._text(status, answer)
            await asyncio.sleep(pause)
        raise AssertionError("the last pause is longer than any deadline")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _text(self, status: int, answer: Any) -> str:
        """Return the text of the model's message.

        Raises:
            ChatRefused: the server rejected the request.
            NoText: the message has no text.
            Infrastructure: the answer is not a chat completion.
        """
        problem = f"{self._url} answered with status {status}: {answer!r:.300}"
        if status in REFUSED_STATUSES:
            raise ChatRefused(problem)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            raise Infrastructure(problem) from None
        if status == 200 and text is None:
            reason = choice.get("finish_reason")
            raise NoText(f"{self._url}: the message has no text (finish_reason={reason!r})")
        if status != 200 or not isinstance(text, str):
            raise Infrastructure(problem)
        return text
