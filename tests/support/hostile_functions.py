"""Functions that tests run in worker processes: some work, others hang, crash or fail."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from agentrl.errors import EngineError, ToolError


def add(a, b=1):
    return a + b


async def async_echo(a):
    await asyncio.sleep(0.01)
    return a


def pid():
    return os.getpid()


def nap(seconds):
    time.sleep(seconds)


def hang():
    time.sleep(600)


def match_slow_regex():
    re.fullmatch(r"(a|aa)+", "a" * 60 + "b")


def allocate_8_gib():
    return len(bytearray(8 << 30))


def crash():
    ctypes.string_at(0)


def exit_at_once():
    os._exit(3)


def exit_politely():
    sys.exit("no more")


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def key_error():
    return {}["x"]


def refuse():
    raise ToolError("not like that")


def is_down():
    raise EngineError("the judge is down")


class UnpicklableError(ToolError):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def raise_unpicklable():
    raise UnpicklableError("a", "b")


def lambda_result():
    return lambda: 1


def large_result():
    return bytes(65 << 20)


def print_lines_and_exit(lines):
    for i in range(lines):
        print("line", i, file=sys.stderr if i % 2 else sys.stdout)
    sys.stdout.flush()
    exit_at_once()


def hang_with_child(folder):
    """Start a child process, which the pool must end, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "child").write_text(str(child.pid))
    hang()


def write_pid_and_hang(file):
    Path(file).write_text(str(os.getpid()))
    match_slow_regex()


def exit_on_any_arguments(*arguments):
    os._exit(3)
