"""A sandbox that stays, for an episode: a driver inside, which takes orders, and our end of it.

LocalSandbox      opens boxes on this machine
Box             what users have: another driver comes where one is gone
Driver          one driver, and what it answers
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import struct
import subprocess
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar

import orjson

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.base import (
    MAX_BOXES,
    Completed,
    Language,
    Limits,
    Sandbox,
    checked_files,
    clean,
    plain,
    shorten,
)

log = logging.getLogger("agentrl.sandbox")

INSIDE = Path(__file__).parent / "inside"
PROGRAMS = {n: (INSIDE / n).read_bytes() for n in ("driver.py", "scratch.py", "cells.py")}
START_SECONDS = 30.0
GRACE_SECONDS = 10.0
"""For the driver, over a program's own time."""
MAX_ANSWER = 128 * 2**20
WORDS_BYTES = 4096
"""Of what the driver (or bwrap) prints of itself."""
LOST = "\n[the Python interpreter was restarted: variables are lost, files are kept]\n"
GONE = "\n[the sandbox was terminated: variables and files are lost]\n"
NEW = "\n[this ran in a new sandbox: earlier variables and files are lost]\n"
TRIES = 3
"""For an order that no box was there to begin."""
_CHUNK = 65_536

T = TypeVar("T")
Slot = Callable[[], AbstractAsyncContextManager[None]]
"""Where a program waits for its turn."""


class BoxLost(SandboxError):
    """A box is gone. What it was asked to do may have begun, or not."""

    def __init__(self, why: str, *, began: bool, silent: bool = False):
        """Say whether the order had been sent, and whether it went unanswered for too long."""
        super().__init__(why)
        self.began, self.silent = began, silent


class DriverProcess(Protocol):
    """The driver's process, however it is isolated."""

    process: subprocess.Popen[bytes]
    """With pipes for stdin, stdout and stderr."""
    fault: str
    """Why it was ended before the driver began, if this machine is the cause."""

    def kill(self) -> None:
        """End it and all that it started."""
        ...

    async def gone(self) -> bool:
        """Wait until all of it has ended; whether it has."""
        ...


def driver_command(
    python: str,
    limits: Limits,
    folder: str,
    sent: str,
    environment: Mapping[str, str],
    *,
    count_processes: bool,
) -> list[str]:
    """The command line of a driver.

    Args:
        python: the interpreter, for the driver and for programs.
        limits: of each program.
        folder: its scratch folder.
        sent: the folder with `PROGRAMS`.
        environment: of programs.
        count_processes: whether `limits.processes` is a limit of theirs.
    """
    told = {
        **asdict(limits),
        "processes": limits.processes if count_processes else 0,
        "python": python,
        "folder": folder,
        "cells": f"{sent}/cells.py",
        "environment": environment,
    }
    return [python, "-I", "-S", "-B", f"{sent}/driver.py", json.dumps(told)]


