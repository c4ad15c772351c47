"""Python programs in new processes that do not spend seconds on imports.

One server process per test process imports torch, transformers, agentrl and the other large
libraries once. Each program runs in a fork of that server. It is a real process with its own
environment, working directory, signals and exit code.

Use `subprocess` instead to test what a new interpreter does: import times, and environment
variables that a library reads when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = (
    "accelerate",
    "agentrl.cli",
    "agentrl.cluster.connect",
    "agentrl.compat.verl.hydra",  # reads a large YAML file
    "agentrl.demo.recipe",
    "agentrl.observers.results",
    "agentrl.observers.tracking",
    "agentrl.report.live",
    "agentrl.trainer.trainer",
    "fastapi",
    "httpcore",
    "httpx",
    "jsonschema",
    "matplotlib.backends.backend_svg",
    "matplotlib.pyplot",
    "pandas",
    "peft",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "rich.console",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "typer",
    "uvicorn",
)
START_SECONDS = 120.0
NUMBER = struct.Struct("!q")
"""The format in which the server sends a PID and then an exit status."""


class ForkedPython:
    """A running Python program, with the methods of `subprocess.Popen` that the tests use.

    `arguments` follow the name of the interpreter: `-m module ...`, `-c code ...` or `file ...`.
    stdout and stderr go to files, so a program never waits for a reader. `open_files` is its limit
    of open files; `merge_outputs` sends stderr to stdout.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        start_new_session: bool = False,
        open_files: int | None = None,
        merge_outputs: bool = False,
    ):
        self.args = [str(word) for word in arguments]
        self.returncode: int | None = None
        folder, address = _server()
        self._outputs = [tempfile.TemporaryFile(dir=folder) for _ in range(2)]  # noqa: SIM115
        request = {
            "arguments": self.args,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
            "open_files": open_files,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        out, err = (file.fileno() for file in self._outputs)
        numbers = [out, out if merge_outputs else err]
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], numbers)
        self.pid = self._read_number()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = self._read_number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self.returncode = os.waitstatus_to_exitcode(status)
            self._connection.close()
        return self.returncode

    def _read_number(self) -> int:
        data = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        return NUMBER.unpack(data)[0]

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal to the program if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def read(self) -> tuple[str, str]:
        """Return what the program has written to stdout and to stderr so far."""
        texts = []
        for file in self._outputs:
            # The program shares the position in the file, which must stay.
            data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
            texts.append(data.decode(errors="replace"))
        return texts[0], texts[1]

    def read_line(self, seconds: float = 60.0) -> str:
        """Wait for the first line of stdout and return it; return "" if there is none."""
        end = time.monotonic() + seconds
        while "\n" not in self.read()[0] and self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        line, newline, _ = self.read()[0].partition("\n")
        return line + newline

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, then return the whole of stdout and stderr."""
        self.wait(timeout)
        return self.read()

    def __enter__(self) -> ForkedPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()


def run_python(
    arguments: Sequence[object], *, timeout: float = 240.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run([sys.executable, *arguments])` does."""
    with ForkedPython(arguments, **options) as program:
        out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


def run_agentrl(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end: `agentrl ...`."""
    return run_python(["-m", "agentrl", *arguments], **options)


@cache
def _server() -> tuple[str, str]:
    """Start the server of this test process. Return its folder and the address of its socket."""
    folder = tempfile.mkdtemp(prefix="forked-python-")
    address = f"{folder}/socket"
    ours, theirs = socket.socketpair()  # the server ends when our end closes, however we end
    command = [sys.executable, __file__, address, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()

    def stop() -> None:
        ours.close()
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    ours.settimeout(START_SECONDS)
    assert ours.recv(1), "the server of forked programs did not start"
    return folder, address


def _serve(address: str, parent: socket.socket) -> dict[str, Any]:
    """Answer requests until the test process ends; in a new program, return its request."""
    for name in LIBRARIES:
        importlib.import_module(name)
    # The programs need not look through what was imported, which took them half a second.
    gc.collect()
    gc.freeze()
    # Ctrl-C in a terminal is for pytest alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    parent.send(b".")
    while parent not in select.select([listener, parent], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            parent.close()
            request = _fork(connection)
            # A shell lets what it runs in the background ignore Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return request
        connection.close()
    os._exit(0)


def _fork(connection: socket.socket) -> dict[str, Any]:
    """Fork the program and return the request in it. Report its PID and status from this process.

    The program is killed when the test process no longer waits for it.
    """
    data, numbers, *_ = socket.recv_fds(connection, 65536, 2)
    while not data.endswith(b"\n"):
        data += connection.recv(65536)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        connection.send(NUMBER.pack(pid))
        threading.Thread(target=_kill_at_end_of, args=(connection, pid), daemon=True).start()
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            connection.send(NUMBER.pack(status))
        os._exit(0)
    connection.close()
    for number, target in zip(numbers, (1, 2), strict=True):
        os.dup2(number, target)
        os.close(number)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return json.loads(data)


def _kill_at_end_of(connection: socket.socket, pid: int) -> None:
    connection.recv(1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become(request: dict[str, Any]) -> None:
    """Be the program: what `python ARGUMENTS` is, in its folder and with its environment."""
    if request["start_new_session"]:
        os.setsid()
    if limit := request["open_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    extra = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = [p for p in extra if p not in sys.path]
    if first == "-m":
        sys.argv, sys.path[:0] = rest, [request["cwd"]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [request["cwd"]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = [first, *rest], [str(Path(first).resolve().parent)]
        runpy.run_path(first, run_name="__main__")


def _main() -> None:
    code = 0

    @atexit.register  # before all others, so it runs after them
    def skip_the_deletion_of_modules() -> None:
        """Save a second: nothing but memory is left to release."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    request = _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    try:
        _become(request)
    except SystemExit as e:
        code = 0 if e.code is None else e.code & 255 if isinstance(e.code, int) else 1
        raise
    except KeyboardInterrupt:
        atexit.unregister(skip_the_deletion_of_modules)  # Python ends itself by SIGINT
        raise
    except BaseException:
        code = 1
        raise


if __name__ == "__main__":
    del sys.path[0]  # tests/support
    _main()
