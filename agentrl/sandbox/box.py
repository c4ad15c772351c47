"""The outer end of a box: orders to the driver inside, and its answers."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import struct
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import orjson

from agentrl.errors import SandboxError
from agentrl.sandbox import inside
from agentrl.sandbox.base import Completed, Language, Limits
from agentrl.sandbox.output import clean, shorten

log = logging.getLogger("agentrl.sandbox")

INSIDE = Path(inside.__file__).parent
PROGRAMS = {n: (INSIDE / n).read_bytes() for n in ("driver.py", "scratch.py", "cells.py")}
START_SECONDS = 30.0
GRACE_SECONDS = 10.0
"""For the driver, over a program's own time."""
MAX_ANSWER = 128 * 2**20
LOST = "\n[the interpreter was ended: its variables are lost, the files are not]\n"
GONE = "\n[the sandbox was ended: its variables and files are lost]\n"


class BoxLost(SandboxError):
    """A box is gone. What it was asked to do may have begun, or not."""

    def __init__(self, why: str, *, began: bool, silent: bool = False):
        """Say whether the order had been sent, and whether it went unanswered for too long."""
        super().__init__(why)
        self.began, self.silent = began, silent


class Held(Protocol):
    """The driver's process, however it is isolated."""

    def kill(self) -> None:
        """End it and all that it started."""
        ...

    async def gone(self) -> bool:
        """Wait until all of it has ended; whether it has."""
        ...


def settings(
    python: str, limits: Limits, folder: str, cells: str, environment: dict[str, str], nproc: bool
) -> str:
    """What the driver is told at its start."""
    return json.dumps(
        {
            "python": python,
            "folder": folder,
            "cells": cells,
            "environment": environment,
            "cpu_seconds": limits.cpu_seconds,
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes if nproc else 0,
            "open_files": limits.open_files,
            "output_bytes": limits.output_bytes,
        }
    )


