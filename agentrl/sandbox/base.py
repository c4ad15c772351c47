"""What a sandbox is: a place where code that a model wrote runs, and what came of it.

Sandbox    what users see, and what all backends share: slots, limits, files that are checked
"""

from __future__ import annotations

import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, NamedTuple

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError

if TYPE_CHECKING:
    from agentrl.sandbox.box import Box

WAIT_SECONDS = 60.0
"""For a free slot. Who waits longer waits for a machine that does not keep up."""
MAX_BOXES = 1024
FILES_OF_PROGRAM, FILES_OF_BOX = 12, 6
"""Descriptors: pipes while a program runs, and for a moment the files that it is given."""
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

Language = Literal["python", "bash"]
EndedBy = Literal["", "time", "cpu", "output", "signal"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Whatever passes a limit is ended with all that it started."""

    seconds: float = 10.0
    """Of the wall clock."""
    cpu_seconds: int = 10
    memory_mb: int = 2048
    """MiB of address space, of each process. `sandbox/cgroup.py` limits all of them together."""
    disk_mb: int = 64
    """MiB it may write in all, and in one file."""
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 65_536
    """Of stdout and of stderr: of more, the head and the tail are kept, and the program ends."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended, and what it said: text that can be encoded and stored."""

    stdout: str
    stderr: str
    exit_code: int
    """Below 0: the number of the signal that ended it."""
    ended_by: EndedBy = ""
    """The limit that ended it, or "signal" where it crashed by itself; "" where it exited."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it exited by itself, with 0."""
        return self.exit_code == 0 and not self.ended_by


class Program(NamedTuple):
    """One program to run, as `Sandbox.run` describes it."""

    code: str
    language: Language
    stdin: str
    files: Mapping[str, bytes]
    limits: Limits
    init: bool

    def words(self, python: str) -> list[str]:
        """The interpreter's part of its command line."""
        return [python, "-s"] if self.language == "python" else ["bash"]


class Sandbox(ABC):
    """Runs programs in isolation, at most so many at once. Belongs to one event loop."""

    name: str
    """For people: `bubblewrap`, `unsafe-subprocess`, `SandboxFusion at URL`."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._limits = default_limits(config)
        self._slots = slot_count(config.slots)
        self._free_slots = asyncio.Semaphore(self._slots)

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        init: bool = False,
    ) -> Completed:
        """Run one program in a folder of its own, which is gone afterwards.

        Args:
            code: the program; it reaches the interpreter as a file.
            language: what it is written in.
            stdin: what it reads.
            files: by relative path, what lies in its folder.
            limits: by default those of the section `sandbox`.
            init: run it as process 1 of its namespace, where the backend makes one for each
                program (bubblewrap does). No process that it starts can end or stop it.

        Raises:
            SandboxError: it could not be run, or could not be run in isolation: infrastructure,
                never the program's doing.
        """
        limits = limits or self._limits
        program = Program(code, language, stdin, checked_files(files, limits), limits, init)
        async with self._slot():
            return await self._run(program)

    @abstractmethod
    async def _run(self, program: Program) -> Completed:
        """Run a program that has a slot."""

    @abstractmethod
    async def open(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Box:
        """A box that stays until it is closed; `limits.seconds` is for each program in it.

        Raises:
            SandboxError: none can be had, or this backend has none.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End all that runs."""

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """A slot for the time of the block. Waiting for it is not part of a program's time.

        Raises:
            SandboxError: none became free.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free_slots.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no program could be started within {WAIT_SECONDS:g} s: all {self._slots} slots"
                " are taken. Set sandbox.slots higher where there are cores for it,"
                " sandbox.timeout_s lower, or play fewer rollouts at once"
            ) from None
        try:
            yield
        finally:
            self._free_slots.release()


def default_limits(config: SandboxConfig) -> Limits:
    """The limits of the section `sandbox`."""
    return Limits(
        seconds=config.timeout_s,
        cpu_seconds=max(1, round(config.timeout_s)),
        memory_mb=config.memory_mb,
    )


def slot_count(slots: int) -> int:
    """Return how many programs run at once: `sandbox.slots`, where 0 means twice the cores."""
    return slots or 2 * len(os.sched_getaffinity(0))


def checked_files(files: Mapping[str, bytes] | None, limits: Limits) -> dict[str, bytes]:
    """The files for a program's folder.

    Raises:
        ValueError: a path that is not below the folder, or more than the folder may hold.
    """
    files = dict(files or {})
    for name in files:
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{name!r} is no path below the program's folder")
    size = sum(map(len, files.values()))
    if size > limits.disk_mb * 2**20:
        raise ValueError(f"files of {size} bytes do not fit {limits.disk_mb} MiB (Limits.disk_mb)")
    return files


def plain(text: str) -> str:
    """Without what no UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def clean(content: bytes) -> str:
    """Text that can be encoded and shown: no NUL; escape sequences begin with a visible x1b."""
    text = content.decode("utf-8", "replace").replace("\0", "")
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", text)


def shorten(content: bytes, most: int) -> bytes:
    """The head and the tail of what is longer, and how much is between them."""
    if len(content) <= most:
        return content
    head, tail = content[: most - most // 2], content[len(content) - most // 2 :]
    return head + b"\n[%d bytes omitted]\n" % (len(content) - most) + tail
