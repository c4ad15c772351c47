"""F11: a worker that hangs, crashes or eats all memory costs itself, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support import hostile_functions as hostile
from support.hostile_functions import add

from agentrl.errors import ConfigError, EngineError, ToolError
from agentrl.registry import load_file
from agentrl.trajectory import ToolResult
from agentrl.workers import Processes, WorkerDied, WorkerError, locate_function
from agentrl.workers.child_process import ChildProcess, MessageTooLong


@pytest.fixture(scope="module")
def pool():
    """Two workers. A worker that a test ends is replaced by the next call."""
    pool = Processes(2, memory_mb=512)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def single():
    """One worker; see `pool`."""
    pool = Processes(1, memory_mb=512)
    yield pool
    pool.close()


def ended(pid: int) -> bool:
    """Whether a process ends within two seconds; a zombie has."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


async def test_a_function_runs_in_another_process(pool):
    assert await pool.call(add, 2, seconds=5) == 3
    assert await pool.call(add, 2, b=5, seconds=5) == 7
    assert await pool.call(hostile.async_echo, ToolResult("x"), seconds=5) == ToolResult("x")
    there = await pool.call(hostile.pid, seconds=5)
    assert there != os.getpid()
    # One call at a time needs one worker, and the same serves them all.
    assert await pool.call(hostile.pid, seconds=5) == there


async def test_calls_run_concurrently_and_the_queue_does_not_count(pool):
    naps = [pool.call(time.sleep, 0.3, seconds=0.9) for _ in range(6)]
    await asyncio.gather(*naps)


def test_a_pool_serves_one_event_loop_after_another(pool):
    assert asyncio.run(pool.call(add, 3, seconds=5)) == 4
    assert asyncio.run(pool.call(add, 4, seconds=5)) == 5


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (hostile.hang, TimeoutError, r"not done in 0\.3 s"),
        (hostile.match_slow_regex, TimeoutError, r"not done in 0\.3 s"),
        (hostile.crash, WorkerDied, r"SIGSEGV[\s\S]*hostile_functions\.py"),
        (hostile.exit_at_once, WorkerDied, "exit code 3"),
        (hostile.kill_itself, WorkerDied, "SIGKILL"),
        (hostile.allocate_8_gib, WorkerDied, "more than 512 MiB"),
        (hostile.key_error, WorkerError, r"^KeyError: 'x' \(.*hostile_functions\.py:\d+\)$"),
        (hostile.exit_politely, WorkerError, "SystemExit: no more"),
        (hostile.refuse, ToolError, "^not like that$"),
        (hostile.raise_unpicklable, WorkerError, "UnpicklableError: a b"),
        (hostile.is_down, EngineError, "judge is down"),
        (hostile.lambda_result, WorkerError, "Can't (pickle|get) local object"),
        (hostile.large_result, WorkerError, "the result has 681"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
async def test_a_failing_function_fails_only_its_caller(single, function, error, says):
    # A crash is found at once, whatever time there would be.
    seconds = 0.3 if error is TimeoutError else 20
    with pytest.raises(error, match=says):
        await single.call(function, seconds=seconds)
    assert await single.call(add, 1, seconds=5) == 2


async def test_only_a_worker_that_hangs_or_dies_is_replaced(pool):
    """The other worker, and what it has loaded, stay."""
    first = asyncio.create_task(pool.call(hostile.hang, seconds=0.8))
    await asyncio.sleep(0.2)
    there = await pool.call(hostile.pid, seconds=5)
    with pytest.raises(WorkerDied):
        await pool.call(hostile.exit_at_once, seconds=5)
    another = await pool.call(hostile.pid, seconds=5)
    assert ended(there) and another != there
    with pytest.raises(TimeoutError):
        await first
    answers = await asyncio.gather(*(pool.call(add, i, seconds=5) for i in range(8)))
    assert answers == [*range(1, 9)]


async def test_processes_that_a_function_started_end_with_it(single, tmp_path):
    with pytest.raises(TimeoutError):
        await single.call(hostile.hang_with_child, str(tmp_path), seconds=1)
    assert ended(int((tmp_path / "child").read_text()))


async def test_a_worker_is_recycled():
    pool = Processes(1, memory_mb=512, max_calls=2)
    pids = [await pool.call(hostile.pid, seconds=5) for _ in range(4)]
    pool.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_output_of_a_function_is_logged_and_bounded(single, caplog):
    caplog.set_level(logging.INFO, "agentrl")
    with pytest.raises(WorkerDied, match=r"exit code 3\. Its last lines:\n[\s\S]*line 999"):
        await single.call(hostile.print_lines_and_exit, 1000, seconds=5)
    assert len(caplog.records) == 50


async def test_a_file_of_the_user_is_loaded_in_workers(single, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Point:\n    x: int\n"
        "def moved(p):\n    return Point(p.x + 1)\n"
        "def wrong():\n    raise RuntimeError('oh')\n"
    )
    module = load_file(str(file))
    assert await single.call(module.moved, module.Point(2), seconds=5) == module.Point(3)
    with pytest.raises(WorkerError, match=r"RuntimeError: oh \(.*mine\.py:8\)"):
        await single.call(module.wrong, seconds=5)


@pytest.mark.parametrize("function", [lambda: 1, partial(add, 1), "x".upper, [].append])
def test_functions_that_no_worker_can_import_are_refused(function):
    with pytest.raises(ConfigError, match="at the top level of a separate file"):
        locate_function(function)


async def test_a_closed_pool_leaves_nothing(tmp_path):
    pool = Processes(2)
    there = await pool.call(hostile.pid, seconds=5)
    running = asyncio.create_task(pool.call(hostile.hang, seconds=60))
    await asyncio.sleep(0.3)
    pool.close()
    with pytest.raises(WorkerDied):
        await running
    assert ended(there)
    pool.close()
    with pytest.raises(WorkerDied, match="closed"):
        await pool.call(add, 1, seconds=5)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """This holds too for a process that holds the GIL, in which no other thread could react."""
    file = tmp_path / "pid"
    program = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from support import hostile_functions as h\n"
        "from agentrl.workers import Processes\n"
        "asyncio.run(Processes(1).call(h.write_pid_and_hang, sys.argv[2], seconds=60))\n"
    )
    here = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", program, here, str(file)])
    try:
        for _ in range(500):
            if file.exists() and file.read_text():
                break
            time.sleep(0.01)
        time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    assert ended(int(file.read_text()))


