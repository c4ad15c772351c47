"""A box: a sandbox that stays open for an episode. A driver inside executes requests.

Box               the interface for tools; it starts a new driver if a driver is lost
DriverConnection  the connection to one driver
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
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar

import orjson

from agentrl.errors import SandboxError
from agentrl.sandbox.program import (
    Completed,
    Language,
    Limits,
    clean_input,
    readable_output,
)

log = logging.getLogger("agentrl.sandbox")

INSIDE = Path(__file__).parent / "inside"
PROGRAMS = {
    n: (INSIDE / n).read_bytes() for n in ("driver.py", "descendants.py", "scratch.py", "cells.py")
}
PROGRAMS_FOLDER = "/agentrl"
"""The folder of these files, in the sandbox."""
START_SECONDS = 30.0
GRACE_SECONDS = 10.0
"""The time that the driver has to answer, in addition to the program's time."""
MAX_ANSWER = 128 * 2**20
DRIVER_OUTPUT_BYTES = 4096
"""The number of bytes that are kept of the output of the driver itself (or of bwrap)."""
RESTARTED_NOTE = "\n[the Python interpreter was restarted: variables are lost, files are kept]\n"
TERMINATED_NOTE = "\n[the sandbox was terminated: variables and files are lost]\n"
NEW_SANDBOX_NOTE = "\n[this ran in a new sandbox: earlier variables and files are lost]\n"
TRIES = 3
"""The maximum number of attempts of a request that no driver has begun."""
_CHUNK = 65_536

