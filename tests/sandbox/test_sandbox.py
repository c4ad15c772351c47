"""Programs that a model wrote: isolated, bounded, and gone when they are over; on every backend."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.cheats import (
    HONEST,
    LEAVE_A_FILE,
    LEAVE_A_PROCESS,
    READ_ITS_OWN_PROCESS,
    STOP_THE_HARNESS,
    scores,
)
from support.needs import needs_sandbox
from support.sandbox_conformance import CHECKS

from agentrl import sandbox
from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox import Limits
from agentrl.sandbox.bubblewrap import Child
from agentrl.sandbox.settings import open_sandbox
from agentrl.sandbox.uids import has_processes, process_uids

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def opened(**keys):
    place = open_sandbox(SandboxConfig(**keys))
    try:
        yield place
    finally:
        await place.aclose()


@pytest.fixture
def folder():
    """One that everybody can read: programs run as users of their own, where we are root."""
    with tempfile.TemporaryDirectory(prefix="agentrl-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def names(check):
    return check.name


@needs_sandbox
@pytest.mark.parametrize("check", CHECKS, ids=names)
async def test_bubblewrap_conforms(check):
    async with opened() as place:
        await check.run(place)


@pytest.mark.slow
@pytest.mark.parametrize("check", [c for c in CHECKS if not c.isolating], ids=names)
async def test_unsafe_subprocess_conforms_but_isolates_nothing(check):
    async with opened(backend="unsafe-subprocess") as place:
        await check.run(place)


# Limits: whoever passes one harms nobody (S3, S4)

BOMBS = {
    "fork": (
        "import os, time\nn = 0\ntry:\n"
        "    while n < 60:\n"
        "        if os.fork() == 0: time.sleep(1000)\n"
        "        n += 1\n"
        "except OSError: print('refused after', n)\n"
    ),
    "memory": "x = bytearray(4 << 30)",
    "disk": "f = open('f', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))",
    "many files": "for i in range(10**6): open(str(i), 'w').close()",
    "descriptors": "held = [open('/dev/null') for _ in range(10_000)]",
    "output": "while True: print('x' * 1000)",
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        while True: pass\n    os._exit(0)\nprint('left')\n",
}
CHECKED_BOMBS = ("memory", "output", "loop", "sleep")
"""A check of conformance has the same limit, and nothing is left of a single process."""
BOMBED = Limits(seconds=1.5, processes=32, memory_mb=512)


@needs_sandbox
@pytest.mark.parametrize(
    "bomb", [pytest.param(b, marks=pytest.mark.slow) if b in CHECKED_BOMBS else b for b in BOMBS]
)
async def test_programs_that_take_too_much_are_stopped_and_leave_nothing(bomb):
    async with opened() as place:
        done = await place.run(BOMBS[bomb], limits=BOMBED)
        stopped = {
            "fork": done.ok and done.stdout == "refused after 31\n",
            "memory": "MemoryError" in done.stderr,
            "disk": "File too large" in done.stderr or "No space left" in done.stderr,
            "many files": done.ended_by in ("time", "output", ""),
            "descriptors": "Too many open files" in done.stderr,
            "output": done.ended_by == "output",
            "loop": done.ended_by == "time",
            "sleep": done.ended_by == "time",
            "daemon": done.ok and done.stdout == "left\n",
        }
        assert stopped[bomb], done
        # The next program gets its user id, and may start as many processes as it.
        assert [lease for lease in process_uids.free if has_processes(lease.uid)] == []
        assert bool(process_uids.free) == (os.geteuid() == 0)
        again = await place.run(BOMBS["fork"], limits=BOMBED)
        assert again.stdout == "refused after 31\n", again


@needs_sandbox
async def test_four_bombs_do_not_harm_a_fifth():
    """One user id between them, and the bomb's processes would have been the good one's."""
    good = """
import os, time
pids = []
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2); os._exit(0)
    pids.append(pid)