def child(code: str, **options) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], **options)


def test_messages_are_bounded_in_time_and_size():
    echo = "import os\nos.write(0, os.read(0, 100))\nos.read(0, 100)"
    process = child(echo)
    soon = time.monotonic() + 20
    process.send(b"hello", soon)
    with pytest.raises(MessageTooLong, match="the message has 5 bytes, more than 4"):
        process.receive(soon, max_bytes=4)
    with pytest.raises(TimeoutError):
        process.receive(time.monotonic() - 1)
    process.stop()
    with pytest.raises(EOFError):
        process.send(b"hello", soon)
    with pytest.raises(EOFError):
        process.receive(soon)


def test_the_last_lines_are_kept_and_the_exit_code():
    process = child("print('a' * 5000)\nfor i in range(99): print(i)\nraise SystemExit(7)")
    assert process.wait(20) and process.exit_code == 7 and not process.running
    assert [*process.tail] == [str(i) for i in range(49, 99)]
    process.stop()


def test_stop_waits_for_a_child_that_ends_itself_before_it_kills():
    calm = child("import sys\nsys.stdin.read()\nprint('done')", stops_at_eof=True)
    time.sleep(0.3)
    calm.stop(20)
    assert (calm.exit_code, [*calm.tail]) == (0, ["done"])
    deaf = child("import time\nprint('on', flush=True)\ntime.sleep(600)", stops_at_eof=True)
    deaf.stop(0.3)
    assert deaf.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("fork", [False, True])
def test_a_group_ends_with_a_parent_that_is_killed(fork):
    """This holds too if a fork of the parent still runs, and for each process group."""
    inner = (
        "import os, re, subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), left.pid, flush=True)\n"
        "re.match('(a+)+b', 'a' * 60)\n"
    )
    outer = (
        "import os, sys, time\n"
        "from agentrl.workers.child_process import ChildProcess\n"
        f"process = ChildProcess([sys.executable, '-c', {inner!r}])\n"
        "while not process.tail: time.sleep(0.01)\n"
        f"fork = os.fork() if {fork} else -1\n"
        "if fork == 0: time.sleep(600)\n"
        "print(process.tail[0], fork, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", outer], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    first, second, forked = map(int, parent.stdout.readline().split())
    try:
        assert parent.wait() == -signal.SIGKILL
        assert ended(first) and ended(second)
    finally:
        if fork:
            os.kill(forked, signal.SIGKILL)
        parent.stdout.close()


def test_a_child_without_a_parent_ends_silently():
    """SIGTERM may end the parent while its children still start."""
    code = (
        "import socket\nfrom agentrl.workers import child\n"
        "ours, parents = socket.socketpair()\nchannel = ours.makefile('rwb')\nparents.close()\n"
        "child.send(channel, b'ready')\nprint('still there')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
