"""The memory of a program as a whole, with what the kernel stores for it: bounded by a cgroup."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from contextlib import suppress

import pytest
from support.needs import needs_sandbox

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox import Limits, cgroup
from agentrl.sandbox.cgroup import EXTRA_MB, Cgroup, Parent
from agentrl.sandbox.settings import open_sandbox

needs_cgroup = pytest.mark.skipif(
    "cgroup.find_parent() is None", reason="no cgroup with a memory limit can be made here"
)
LIMITS = Limits(seconds=30, cpu_seconds=30, memory_mb=64, disk_mb=1, processes=8)
BOUND = (LIMITS.memory_mb + LIMITS.disk_mb + EXTRA_MB) * 2**20
ATTACKS = {
    # At most 250 MiB in all processes, of which none has more than 20.
    "sockets": """
import os, socket
for _ in range(2):
    if os.fork() == 0: break
held = []
for _ in range(100):
    held.append(socket.socketpair())
    for end in held[-1]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.setblocking(False)
        try:
            while True: end.send(bytes(32768))
        except BlockingIOError: pass
import time
time.sleep(1)
print('done')
""",
    # Some 220 MiB, while the program itself has 10.
    "empty files": """
import os
for i in range(250_000): os.mknod(str(i))
print('done')
""",
}


def peaks(parent: Parent) -> list[int]:
    """The most memory that each program's cgroup has held so far, in bytes."""
    name = "memory.peak" if parent.limit == "memory.max" else "memory.max_usage_in_bytes"
    values = []
    for file in parent.folder.glob(f"agentrl-*/{name}"):
        with suppress(OSError):  # the program ended meanwhile, before or after the file was opened
            values.append(int(file.read_text()))
    return values


@needs_sandbox
@needs_cgroup
@pytest.mark.parametrize("attack", ATTACKS)
async def test_what_the_kernel_stores_for_a_program_counts_as_its_memory(attack):
    parent = cgroup.find_parent()
    assert parent is not None
    place, most = open_sandbox(SandboxConfig()), 0
    for _ in range(5):  # the last peak may come and go between two looks
        program = asyncio.create_task(place.run(ATTACKS[attack], limits=LIMITS))
        while not program.done():
            await asyncio.sleep(0.005)
            most = max(most, *peaks(parent), 0)
        done = await program
        assert done.ended_by == "signal" and "done" not in done.stdout, done
        if most > 0.8 * BOUND:
            break
    assert 0.8 * BOUND < most <= BOUND
    again = await place.run("print(6 * 7)", limits=LIMITS)
    assert again.stdout == "42\n", again
    await place.aclose()
    assert not [f for f in cgroup._pending_removal if f.exists()]


@needs_sandbox
@needs_cgroup
async def test_a_box_works_after_a_program_that_took_too_much_memory():
    place = open_sandbox(SandboxConfig())
    box = await place.open(limits=LIMITS)
    done = await box.run(ATTACKS["sockets"])
    assert "done" not in done.stdout and done.ended_by == "signal", done
    assert (await box.run("6 * 7")).stdout == "42\n"
    await box.aclose()
    await place.aclose()


@needs_sandbox
@needs_cgroup
async def test_one_process_at_its_own_limit_gets_a_memory_error_and_is_not_ended():
    place = open_sandbox(SandboxConfig())
    code = "held = []\ntry:\n    while True: held.append(bytes(1 << 20))\nexcept MemoryError: "
    done = await place.run(f"{code}held = None; print('refused')", limits=LIMITS)
    assert done.ok and done.stdout == "refused\n", done
    await place.aclose()


@needs_sandbox
@needs_cgroup
async def test_a_program_that_cannot_be_limited_is_an_infrastructure_error(monkeypatch):
    def refused(self, pid):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Cgroup, "add", refused)
    place = open_sandbox(SandboxConfig())
    with pytest.raises(
        SandboxError, match=r"cannot move a process to the cgroup .*: Permission denied"
    ):
        await place.run("print(1)")
    with pytest.raises(
        SandboxError, match=r"cannot move a process to the cgroup .*: Permission denied"
    ):
        await place.open()
    await place.aclose()


@needs_sandbox
async def test_programs_run_where_no_cgroup_can_be_made(monkeypatch):
    monkeypatch.setattr(cgroup, "find_parent", lambda: None)
    place = open_sandbox(SandboxConfig())
    assert (await place.run("print(6 * 7)")).stdout == "42\n"
    box = await place.open()
    assert (await box.run("6 * 7")).stdout == "42\n"
    await box.aclose()
    await place.aclose()


@needs_cgroup
def test_cgroups_of_a_run_that_was_killed_are_removed_by_the_next(monkeypatch):
    """It is not deleted at once: another container may still put a process into it."""
    parent = cgroup.find_parent()
    assert parent is not None
    with subprocess.Popen(["true"]) as ended:
        pass
    orphan = parent.folder / f"agentrl-{ended.pid}-{'0' * 16}"
    other = parent.folder / f"agentrl-{ended.pid}-by-hand"
    orphan.mkdir()
    other.mkdir()
    try:
        cgroup.find_parent.cache_clear()
        assert cgroup.find_parent() == parent and orphan.exists()
        monkeypatch.setattr(cgroup, "ORPHAN_SECONDS", -1.0)
        cgroup.find_parent.cache_clear()
        assert cgroup.find_parent() == parent and not orphan.exists() and other.exists()
    finally:
        other.rmdir()


def world(folder, own, mounts, controllers=()):
    """A `/proc/self` with these lines, and the folders of cgroups with their controllers."""
    (folder / "self").mkdir()
    (folder / "self" / "cgroup").write_text(own)
    (folder / "self" / "mountinfo").write_text(mounts.replace("FOLDER", str(folder)))
    for name, text in dict(controllers).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "cgroup.subtree_control").write_text(text)
    return folder / "self"


SECOND = "31 23 0:28 / FOLDER/cg rw,nosuid - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("own", "controllers", "folders"),
    [
        # systemd: beside the cgroup of the session.
        ("0::/user.slice/s.scope\n", {"user.slice": "cpu memory\n", "user.slice/s.scope": "\n"},
         ["user.slice"]),
        # The root cgroup is the only one that may have processes and limit others.
        ("0::/\n", {"": "cpu memory pids\n"}, [""]),
        # A container: nothing is delegated.
        ("0::/\n", {"": "\n"}, []),
        ("0::/user.slice/s.scope\n", {"user.slice": "cpu\n", "user.slice/s.scope": "\n"}, []),
    ],
)  # fmt: skip
def test_folders_where_cgroups_v2_can_be_made(tmp_path, own, controllers, folders):
    controllers = {f"cg/{name}": text for name, text in controllers.items()}
    proc = world(tmp_path, own, SECOND, controllers)
    candidates = [parent.folder for parent in cgroup._candidates(proc)]
    assert candidates == [tmp_path / "cg" / name for name in folders]


def test_cgroups_v1_is_used_if_it_has_the_memory_controller(tmp_path):
    first = "35 31 0:32 /docker/1 FOLDER/memory rw - cgroup cgroup rw,memory\n"
    other = "36 31 0:33 / FOLDER/pids rw - cgroup cgroup rw,pids\n"
    (tmp_path / "memory" / "mine").mkdir(parents=True)
    proc = world(tmp_path, "4:memory:/docker/1/mine\n8:pids:/\n0::/\n", other + first + SECOND)
    assert [p.folder for p in cgroup._candidates(proc)] == [tmp_path / "memory" / "mine"]
