"""Start a child process, exchange messages with it, read its output and wait for its end.

Every child ends when this process ends, even if this process is killed (see `ChildProcess`).
Engines, the workers of the tool server, the workers of `Processes` and the parsers of other
projects are such children.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakSet

TAIL_LINES = 50
MAX_LINE = 2048
"""The longest line, in characters. A longer line is split."""
OUTPUT_GRACE_SECONDS = 1.0
"""The longest time to wait for the rest of the output of a process that has ended, in seconds. A
process that it started may have left its group and keep the pipe open."""

_children: WeakSet[ChildProcess] = WeakSet()


class MessageTooLong(ValueError):
    """A child sent a message with more bytes than the caller accepts."""


def python_command(code: str, *options: str) -> list[str]:
    """Return the command that runs code with this interpreter and its module search path."""
    path = f"import sys; sys.path[:] = {sys.path!r}"
    return [sys.executable, "-P", *options, "-c", f"{path}; {code}"]


class ChildProcess:
    """A process in its own session; the processes that it starts are in its process group.

    The whole group is killed when the process ends. If this process ends, even by SIGKILL, the
    kernel kills the group (Linux), whatever the child is doing. (A thread of the child that waits
    for our end would not run while a regular expression holds the interpreter.) A child that has
    work to do at its end (`stops_at_eof`) waits for the end of its standard input instead.

    Standard input is a socket. A message on it is 4 bytes of length (little-endian) and as many
    bytes of content, in both directions. The child's output is read line by line.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stops_at_eof: bool = False,
        environment: Mapping[str, str] | None = None,
        inherits_environment: bool = True,
        inherited_fds: Sequence[int] = (),
        on_line: Callable[[str], None] | None = None,
        on_end: Callable[[ChildProcess], None] | None = None,
    ):
        """Start the process.

        Args:
            command: the program and its arguments. Other users can read them: pass no secrets.
            stops_at_eof: the child stops at the end of its standard input, so the kernel does not
                kill it.
            environment: variables in addition to this process's variables.
            inherits_environment: False if the child gets no other variables than `environment`.
            inherited_fds: file descriptors that the child inherits under the same numbers.
            on_line: called in a thread with each line that the child prints.
            on_end: called in a thread after the child has ended, for whatever reason.

        Raises:
            OSError: the program cannot be run.
        """
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines that the child printed."""
        self.exit_code: int | None = None
        """None while the child runs. If a signal killed it: minus the number of the signal."""
        self._on_line, self._on_end = on_line, on_end
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._channel, child_end = socket.socketpair()
        # A socket object has one time limit; a thread may send while another receives.
        self._receiving = self._channel.dup()
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=child_end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=(dict(os.environ) if inherits_environment else {}) | dict(environment or {}),
                pass_fds=(*inherited_fds, *(() if stops_at_eof else (read_end,))),
                start_new_session=True,  # Ctrl-C stops the run, which still needs its children.
            )
            if not stops_at_eof:
                _kill_group_when_closed(read_end, self.pid)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(read_end)
            child_end.close()
        _children.add(self)
        self._reader = threading.Thread(target=self._read, name="child's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="child's end", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id of the child, which is also the id of its process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the child has not ended yet."""
        return self.exit_code is None

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message.

        Args:
            message: the content.
            deadline: on the clock of `time.monotonic()`.

        Raises:
            TimeoutError: the child did not read the message before the deadline.
            EOFError: the child has ended.
        """
        with self._until(self._channel, deadline) as channel:
            channel.sendall(struct.pack("<I", len(message)) + message)

    def receive(self, deadline: float, max_bytes: int = 2**32) -> bytes:
        """Wait for a message and return its content.

        Args:
            deadline: on the clock of `time.monotonic()`.
            max_bytes: the longest content to accept.

        Raises:
            TimeoutError: no message came before the deadline.
            EOFError: the child has ended.
            MessageTooLong: the message is longer than `max_bytes`.
        """
        (size,) = struct.unpack("<I", self._receive_exactly(4, deadline))
        if size > max_bytes:
            raise MessageTooLong(f"the message has {size} bytes, more than {max_bytes}")
        return self._receive_exactly(size, deadline)

    def take_channel(self) -> socket.socket:
        """Return a socket that reads and writes the child's standard input, for an event loop.

        After that, neither `send` nor `receive` may be called.
        """
        taken = self._channel.dup()
        taken.setblocking(False)
        return taken

    def terminate(self) -> None:
        """Send SIGTERM to the process, but not to the processes that it started."""
        with self._lock:
            if self.running:
                os.kill(self.pid, signal.SIGTERM)

    def close_input(self) -> None:
        """End the child's standard input: a child with `stops_at_eof` stops. Idempotent."""
        with contextlib.suppress(OSError):
            # Do not close it: another thread may read it, and its number could be reused.
            self._channel.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float) -> bool:
        """Wait for the child to end; return whether it has ended.

        If it has, `exit_code` and `tail` are final.
        """
        return self._has_ended.wait(max(seconds, 0.0))

    def kill(self) -> None:
        """Kill the process group without waiting for its end. Idempotent, from any thread."""
        with self._lock:
            if self.running:
                self._kill_group()
        self.close_input()

    def stop(self, seconds: float = 0.0) -> None:
        """Close the child's input; kill the child if it still runs after `seconds`. Idempotent."""
        self.close_input()
        if not self.wait(seconds):
            self.kill()
            self._has_ended.wait()
        self._close()

    @staticmethod
    @contextlib.contextmanager
    def _until(channel: socket.socket, deadline: float) -> Iterator[socket.socket]:
        """Yield a socket, with a deadline. An error of the socket means that the child has ended.

        Raises:
            TimeoutError: the deadline has passed.
            EOFError: the child has ended.
        """
        if (seconds := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        try:
            channel.settimeout(seconds)
            yield channel
        except TimeoutError:
            raise
        except OSError as e:
            raise EOFError("the process ended by itself") from e

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            with self._until(self._receiving, deadline) as channel:
                piece = channel.recv(min(size - len(content), 2**20))
            if not piece:
                raise EOFError("the process ended by itself")
            content += piece
        return bytes(content)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(MAX_LINE):
                self.tail.append(line.rstrip())
                if self._on_line is not None:
                    self._on_line(line.rstrip())

    def _wait(self) -> None:
        if hasattr(os, "waitid"):  # not on macOS
            # Do not read the exit code yet: otherwise the process id, which is also the id of the
            # group, could be reused before the group is killed.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._kill_group()
            self.exit_code = self._process.wait()
        self._reader.join(OUTPUT_GRACE_SECONDS)
        self._has_ended.set()
        if self._on_end is not None:
            self._on_end(self)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        """Close our ends of the socket and of the pipe."""
        self._channel.close()
        self._receiving.close()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _kill_group_when_closed(pipe: int, group: int) -> None:
    """Make the kernel kill a process group when the writing end of a pipe is closed everywhere.

    This works as long as a process of the group holds the reading end.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # macOS: the child ends when it reads its input.
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _close_after_fork() -> None:
    """Close the sockets and pipes of all children in a fork of this process.

    Otherwise the children would not end with this process.
    """
    for child in _children:
        child._close()


os.register_at_fork(after_in_child=_close_after_fork)
