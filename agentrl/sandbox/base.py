"""The interface of a sandbox, which runs code that a model wrote, and code that all backends share.

Sandbox       runs programs: slots, limits, checks of files
LocalSandbox  also opens boxes, on this machine
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.box import PROGRAMS_FOLDER, Box, DriverConnection, Slot
from agentrl.sandbox.program import (
    MAX_BOXES,
    Completed,
    Language,
    Limits,
    Program,
    check_files,
    clean_input,
    default_limits,
    slot_count,
)

SLOT_SECONDS = 60.0
"""The longest time that a program waits for a free slot. After that, the machine is overloaded."""


class Sandbox(ABC):
    """Runs programs in isolation, a limited number at a time. Belongs to one event loop."""

    name: str
    """The name in messages: `bubblewrap`, `unsafe-subprocess`, `SandboxFusion at URL`."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._python = config.python
        self._limits = default_limits(config)
        self.slots = slot_count(config.slots)
        """How many programs run at the same time."""
        self._free_slots = asyncio.Semaphore(self.slots)

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        init: bool = False,
        image: str = "",
    ) -> Completed:
        """Run one program in its own folder, which is deleted afterwards.

        Args:
            code: the program. The interpreter gets it as a file.
            language: the language of the program.
            stdin: the standard input of the program.
            files: the files in the program's folder, by relative path.
            limits: the limits of the program; by default the limits of the section `sandbox`.
            init: run the program as process 1 of a PID namespace, if the backend creates one for
                each program (bubblewrap does). Then no process that it starts can kill or stop it.
            image: the image of the program's container, one of `sandbox.images`; by default the
                first. Only for docker and podman.

        Raises:
            SandboxError: the program could not be run in isolation. This is a failure of the
                infrastructure, never of the program.
        """
        limits = limits or self._limits
        self.check_image(image)
        program = Program(code, language, stdin, check_files(files, limits), limits, init, image)
        async with self._slot():
            try:
                return await self._run(program)
            except OSError as e:
                raise SandboxError(f"{self.name} cannot run a program: {e}") from e

    def check_image(self, image: str) -> None:
        """Raise SandboxError if programs cannot run in this image; "" is the default."""
        if image:
            raise SandboxError(
                f"{self.name} has no images, so image={image!r} needs sandbox.backend=docker or"
                " podman"
            )

    @abstractmethod
    async def _run(self, program: Program) -> Completed:
        """Run a program. The caller holds a slot for it."""

    async def open(
        self,
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        image: str = "",
    ) -> Box:
        """Open a box, which stays open between programs. `limits.seconds` applies to each program.

        Args:
            files: the files in the box's folder, by relative path.
            limits: the limits of each program; by default the limits of the section `sandbox`.
            image: the image of the box's container, as in `run`.

        Raises:
            SandboxError: no box can be opened, or the backend does not support boxes.
        """
        limits = limits or self._limits
        self.check_image(image)
        initial_files = check_files(files, limits)

        async def start() -> DriverConnection:
            return await self._start_driver(initial_files, limits, image)

        return Box(await start(), start)

    async def _start_driver(
        self, files: Mapping[str, bytes], limits: Limits, image: str
    ) -> DriverConnection:
        """Start the driver of a box. Backends without boxes raise SandboxError."""
        raise SandboxError(
            f"{self.name} cannot keep variables or files between calls. Set"
            " sandbox.backend=bubblewrap, or use a tool that runs whole programs, such as"
            " shelf:python"
        )

    @abstractmethod
    async def aclose(self) -> None:
        """End all programs and boxes."""

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block. The wait for it does not count as the program's time.

        Raises:
            SandboxError: no slot became free in time.
        """
        try:
            async with asyncio.timeout(SLOT_SECONDS):
                await self._free_slots.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no program could be started within {SLOT_SECONDS:g} s: all {self.slots} slots"
                " are taken. Set sandbox.slots higher if there are enough cores,"
                " sandbox.timeout_s lower, or play fewer rollouts at once"
            ) from None
        try:
            yield
        finally:
            self._free_slots.release()


class LocalSandbox(Sandbox):
    """A sandbox on this machine, with boxes. Subclasses start the drivers."""

    def __init__(self, config: SandboxConfig):
        super().__init__(config)
        self.drivers: set[DriverConnection] = set()
        """The drivers of the open boxes."""

    async def _start_driver(
        self, files: Mapping[str, bytes], limits: Limits, image: str
    ) -> DriverConnection:
        if len(self.drivers) >= MAX_BOXES:
            raise SandboxError(f"this process has {MAX_BOXES} open boxes, which is the maximum")
        try:
            return await self._connect(files, limits, self._slot, image)
        except OSError as e:
            raise SandboxError(f"{self.name} cannot start a box: {e}") from e

    async def _run(self, program: Program) -> Completed:
        """Run a program by a driver of its own."""
        # The program already has a slot.
        driver = await self._connect(
            program.files, program.limits, contextlib.nullcontext, program.image
        )
        try:
            path = str(self._script_folder(driver) / program.script)
            return await driver.run(
                {
                    "do": "script",
                    "argv": [*program.interpreter_command(self._python), path],
                    "code": program.code,
                    "path": path,
                    "stdin": clean_input(program.stdin),
                }
            )
        finally:
            await driver.aclose()

    def _script_folder(self, driver: DriverConnection) -> Path:
        """Return the folder for the code of a program, in the sandbox."""
        return Path(PROGRAMS_FOLDER)

    async def aclose(self) -> None:
        await asyncio.gather(*(box.aclose() for box in list(self.drivers)))

    @abstractmethod
    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> DriverConnection:
        """Start a driver with these files in its folder."""

    async def _connect(
        self, files: Mapping[str, bytes], limits: Limits, slot: Slot, image: str
    ) -> DriverConnection:
        """Start a driver with these files in its folder, and wait until it answers."""
        return await self._begin(self._start(files, limits, slot))

    async def _begin(self, driver: DriverConnection) -> DriverConnection:
        """Wait until a driver answers. It is in `_boxes` until it is closed."""
        self.drivers.add(driver)
        driver.resources.callback(self.drivers.discard, driver)
        try:
            await driver.wait_until_ready()
        except BaseException:
            await driver.aclose()
            raise
        return driver
