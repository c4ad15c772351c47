"""Conformance checks for sandbox backends. They run real programs in a sandbox.

Checks with `isolating` apply to backends that isolate programs from this machine, checks with
`boxes` to backends that have boxes, and checks with `limits` to backends that enforce all `Limits`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox import Box, Limits, Sandbox

__all__ = ["CHECKS", "Check"]

Run = Callable[[Sandbox], Awaitable[None]]
RunInBox = Callable[[Box], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of a backend."""

    name: str
    run: Run
    """Runs the check on a sandbox. Raises `AssertionError` if the backend does not meet it."""
    isolating: bool = False
    """True if it tests the isolation from this machine."""
    boxes: bool = False
    """True if it needs `Sandbox.open`."""
    limits: bool = False
    """True if it tests limits that a remote server may not enforce: output, files, memory."""
    empty_root: bool = False
    """True if only a backend can meet it whose programs do not see an image's files."""


CHECKS: list[Check] = []


def check(
    isolating: bool = False, boxes: bool = False, limits: bool = False, empty_root: bool = False
) -> Callable[[Run], Run]:
    """Add a check of a sandbox; the check has the name of the decorated function."""

    def add(run: Run) -> Run:
        name = getattr(run, "__name__", "").removeprefix("_")
        CHECKS.append(Check(name, run, isolating, boxes, limits, empty_root))
        return run

    return add


def box_check(isolating: bool = False, **options: Any) -> Callable[[RunInBox], RunInBox]:
    """Add a check of a box that `Sandbox.open` opens with these options."""

    def add(run: RunInBox) -> RunInBox:
        async def open_and_run(s: Sandbox) -> None:
            async with aclosing(await s.open(**options)) as box:
                await run(box)

        open_and_run.__name__ = run.__name__
        check(isolating, boxes=True)(open_and_run)
        return run

    return add


async def run_ok(sandbox: Sandbox | Box, code: str, **kwargs: Any) -> str:
    """Return the output of a program that must succeed."""
    done = await sandbox.run(code, **kwargs)
    assert done.ok, done
    return done.stdout


async def check_output(
    sandbox: Sandbox | Box, code: str, expected: str = "", **kwargs: Any
) -> None:
    """Run a program that must succeed and print exactly `expected`."""
    text = await run_ok(sandbox, code, **kwargs)
    assert text == expected, text


# Boxes: their variables and files, and the driver that controls them.


@box_check()
async def _a_box_keeps_variables_and_files(box: Box) -> None:
    await run_ok(box, "x = 41\ndef f(): return x + 1\nopen('a', 'w').write('kept')")
    assert await run_ok(box, "f()") == "42\n"
    assert await run_ok(box, "print('no value')\nNone") == "no value\n"
    assert await run_ok(box, "cat a", language="bash") == "kept"
    assert await box.read("a") == b"kept"
    await box.write("deep/b.bin", b"\0\xff")
    assert await run_ok(box, "open('deep/b.bin', 'rb').read()") == "b'\\x00\\xff'\n"


@box_check()
async def _a_box_survives_mistakes(box: Box) -> None:
    await run_ok(box, "x = 1")
    for code in ("1 / 0", "def f(:", "import sys; sys.exit(3)", "raise KeyboardInterrupt"):
        assert not (await box.run(code)).ok
    assert await run_ok(box, "x") == "1\n"
    assert (await box.run("exit 3", language="bash")).exit_code == 3


@box_check()
async def _a_timeout_in_a_box_loses_variables_but_keeps_files(box: Box) -> None:
    await run_ok(box, "x = 1; open('a', 'w').write('kept')")
    done = await box.run("while True: pass", seconds=0.5)
    assert done.ended_by == "time" and "variables are lost" in done.stderr, done
    assert "NameError" in (await box.run("x")).stderr
    assert await run_ok(box, "open('a').read()") == "'kept'\n"
    done = await box.run("sleep 100 & sleep 100", language="bash", seconds=0.5)
    assert done.ended_by == "time", done


@box_check()
async def _a_timeout_of_a_shell_keeps_variables(box: Box) -> None:
    await run_ok(box, "x = 7")
    assert (await box.run("sleep 100", language="bash", seconds=0.5)).ended_by == "time"
    assert await run_ok(box, "x") == "7\n"