class LocalSandbox(Sandbox):
    """What the sandboxes on this machine have in common: boxes. Subclasses start their drivers."""

    def __init__(self, config: SandboxConfig):
        super().__init__(config)
        self._boxes: set[Driver] = set()

    async def open(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Box:
        """See `Sandbox.open`."""
        limits = limits or self._limits
        checked = checked_files(files, limits)

        async def opened() -> Driver:
            if len(self._boxes) >= MAX_BOXES:
                raise SandboxError(
                    f"{MAX_BOXES} boxes are open, and no more are opened in a process"
                )
            return await self._begun(self._start(checked, limits, self._slot))

        return Box(await opened(), opened)

    async def aclose(self) -> None:
        """See `Sandbox.aclose`."""
        await asyncio.gather(*(box.aclose() for box in list(self._boxes)))

    @abstractmethod
    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> Driver:
        """Start a driver with these files in its folder."""

    async def _begun(self, driver: Driver) -> Driver:
        """Return a driver once it answers; it is one of ours until it is closed."""
        self._boxes.add(driver)
        driver.resources.callback(self._boxes.discard, driver)
        try:
            await driver.begin()
        except BaseException:
            await driver.aclose()
            raise
        return driver


class Box:
    """A sandbox that stays: one interpreter and one scratch folder, for one episode.

    Calls run one after another. A box begins anew, with the files that it was opened with, where
    its driver is gone. Else a policy could have a rollout that goes badly dropped as a machine's
    failure.
    """

    def __init__(self, driver: Driver, again: Callable[[], Awaitable[Driver]]):
        """Take over a driver.

        Args:
            driver: the first.
            again: starts another like it.
        """
        self._driver, self._again = driver, again
        self._turn = asyncio.Lock()
        self._new = False
        """Whether it is still to be said that this is not the first."""
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        seconds: float | None = None,
    ) -> Completed:
        """Run code. Python keeps its variables from call to call; bash starts anew in the folder.

        A program that passes its time is ended; the variables are lost with it, the files stay. One
        that takes the box along has ended by "signal", or "time"; the next call is in a new box,
        with the files that this one was opened with.

        Args:
            code: the program.
            language: what it is written in.
            stdin: what it reads.
            seconds: at most so long; by default the limit that the box was opened with.

        Raises:
            SandboxError: the box is closed, or is gone and no other can be had.
        """
        order = {"do": "cell", "code": plain(code), "stdin": plain(stdin)}
        if language == "bash":
            order |= {"do": "script", "argv": ["bash", "/proc/self/fd/3"]}
        done = await self._lasting(lambda driver: driver.run(order, seconds))
        if self._new:
            self._new = False
            done = replace(done, stderr=done.stderr + NEW)
        return done

    async def read(self, path: str, max_bytes: int = 65_536) -> bytes:
        """A file of the scratch folder.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: as of any file; a path out of the
                folder, also by a link, is not permitted.
        """
        answer = await self._lasting(lambda driver: driver.ask_file("read", path, most=max_bytes))
        return base64.b64decode(answer["data"])

    async def write(self, path: str, content: bytes) -> None:
        """Write a file of the scratch folder, making the folders on the way.

        Raises:
            PermissionError: a path out of the folder.
            OSError: the folder is full.
        """
        data = base64.b64encode(content).decode("ascii")
        await self._lasting(lambda driver: driver.ask_file("write", path, data=data))

    async def aclose(self) -> None:
        """End all of it; nothing it started is left. Idempotent."""
        self._closed = True
        await self._driver.aclose()

    async def _lasting(self, ask: Callable[[Driver], Awaitable[T]]) -> T:
        """What a driver answers that is there.

        Raises:
            SandboxError: no other can be had, or they go as they come.
        """
        for _ in range(TRIES - 1):
            try:
                return await ask(await self._present())
            except BoxLost:  # with another's program, or before this one's began
                continue
        return await ask(await self._present())

    async def _present(self) -> Driver:
        async with self._turn:
            if self._driver.lost and not self._closed:
                await self._driver.aclose()
                self._driver, self._new = await self._again(), True
                if self._closed:  # meanwhile
                    await self._driver.aclose()
        return self._driver


