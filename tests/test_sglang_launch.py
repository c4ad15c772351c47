"""Processes: what holds a server ends with it, and a server with its parent; without SGLang."""

import os
import signal
import subprocess
import sys
import time

import pytest

from agentrl.engine.server import leash
from agentrl.engine.sglang import SGLangLaunch
from agentrl.errors import ConfigError

CHILD_AND_GRANDCHILD = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), grandchild.pid, flush=True)
{then}
"""


def command(then):
    return [sys.executable, "-I", leash.__file__, sys.executable, "-c",
            CHILD_AND_GRANDCHILD.format(then=then)]  # fmt: skip


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids):
    end = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(runs, pids))


def test_all_end_with_the_server():
    with subprocess.Popen(
        command("sys.exit(3)"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as held:
        assert held.stdout is not None
        pids, last = held.stdout.read().splitlines()
    assert last == "the server's process ended with code 3"
    assert all_end([*map(int, pids.split()), held.pid])


def test_all_end_with_the_parent():
    script = (
        "import os, subprocess, sys\n"
        f"held = subprocess.Popen({command('time.sleep(600)')!r}, stdin=subprocess.PIPE,\n"
        "    stdout=subprocess.PIPE, text=True, start_new_session=True)\n"
        "print(held.pid, held.stdout.readline(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 3 and all_end(pids)


def test_a_python_without_sglang_is_named():
    with pytest.raises(ConfigError, match=r"has no sglang\. Install .* rollout\.python"):
        SGLangLaunch("model", python=os.path.realpath("/usr/bin/env")).start()
    with pytest.raises(ConfigError, match=r"rollout\.python=/no/python: cannot run"):
        SGLangLaunch("model", python="/no/python").start()