@box_check(limits=Limits(output_bytes=10_000))
async def _a_box_caps_output(box: Box) -> None:
    done = await box.run("while True: print('x' * 999)")
    assert done.ended_by == "output" and len(done.stdout) < 11_000, done.ended_by


@box_check()
async def _a_program_that_ends_the_interpreter_is_reported(box: Box) -> None:
    done = await box.run("import os; os._exit(7)")
    assert done.exit_code == 7 and "lost" in done.stderr, done
    done = await box.run("import os; os.kill(os.getpid(), 9)")
    assert done.exit_code == -9 and done.ended_by == "signal", done
    assert await run_ok(box, "1 + 1") == "2\n"


@box_check()
async def _no_path_leads_out_of_a_box(box: Box) -> None:
    await run_ok(
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
            raise AssertionError(f"{path!r} was accepted")


@box_check()
async def _files_of_a_box_fail_as_files_do(box: Box) -> None:
    await box.write("d/e", b"12345")
    assert await box.read("d/e", max_bytes=3) == b"123"
    for path, error in (("nothing", FileNotFoundError), ("d", IsADirectoryError)):
        try:
            await box.read(path)
        except error:
            continue
        raise AssertionError(f"{path} could be read")


@box_check()
async def _a_program_cannot_forge_the_answers_of_a_box(box: Box) -> None:
    """A program has no descriptor of the driver, so that it cannot forge an answer."""
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


@box_check(isolating=True)
async def _the_driver_of_a_box_cannot_be_touched(box: Box) -> None:
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
    await check_output(box, code)
    await check_output(box, "kill -INT 1; sleep 0.1", language="bash")
    assert await run_ok(box, "print('still here')") == "still here\n"


@box_check(isolating=True)
async def _the_driver_of_a_box_keeps_its_files_and_processor(box: Box) -> None:
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
os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 1))
os.sched_setaffinity(0, os.sched_getaffinity(0))
"""
    await check_output(box, code)
    assert await run_ok(box, "print('still here')") == "still here\n"


@box_check()
async def _a_program_that_kills_its_box_gets_a_result(box: Box) -> None:
    """This must not count as an infrastructure failure, because the episode would be retried."""
    for number in (9, 2):
        await box.run(f"import os; os.kill(os.getppid(), {number})")
        await box.run(f"kill -{number} $PPID", language="bash")
        assert await run_ok(box, "print(6 * 7)") == "42\n"
        await box.write("a", b"written")
        assert await box.read("a") == b"written"


@check(boxes=True)
async def _boxes_do_not_mix(s: Sandbox) -> None:
    boxes = await asyncio.gather(*(s.open() for _ in range(4)))
    try:
        await asyncio.gather(
            *(b.run(f"x = {i}; open('f', 'w').write(str(x))") for i, b in enumerate(boxes))
        )
        results = await asyncio.gather(*(b.run("print(x, open('f').read())") for b in boxes))
        assert [d.stdout for d in results] == [f"{i} {i}\n" for i in range(4)], results
    finally:
        await asyncio.gather(*(b.aclose() for b in boxes))


@box_check()
async def _a_cancelled_call_leaves_the_box_usable(box: Box) -> None:
    await run_ok(box, "x = 1")
    task = asyncio.ensure_future(box.run("import time; time.sleep(1000)", seconds=1000))
    await asyncio.sleep(0.3)
    task.cancel()
    done = await asyncio.wait_for(box.run("print(2)"), 20)
    assert done.stdout == "2\n", done


@box_check()
async def _threads_stop_between_calls(box: Box) -> None:
    """A thread must not continue to run between calls."""
    await run_ok(
        box,
        "import threading, time\nn = 0\ndef count():\n    global n\n"
        "    while True: n += 1; time.sleep(0.001)\n"
        "threading.Thread(target=count, daemon=True).start(); time.sleep(0.05)",
    )
    first = int(await run_ok(box, "n"))
    await asyncio.sleep(0.7)
    second = int(await run_ok(box, "n"))
    assert second - first < 300, (first, second)


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


# Isolation: things that programs must not reach.


async def _check_hidden(s: Sandbox, paths: list[str]) -> None:
    code = f"""