class DriverBox:
    """See `Box`. Programs run one after another; each takes a slot while it does."""

    def __init__(
        self,
        held: Held,
        stdin: int,
        stdout: int,
        limits: Limits,
        folder: str,
        slot: Callable[[], AbstractAsyncContextManager[None]],
        resources: ExitStack,
        words: Callable[[], str],
    ):
        """Take over a driver that was started.

        Args:
            held: its process.
            stdin: descriptor where it reads orders; ours from here on, as is the next.
            stdout: where it answers.
            limits: `seconds` is the time of a program that is given none.
            folder: its scratch folder, as programs see it.
            slot: where a program waits for its turn.
            resources: closed once all is gone.
            words: what it said of itself, for where it does not answer.
        """
        self._held, self._limits, self._folder = held, limits, PurePosixPath(folder)
        self._slot, self._resources, self._words = slot, resources, words
        self._pipes = stdin, stdout
        self._turn = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False
        self._lost = False

    @property
    def lost(self) -> bool:
        """Whether the driver is gone, though nobody closed this."""
        return self._lost

    async def begin(self) -> None:
        """Wait for the driver.

        Raises:
            SandboxError: it does not come.
        """
        loop = asyncio.get_running_loop()
        stdin, stdout = (
            os.fdopen(fd, mode, 0) for fd, mode in zip(self._pipes, ("wb", "rb"), strict=True)
        )
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, stdout)
        self._resources.callback(_close, transport)
        transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, stdin)
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        await self._ask({"do": "hello"}, START_SECONDS)

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        seconds: float | None = None,
    ) -> Completed:
        """See `Box.run`."""
        seconds = self._limits.seconds if seconds is None else seconds
        if language == "python":
            order = {"do": "cell", "code": _plain(code)}
        else:
            argv = ["bash", "/proc/self/fd/3"]
            order = {"do": "script", "argv": argv, "code": _plain(code)}
        return await self.order_program({**order, "stdin": _plain(stdin), "seconds": seconds})

    async def order_program(self, order: dict[str, Any]) -> Completed:
        """Have the driver run something.

        A driver that is gone with the program was ended by it, for all that can be known: this is
        how the program ended. As a machine's failure, it would undo what a model did before.

        Raises:
            BoxLost: it was gone before.
        """
        began = time.monotonic()
        try:
            async with self._slot():
                began = time.monotonic()
                answer = await self._ask(order, order["seconds"] + GRACE_SECONDS)
        except BoxLost as e:
            if not e.began:
                raise
            log.warning("a program ended its box: %s", e)
            why = "time" if e.silent else "signal"
            took = round(time.monotonic() - began, 4)
            return Completed("", GONE, -signal.SIGKILL, why, took)
        stdout, stderr = (
            clean(shorten(base64.b64decode(answer[name]), self._limits.output_bytes))
            for name in ("stdout", "stderr")
        )
        code, why = answer["exit_code"], answer["ended_by"]
        if not why and code < 0:
            why = "cpu" if -code == signal.SIGXCPU else "signal"
        if answer["lost"]:
            stderr += LOST
        return Completed(stdout, stderr, code, why, round(answer["seconds"], 4))

    async def read(self, path: str, max_bytes: int = 65_536) -> bytes:
        """See `Box.read`."""
        order = {"do": "read", "path": self._below(path), "most": max_bytes}
        return base64.b64decode((await self._ask(order, GRACE_SECONDS))["data"])

    async def write(self, path: str, content: bytes) -> None:
        """See `Box.write`."""
        data = base64.b64encode(content).decode("ascii")
        await self._ask({"do": "write", "path": self._below(path), "data": data}, GRACE_SECONDS)

    async def aclose(self) -> None:
        """See `Box.aclose`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            _close(self._writer.transport)
        self._held.kill()
        try:
            if not await self._held.gone():
                raise SandboxError("a box's processes did not end after they were killed")
        finally:
            self._resources.close()

    def _below(self, path: str) -> str:
        """The path from the scratch folder on."""
        if not path or "\0" in path:
            raise PermissionError(f"{path!r} is no path")
        given = PurePosixPath(path)
        if given.is_absolute():
            if not given.is_relative_to(self._folder):
                raise PermissionError(f"{path} is not below {self._folder}")
            given = given.relative_to(self._folder)
        return str(given)

    async def _ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send an order and wait for its answer.

        Who is cancelled while the order is carried out has it stopped; the next order waits.

        Raises:
            BoxLost: the driver is gone, or silent.
            OSError: of the file that the order is about.
        """
        task = asyncio.ensure_future(self._exchange(order, seconds))
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._turn.locked() and self._writer is not None:
                self._send({"do": "stop"})
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            raise
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"] or os.strerror(answer["errno"]))
        return answer

    async def _exchange(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        async with self._turn:
            reader = self._reader
            if self._closed or reader is None:
                raise SandboxError("this box is closed")
            if self._lost or reader.at_eof():
                self._lost = True
                raise BoxLost("a box is gone", began=False)
            try:
                async with asyncio.timeout(seconds):
                    self._send(order)
                    (length,) = struct.unpack("<I", await reader.readexactly(4))
                    if length > MAX_ANSWER:
                        raise SandboxError(f"a box answers with {length} bytes")
                    return orjson.loads(await reader.readexactly(length))
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as e:
                if self._closed:
                    raise SandboxError("this box was closed") from e
                self._lost = True
                self._held.kill()
                said, silent = self._words().strip(), isinstance(e, TimeoutError)
                why = f"a box {'does not answer' if silent else 'is gone'}"
                raise BoxLost(why + (f": {said}" if said else ""), began=True, silent=silent) from e

    def _send(self, order: dict[str, Any]) -> None:
        assert self._writer is not None
        text = json.dumps(order).encode("ascii")
        self._writer.write(struct.pack("<I", len(text)) + text)


def _close(transport: asyncio.BaseTransport) -> None:
    """Close a pipe, unless its other end was first."""
    if not transport.is_closing():
        transport.close()


def _plain(text: str) -> str:
    """Without what no UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()