T = TypeVar("T")
Slot = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager that holds a slot for a program."""


class BoxLost(SandboxError):
    """The driver of a box is lost. The request may or may not have begun."""

    def __init__(self, why: str, *, began: bool, timed_out: bool = False):
        """Create the error.

        Args:
            why: the message.
            began: whether the request was sent.
            timed_out: whether the answer did not arrive in time.
        """
        super().__init__(why)
        self.began, self.timed_out = began, timed_out


class DriverProcess(Protocol):
    """The process of a driver. Each local backend has its own implementation."""

    process: subprocess.Popen[bytes]
    """The process, with pipes for stdin, stdout and stderr."""
    fault: str
    """Why agentrl killed the process before the driver started; "" if it did not."""

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        ...

    async def wait_until_ended(self) -> bool:
        """Wait until all its processes have ended; return False if they did not end in time."""
        ...


def driver_command(
    python: str,
    limits: Limits,
    folder: str,
    programs_folder: str,
    environment: Mapping[str, str],
    *,
    count_processes: bool,
    remove: str = "",
) -> list[str]:
    """Return the command line of a driver.

    Args:
        python: the interpreter of the driver and of programs.
        limits: the limits of each program.
        folder: the scratch folder.
        programs_folder: the folder with `PROGRAMS`.
        environment: the environment variables of programs.
        count_processes: whether `limits.processes` applies.
        remove: a folder that the driver deletes if this process is killed.
    """
    settings = {
        **asdict(limits),
        "processes": limits.processes if count_processes else 0,
        "python": python,
        "folder": folder,
        "cells": f"{programs_folder}/cells.py",
        "environment": environment,
        "remove": remove,
    }
    return [python, "-I", "-S", "-B", f"{programs_folder}/driver.py", json.dumps(settings)]


class Box:
    """A sandbox for one episode, with one interpreter and one scratch folder.

    Calls run one after another. If the driver is lost, the box starts a new driver with the initial
    files. An error would be an infrastructure failure and drop the rollout. Then a policy could
    learn to drop rollouts with a low reward.
    """

    def __init__(
        self, driver: DriverConnection, restart: Callable[[], Awaitable[DriverConnection]]
    ):
        """Create a box with a driver that runs.

        Args:
            driver: the first driver.
            restart: starts another driver with the same files.
        """
        self.driver, self._restart = driver, restart
        self._lock = asyncio.Lock()
        self._was_replaced = False
        """True if the next result must contain a note that the driver is new."""
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        seconds: float | None = None,
    ) -> Completed:
        """Run code. Python keeps its variables; each bash call starts in the same folder.

        A program that exceeds its time is killed; the variables are lost and the files are kept. If
        the program kills the driver, `ended_by` is "signal" or "time", and the next call runs in a
        new driver with the initial files.

        Args:
            code: the program.
            language: the language of the program.
            stdin: the standard input of the program.
            seconds: the time limit; by default the limit of the box.

        Raises:
            SandboxError: the box is closed, or its driver was lost and no other can be started.
        """
        request = {"do": "cell", "code": clean_input(code), "stdin": clean_input(stdin)}
        if language == "bash":
            request |= {"do": "script", "argv": ["bash", "/proc/self/fd/3"]}
        done = await self._with_driver(lambda driver: driver.run(request, seconds))
        if self._was_replaced:
            self._was_replaced = False
            done = replace(done, stderr=done.stderr + NEW_SANDBOX_NOTE)
        return done

    async def read(self, path: str, max_bytes: int = 65_536) -> bytes:
        """Return the first bytes of a file of the scratch folder; at most 96 MiB can be read.

        Raises:
            FileNotFoundError, IsADirectoryError: as `open` does.
            PermissionError: the path leads out of the folder, possibly through a link.
        """
        answer = await self._with_driver(
            lambda driver: driver.file_request("read", path, max_bytes=max_bytes)
        )
        return base64.b64decode(answer["data"])

    async def write(self, path: str, content: bytes) -> None:
        """Write a file of the scratch folder and create its parent folders.

        Raises:
            PermissionError: the path leads out of the folder.
            OSError: the folder is full.
        """
        data = base64.b64encode(content).decode("ascii")
        await self._with_driver(lambda driver: driver.file_request("write", path, data=data))

    async def aclose(self) -> None:
        """End all processes of the box. Idempotent."""
        self._closed = True
        await self.driver.aclose()

    async def _with_driver(self, send: Callable[[DriverConnection], Awaitable[T]]) -> T:
        """Send a request to a running driver, and return its answer.

        Raises:
            SandboxError: no new driver can be started, or the new drivers are lost at once.
        """
        for _ in range(TRIES - 1):
            try:
                return await send(await self._live_driver())
            except BoxLost:  # lost with an earlier program, or before this one began
                continue
        return await send(await self._live_driver())

    async def _live_driver(self) -> DriverConnection:
        async with self._lock:
            if self.driver.lost and not self._closed:
                await self.driver.aclose()
                self.driver, self._was_replaced = await self._restart(), True
                if self._closed:  # the box was closed meanwhile
                    await self.driver.aclose()
        return self.driver


class DriverConnection:
    """The connection to a driver. Programs run one after another, each in a slot."""

    lost = False
    """True if the driver ended although nobody closed it."""

    def __init__(
        self, process: DriverProcess, limits: Limits, folder: str, slot: Slot, resources: ExitStack
    ):
        """Connect to a driver that was started.

        Args:
            process: the driver's process. It reads requests from stdin and answers on stdout.
            limits: the limits of programs; `seconds` is the default.
            folder: the scratch folder, as programs see it.
            slot: holds a slot for a program.
            resources: the resources to close when all processes have ended.
        """
        self.process, self._limits, self.folder = process, limits, Path(folder)
        self._slot, self.resources = slot, resources
        self._output = Capture(process.process.stderr, DRIVER_OUTPUT_BYTES)
        resources.callback(self._output.close)
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False

    @property
    def output(self) -> str:
        """The text that the driver printed to stderr, for error messages."""
        return self._output.text

    async def wait_until_ready(self) -> None:
        """Wait for the driver's first answer.

        Raises:
            SandboxError: the driver does not answer.
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
        await self._request({"do": "hello"}, START_SECONDS)

    async def use(self, limits: Limits, slot: Slot, settings: dict[str, Any]) -> None:
        """Set the limits of programs and their slot, for a driver that was started before.

        Raises:
            BoxLost: the driver has ended.
        """
        self._limits, self._slot = limits, slot
        await self._request({"do": "hello", **settings}, GRACE_SECONDS)

    async def run(self, request: Mapping[str, Any], seconds: float | None = None) -> Completed:
        """Let the driver run a program.

        If the driver is lost during the program, the program is treated as the cause: the result is
        a program that was killed. An infrastructure failure would discard the whole rollout.

        Raises:
            BoxLost: the driver was lost before the program began.
        """
        seconds = self._limits.seconds if seconds is None else seconds
        start = time.monotonic()
        try:
            async with self._slot():
                start = time.monotonic()
                answer = await self._request(
                    {**request, "seconds": seconds}, seconds + GRACE_SECONDS
                )
        except BoxLost as e:
            if not e.began:
                raise
            log.warning("a program terminated its sandbox: %s", e)
            why = "time" if e.timed_out else "signal"
            seconds_run = round(time.monotonic() - start, 4)
            return Completed("", TERMINATED_NOTE, -signal.SIGKILL, why, seconds_run)
        stdout, stderr = (
            readable_output(base64.b64decode(answer[name]), self._limits.output_bytes)
            for name in ("stdout", "stderr")
        )
        code, why = answer["exit_code"], answer["ended_by"]
        if not why and code < 0:
            why = "cpu" if -code == signal.SIGXCPU else "signal"
        if answer["lost"]:
            stderr += RESTARTED_NOTE
        return Completed(stdout, stderr, code, why, round(answer["seconds"], 4))

    async def file_request(self, do: str, path: str, **request: Any) -> dict[str, Any]:
        """Let the driver read or write a file.

        Raises:
            OSError: the file cannot be read or written.
            PermissionError: the path leads out of the folder.
        """
        return await self._request(
            {"do": do, "path": self._relative_path(path), **request}, GRACE_SECONDS
        )

    async def aclose(self) -> None:
        """End the driver and all its processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None and not self._writer.transport.is_closing():
            # At the end of its input without this request, the driver deletes its folder.
            self._send({"do": "close"})
            self._writer.transport.close()
        self.process.kill()
        try:
            if not await self.process.wait_until_ended():
                raise SandboxError("the processes of a box did not end after they were killed")
        finally:
            self.resources.close()

    def _relative_path(self, path: str) -> str:
        """Return a path relative to the scratch folder."""
        if not path or "\0" in path:
            raise PermissionError(f"{path!r} is not a valid path")
        relative = PurePosixPath(path)
        if relative.is_absolute():
            if not relative.is_relative_to(self.folder):
                raise PermissionError(f"{path} is not below {self.folder}")
            relative = relative.relative_to(self.folder)
        return str(relative)

    async def _request(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        If the caller is cancelled, the driver stops the program; the next request waits for that.

        Raises:
            BoxLost: the driver is lost, or does not answer in time.
            OSError: the error of the file that the request names.
        """
        task = asyncio.ensure_future(self._exchange(request, seconds))
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._lock.locked() and self._writer is not None:
                self._send({"do": "stop"})
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            raise
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"] or os.strerror(answer["errno"]))
        return answer

    async def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        async with self._lock:
            reader = self._reader
            if self._closed or reader is None:
                raise SandboxError("the box is closed")
            if self.lost or reader.at_eof():
                self.lost = True
                raise BoxLost("the driver of a box has ended", began=False)
            try:
                async with asyncio.timeout(seconds):
                    self._send(request)
                    (length,) = struct.unpack("<I", await reader.readexactly(4))
                    if length > MAX_ANSWER:
                        for start in range(0, length, _CHUNK):  # The next answer follows it.
                            await reader.readexactly(min(_CHUNK, length - start))
                        raise SandboxError(
                            f"the driver of a box sent {length} bytes, more than {MAX_ANSWER}"
                        )
                    return orjson.loads(await reader.readexactly(length))
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as e:
                if self._closed:
                    raise SandboxError("the box was closed during the request") from e
                self.lost = True
                self.process.kill()
                message, timed_out = self.output.strip(), isinstance(e, TimeoutError)
                why = f"the driver of a box {'does not answer' if timed_out else 'has ended'}"
                raise BoxLost(
                    why + (f": {message}" if message else ""), began=True, timed_out=timed_out
                ) from e

    def _send(self, request: dict[str, Any]) -> None:
        assert self._writer is not None
        text = json.dumps(request).encode("ascii")
        self._writer.write(struct.pack("<I", len(text)) + text)