import os
for path in {paths!r}:
    try: content = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read()
    except OSError: continue
    if content and b"PATH=" not in content: print(path, content[:80])
"""
    await check_output(s, code)


@check(isolating=True)
async def _files_of_this_machine_are_hidden(s: Sandbox) -> None:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"secret")
    os.chmod(file.name, 0o666)
    try:
        paths = ["/etc/shadow", "/root", "/home", file.name, str(Path.home()), "/proc/1/environ",
                 "/proc/1/root/etc/passwd", "/dev/mem", "/dev/kvm", "/dev/sda"]  # fmt: skip
        await _check_hidden(s, paths)
    finally:
        os.unlink(file.name)


@check(isolating=True, empty_root=True)
async def _there_are_no_users_and_no_folders_of_a_system(s: Sandbox) -> None:
    await _check_hidden(s, ["/etc/passwd", "/var", "/sys", "/run"])


@check(isolating=True)
async def _no_ipc_objects_can_be_created(s: Sandbox) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None)
for handle in (libc.semget(77, 1, 0o1600), libc.shmget(77, 4096, 0o1600), libc.msgget(77, 0o1600),
             libc.mq_open(b"/left", 0o102, 0o600, None)):
    if handle >= 0: print("created", handle)
"""
    await check_output(s, code)


@check(isolating=True)
async def _nothing_outside_of_its_folder_can_be_written(s: Sandbox) -> None:
    code = """
import os
for path in ["/x", "/usr/x", "/usr/bin/python3", "/bin/x", "/etc/x", "/dev/x", "/proc/sys/kernel/x",
             "/proc/sys/kernel/core_pattern", "/main.py"]:
    try: open(path, "ab").write(b"x"); print("wrote", path)
    except OSError: pass
for target in ["/usr/lib/x", "/etc/x"]:
    os.path.lexists("link") and os.unlink("link")
    os.symlink(target, "link")
    try: open("link", "w").write("x"); print("wrote", target)
    except OSError: pass
try: os.link("/usr/bin/env", "hard"); print("linked")
except OSError: pass
"""
    await check_output(s, code)


@check(isolating=True)
async def _no_network(s: Sandbox) -> None:
    """A server of this process on loopback or on an abstract socket must not be reachable."""
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract = f"\0agentrl-{secrets.token_hex(4)}"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(abstract)
    unix.listen()
    code = f"""
import socket
def attempt(name, connect):
    try: connect()
    except OSError: return
    print("connected", name)
for host in ("127.0.0.1", "::1", "1.1.1.1"):
    attempt(host, lambda: socket.create_connection((host, {tcp.getsockname()[1]}), 2))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: s.sendto(b"x", ("127.0.0.1", {udp.getsockname()[1]}))
except OSError: pass
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect({abstract!r}))
for family in (16, 17, 38, 40):
    for kind in (1, 2, 3):
        attempt(family, lambda: socket.socket(family, kind))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("name", lambda: socket.getaddrinfo("example.com", 80))
"""
    try:
        await check_output(s, code)
        for server in (tcp, udp, unix):
            server.settimeout(0.1)
        with suppress(TimeoutError):
            assert not udp.recv(10)
    finally:
        for server in (tcp, udp, unix):
            server.close()


@check(isolating=True)
async def _processes_of_this_machine_are_hidden(s: Sandbox) -> None:
    code = f"""
import os
pids = [p for p in os.listdir("/proc") if p.isdigit()]
if len(pids) > 8: print("sees", len(pids))
for number in (0, 9):
    try: os.kill({os.getpid()}, number); print("signalled", number)
    except OSError: pass
"""
    if os.getpid() > 100:  # a process in the sandbox may have such a small number itself
        await check_output(s, code)


