"""Run programs in namespaces with bubblewrap: without network, files and privileges.

Each program has its own file system (/usr read-only, a small writable /tmp), an empty network, no
capabilities, a filter of system calls, rlimits, a cgroup if one can be created, and its own user id
if this process is root. Process 1 of the PID namespace is the program itself if `init` is set, else
a shell that waits for the program. When process 1 ends, the kernel kills all other processes of the
namespace before bwrap sees the end. So when bwrap has ended, all processes have ended.
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
from agentrl.sandbox.base import LocalSandbox
from agentrl.sandbox.box import (
    PROGRAMS,
    PROGRAMS_FOLDER,
    Capture,
    DriverConnection,
    Slot,
    driver_command,
)
from agentrl.sandbox.cgroup import Cgroup, memory_limit
from agentrl.sandbox.namespace import (
    ENVIRONMENT,
    FOLDER,
    SHELL,
    InheritedFiles,
    bwrap_options,
    explain_failure,
    rlimit_command,
)
from agentrl.sandbox.program import Completed, EndedBy, Limits, Program
from agentrl.sandbox.uids import dedicated_user

SETUP_SECONDS = 30.0
"""The longest time for bwrap to create namespaces. A longer time is the fault of the machine."""
END_SECONDS = 10.0
"""The longest time for a killed namespace to end. With many processes the kernel needs seconds."""


class Bubblewrap(LocalSandbox):
    """The sandbox of `sandbox.backend=bubblewrap`."""

    name = "bubblewrap"

    async def _run(self, program: Program) -> Completed:
        python, limits, stdin = self._python, program.limits, program.stdin
        script = f"/{program.script}"
        scripts = {script: program.code.encode("utf-8", "surrogatepass")}
        with InheritedFiles() as inherited, dedicated_user() as uid, memory_limit(limits) as cgroup:
            options = bwrap_options(python, limits, inherited, program.files, scripts, uid)
            command = [] if program.init else ["sh", "-c", SHELL, "sh"]
            command += [*rlimit_command(limits), *program.interpreter_command(python), script]
            stdin_fd = (
                inherited.add(stdin.encode("utf-8", "surrogatepass"))
                if stdin
                else subprocess.DEVNULL
            )
            return await _run([options, command], inherited, stdin_fd, limits, cgroup)

    def _start(self, files: Mapping[str, bytes], limits: Limits, slot: Slot) -> DriverConnection:
        python, programs = self._python, {f"{PROGRAMS_FOLDER}/{n}": c for n, c in PROGRAMS.items()}
        with ExitStack() as resources, InheritedFiles() as inherited:
            uid = resources.enter_context(dedicated_user())
            cgroup = resources.enter_context(memory_limit(limits))
            options = bwrap_options(python, limits, inherited, files, programs, uid)
            command = driver_command(
                python, limits, FOLDER, PROGRAMS_FOLDER, ENVIRONMENT, count_processes=True
            )
            child = Child([options, command], inherited, subprocess.PIPE, cgroup, lambda: None)
            return DriverConnection(child, limits, FOLDER, slot, resources.pop_all())

    async def _begin(self, driver: DriverConnection) -> DriverConnection:
        try:
            return await super()._begin(driver)
        except SandboxError as e:
            raise SandboxError(driver.process.fault or explain_failure(driver.output)) from e


async def _run(
    command: Sequence[list[str]],
    inherited: InheritedFiles,
    stdin: int,
    limits: Limits,
    cgroup: Cgroup | None,
) -> Completed:
    """Run a bwrap command to its end, and check that all processes have ended.

    Raises:
        SandboxError: the program did not start, or some processes did not end.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def begin() -> None:
        timers.pop().cancel()
        timers.append(loop.call_later(limits.seconds, child.kill, "time"))

    child = Child(command, inherited, stdin, cgroup, begin)
    timers.append(loop.call_later(SETUP_SECONDS, child.kill))
    outputs = [
        Capture(pipe, limits.output_bytes, lambda: child.kill("output"))
        for pipe in (child.process.stdout, child.process.stderr)
    ]
    end_time = 0.0
    try:
        await child.wait_for_end()
        end_time = time.monotonic()
    finally:
        for timer in timers:
            timer.cancel()
        child.kill()
        has_ended = await child.wait_until_ended()
        for output in outputs:
            output.drain()
    if not has_ended:
        raise SandboxError("the processes of a program did not end after they were killed")
    if child.fault:
        raise SandboxError(child.fault)
    stdout, stderr = (output.text for output in outputs)
    if child.exit_code is None and not child.killed_by:
        raise SandboxError(explain_failure(stderr))
    code, why = _exit_status(child, limits)
    return Completed(stdout, stderr, code, why, round(end_time - child.began, 4))


