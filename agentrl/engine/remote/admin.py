"""A blocking client of an inference server, and the exceptions for the errors of servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import orjson
from safetensors import SafetensorError

from agentrl.engine.remote.launch import ServerHandle
from agentrl.errors import (
    AgentRLError,
    EngineError,
    EngineOverloaded,
    InvalidEngineResponse,
    PromptTooLong,
    RequestRefused,
)
from agentrl.http import fetch

ADMIN_SECONDS = 60.0
_TOO_LONG = re.compile(
    r"longer than the model's context|maximum allowed length|context length|maximum model length"
)

T = TypeVar("T")


class AdminClient:
    """A blocking HTTP client of one server, also for its management endpoints."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        admin_key: str = "",
        process: ServerHandle | None = None,
    ):
        """Store the address and the keys; send nothing yet.

        Args:
            url: the URL of the server.
            key: its API key.
            admin_key: the key of its management endpoints; "" if these use the API key.
            process: the process of the server, if agentrl started it. If there is no answer, the
                client checks whether the process has ended.
        """
        self.url, self.process = url, process
        self.key, self.admin_key = key, admin_key or key

    def ask(self, path: str, body: Any = None, *, seconds: float = ADMIN_SECONDS) -> Any:
        """Send a GET, or a POST if there is a body; return the parsed answer.

        Raises:
            EngineError: the server refuses the request, or does not answer in time.
            EngineDead: the server's process has ended.
        """
        return self._parse_or_raise(path, *self.send(path, body, key=self.key, seconds=seconds))

    def manage(
        self, path: str, body: Any, *, seconds: float = ADMIN_SECONDS, json: bool = True
    ) -> Any:
        """Send a request as `ask` does, with the admin key.

        If `json` is False, a successful answer need not be JSON.
        """
        return self._parse_or_raise(path, *self.send(path, body, seconds=seconds), json=json)

    def send(
        self, path: str, body: Any, *, key: str | None = None, seconds: float = ADMIN_SECONDS
    ) -> tuple[int, bytes]:
        """Send a request as `manage` does, and return the status and the body of any answer."""
        key = self.admin_key if key is None else key
        try:
            return fetch(self.url, path, body, token=key, error=EngineError, timeout=seconds)
        except EngineError:
            if self.process is not None and not self.process.running:
                raise self.process.death_error() from None
            raise

    def _parse_or_raise(self, path: str, status: int, content: bytes, *, json: bool = True) -> Any:
        try:
            answer = orjson.loads(content) if content else None
        except orjson.JSONDecodeError as e:
            if status == 200 and json:
                raise InvalidEngineResponse(f"{self.url}{path}: not JSON: {e}") from e
            answer = content.decode("utf-8", "replace")
        if status != 200:
            raise refusal(status, answer, f"{self.url}{path}")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise refusal(400, answer, f"{self.url}{path}")
        return answer


def refusal(status: int, answer: Any, where: str) -> EngineError:
    """Return the error for an answer whose status is not 200."""
    message = _message(answer)
    text = f"{where}: status {status}: {message[:2000]}"
    if status in (429, 503):
        return EngineOverloaded(text)
    if status == 400:
        return PromptTooLong(text) if _TOO_LONG.search(message) else RequestRefused(text)
    return EngineError(text)


def _message(answer: Any) -> str:
    """Return the text of an error, which SGLang writes in several formats."""
    while isinstance(answer, dict):
        texts = [answer[key] for key in ("error", "message", "detail") if key in answer]
        answer = texts[0] if texts else str(answer)
    return str(answer)


@contextmanager
def reading(server: str, where: str) -> Iterator[None]:
    """Raise other exceptions that occur while an answer is read as engine errors.

    Otherwise they would stop the run.

    Raises:
        InvalidEngineResponse: the answer is not a valid one of `server`.
        EngineError: a file or a socket failed.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (OSError, SafetensorError) as e:
        raise EngineError(f"{where}: {type(e).__name__}: {e}") from e
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise InvalidEngineResponse(
            f"{where}: not a valid answer of {server}: {type(e).__name__}: {e}"
        ) from e


def in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """Run a function in a daemon thread. Python does not wait for the thread when it exits."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    Thread(target=run, name=name, daemon=True).start()
    return future


def close_opened(opening: Future[Any]) -> None:
    """Close what was opened in a thread; a callback for its future."""
    if opening.exception() is None:
        opening.result().close()