@check(isolating=True)
async def _no_rights(s: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = open("/proc/self/status").read()
for line in status.splitlines():
    if line.startswith("Cap") and int(line.split()[1], 16): print(line)
    if line.startswith("NoNewPrivs") and line.split()[1] != "1": print(line)
    if line.startswith("Seccomp:") and line.split()[1] != "2": print(line)
if os.getuid() == 0: print("root")
for name, call in {
    "setuid": lambda: os.setuid(0),
    "chroot": lambda: os.chroot("/tmp"),
    "mknod": lambda: os.mknod("node", 0o020666, os.makedev(1, 1)),
    "nice": lambda: os.nice(-5),
}.items():
    try: call(); print("did", name)
    except OSError: pass
for name, *args in [
    ("unshare", 0x10000000), ("unshare", 0x40000000), ("setns", 3, 0),
    ("mount", b"none", b"/tmp", b"tmpfs", 0, None), ("umount2", b"/tmp", 2),
    ("ptrace", 16, os.getppid(), None, None), ("personality", 0x0040000),
    ("sethostname", b"x", 1), ("reboot", 0),
]:
    if getattr(libc, name)(*args) >= 0: print("did", name)
import platform
numbers = {  # bpf, keyctl, perf_event_open, userfaultfd, memfd_create, shmget
    "x86_64": [321, 250, 298, 323, 319, 29], "aarch64": [280, 219, 241, 282, 279, 194],
}
for number in [*numbers[platform.machine()], 425, 430, 435]:  # io_uring, fsopen, clone3
    if libc.syscall(number, 0, 4096, 0, 0, 0, 0) >= 0: print("did", number)
"""
    await check_output(s, code)


@check(isolating=True)
async def _no_way_into_new_namespaces(s: Sandbox) -> None:
    done = await s.run("unshare -U true || unshare -n true || unshare -r id", language="bash")
    assert done.exit_code != 0, done


@check(isolating=True)
async def _setuid_programs_get_no_rights(s: Sandbox) -> None:
    code = """
find /usr/bin -perm -4000 | wc -l
su -c id root < /dev/null; sudo -n id; id -u
"""
    done = await s.run(code, language="bash")
    assert "uid=0" not in done.stdout and done.stdout.splitlines()[-1] != "0", done


@check(isolating=True)
async def _there_is_no_terminal(s: Sandbox) -> None:
    code = """
import fcntl
for path in ("/dev/tty", "/dev/console", "/dev/stdin"):
    try:
        with open(path, "rb") as f: fcntl.ioctl(f, 0x5412, b"x"); print("typed into", path)
    except OSError: pass
"""
    await check_output(s, code)


@check(isolating=True)
async def _shared_memory_is_bounded(s: Sandbox) -> None:
    code = """
try:
    for i in range(64):
        with open(f"/dev/shm/{i}", "wb") as f: f.write(bytes(1 << 20))
    print("wrote it")
except OSError as e: print("refused")
"""
    assert await run_ok(s, code) == "refused\n"


# Limits, and what happens to programs that exceed them.


@check(limits=True)
async def _a_crash_reports_its_signal(s: Sandbox) -> None:
    done = await s.run("import os; os.kill(os.getpid(), 11)")
    assert (done.exit_code, done.ended_by) == (-11, "signal"), done
    done = await s.run("import os; os.abort()")
    assert (done.exit_code, done.ended_by) == (-6, "signal"), done


@check(limits=True)
async def _memory_is_bounded(s: Sandbox) -> None:
    done = await s.run("x = bytearray(1 << 30); print('had it')", limits=Limits(memory_mb=256))
    assert not done.ok and "had it" not in done.stdout and "MemoryError" in done.stderr, done


@check(limits=True)
async def _processor_time_is_bounded(s: Sandbox) -> None:
    done = await s.run("while True: pass", limits=Limits(cpu_seconds=1, seconds=60))
    assert done.ended_by == "cpu" and done.exit_code < 0, done


@check(limits=True)
async def _excessive_output_is_ended_and_cut(s: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        code = f"import sys\nprint('first', file=sys.{stream})\n"
        code += f"while True: print('x' * 999, file=sys.{stream})"
        done = await s.run(code, limits=Limits(output_bytes=10_000, seconds=30))
        assert done.ended_by == "output", done
        text = getattr(done, stream)
        assert text.startswith("first") and "omitted" in text and len(text) < 11_000, len(text)


@check(limits=True)
async def _output_below_the_limit_is_complete(s: Sandbox) -> None:
    text = await run_ok(s, "print('x' * 60_000)")
    assert text == "x" * 60_000 + "\n"


@check(limits=True)
async def _files_are_bounded(s: Sandbox) -> None:
    code = """
try:
    with open("big", "wb") as f:
        for _ in range(64): f.write(bytes(1 << 20))
    print("wrote it")
except OSError as e: print(type(e).__name__)
"""
    assert await run_ok(s, code, limits=Limits(disk_mb=8)) == "OSError\n"


@check(limits=True)
async def _open_files_are_bounded(s: Sandbox) -> None:
    code = """
files = []
try:
    while len(files) < 5000: files.append(open("/dev/null"))
    print("all")
except OSError as e: print(e.strerror)
"""
    assert await run_ok(s, code, limits=Limits(open_files=64)) == "Too many open files\n"


# Start, input, output and end of programs.


@check()
async def _output_is_returned(s: Sandbox) -> None:
    done = await s.run("import sys\nprint(6 * 7)\nprint('oh', file=sys.stderr)")
    assert (done.stdout, done.stderr.strip(), done.exit_code) == ("42\n", "oh", 0), done
    assert done.ok and done.ended_by == "" and 0 < done.seconds < 60, done


@check()
async def _an_empty_program_has_no_output(s: Sandbox) -> None:
    for language in ("python", "bash"):
        done = await s.run("", language=language)
        assert done.ok and not done.stdout and not done.stderr, done


@check()
async def _exit_codes_are_kept(s: Sandbox) -> None:
    for code in (1, 2, 42, 127):
        done = await s.run(f"import sys; sys.exit({code})")
        assert (done.exit_code, done.ended_by, done.ok) == (code, "", False), done
        done = await s.run(f"exit {code}", language="bash")
        assert (done.exit_code, done.ended_by) == (code, ""), done


@check()
async def _an_exception_is_exit_code_1(s: Sandbox) -> None:
    done = await s.run("print('before', flush=True)\n1 / 0")
    assert (done.exit_code, done.stdout, done.ended_by) == (1, "before\n", ""), done
    assert "ZeroDivisionError" in done.stderr and "line 2" in done.stderr, done


@check()
async def _a_syntax_error_is_exit_code_1(s: Sandbox) -> None:
    done = await s.run("def f(:")
    assert done.exit_code == 1 and "SyntaxError" in done.stderr, done


@check()
async def _process_1_ends_like_any_program(s: Sandbox) -> None:
    done = await s.run("import sys\nprint(input())\nsys.exit(3)", stdin="1", init=True)
    assert (done.stdout, done.exit_code, done.ended_by) == ("1\n", 3, ""), done


@check()
async def _stdin_is_complete(s: Sandbox) -> None:
    stdin_text = "line é\n" * 50_000
    text = await run_ok(
        s, "import sys; t = sys.stdin.read(); print(len(t), t[:6])", stdin=stdin_text
    )
    assert text == f"{len(stdin_text)} line é\n", text
    assert await run_ok(s, "import sys; print(repr(sys.stdin.read()))") == "''\n"
    assert await run_ok(s, "read a; read b; echo $b", language="bash", stdin="1\n2\n") == "2\n"


@check()
async def _unicode_is_preserved(s: Sandbox) -> None:
    text = "naïve Ω 漢字 🙂"
    assert await run_ok(s, f"print({text!r})") == text + "\n"


@check()
async def _control_characters_are_escaped(s: Sandbox) -> None:
    code = r"import os; os.write(1, b'\xff\xfe a\0b \x1b[31mred \xc2\x9b ok')"
    text = await run_ok(s, code)
    assert "\0" not in text and "\x1b" not in text and "\x9b" not in text, repr(text)
    assert "red" in text and text.endswith("ok"), repr(text)
    text.encode()


@check()
async def _lone_surrogates_are_accepted(s: Sandbox) -> None:
    done = await s.run("print('a\ud800b')", stdin="\udfff")
    (done.stdout + done.stderr).encode()


@check()
async def _files_are_in_the_working_folder(s: Sandbox) -> None:
    files = {"a.txt": b"one", "deep/er/b.bin": bytes(range(256)), "helper.py": b"x = 5"}
    code = """
import helper
print(open("a.txt").read(), len(open("deep/er/b.bin", "rb").read()), helper.x)
"""
    assert await run_ok(s, code, files=files) == "one 256 5\n"


@check()
async def _paths_out_of_the_folder_are_refused(s: Sandbox) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "", "nul\0"):
        try:
            await s.run("", files={name: b""})
        except ValueError:
            continue
        raise AssertionError(f"a file {name!r} was accepted")


@check()
async def _no_files_are_left_for_the_next_program(s: Sandbox) -> None:
    name = f"left-{secrets.token_hex(4)}"
    await s.run(f"open({name!r}, 'w').write('x')")
    assert await run_ok(s, f"import os; print(os.path.exists({name!r}))") == "False\n"


@check()
async def _folders_can_be_made_and_used(s: Sandbox) -> None:
    code = "mkdir -p a/b && cd a/b && echo hi > c && cat c && python3 -c 'print(1)'"
    assert await run_ok(s, code, language="bash") == "hi\n1\n"


@check()
async def _a_program_that_takes_too_long_is_ended(s: Sandbox) -> None:
    done = await s.run("while True: pass", limits=Limits(seconds=1))
    assert done.ended_by == "time" and not done.ok and done.exit_code < 0, done
    assert 0.9 < done.seconds < 10, done


@check()
async def _a_sleeping_program_is_ended(s: Sandbox) -> None:
    done = await s.run("sleep 1000", language="bash", limits=Limits(seconds=1))
    assert done.ended_by == "time", done


@check()
async def _ignoring_signals_does_not_prevent_the_end(s: Sandbox) -> None:
    code = """
import signal, time
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(10)
"""
    done = await s.run(code, limits=Limits(seconds=1))
    assert done.ended_by == "time", done


@check()
async def _output_before_the_end_is_kept(s: Sandbox) -> None:
    code = "import time; print('begun', flush=True); time.sleep(100)"
    done = await s.run(code, limits=Limits(seconds=1))
    assert done.ended_by == "time" and done.stdout == "begun\n", done


@check()
async def _children_end_with_their_program(s: Sandbox) -> None:
    """Processes in their own session that keep the output open must end as well."""
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.fork()
    time.sleep(1000)
print("done", flush=True)
os._exit(0)
"""
    start = asyncio.get_running_loop().time()
    done = await s.run(code, limits=Limits(seconds=30))
    assert done.stdout == "done\n" and done.exit_code == 0, done
    assert asyncio.get_running_loop().time() - start < 15


@check()
async def _many_at_once_do_not_mix(s: Sandbox) -> None:
    async def one(i: int) -> None:
        code = f"open('mine', 'w').write('{i}')\nimport time; time.sleep(0.05)\n"
        code += "print(open('mine').read())"
        assert await run_ok(s, code) == f"{i}\n"

    await asyncio.gather(*(one(i) for i in range(12)))


@check()
async def _a_cancelled_run_is_stopped(s: Sandbox) -> None:
    task = asyncio.ensure_future(s.run("import time; time.sleep(1000)"))
    await asyncio.sleep(0.3)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, 15)
    assert await run_ok(s, "print(1)") == "1\n"


@check()
async def _a_long_program_is_accepted(s: Sandbox) -> None:
    code = "x = [\n" + "1,\n" * 100_000 + "]\nprint(sum(x))"
    assert await run_ok(s, code) == "100000\n"


@check()
async def _environment_variables_are_not_inherited(s: Sandbox) -> None:
    name = f"AGENTRL_SECRET_{secrets.token_hex(4).upper()}"
    os.environ[name] = "secret"
    try:
        text = await run_ok(s, "import os, json; print(json.dumps(dict(os.environ)))")
    finally:
        del os.environ[name]
    assert "secret" not in text and "PATH" in json.loads(text), text


@check()
async def _a_process_pool_works(s: Sandbox) -> None:
    code = """
from multiprocessing import get_context
def f(x): return x * x
if __name__ == "__main__":
    with get_context("fork").Pool(2) as pool: print(sum(pool.map(f, range(10))))
"""
    assert await run_ok(s, code) == "285\n"
