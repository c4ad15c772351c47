"""What is asked of a server from code that is not async, and the errors behind all its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import orjson

from agentrl.engine.remote.launch import ServerHandle
from agentrl.errors import (
    EngineError,
    EngineNonsense,
    EngineOverloaded,
    PromptTooLong,
    RequestRefused,
)
from agentrl.http import fetch

CONTROL_SECONDS = 60.0
_TOO_LONG = re.compile(
    r"longer than the model's context|maximum allowed length|context length|maximum model length"
)

T = TypeVar("T")


class Control:
    """One server's blocking door."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        admin_key: str = "",
        process: ServerHandle | None = None,
    ):
        """Ask nothing yet.

        Args:
            url: the server's.
            key: its api key.
            admin_key: for what manages it; "" where it has none, and takes the api key there too.
            process: its own, where it is ours: an answer that does not come may be its death.
        """
        self.url, self.process = url, process
        self.key, self._admin_key = key, admin_key or key

    def ask(self, path: str, body: Any = None, *, seconds: float = CONTROL_SECONDS) -> Any:
        """The answer to a GET, or to a POST of a body.

        Raises:
            EngineError: it is refused, or there is none in time.
            EngineDead: the server ended.
        """
        return self._must(path, *self._fetch(path, body, self.key, seconds))

    def manage(
        self, path: str, body: Any, *, seconds: float = CONTROL_SECONDS, json: bool = True
    ) -> Any:
        """As `ask`, where the server wants its admin key; `json`: whether success is JSON."""
        return self._must(path, *self.attempt(path, body, seconds=seconds), json=json)

    def attempt(
        self, path: str, body: Any, *, seconds: float = CONTROL_SECONDS
    ) -> tuple[int, bytes]:
        """As `manage`, whatever the answer is: its status and its body."""
        return self._fetch(path, body, self._admin_key, seconds)

    def _must(self, path: str, status: int, content: bytes, *, json: bool = True) -> Any:
        try:
            answer = orjson.loads(content) if content else None
        except orjson.JSONDecodeError as e:
            if status == 200 and json:
                raise EngineNonsense(f"{self.url}{path}: not JSON: {e}") from e
            answer = content.decode("utf-8", "replace")
        if status != 200:
            raise refusal(status, answer, f"{self.url}{path}")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise refusal(400, answer, f"{self.url}{path}")
        return answer

    def _fetch(self, path: str, body: Any, key: str, seconds: float) -> tuple[int, bytes]:
        try:
            return fetch(self.url, path, body, token=key, error=EngineError, timeout=seconds)
        except EngineError:
            if self.process is not None and not self.process.running:
                raise self.process.death() from None
            raise


def refusal(status: int, answer: Any, where: str) -> EngineError:
    """The error behind a status that is not 200."""
    said = _message(answer)
    text = f"{where}: status {status}: {said[:2000]}"
    if status in (429, 503):
        return EngineOverloaded(text)
    if status == 400:
        return PromptTooLong(text) if _TOO_LONG.search(said) else RequestRefused(text)
    return EngineError(text)


def _message(answer: Any) -> str:
    """The text in one of the shapes that SGLang's errors have."""
    while isinstance(answer, dict):
        found = [answer[key] for key in ("error", "message", "detail") if key in answer]
        answer = found[0] if found else str(answer)
    return str(answer)


@contextmanager
def reading(server: str, where: str) -> Iterator[None]:
    """Take what goes wrong in reading an answer for the fault of the answer.

    Raises:
        EngineNonsense: the answer cannot be `server`'s.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise EngineNonsense(f"{where}: not {server}'s answer: {type(e).__name__}: {e}") from e


def in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """Run it in a thread that nobody must wait for, not even the interpreter's end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    Thread(target=run, name=name, daemon=True).start()
    return future
