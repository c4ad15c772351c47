"""Parsers of other projects, for formats without a parser here: `sglang:NAME` and `hf`.

These parsers are not strict, and some take quadratic time (SGLang's takes 20 s for 220 kB of
opening tags). Python code in a thread cannot be interrupted. So each parser runs in its own
process, with a limit on the length of the text and a deadline. After the deadline the process is
killed and started again.

The child process runs `foreign.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.chat.formats.scan import MAX_CALLS, limit_calls
from agentrl.chat.formats.strict_json import invalid_call, read_object
from agentrl.errors import Infrastructure, UserError
from agentrl.installation import install_command
from agentrl.trajectory import ToolCall
from agentrl.workers.child_process import ChildProcess, MessageTooLong

log = logging.getLogger("agentrl.chat")

MAX_TEXT = 64 * 1024
MAX_ANSWER = 1024 * 1024
DEADLINE = 1.0
START_SECONDS = 120.0
UNREAD = "the tool call cannot be read"
_CHILD = Path(__file__).with_name("foreign.py")


class ForeignParser:
    """Parses tool calls with another project's parser, and reports the calls that it cannot parse.

    Thoughts between `<think>` and `</think>` are removed first. If the parser raises, takes too
    long or seems to drop a call silently, the result is a call with an error.

    Example:
        with ForeignParser("sglang:kimi_k2") as parse:
            calls = await parse(text, schemas)

    Args:
        format: `sglang:NAME` (one of SGLang's tool-call parsers), or `hf` (transformers' response
            parsing, by the tokenizer's response template).
        tokenizer: for `hf`.
        python: the Python of an environment with sglang (`rollout.python`). It is used if sglang is
            not installed in this environment.
        seconds: the deadline for one text, without the start of the parser.

    Raises:
        UserError: if the parser is not installed or not known, or the tokenizer has no template.
        Infrastructure: if the process does not start.
    """

    def __init__(
        self, format: str, tokenizer: Any = None, *, python: str = "", seconds: float = DEADLINE
    ):
        kind, _, name = format.partition(":")
        if kind == "sglang":
            if importlib.util.find_spec("sglang") is not None:
                python = ""
            elif not python:
                raise UserError(
                    f"{format!r} needs sglang. Install it ({install_command('sglang')}), or"
                    " set rollout.python to the Python of an environment that has it"
                )
            hello = {"kind": kind, "name": name}
        elif format == "hf":
            python = ""
            hello = {"kind": kind, **_response_template(tokenizer)}
        else:
            raise UserError(f"unknown format {format!r}: `sglang:NAME` or `hf`")
        self.format, self.seconds = format, seconds
        self._level = logging.WARNING
        """The log level of the parser's next exception. Only the first one is a warning."""
        self._hello, self._python = hello, python
        self.process = self._start()
        try:
            self._wait_ready()
        except BaseException:
            self.process.stop()
            raise
        # Texts wait for this one thread, so that they do not block the event loop's own pool.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foreign-parser")

    async def __call__(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Return the calls of one assistant turn.

        Args:
            text: the text of the turn, with control tokens, without its closing token.
            schemas: the tools, as `{"type": "function", "function": {...}}`.
        """
        if len(text) > MAX_TEXT:
            return [invalid_call(text, f"more than {MAX_TEXT} characters in one turn")]
        loop, tools = asyncio.get_running_loop(), [dict(schema) for schema in schemas]
        return await loop.run_in_executor(self._thread, self._parse, text, tools)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.kill()  # without waiting for the current text
        self._thread.shutdown()
        self.process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _parse(self, text: str, schemas: list[dict[str, Any]]) -> list[ToolCall]:
        if not self.process.running:  # the process was killed from outside, not by this text
            self._start_again()
        try:
            self._wait_ready()
        except Infrastructure:
            self._start_again()  # for the next text
            raise
        try:
            answer = self._ask({"text": text, "schemas": schemas}, self.seconds)
        except TimeoutError:
            error = f"not parsed within {self.seconds:g} s"
        except MessageTooLong:
            error = f"the parser returned more than {MAX_ANSWER} bytes"
        except EOFError:
            error = "the parser crashed"
        else:
            if error := answer.get("error"):
                log.log(self._level, "%s raised on a model turn: %s", self.format, error)
                self._level = logging.DEBUG
            return _calls(text, answer)
        self._start_again()
        return [invalid_call(text, f"{self.format}: {error}")]

    def _start(self) -> ChildProcess:
        # The same Python imports modules from this process's path. Another Python uses its own path
        # without the working directory.
        path = "[p for p in sys.path if p]" if self._python else repr(sys.path)
        run = f"import runpy; runpy.run_path({str(_CHILD)!r}, run_name='__main__')"
        python = str(Path(self._python).absolute()) if self._python else sys.executable
        self._ready = False
        try:
            return ChildProcess([python, "-c", f"import sys; sys.path[:] = {path}; {run}"])
        except OSError as e:
            raise UserError(f"rollout.python={self._python}: cannot run it: {e}") from None

    def _start_again(self) -> None:
        """Start the process again. Only the next text waits until it is ready."""
        self.process.stop()
        self.process = self._start()

    def _wait_ready(self) -> None:
        """Wait until the child process has imported the parser."""
        if self._ready:
            return
        try:
            answer = self._ask(self._hello, START_SECONDS)
        except (EOFError, TimeoutError) as e:
            raise Infrastructure(f"the parser's process did not start: {e}") from e
        if error := answer.get("user_error"):
            raise UserError(error)
        self._ready = True

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        self.process.send(json.dumps(request).encode(), end)
        return json.loads(self.process.receive(end, MAX_ANSWER))


def _response_template(tokenizer: Any) -> dict[str, Any]:
    """Return the response template of a tokenizer (a schema in transformers before 5.13)."""
    for attribute in ("response_template", "response_schema"):
        if value := getattr(tokenizer, attribute, None):
            return {"attribute": attribute, "template": value}
    raise UserError(
        "the format 'hf' needs a tokenizer with a response template, and this one has none. Set"
        " `tokenizer.response_template` (transformers' documentation: response parsing) and save"
        " the tokenizer, or choose another format"
    )


def _calls(text: str, answer: dict[str, Any]) -> list[ToolCall]:
    if answer.get("error"):  # an exception of the parser; its text does not help the model
        return [invalid_call(text, UNREAD)]
    calls = [_call(**call) for call in answer["calls"][: MAX_CALLS + 1]]
    if answer["lost"] and len(calls) <= MAX_CALLS:
        return [*calls, invalid_call(text, answer["lost"])]
    return limit_calls(calls)


def _call(name: Any, arguments: str, id: Any) -> ToolCall:
    value, error = read_object(arguments)
    if error:
        return invalid_call(arguments, error, name if isinstance(name, str) else "")
    if not isinstance(name, str) or not name or not name.isprintable():
        return invalid_call(arguments, '"name" must be a string')
    return ToolCall(name, value, id=id if isinstance(id, str) else "")
