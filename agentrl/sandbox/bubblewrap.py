"""Programs in namespaces of their own, by bubblewrap: no network, no files, no rights.

Each gets a file system of its own (/usr for reading, a small /tmp for writing), a network without
anything in it, no capabilities, a filter of system calls, rlimits, a cgroup where one can be made,
and, where we are root, a user id of its own. Process 1 of the namespace is the program itself where
that was asked for, else a shell that waits for it: where process 1 ends, the kernel ends whatever
else is in there, before bwrap is told. So when bwrap is gone, all of it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Completed, EndedBy, Limits, Program
from agentrl.sandbox.box import (
    PROGRAMS,
    Capture,
    Driver,
    LocalSandbox,
    Slot,
    driver_command,
)
from agentrl.sandbox.cgroup import Cgroup, memory_limit
from agentrl.sandbox.namespace import (
    ENVIRONMENT,
    FOLDER,
    SHELL,
    Files,
    advice,
    bwrap_command,
    rlimit_command,
)
from agentrl.sandbox.uids import own_user

SETUP_SECONDS = 30.0
"""For bwrap to make its namespaces; longer is this machine's doing, not the program's."""
END_SECONDS = 10.0
"""For a killed namespace to be gone: of many processes it can take the kernel seconds."""
SENT = "/agentrl"
"""Where programs of ours are, in a box."""


class Bubblewrap(LocalSandbox):
    """The sandbox of `sandbox.backend=bubblewrap`."""

    name = "bubblewrap"

    async def _run(self, program: Program) -> Completed:
        python, limits, stdin = self._config.python, program.limits, program.stdin
        script = "/main.py" if program.language == "python" else "/main.sh"
        scripts = {script: program.code.encode("utf-8", "surrogatepass")}
        with Files() as given, own_user() as uid, memory_limit(limits) as cgroup:
            options = bwrap_command(python, limits, given, program.files, scripts, uid)
            command = [] if program.init else ["sh", "-c", SHELL, "sh"]
            command += [*rlimit_command(limits), *program.words(python), script]
            read = (
                given.add(stdin.encode("utf-8", "surrogatepass")) if stdin else subprocess.DEVNULL
            )
            return await _run([options, command], given, read, limits, cgroup)

    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> Driver:
        python, programs = self._config.python, {f"{SENT}/{n}": c for n, c in PROGRAMS.items()}
        with ExitStack() as opened, Files() as given:
            uid = opened.enter_context(own_user())
            cgroup = opened.enter_context(memory_limit(limits))
            options = bwrap_command(python, limits, given, files, programs, uid)
            command = driver_command(
                python, limits, FOLDER, SENT, ENVIRONMENT, count_processes=True
            )
            child = Child([options, command], given, subprocess.PIPE, cgroup, lambda: None)
            return Driver(child, limits, FOLDER, slot, opened.pop_all())

    async def _begun(self, driver: Driver) -> Driver:
        try:
            return await super()._begun(driver)
        except SandboxError as e:
            raise SandboxError(driver.process.fault or advice(driver.words)) from e


async def _run(
    command: Sequence[list[str]],
    given: Files,
    stdin: int,
    limits: Limits,
    cgroup: Cgroup | None,
) -> Completed:
    """Run a command of bwrap's to its end, and see that nothing of it is left.

    Raises:
        SandboxError: it never ran, or something is left.
    """
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(SETUP_SECONDS, lambda: child.kill())]

    def begin() -> None:
        timers.pop().cancel()
        timers.append(loop.call_later(limits.seconds, lambda: child.kill("time")))

    child = Child(command, given, stdin, cgroup, begin)
    outputs = [
        Capture(pipe, limits.output_bytes, lambda: child.kill("output"))
        for pipe in (child.process.stdout, child.process.stderr)
    ]
    ended = 0.0
    try:
        await child.ended()
        ended = time.monotonic()
    finally:
        for timer in timers:
            timer.cancel()
        child.kill()
        gone = await child.gone()
        for output in outputs:
            output.drain()
    if not gone:
        raise SandboxError("a program's processes did not end after they were killed")
    if child.fault:
        raise SandboxError(child.fault)
    stdout, stderr = (output.text for output in outputs)
    if child.exit_code is None and not child.killed:
        raise SandboxError(advice(stderr))
    code, why = _ending(child, limits)
    return Completed(stdout, stderr, code, why, round(ended - child.began, 4))


def _ending(child: Child, limits: Limits) -> tuple[int, EndedBy]:
    """Exit code and what ended it; a shell says of signal N: 128 + N."""
    if child.killed:
        return -signal.SIGKILL, child.killed
    code = child.exit_code or 0
    if not 128 < code <= 128 + signal.NSIG:
        return code, ""
    number = code - 128
    # Asked to stop, then killed, where its time on the processor is over.
    killed = number == signal.SIGKILL and child.cpu_seconds >= limits.cpu_seconds
    if number == signal.SIGXCPU or killed:
        return -number, "cpu"
    return -number, "signal"


class Child:
    """A command line of bwrap's, started."""

    killed: EndedBy = ""
    """The limit for which it was."""
    fault: str = ""
    """Why it was ended before the program began, if this machine is the cause."""

    def __init__(
        self,
        command: Sequence[list[str]],
        given: Files,
        stdin: int,
        cgroup: Cgroup | None,
        on_begin: Callable[[], None],
    ):
        """Start it. It ends with the thread that is here, by whatever death.

        Args:
            command: bwrap with its options, and what it runs.
            given: what it finds as descriptors; ours are closed.
            stdin: a descriptor, or `subprocess.PIPE`.
            cgroup: for all that runs in the namespace, but not for bwrap itself: were that ended
                for its program's memory, it would look like a fault of this machine.
            on_begin: called once there is a namespace.
        """
        self._loop = asyncio.get_running_loop()
        self._said = b""
        self._cgroup = cgroup
        self._on_begin = on_begin
        self._init = -1
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.began = 0.0
        """When there was a namespace, as `time.monotonic()` says; 0 until then."""
        self.exit_code: int | None = None
        """As a shell says it; None where the program never ran, or was killed."""
        self.cpu_seconds = 0.0
        options, program = command
        ours, status = os.pipe()
        self._status = os.fdopen(ours, "rb", 0)
        options += ["--json-status-fd", str(given.take(status))]
        self._gate = ExitStack()
        if cgroup is not None:  # it waits until this pipe is closed before it starts the program
            gate, ours = os.pipe()
            self._gate.callback(os.close, ours)
            options += ["--block-fd", str(given.take(gate))]
        try:
            self.process = subprocess.Popen(
                [*options, *program],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=given.fds,
                cwd="/",
                env={},
            )
        except BaseException:
            self._status.close()
            self._gate.close()
            raise
        given.close()
        os.set_blocking(self._status.fileno(), False)
        self._loop.add_reader(self._status, self._read_status)

    def kill(self, why: EndedBy = "") -> None:
        """End everything in there, by ending its process 1; bwrap sees to the rest. Idempotent."""
        self.killed = self.killed or why
        with contextlib.suppress(ProcessLookupError):
            if self._init >= 0:
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            elif self.process.returncode is None:
                self.process.kill()

    async def gone(self) -> bool:
        """Wait for the end of all of it; whether it is known to have come."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await asyncio.shield(self._ended)
                # bwrap has waited for process 1, unless somebody killed bwrap itself.
                while self._init >= 0 and not _has_ended(self._init):
                    await asyncio.sleep(0.01)
                while not self._reaped():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            self.process.kill()
            return False
        finally:
            self._close_status()
            if self._init >= 0:
                os.close(self._init)
                self._init = -1
        return True

    async def ended(self) -> None:
        """Wait until it ends by itself or by `kill`."""
        await asyncio.shield(self._ended)

    def _reaped(self) -> bool:
        if self.process.returncode is not None:
            return True
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return True

    def _read_status(self) -> None:
        read = self._status.read(4096)
        if read is None:  # nothing is there
            return
        self._said += read
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "child-pid" in said:
                with contextlib.suppress(ProcessLookupError):
                    self._init = os.pidfd_open(said["child-pid"])
                self.began = time.monotonic()
                self._limit_memory(said["child-pid"])
                self._on_begin()
            self.exit_code = said.get("exit-code", self.exit_code)
        if not read:
            self._close_status()

    def _limit_memory(self, init: int) -> None:
        """Move process 1 into the cgroup, then let it start the program."""
        try:
            if self._cgroup is not None:
                self._cgroup.add(init)
        except ProcessLookupError:  # it was killed meanwhile
            pass
        except OSError as e:
            assert self._cgroup is not None
            self.fault = f"no process can be moved to {self._cgroup.folder}: {e.strerror}"
            self.kill()
        else:
            self._gate.close()

    def _close_status(self) -> None:
        self._gate.close()
        if not self._status.closed:
            self._loop.remove_reader(self._status)
            self._status.close()
            self._ended.set_result(None)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