print(sum(os.waitpid(pid, 0)[1] == 0 for pid in pids), len(bytearray(64 << 20)))
"""
    async with opened(slots=5) as place:
        bombs = [place.run(BOMBS[b], limits=BOMBED) for b in ("fork", "loop", "daemon", "disk")]
        done, *_ = await asyncio.gather(
            place.run(good, limits=Limits(seconds=30, processes=32)), *bombs
        )
    assert done.stdout == f"20 {64 << 20}\n", done


@needs_sandbox
async def test_a_program_that_ignores_the_cpu_limit_signal_is_killed():
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    async with opened() as place:
        done = await place.run(code, limits=Limits(cpu_seconds=1, seconds=60))
    assert (done.exit_code, done.ended_by) == (-9, "cpu"), done


@needs_sandbox
async def test_setting_up_is_timed_apart_from_the_program(monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.bubblewrap.SETUP_SECONDS", 0.8)
    async with opened() as place:
        done = await place.run("import time; time.sleep(1.2); print('whole')")
    assert done.ok and done.stdout == "whole\n", done


@needs_sandbox
async def test_no_program_can_stop_the_init_process_of_its_namespace():
    code = """
import os, signal, time
if os.fork() == 0:
    for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        os.kill(os.getppid(), number)
    time.sleep(60)
time.sleep(0.3)
os.kill(-1, signal.SIGKILL)
print(os.getpid(), os.WTERMSIG(os.wait()[1]))
"""
    async with opened() as place:
        done = await place.run(code, init=True)
    assert done.ok and done.stdout == "1 9\n", done


async def test_a_folder_is_removed_however_deep_it_is():
    code = "import os\nfor _ in range(1500):\n    os.mkdir('a')\n    os.chdir('a')"
    async with opened(backend="unsafe-subprocess") as place:
        done = await place.run(f"import os\nprint(os.environ['HOME'])\n{code}")
        assert done.ok, done
        assert not Path(done.stdout.strip()).parent.exists()


# A box that is gone is the program's doing: the episode goes on


def killed(box):
    """End its driver, as nothing in there can."""
    if isinstance(box.driver.process, Child):
        box.driver.process.kill()
    else:
        os.kill(box.driver.process.process.pid, 9)


@pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=needs_sandbox), "unsafe-subprocess"]
)
@pytest.mark.timing
async def test_a_box_that_dies_ends_its_program_and_is_replaced(backend):
    async with opened(backend=backend) as place:
        box = await place.open(files={"given": b"first"})
        await box.run("x = 1; open('a', 'w').write('mine'); open('given', 'w').write('other')")
        running = asyncio.ensure_future(box.run("import time; time.sleep(30)", seconds=30))
        waiting = asyncio.ensure_future(box.run("import os; sorted(os.listdir())"))
        await asyncio.sleep(0.3)
        killed(box)
        done = await running
        assert (done.exit_code, done.ended_by, done.stdout) == (-9, "signal", "")
        assert "variables and files are lost" in done.stderr and 0.2 < done.seconds < 10
        done = await waiting
        assert (done.exit_code, done.stdout) == (0, "['given']\n") and "lost" in done.stderr
        assert await box.read("given") == b"first"
        assert (await box.run("x = 2")).stderr == ""
        # Between two programs, too; and where a file is asked for first.
        killed(box)
        await asyncio.sleep(0.2)
        with pytest.raises(FileNotFoundError):
            await box.read("a")
        done = await box.run("x")
        assert "NameError" in done.stderr and "earlier variables and files are lost" in done.stderr
        assert len(place.drivers) == 1
        await box.aclose()
        assert not place.drivers
        with pytest.raises(SandboxError, match="closed"):
            await box.run("1")


@needs_sandbox
async def test_a_box_that_stops_answering_ends_its_program_by_timeout(monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.box.GRACE_SECONDS", 0.3)
    async with opened() as place:
        box = await place.open()
        signal.pidfd_send_signal(box.driver.process.init_pidfd, signal.SIGSTOP)
        done = await box.run("1", seconds=0.2)
        assert (done.exit_code, done.ended_by) == (-9, "time"), done
        assert (await box.run("6 * 7")).stdout == "42\n"
        await box.aclose()


@needs_sandbox
async def test_a_dead_box_without_a_replacement_is_an_infrastructure_error(monkeypatch):
    async with opened() as place:
        box = await place.open()
        killed(box)
        await asyncio.sleep(0.2)
        monkeypatch.setattr("agentrl.sandbox.base.MAX_BOXES", 0)
        for _ in range(2):
            with pytest.raises(SandboxError, match="open boxes, which is the maximum"):
                await box.run("1")
        monkeypatch.undo()
        assert (await box.run("6 * 7")).stdout == "42\n"
        await box.aclose()


async def test_a_box_closed_during_a_program_is_an_infrastructure_error():
    async with opened(backend="unsafe-subprocess") as place:
        box = await place.open()
        running = asyncio.ensure_future(box.run("import time; time.sleep(30)", seconds=30))
        await asyncio.sleep(0.3)
        await place.aclose()
        with pytest.raises(SandboxError, match="closed"):
            await running


# Closed where it cannot be had (S5)


@pytest.mark.parametrize(
    ("bwrap", "message"),
    [
        ("", "apt-get install bubblewrap"),
        ("exit 1", "it printed nothing"),
        ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "apparmor_parser -r"),
        (
            "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1",
            "seccomp=unconfined",
        ),
        ("echo 'bwrap: Unknown option --disable-userns' >&2; exit 1", "0.8 or newer"),
        ("kill -9 $$", "does not work here"),
    ],
)
async def test_without_a_bwrap_that_works_nothing_runs(bwrap, message, folder, monkeypatch):
    for name in ("setpriv", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    if bwrap:
        (folder / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
        (folder / "bwrap").chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    ran = folder / "ran"
    async with opened() as place:
        with pytest.raises(SandboxError, match=message):
            await place.run(f"open({str(ran)!r}, 'w')")
        with pytest.raises(SandboxError, match=message):
            await place.open()
    assert message in sandbox.probe(SandboxConfig())
    assert not ran.exists()


@pytest.mark.parametrize("python", ["/no/such/python", "/usr", "/etc/passwd"])
async def test_an_interpreter_that_is_not_executable_is_an_error(python):
    async with opened(python=python) as place:
        with pytest.raises(
            SandboxError, match=f"sandbox.python={python} is not an executable file"
        ):
            await place.run("print(1)")


@needs_sandbox
async def test_a_program_that_cannot_be_started_is_an_infrastructure_error(monkeypatch):
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    def popen(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    async with opened() as place:
        await place.run("1")
        monkeypatch.setattr("agentrl.sandbox.bubblewrap.SETUP_SECONDS", 0.05)
        monkeypatch.setattr(subprocess, "Popen", popen)
        with pytest.raises(SandboxError, match=r"bubblewrap cannot run a program: .*open files"):
            await place.run("1")
        with pytest.raises(SandboxError, match=r"bubblewrap cannot start a box: .* open files"):
            await place.open()
        await asyncio.sleep(0.2)
    assert faults == []


async def test_without_isolation_such_a_program_is_an_infrastructure_error_too(monkeypatch):
    def popen(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", popen)
    async with opened(backend="unsafe-subprocess") as place:
        with pytest.raises(SandboxError, match="unsafe-subprocess cannot run a program"):
            await place.run("1")


# Nothing outlives its parent (F17)

PARENT = """
import asyncio, sys
from agentrl.config import SandboxConfig
from agentrl.sandbox.settings import open_sandbox

