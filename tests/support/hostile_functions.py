"""Functions that tests send to workers: some behave well, others do not."""

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


async def waited(a):
    await asyncio.sleep(0.01)
    return a


def pid():
    return os.getpid()


def nap(seconds):
    time.sleep(seconds)


def hang():
    time.sleep(600)


def wild_pattern():
    re.fullmatch(r"(a|aa)+", "a" * 60 + "b")


def eat():
    return len(bytearray(8 << 30))


def crash():
    ctypes.string_at(0)


def leave():
    os._exit(3)


def exit_politely():
    sys.exit("no more")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def key_error():
    return {}["x"]


def refuse():
    raise ToolError("not like that")


def is_down():
    raise EngineError("the judge is down")


class Odd(ToolError):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def odd():
    raise Odd("a", "b")


def lambda_result():
    return lambda: 1


def too_much():
    return bytes(65 << 20)


def chatter(lines):
    for i in range(lines):
        print("line", i, file=sys.stderr if i % 2 else sys.stdout)
    sys.stdout.flush()
    leave()


def with_child(folder):
    """Start a process that outlives us unless somebody sees to it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "child").write_text(str(child.pid))
    hang()


def write_pid_and_hang(file):
    Path(file).write_text(str(os.getpid()))
    wild_pattern()


def die_of(*given):
    os._exit(3)
