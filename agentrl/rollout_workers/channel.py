"""Calls between a run and a process that plays rollouts, in both directions over one socket.

A message is 4 bytes of length (little-endian), the pickled kind and number, and a pickled tuple.
Messages arrive in their order, and functions that are not coroutines are called in that order. Both
ends trust each other: the run has started the process, and nobody else holds an end of the socket.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from agentrl.errors import AgentRLError, Infrastructure, UserError

CALL, NOTE, ANSWER, CANCEL = "call", "note", "answer", "cancel"
_NOT_SENT = (
    "a row or a result cannot be sent to another process ({}). Rows, and what loops and rewards"
    " return, need plain values; or set rollout.workers=1"
)


class ChannelClosed(Infrastructure):
    """The other process has ended, or the connection to it."""


def pack(kind: str, number: int, *content: Any) -> bytes:
    """Return a message with its length.

    Raises:
        UserError: something in it cannot be pickled, or it is longer than 4 GiB.
    """
    try:
        message = pickle.dumps((kind, number)) + pickle.dumps(content, protocol=5)
        return len(message).to_bytes(4, "little") + message
    except Exception as e:
        raise UserError(_NOT_SENT.format(f"{type(e).__name__}: {e}")) from e


def unpack(message: bytes) -> tuple[str, int, tuple[Any, ...] | UserError]:
    """Return kind, number and content of a message; an error if the content cannot be read."""
    file = io.BytesIO(message)
    kind, number = pickle.load(file)
    try:
        return kind, number, pickle.load(file)
    except Exception as e:  # A class of the other process is missing here.
        error = UserError(_NOT_SENT.format(f"{type(e).__name__}: {e}"))
        return kind, number, (False, error) if kind == ANSWER else error


def pack_error(number: int, error: BaseException) -> bytes:
    """Return the answer that a call has failed.

    An error that another process cannot read becomes an `AgentRLError` with the same text.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # A subclass may have another constructor, or hold a lock.
        kind = Infrastructure if isinstance(error, Infrastructure) else AgentRLError
        error = kind(f"{type(error).__name__}: {error}")
    return pack(ANSWER, number, False, error)


class Channel:
    """One end of a connection. It belongs to an event loop.

    Args:
        reader: reads what the other end writes.
        writer: writes to the other end.
        functions: the functions that the other end may call, by name; some may be coroutines.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ):
        """Read from now on."""
        self._reader, self._writer = reader, writer
        self.functions = dict(functions)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        """The calls of this end that have no answer, by number."""
        self._running: dict[int, asyncio.Task[None]] = {}
        """The calls of the other end that run here, by number."""
        self.is_closed = False
        self.reading = asyncio.create_task(self._read())
        """Ends when the connection does. Then all calls fail, and those of the other end end."""

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The calls of the other end that run here."""
        return [*self._running.values()]

    async def call(self, name: str, *args: Any) -> Any:
        """Call a function of the other end, and return its result. A cancellation reaches it.

        Raises:
            ChannelClosed: the other end has ended.
            UserError: the arguments or the result cannot be pickled.
            Exception: the function raised it.
        """
        number = next(self._numbers)
        self._send(pack(CALL, number, name, args))
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.is_closed:
                self._send(pack(CANCEL, number))
            raise
        finally:
            self._waiting.pop(number, None)

    def note(self, name: str, *args: Any) -> None:
        """Call a function of the other end without waiting for it, if that end still runs."""
        if not self.is_closed:
            self._send(pack(NOTE, 0, name, args))

    def close(self) -> None:
        """End the connection. Calls without an answer fail, and those of the other end end."""
        self.is_closed = True
        self._writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ChannelClosed("the process that played it has ended"))
        for task in self._running.values():
            task.cancel()

    async def _read(self) -> None:
        """Handle the messages of the other end until it ends."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                kind, number, content = unpack(await self._reader.readexactly(size))
                if isinstance(content, UserError):
                    self.reply(pack_error(number, content))
                else:
                    self._handle(kind, number, *content)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()

    def reply(self, message: bytes) -> None:
        """Send an answer, if the other end still runs."""
        if not self.is_closed:
            self._writer.write(message)

    def _send(self, message: bytes) -> None:
        if self.is_closed:
            raise ChannelClosed("the process that plays it has ended")
        self._writer.write(message)

    def _handle(self, kind: str, number: int, *content: Any) -> None:
        if kind == ANSWER:
            succeeded, result = content
            answer = self._waiting.get(number)
            if answer is None or answer.done():  # The call was cancelled.
                return
            answer.set_result(result) if succeeded else answer.set_exception(result)
        elif kind == CANCEL:
            if task := self._running.get(number):
                task.cancel()
        elif kind == NOTE:
            name, args = content
            self.functions[name](*args)
        else:
            name, args = content
            self._begin(number, self.functions[name], args)

    def _begin(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run a call of the other end and answer it."""
        if not inspect.iscoroutinefunction(function):
            self._answer(number, function, args)
            return

        async def run() -> None:
            try:
                result = await function(*args)
            except asyncio.CancelledError:  # The caller need not have caused it.
                self.reply(pack_error(number, Infrastructure("the call was cancelled")))
            except BaseException as e:
                self.reply(pack_error(number, e))
            else:
                self._answer(number, lambda: result, ())
            finally:
                self._running.pop(number)

        self._running[number] = asyncio.create_task(run())

    def _answer(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            message = pack(ANSWER, number, True, function(*args))
        except Exception as e:
            message = pack_error(number, e)
        self.reply(message)
