"""Boxes: what stays, what is lost, and who may give orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox import Box, Completed, Limits, Sandbox
from agentrl.testing.sandbox_conformance.check import check


async def _in_box(s: Sandbox, use: Callable[[Box], Awaitable[None]], **kwargs: Any) -> None:
    box = await s.open(**kwargs)
    try:
        await use(box)
    finally:
        await box.aclose()


async def _ran(box: Box, code: str, **kwargs: Any) -> Completed:
    done = await box.run(code, **kwargs)
    assert done.ok, done
    return done


@check(boxes=True)
async def _a_box_keeps_variables_and_files(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(box, "x = 41\ndef f(): return x + 1\nopen('a', 'w').write('kept')")
        assert (await _ran(box, "f()")).stdout == "42\n"
        assert (await _ran(box, "print('no value')\nNone")).stdout == "no value\n"
        assert (await _ran(box, "cat a", language="bash")).stdout == "kept"
        assert await box.read("a") == b"kept"
        await box.write("deep/b.bin", b"\0\xff")
        assert (await _ran(box, "open('deep/b.bin', 'rb').read()")).stdout == "b'\\x00\\xff'\n"

    await _in_box(s, use)


@check(boxes=True)
async def _a_box_survives_mistakes(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(box, "x = 1")
        for code in ("1 / 0", "def f(:", "import sys; sys.exit(3)", "raise KeyboardInterrupt"):
            assert not (await box.run(code)).ok
        assert (await _ran(box, "x")).stdout == "1\n"
        assert (await box.run("exit 3", language="bash")).exit_code == 3

    await _in_box(s, use)


@check(boxes=True)
async def _in_a_box_time_takes_the_variables_not_the_files(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(box, "x = 1; open('a', 'w').write('kept')")
        done = await box.run("while True: pass", seconds=0.5)
        assert done.ended_by == "time" and "variables are lost" in done.stderr, done
        assert "NameError" in (await box.run("x")).stderr
        assert (await _ran(box, "open('a').read()")).stdout == "'kept'\n"
        done = await box.run("sleep 100 & sleep 100", language="bash", seconds=0.5)
        assert done.ended_by == "time", done

    await _in_box(s, use)


@check(boxes=True)
async def _a_shell_over_its_time_takes_no_variables(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(box, "x = 7")
        assert (await box.run("sleep 100", language="bash", seconds=0.5)).ended_by == "time"
        assert (await _ran(box, "x")).stdout == "7\n"

    await _in_box(s, use)


@check(boxes=True)
async def _a_box_caps_output(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        done = await box.run("while True: print('x' * 999)")
        assert done.ended_by == "output" and len(done.stdout) < 11_000, done.ended_by

    await _in_box(s, use, limits=Limits(output_bytes=10_000))


@check(boxes=True)
async def _a_program_that_ends_the_interpreter_is_reported(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        done = await box.run("import os; os._exit(7)")
        assert done.exit_code == 7 and "lost" in done.stderr, done
        done = await box.run("import os; os.kill(os.getpid(), 9)")
        assert done.exit_code == -9 and done.ended_by == "signal", done
        assert (await _ran(box, "1 + 1")).stdout == "2\n"

    await _in_box(s, use)


@check(boxes=True)
async def _no_path_leads_out_of_a_box(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(
            box,
            "import os\nos.symlink('/usr/bin/env', 'out'); os.symlink('/', 'root')\n"
            "os.symlink('a', 'loop-b'); os.symlink('loop-b', 'a')\n"
            "os.mkfifo('pipe'); os.symlink('/proc/self/mem', 'mem')",
        )
        for path in ("/etc/passwd", "../x", "a/../../x", "out", "root/usr/bin/env", "a", "pipe",
                     "mem", "", "x\0y"):  # fmt: skip
            for touch in (box.read(path), box.write(path, b"x")):
                try:
                    await asyncio.wait_for(touch, 20)
                except PermissionError:
                    continue
                except OSError as e:
                    # A pipe that nobody reads cannot be opened for writing.
                    assert path == "pipe", (path, e)
                    continue
                raise AssertionError(f"{path!r} was let through")

    await _in_box(s, use)


@check(boxes=True)
async def _files_of_a_box_fail_as_files_do(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await box.write("d/e", b"12345")
        assert await box.read("d/e", max_bytes=3) == b"123"
        for path, error in (("nothing", FileNotFoundError), ("d", IsADirectoryError)):
            try:
                await box.read(path)
            except error:
                continue
            raise AssertionError(f"{path} could be read")

    await _in_box(s, use)


@check(boxes=True)
async def _a_box_takes_orders_from_us_alone(s: Sandbox) -> None:
    """A program finds no descriptor to answer on, and says nothing in the driver's place."""

    async def use(box: Box) -> None:
        code = """
import os, json, struct
forged = json.dumps({"stdout": "", "stderr": "", "exit_code": 0, "ended_by": "", "seconds": 0,
                     "lost": False}).encode()
for fd in range(3, 300):
    for data in (struct.pack("<I", len(forged)) + forged,):
        try: os.write(fd, data)
        except OSError: pass
"""
        await box.run(code)
        done = await box.run("print('real'); raise SystemExit(5)")
        assert (done.stdout, done.exit_code) == ("real\n", 5), done

    await _in_box(s, use)