async def main():
    place = open_sandbox(SandboxConfig(backend=sys.argv[1]))
    box = await place.open()
    print((await box.run("import os; print(os.getcwd())")).stdout, end="", flush=True)
    sleep = f"(['sleep', '{sys.argv[2]}'], start_new_session=True)"
    runs = [
        asyncio.ensure_future(place.run("import subprocess; subprocess.run" + sleep))
        for _ in range(2)
    ]
    await box.run("import subprocess; subprocess.Popen" + sleep)
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await asyncio.gather(*runs)

asyncio.run(main())
"""


def running(words):
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                count += words in (entry / "cmdline").read_bytes() and state != "Z"
            except OSError:
                continue
    return count


@pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap", marks=needs_sandbox), "unsafe-subprocess"]
)
def test_programs_end_with_a_parent_that_was_killed(backend):
    seconds = str(40_000 + os.getpid() % 10_000 + (backend == "bubblewrap") * 20_000)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, backend, seconds],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    try:
        folder = Path(parent.stdout.readline().strip()).parent
        assert parent.stdout.readline() == "ready\n"
        words = f"sleep\0{seconds}\0".encode()
        assert running(words) == 3
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    # Without a namespace, the driver deletes its folder.
    isolated = backend == "bubblewrap"
    until = time.monotonic() + 30
    while (running(words) or (not isolated and folder.exists())) and time.monotonic() < until:
        time.sleep(0.05)
    assert running(words) == 0
    assert isolated or not folder.exists()


# As an ordinary user


@needs_sandbox
def test_an_ordinary_user_has_the_same_limits():
    """If the sandbox cannot switch to another user, processes are counted per namespace."""
    script = f"""
