"""A temporary folder that is removed even if the process that made it was killed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import IO

from agentrl.workers.parent_watch import (
    OWNER,
    PREFIX,
    describe_owner,
    remove_abandoned,
    remove_folder,
)


class OwnedFolder:
    """A temporary folder that its owner, this process, holds locked.

    It is removed by `cleanup`, at the latest when this process exits. If this process is killed,
    the kernel releases the lock, and the next process of the same user that makes such a folder
    removes this one.
    """

    def __init__(self, kind: str, parent: str | None = None):
        """Create the folder, which only this user can enter, and remove abandoned folders.

        Args:
            kind: a word for the folder's name.
            parent: an existing folder; None: TMPDIR.
        """
        _remove_abandoned_once(os.getpid())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        lock = os.fdopen(os.open(self.path / OWNER, os.O_CREAT | os.O_RDWR, 0o600), "r+")
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(describe_owner())
        lock.flush()
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the folder. Idempotent."""
        self._finalizer()


def _remove(path: Path, lock: IO[str], pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of the owner
        remove_folder(path)
    lock.close()


@cache
def _remove_abandoned_once(pid: int) -> None:
    """Remove abandoned folders; the second call of a process does nothing."""
    remove_abandoned()