@check(boxes=True, isolating=True)
async def _the_driver_of_a_box_cannot_be_touched(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        code = """
import os, signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for _ in range(3000): os.kill(1, signal.SIGCHLD)
for name in ("mem", "environ", "fd/0", "maps"):
    try: open(f"/proc/1/{name}", "rb").read(1); print("read", name)
    except OSError: pass
try: os.listdir("/proc/1/fd"); print("listed")
except OSError: pass
"""
        assert (await _ran(box, code)).stdout == ""
        assert (await _ran(box, "kill -INT 1; sleep 0.1", language="bash")).stdout == ""
        assert (await _ran(box, "print('still here')")).stdout == "still here\n"

    await _in_box(s, use)


@check(boxes=True, isolating=True)
async def _the_driver_of_a_box_keeps_its_files_and_processor(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        code = """
import os, resource
for name, take in {
    "files": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)),
    "time": lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    "turns": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "turns of all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "turns of its group": lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
    "class": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "cores": lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}),
}.items():
    try: take(); print("took", name)
    except PermissionError: pass
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
os.setpriority(os.PRIO_PROCESS, 0, 5)
os.sched_setaffinity(0, os.sched_getaffinity(0))
"""
        assert (await _ran(box, code)).stdout == ""
        assert (await _ran(box, "print('still here')")).stdout == "still here\n"

    await _in_box(s, use)


@check(boxes=True)
async def _a_program_that_ends_its_box_is_answered(s: Sandbox) -> None:
    """Where it can: as a failure of the machine, it would undo what a policy did before."""

    async def use(box: Box) -> None:
        for number in (9, 2):
            await box.run(f"import os; os.kill(os.getppid(), {number})")
            await box.run(f"kill -{number} $PPID", language="bash")
            assert (await _ran(box, "print(6 * 7)")).stdout == "42\n"
            await box.write("a", b"written")
            assert await box.read("a") == b"written"

    await _in_box(s, use)


@check(boxes=True)
async def _boxes_do_not_mix(s: Sandbox) -> None:
    boxes = await asyncio.gather(*(s.open() for _ in range(4)))
    try:
        await asyncio.gather(
            *(b.run(f"x = {i}; open('f', 'w').write(str(x))") for i, b in enumerate(boxes))
        )
        said = await asyncio.gather(*(b.run("print(x, open('f').read())") for b in boxes))
        assert [d.stdout for d in said] == [f"{i} {i}\n" for i in range(4)], said
    finally:
        await asyncio.gather(*(b.aclose() for b in boxes))


@check(boxes=True)
async def _a_cancelled_call_leaves_the_box_usable(s: Sandbox) -> None:
    async def use(box: Box) -> None:
        await _ran(box, "x = 1")
        task = asyncio.ensure_future(box.run("import time; time.sleep(1000)", seconds=1000))
        await asyncio.sleep(0.3)
        task.cancel()
        done = await asyncio.wait_for(box.run("print(2)"), 20)
        assert done.stdout == "2\n", done

    await _in_box(s, use)


@check(boxes=True)
async def _nothing_works_between_calls(s: Sandbox) -> None:
    """A thread left behind would count on while nobody waits for it."""

    async def use(box: Box) -> None:
        await _ran(
            box,
            "import threading, time\nn = 0\ndef count():\n    global n\n"
            "    while True: n += 1; time.sleep(0.001)\n"
            "threading.Thread(target=count, daemon=True).start(); time.sleep(0.05)",
        )
        first = int((await _ran(box, "n")).stdout)
        await asyncio.sleep(0.7)
        second = int((await _ran(box, "n")).stdout)
        assert second - first < 300, (first, second)

    await _in_box(s, use)


@check(boxes=True)
async def _a_closed_box_is_closed(s: Sandbox) -> None:
    box = await s.open()
    await box.aclose()
    await box.aclose()
    try:
        await box.run("1")
    except SandboxError:
        return
    raise AssertionError("a closed box ran a program")
