"""A user id for each program at a time, where we are root.

The kernel counts a user's processes, not a sandbox's, and lets processes of one user send each
other signals: with one id between them, a program that forks without end would starve its
neighbours. Of root it counts none at all. So each takes an id that nobody else has, on the whole
machine: a trainer and a tool server are two processes, each with programs of its own.
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

log = logging.getLogger("agentrl.sandbox")

FOLDER = Path("/run/agentrl/uids")
"""A file for each id, locked by the process that has it."""
COUNT = 4096
BASES = (2_000_000_000, 61_184)
"""First ids of the ranges to take from: of nobody on a usual machine; and what a container has that
knows 65,536 ids only, where systemd would put its services of the moment."""


@dataclass(frozen=True, slots=True)
class Lease:
    """An id that is ours until the descriptor is closed, or this process ends."""

    uid: int
    fd: int


class Uids:
    """The ids of this process: taken from the machine as they are needed, and kept."""

    def __init__(self, folder: Path = FOLDER):
        self._folder = folder
        self._free: list[Lease] = []
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> Lease:
        """An id that no process runs as.

        Raises:
            SandboxError: there is none, or no place to write down which are taken.
        """
        with self._lock:
            return self._free.pop() if self._free else self._lease()

    def give_back(self, lease: Lease) -> None:
        """Return an id of which no process is left."""
        self._free.append(lease)

    def _lease(self) -> Lease:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise SandboxError(
                f"{self._folder} cannot be made ({e.strerror}): as root, programs run as users of"
                " their own, and there it is written down which are taken. Run as another user, or"
                " make the folder"
            ) from e
        base = _base()
        count = COUNT if base == BASES[0] else 65_520 - base
        for _ in range(count):
            uid = base + self._next
            self._next = (self._next + 1) % count
            fd = os.open(self._folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            if not has_processes(uid):  # of a run that was killed a moment ago
                return Lease(uid, fd)
            os.close(fd)
        raise SandboxError(f"all {count} user ids for programs are taken (in {self._folder})")


def _base() -> int:
    """The first id of a range that this user namespace knows."""
    known = [
        (int(inside), int(inside) + int(length))
        for inside, _, length in map(str.split, Path("/proc/self/uid_map").read_text().splitlines())
    ]
    for base in BASES:
        if any(first <= base and base + COUNT <= end for first, end in known):
            return base
    raise SandboxError(
        "this container knows too few user ids for programs to run as users of their own"
        f" (/proc/self/uid_map: {known}). Run as another user than root, or set sandbox.backend to"
        " the URL of a SandboxFusion server"
    )


def has_processes(uid: int) -> bool:
    """Whether anything on this machine runs as this user."""
    ours = f"\nUid:\t{uid}\t"
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            # The folder's owner would not do: of a process that may not be looked into, it is root.
            try:
                if ours in Path(entry.path, "status").read_text():
                    return True
            except OSError:  # it ended meanwhile
                continue
    return False


_uids = Uids()


@contextmanager
def own_user() -> Iterator[int | None]:
    """A user id of its own for a program, where we are root."""
    if os.geteuid() != 0:
        yield None
        return
    lease = _uids.take()
    clean = False
    try:
        yield lease.uid
        clean = True
    finally:
        if clean or not has_processes(lease.uid):
            _uids.give_back(lease)
        else:
            log.warning("processes of user id %d are left; it is not used again", lease.uid)