def _exit_status(child: Child, limits: Limits) -> tuple[int, EndedBy]:
    """Return the exit code and the cause of the end. A shell reports a signal N as 128 + N."""
    if child.killed_by:
        return -signal.SIGKILL, child.killed_by
    code = child.exit_code or 0
    if not 128 < code <= 128 + signal.NSIG:
        return code, ""
    number = code - 128
    # At the limit of CPU time, the kernel sends SIGXCPU, then SIGKILL.
    killed_by = number == signal.SIGKILL and child.cpu_seconds >= limits.cpu_seconds
    if number == signal.SIGXCPU or killed_by:
        return -number, "cpu"
    return -number, "signal"


class Child:
    """A bwrap process and its namespace."""

    killed_by: EndedBy = ""
    """The limit because of which `kill` was called."""
    fault: str = ""
    """Why agentrl killed bwrap before the program began; "" if it did not."""

    def __init__(
        self,
        command: Sequence[list[str]],
        inherited: InheritedFiles,
        stdin: int,
        cgroup: Cgroup | None,
        on_begin: Callable[[], None],
    ):
        """Start bwrap. It is killed when the thread that starts it ends.

        Args:
            command: bwrap with its options, and the command that it runs.
            inherited: the descriptors that bwrap inherits. Those of this process are closed.
            stdin: a descriptor, or `subprocess.PIPE`.
            cgroup: the cgroup of all processes in the namespace, without bwrap itself. If the
                kernel killed bwrap for the memory of its program, this would look like an
                infrastructure failure.
            on_begin: called when the namespace exists.
        """
        self._loop = asyncio.get_running_loop()
        self._status_text = b""
        self._cgroup = cgroup
        self._on_begin = on_begin
        self.init_pidfd = -1
        """A descriptor of process 1 of the namespace; -1 if there is none."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.began = 0.0
        """The `time.monotonic()` seconds at which the namespace was created; 0 before."""
        self.exit_code: int | None = None
        """The exit code, as a shell reports it. None if the program did not start or was killed."""
        self.cpu_seconds = 0.0
        options, program = command
        self._gate = ExitStack()
        status_reader, status = os.pipe()
        self._status = os.fdopen(status_reader, "rb", 0)
        options += ["--json-status-fd", str(inherited.take(status))]
        try:
            if cgroup is not None:  # bwrap starts the program when this pipe is closed
                gate, gate_writer = os.pipe()
                self._gate.callback(os.close, gate_writer)
                options += ["--block-fd", str(inherited.take(gate))]
            self.process = subprocess.Popen(
                [*options, *program],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=inherited.fds,
                cwd="/",
                env={},
            )
        except BaseException:
            self._status.close()
            self._gate.close()
            raise
        inherited.close()
        os.set_blocking(self._status.fileno(), False)
        self._loop.add_reader(self._status, self._read_status)

    def kill(self, why: EndedBy = "") -> None:
        """Kill process 1, and with it all processes in the namespace. Idempotent."""
        self.killed_by = self.killed_by or why
        with contextlib.suppress(ProcessLookupError):
            if self.init_pidfd >= 0:
                signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)
            elif self.process.returncode is None:
                self.process.kill()

    async def wait_until_ended(self) -> bool:
        """Wait until all processes have ended; return False if they did not end in time."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await asyncio.shield(self._ended)
                # bwrap waits for process 1, unless bwrap itself was killed.
                while self.init_pidfd >= 0 and not _has_ended(self.init_pidfd):
                    await asyncio.sleep(0.01)
                while not self._reap():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            self.process.kill()
            return False
        finally:
            self._close_status()
            if self.init_pidfd >= 0:
                os.close(self.init_pidfd)
                self.init_pidfd = -1
        return True

    async def wait_for_end(self) -> None:
        """Wait until the program ends by itself or by `kill`."""
        await asyncio.shield(self._ended)

    def _reap(self) -> bool:
        if self.process.returncode is not None:
            return True
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return True

    def _read_status(self) -> None:
        data = self._status.read(4096)
        if data is None:  # the pipe is empty
            return
        self._status_text += data
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            entry = json.loads(line)
            if "child-pid" in entry:
                with contextlib.suppress(ProcessLookupError):
                    self.init_pidfd = os.pidfd_open(entry["child-pid"])
                self.began = time.monotonic()
                self._limit_memory(entry["child-pid"])
                self._on_begin()
            self.exit_code = entry.get("exit-code", self.exit_code)
        if not data:
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
            self.fault = f"cannot move a process to the cgroup {self._cgroup.folder}: {e.strerror}"
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