import asyncio
from agentrl.config import SandboxConfig
from agentrl.sandbox import Limits
from agentrl.sandbox.settings import open_sandbox

async def main():
    place = open_sandbox(SandboxConfig())
    limits = Limits(processes=32)
    both = await asyncio.gather(*(place.run({BOMBS["fork"]!r}, limits=limits) for _ in range(2)))
    print([d.stdout for d in both])
    box = await place.open()
    print((await box.run("6 * 7")).stdout)
    await box.aclose()

asyncio.run(main())
"""
    become = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
    prefix = become if os.geteuid() == 0 else []
    ours = subprocess.run([*prefix, "test", "-x", sys.executable], check=False).returncode == 0
    # Root's own interpreter is for root alone; another of the same version takes its packages.
    name = f"python3.{sys.version_info.minor}"
    python = sys.executable if ours else shutil.which(name, path=os.defpath)
    if python is None:
        pytest.skip(f"no {name} that an ordinary user may run")
    done = subprocess.run(
        [*prefix, python, "-c", script],
        env={
            "PYTHONPATH": f"{ROOT}:{Path(pytest.__file__).parent.parent}",
            "PATH": os.environ["PATH"],
            "HOME": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("refused after 31") == 2 and "42" in done.stdout, done


# Slots, ids, boxes


async def test_time_in_the_queue_for_a_slot_does_not_count(monkeypatch):
    async with opened(backend="unsafe-subprocess", slots=1) as place:
        limits = Limits(seconds=1.2)
        both = await asyncio.gather(
            *(place.run("import time; time.sleep(0.7)", limits=limits) for _ in range(3))
        )
        assert [d.ended_by for d in both] == ["", "", ""]
        monkeypatch.setattr("agentrl.sandbox.base.SLOT_SECONDS", 0.2)
        long = asyncio.ensure_future(place.run("import time; time.sleep(1)"))
        await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match=r"all 1 slots are taken. Set sandbox.slots higher"):
            await place.run("1")
        assert (await long).ok


def test_two_processes_never_share_an_id(tmp_path):
    from agentrl.sandbox.uids import Uids

    first, second = Uids(tmp_path), Uids(tmp_path)
    a, b, c = first.take(), second.take(), first.take()
    assert len({a.uid, b.uid, c.uid}) == 3
    first.release(a)
    assert first.take() is a
    assert first.take().uid not in (a.uid, b.uid, c.uid)
    assert second.take().uid not in (a.uid, b.uid, c.uid)


# SandboxFusion


FUSION_CHECKS = (
    "output_is_returned",
    "exit_codes_are_kept",
    "stdin_is_complete",
    "files_are_in_the_working_folder",
    "a_program_that_takes_too_long_is_ended",
    "many_at_once_do_not_mix",
    "a_cancelled_run_is_stopped",
)
"""What the translation to fusion's API changes. `make test-all` runs all checks."""


class Code(BaseModel):
    code: str
    language: str
    stdin: str | None = None
    files: dict[str, str | None] = {}
    run_timeout: float = 10
    memory_limit_MB: int = -1


@pytest.fixture(scope="module")
def fusion():
    """Its API (`/run_code`), with our own bubblewrap behind."""
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()
    behind = open_sandbox(SandboxConfig())

    @app.post("/run_code")
    async def run_code(request: Code):
        if request.code == "broken":
            return {"status": "SandboxError", "message": "no place left", "run_result": None}
        done = await behind.run(
            request.code,
            language=request.language,  # pyright: ignore
            stdin=request.stdin or "",
            files={n: base64.b64decode(c or "") for n, c in request.files.items()},
            limits=Limits(seconds=request.run_timeout, memory_mb=request.memory_limit_MB),
        )
        late = done.ended_by == "time"
        return {
            "status": "Success" if done.ok else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "TimeLimitExceeded" if late else "Finished",
                "execution_time": done.seconds,
                "return_code": None if late else done.exit_code,
                "stdout": done.stdout,
                "stderr": done.stderr,
            },
            "files": {},
        }

    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@needs_sandbox
@pytest.mark.parametrize(
    "check",
    [
        c if c.name in FUSION_CHECKS else pytest.param(c, marks=pytest.mark.slow)
        for c in CHECKS
        if not c.boxes and not c.limits
    ],
    ids=names,
)
async def test_sandbox_fusion_conforms(check, fusion):
    async with opened(backend=fusion) as place:
        await check.run(place)


