"""A memory limit for all processes of a program together, by a cgroup if one can be created.

An rlimit bounds the address space of one process. It does not bound what the kernel stores for it,
such as socket buffers and files in memory. A cgroup counts all of this.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import SandboxError
from agentrl.sandbox.program import Limits

EXTRA_MB = 64
"""MiB in addition to `Limits.memory_mb` and `disk_mb`, for /dev/shm, the interpreters and the
kernel's memory per process. So a single process that reaches its own limit gets a MemoryError and
is not killed."""
_NAME = re.compile(r"agentrl-(\d+)-[0-9a-f]{16}")
"""`agentrl-`, the id of the process that created the cgroup, and a random number. The id alone is
not
unique: an earlier process, or a process in a container with the same folder, may have had it."""
ORPHAN_SECONDS = 60.0
"""The age after which an empty cgroup is removed if its creator is not visible here. A younger one
may belong to a container that has not yet moved a process into it."""
_pending_removal: set[Path] = set()
"""Cgroups that could not be removed yet, because a process in them was still ending."""


class Parent(NamedTuple):
    """A cgroup in which this process may create cgroups, and the names of the files for limits."""

    folder: Path
    limit: str
    more: Mapping[str, str]
    """The contents of further files, which may be missing; "" is replaced by the limit."""


class Cgroup:
    """A cgroup with a memory limit."""

    def __init__(self, parent: Parent, limit: int):
        """Create the cgroup.

        Args:
            parent: the parent cgroup.
            limit: the memory limit in bytes.

        Raises:
            OSError: the cgroup cannot be created.
        """
        _remove_pending()
        self.folder = parent.folder / f"agentrl-{os.getpid()}-{secrets.token_hex(8)}"
        self.folder.mkdir()
        try:
            (self.folder / parent.limit).write_text(str(limit))
            for name, value in parent.more.items():
                if (file := self.folder / name).exists():  # some kernels do not account swap
                    file.write_text(value or str(limit))
        except BaseException:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the cgroup. Processes that it starts later are in the cgroup as well.

        Raises:
            OSError: this is not permitted, or the process has ended.
        """
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the cgroup now, or when its last process has ended."""
        _pending_removal.add(self.folder)
        _remove_pending()


@contextmanager
def memory_limit(limits: Limits) -> Iterator[Cgroup | None]:
    """Yield a cgroup for a program; None if this machine allows none.

    Raises:
        SandboxError: the machine allows cgroups, but this one could not be created.
    """
    parent = find_parent()
    if parent is None:
        yield None
        return
    try:
        cgroup = Cgroup(parent, (limits.memory_mb + limits.disk_mb + EXTRA_MB) * 2**20)
    except OSError as e:
        raise SandboxError(f"cannot create a cgroup in {parent.folder}: {e.strerror}") from e
    try:
        yield cgroup
    finally:
        cgroup.remove()


@cache
def find_parent() -> Parent | None:
    """Find a cgroup in which cgroups with a memory limit can be created; None if there is none."""
    for parent in _candidates():
        _remove_orphans(parent.folder)
        try:
            cgroup = Cgroup(parent, 64 * 2**20)
        except OSError:
            continue
        try:
            with subprocess.Popen(["sleep", "60"]) as process:
                try:
                    cgroup.add(process.pid)
                finally:
                    process.kill()
        except OSError:
            continue
        else:
            return parent
        finally:
            cgroup.remove()
    return None


def _candidates(process: Path = Path("/proc/self")) -> Iterator[Parent]:
    """Yield the cgroups that may contain others with a memory limit.

    In cgroup v2, a cgroup with processes cannot have children with limits. There the new cgroups
    become siblings of this process's own cgroup.
    """
    try:
        mounts = (process / "mountinfo").read_text().splitlines()
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    own_paths = {
        tuple(names.split(",")): path for _, names, path in (x.split(":", 2) for x in lines)
    }
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        root, point = before.split(" ")[3:5]
        kind, _, options = after.split(" ")
        for names, path in own_paths.items():
            is_v1 = kind == "cgroup" and "memory" in names and "memory" in options.split(",")
            if not is_v1 and not (kind == "cgroup2" and names == ("",)):
                continue
            top = Path(point)
            folder = top / path.removeprefix(root).lstrip("/")
            folder = folder if folder.is_dir() else top
            if is_v1:
                more = {"memory.memsw.limit_in_bytes": "", "memory.kmem.tcp.limit_in_bytes": ""}
                yield Parent(folder, "memory.limit_in_bytes", more)
                continue
            for parent in [folder.parent] * (folder != top) + [folder]:
                with suppress(OSError):
                    if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                        yield Parent(parent, "memory.max", {"memory.swap.max": "0"})


def _remove_pending() -> None:
    for folder in list(_pending_removal):
        with suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            _pending_removal.discard(folder)


def _remove_orphans(folder: Path) -> None:
    """Remove the cgroups of runs that were killed."""
    for orphan in folder.glob("agentrl-*"):
        name = _NAME.fullmatch(orphan.name)
        if name is None or Path("/proc", name[1]).exists():
            continue
        with suppress(OSError):
            if time.time() - orphan.stat().st_mtime > ORPHAN_SECONDS:
                orphan.rmdir()