class Driver:
    """A driver that was started. Programs run one after another, each in a slot."""

    lost = False
    """Whether it is gone, though nobody closed it."""

    def __init__(
        self,
        process: DriverProcess,
        limits: Limits,
        folder: str,
        slot: Slot,
        resources: ExitStack,
    ):
        """Take it over.

        Args:
            process: its own, however it is isolated. It reads orders on its stdin, and answers on
                its stdout.
            limits: `seconds` is the time of a program that is given none.
            folder: its scratch folder, as programs see it.
            slot: where a program waits for its turn.
            resources: closed once all is gone.
        """
        self.process, self._limits, self.folder = process, limits, Path(folder)
        self._slot, self.resources = slot, resources
        self._output = Capture(process.process.stderr, WORDS_BYTES)
        resources.callback(self._output.close)
        self._turn = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False

    @property
    def words(self) -> str:
        """What it said of itself, for where it does not answer."""
        return self._output.text

    async def begin(self) -> None:
        """Wait for the driver.

        Raises:
            SandboxError: it does not come.
        """
        loop, process = asyncio.get_running_loop(), self.process.process
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, process.stdout)
        self.resources.callback(_close, transport)
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, process.stdin
        )
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        await self._ask({"do": "hello"}, START_SECONDS)

    async def run(self, order: Mapping[str, Any], seconds: float | None = None) -> Completed:
        """Have the driver run something.

        A driver that is gone with the program was ended by it, for all that can be known: this is
        how the program ended. As a machine's failure, it would undo what a model did before.

        Raises:
            BoxLost: it was gone before.
        """
        seconds = self._limits.seconds if seconds is None else seconds
        began = time.monotonic()
        try:
            async with self._slot():
                began = time.monotonic()
                answer = await self._ask({**order, "seconds": seconds}, seconds + GRACE_SECONDS)
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

    async def ask_file(self, do: str, path: str, **order: Any) -> dict[str, Any]:
        """Have the driver read or write a file.

        Raises:
            OSError: of the file; a path out of the folder is not permitted.
        """
        return await self._ask({"do": do, "path": self._below(path), **order}, GRACE_SECONDS)

    async def aclose(self) -> None:
        """See `Box.aclose`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            _close(self._writer.transport)
        self.process.kill()
        try:
            if not await self.process.gone():
                raise SandboxError("a box's processes did not end after they were killed")
        finally:
            self.resources.close()

    def _below(self, path: str) -> str:
        """The path from the scratch folder on."""
        if not path or "\0" in path:
            raise PermissionError(f"{path!r} is no path")
        given = PurePosixPath(path)
        if given.is_absolute():
            if not given.is_relative_to(self.folder):
                raise PermissionError(f"{path} is not below {self.folder}")
            given = given.relative_to(self.folder)
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
            if self.lost or reader.at_eof():
                self.lost = True
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
                self.lost = True
                self.process.kill()
                said, silent = self.words.strip(), isinstance(e, TimeoutError)
                why = f"a box {'does not answer' if silent else 'is gone'}"
                raise BoxLost(why + (f": {said}" if said else ""), began=True, silent=silent) from e

    def _send(self, order: dict[str, Any]) -> None:
        assert self._writer is not None
        text = json.dumps(order).encode("ascii")
        self._writer.write(struct.pack("<I", len(text)) + text)


class Capture:
    """Reads the end of a pipe until it is closed, or holds more than was asked for."""

    def __init__(
        self, pipe: IO[bytes] | None, most: int, on_flood: Callable[[], None] = lambda: None
    ):
        """Start reading; the pipe is ours from here on.

        Args:
            pipe: its end.
            most: bytes to take. A little more is kept, so that something can be left out.
            on_flood: called once, when there are more. Of what comes afterwards nothing is kept.
        """
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        self.content = bytearray()
        self._loop = asyncio.get_running_loop()
        self._pipe, self._most, self._on_flood = pipe, most, on_flood
        self._flooded = False
        self._loop.add_reader(pipe, self._read)

    @property
    def text(self) -> str:
        """What was said, shortened and cleaned."""
        return clean(shorten(bytes(self.content), self._most))

    def close(self) -> None:
        """Stop reading."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe)
            self._pipe.close()

    def drain(self) -> None:
        """Read what is there now, and close: once nobody is left who could write more."""
        while not self._pipe.closed and self._read():
            pass
        self.close()

    def _read(self) -> bool:
        """Whether there was something."""
        read = self._pipe.read(_CHUNK)
        if read is None:  # nothing is there
            return False
        if not read:
            self.close()
        elif not self._flooded:
            self.content += read
            if len(self.content) > self._most:
                self._flooded = True
                self._on_flood()
        return bool(read)


def _close(transport: asyncio.BaseTransport) -> None:
    """Close a pipe, unless its other end was first."""
    if not transport.is_closing():
        transport.close()