class Capture:
    """Reads a pipe until it is closed, and keeps a limited number of bytes."""

    def __init__(
        self, pipe: IO[bytes] | None, max_bytes: int, on_overflow: Callable[[], None] = lambda: None
    ):
        """Start reading.

        Args:
            pipe: the reading end, which is closed with this object.
            max_bytes: the number of bytes to keep. A little more is stored, so that an overflow can
                be detected.
            on_overflow: called once when there are more bytes. All later bytes are discarded.
        """
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        self.content = bytearray()
        self._loop = asyncio.get_running_loop()
        self._pipe, self._max_bytes, self._on_overflow = pipe, max_bytes, on_overflow
        self._has_overflowed = False
        self._loop.add_reader(pipe, self._read)

    @property
    def text(self) -> str:
        """The content, shortened and cleaned."""
        return readable_output(bytes(self.content), self._max_bytes)

    def close(self) -> None:
        """Stop reading and close the pipe."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe)
            self._pipe.close()

    def drain(self) -> None:
        """Read the rest and close the pipe. Call it when no process can write any more."""
        while not self._pipe.closed and self._read():
            pass
        self.close()

    def _read(self) -> bool:
        """Read once, and return whether the pipe contained data."""
        data = self._pipe.read(_CHUNK)
        if data is None:  # the pipe is empty
            return False
        if not data:
            self.close()
        elif not self._has_overflowed:
            self.content += data
            if len(self.content) > self._max_bytes:
                self._has_overflowed = True
                self._on_overflow()
        return bool(data)


def _close(transport: asyncio.BaseTransport) -> None:
    """Close a transport, unless it is already closing."""
    if not transport.is_closing():
        transport.close()
