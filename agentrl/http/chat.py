"""A client for language models that answer with text: a judge, a simulated user.

The model is served at a URL with OpenAI's `/chat/completions`, or it is the run's own engine. Both
implement the protocol `Chat`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.errors import ChatRefused, Infrastructure
from agentrl.http.client import HttpClient
from agentrl.http.pool import MAX_CONNECTIONS_TO_SERVER
from agentrl.trajectory import Message

RETRY_STATUSES = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which the request is sent again."""
REFUSED_STATUSES = (400, 413, 422)
"""Statuses with which a server rejects a request: it is too long, or its content is refused."""

NO_ACCESS_STATUSES = (401, 403, 404)
"""Statuses that every request gets: the key, the URL or the model's name is wrong."""


class NoAccess(Infrastructure):
    """The server refuses the key, or has no such URL or model."""


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
        max_requests: the most requests in flight.
    """

    def __init__(
        self, url: str, model: str, token: str = "", max_requests: int = MAX_CONNECTIONS_TO_SERVER
    ):
        self._client = HttpClient(url, token=token, max_connections=max_requests)
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
            "messages": [m.as_dict() for m in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            **({"stop": list(stop)} if stop else {}),
        }
        answer = await self.complete(body, deadline=deadline)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            text, choice = self, None
        if text is None and choice:
            reason = choice.get("finish_reason")
            raise NoText(f"{self._url}: the message has no text (finish_reason={reason!r})")
        if not isinstance(text, str):
            raise Infrastructure(f"{self._url} answered with status 200: {answer!r:.300}")
        return text

    async def complete(self, body: Mapping[str, Any], *, deadline: float) -> Any:
        """Return the JSON of a chat completion. A status in `RETRY_STATUSES` is retried twice.

        Args:
            body: the request without the model.
            deadline: `time.monotonic()` seconds at which to give up.

        Raises:
            ChatRefused: the server rejected the request.
            NoAccess: the server refuses the key, or has no such URL or model.
            Infrastructure: the answer has another status.
        """
        request = {"model": self._model, **body}
        for pause in (0.5, 1.0, math.inf):
            status, answer = await self._client.request_json(
                "POST",
                "/chat/completions",
                request,
                deadline=deadline,
                retries=1,
                wait_if_busy=True,
            )
            if status not in RETRY_STATUSES or time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
        if status == 200:
            return answer
        kind = ChatRefused if status in REFUSED_STATUSES else Infrastructure
        kind = NoAccess if status in NO_ACCESS_STATUSES else kind
        raise kind(f"{self._url} answered with status {status}: {answer!r:.300}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