@needs_sandbox
async def test_a_server_that_fails_is_infrastructure(fusion):
    async with opened(backend=fusion) as place:
        with pytest.raises(SandboxError, match="no place left"):
            await place.run("broken")
        with pytest.raises(
            SandboxError, match=r"cannot keep variables or files .*sandbox.backend=bubblewrap"
        ):
            await place.open()
        assert sandbox.probe(SandboxConfig(backend=fusion)) == ""
    async with opened(backend=f"{fusion}/nowhere") as place:
        with pytest.raises(SandboxError, match="status 404"):
            await place.run("1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with opened(backend=nobody) as place:
        with pytest.raises(SandboxError):
            await place.run("1")


@needs_sandbox
@pytest.mark.slow
def test_the_code_grader_on_a_server(fusion):
    """Without process 1: a process that is left behind still ends before the next test."""
    sandbox.configure(SandboxConfig(backend=fusion))
    try:
        for way in (READ_ITS_OWN_PROCESS, LEAVE_A_PROCESS, LEAVE_A_FILE):
            assert scores(way) == pytest.approx(dict.fromkeys(way, HONEST))
        assert scores(STOP_THE_HARNESS, seconds=1.0) == pytest.approx(
            dict.fromkeys(STOP_THE_HARNESS, HONEST)
        )
    finally:
        sandbox.configure(SandboxConfig())


# The settings of a process


async def test_the_current_sandbox_follows_the_settings(caplog):
    try:
        sandbox.configure(SandboxConfig())
        first = sandbox.current()
        assert first is sandbox.current() and first.name == "bubblewrap"
        sandbox.configure(SandboxConfig(backend="unsafe-subprocess"))
        assert sandbox.current().name == "unsafe-subprocess"
        assert "runs as you" in caplog.text
        caplog.clear()
        sandbox.configure(SandboxConfig(backend="unsafe-subprocess", slots=3))
        assert not caplog.text
        sandbox.configure(SandboxConfig(backend="http://127.0.0.1:9"))
        assert sandbox.current().name == "SandboxFusion at http://127.0.0.1:9"
    finally:
        sandbox.configure(SandboxConfig())
        await sandbox.release()


# Under load (L1)


@pytest.mark.slow
@needs_sandbox
@pytest.mark.load
async def test_a_thousand_runs_leave_nothing_and_keep_their_pace(capsys):
    """200 of them, so that it fits beside other tests; `benchmarks/sandbox.py` has the figures."""
    count, at_once = 200, 8
    async with opened(slots=at_once) as place:
        took: list[float] = []

        async def one():
            began = time.monotonic()
            done = await place.run("print(1 + 1)")
            took.append(time.monotonic() - began)
            assert done.stdout == "2\n", done

        await asyncio.gather(*(one() for _ in range(at_once)))
        took.clear()
        fds = len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        gate = asyncio.Semaphore(at_once)

        async def gated():
            async with gate:
                await one()

        await asyncio.gather(*(gated() for _ in range(count)))
        rate, p99 = count / (time.monotonic() - began), sorted(took)[int(0.99 * count)]
        left = len(os.listdir("/proc/self/fd"))
    with capsys.disabled():
        print(f"\nsandbox: {rate:.0f} runs/s with {at_once} at once, p99 {p99 * 1e3:.0f} ms")
    assert left <= fds + 2
    assert rate >= 10 and p99 < 3


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("bubblewrap", marks=needs_sandbox),
        pytest.param("unsafe-subprocess", marks=pytest.mark.slow),  # the same code moves the bytes
    ],
)
async def test_large_files_are_written_and_read_in_seconds(backend):
    """The time was proportional to the square of the size: 60 MB took longer than the limit."""
    content = os.urandom(60_000_000)
    async with opened(backend=backend) as place:
        box = await place.open()
        await box.run("x = 5")
        await box.write("a", content)
        assert await box.read("a", len(content)) == content
        if backend == "bubblewrap":
            with pytest.raises(OSError, match="No space left"):
                await box.write("b", content)
        assert (await box.run("print(x)")).stdout == "5\n"


async def test_an_answer_that_is_too_long_does_not_block_the_box(monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.box.MAX_ANSWER", 1000)
    async with opened(backend="unsafe-subprocess") as place:
        box = await place.open()
        await box.write("a", bytes(200_000))
        with pytest.raises(SandboxError, match=r"sent 266.* bytes, more than 1000"):
            await box.read("a", 200_000)
        assert (await box.run("print(5)")).stdout == "5\n"
