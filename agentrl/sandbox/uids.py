"""Reserve a user id for each program, if this process is root.

The kernel counts the processes of a user, not those of a sandbox, and processes of one user may
signal each other. With a shared id, a program that forks without end would starve the others. For
root, no limit applies at all. So each program gets an id that is unique on the machine: a trainer
and a tool server are two processes that both run programs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.regular_files import open_lock

log = logging.getLogger("agentrl.sandbox")

FOLDER = Path("/run/agentrl/uids")
"""Contains a file for each id, which is locked by the process that uses the id."""
COUNT = 4096
BASES = (2_000_000_000, 61_184)
"""The first ids of two ranges. Usually no user has an id of the first range. The second range is
for containers with only 65,536 ids; systemd uses these ids for temporary services."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A user id that belongs to this process until the descriptor is closed."""

    uid: int
    fd: int


class Uids:
    """The user ids of this process. They are reserved when needed, and reused."""

    def __init__(self, folder: Path = FOLDER):
        self._folder = folder
        self.free: list[Lease] = []
        """Ids that were used and have no processes."""
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> Lease:
        """Reserve an id that no process uses, and return it.

        Raises:
            SandboxError: all ids are in use, or the folder of lock files cannot be created.
        """
        with self._lock:
            return self.free.pop() if self.free else self._lease()

    def release(self, lease: Lease) -> None:
        """Make an id available again. All its processes must have ended."""
        self.free.append(lease)

    def _lease(self) -> Lease:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise SandboxError(
                f"cannot create {self._folder} ({e.strerror}): as root, each program runs as its"
                " own user, and this folder holds the lock files of their ids. Create it, or"
                " run as another user"
            ) from e
        base = _base()
        count = COUNT if base == BASES[0] else 65_520 - base
        for _ in range(count):
            uid = base + self._next
            self._next = (self._next + 1) % count
            fd = open_lock(self._folder / str(uid))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            if not has_processes(uid):  # otherwise processes of a killed run still use the id
                return Lease(uid, fd)
            os.close(fd)
        raise SandboxError(f"all {count} user ids for programs are in use (see {self._folder})")


def _base() -> int:
    """Return the first id of a range that exists in this user namespace."""
    ranges = [
        (int(inside), int(inside) + int(length))
        for inside, _, length in map(str.split, Path("/proc/self/uid_map").read_text().splitlines())
    ]
    for base in BASES:
        if any(first <= base and base + COUNT <= end for first, end in ranges):
            return base
    raise SandboxError(
        "this container has too few user ids to run each program as its own user"
        f" (/proc/self/uid_map: {ranges}). Run as another user than root, or set sandbox.backend to"
        " the URL of a SandboxFusion server"
    )


def has_processes(uid: int) -> bool:
    """Return whether a process on this machine runs as this user."""
    uid_line = f"\nUid:\t{uid}\t"
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            # The owner of the /proc folder is not reliable: for non-dumpable processes it is root.
            try:
                if uid_line in Path(entry.path, "status").read_text():
                    return True
            except OSError:  # the process ended meanwhile
                continue
    return False


process_uids = Uids()
"""The user ids of this process."""


@contextmanager
def dedicated_user() -> Iterator[int | None]:
    """Reserve a user id for a program if this process is root; yield None otherwise."""
    if os.geteuid() != 0:
        yield None
        return
    lease = process_uids.take()
    succeeded = False
    try:
        yield lease.uid
        succeeded = True
    finally:
        if succeeded or not has_processes(lease.uid):
            process_uids.release(lease)
        else:
            log.warning(
                "some processes of user id %d did not end, so this id is not used again", lease.uid
            )
