"""Open, lock and replace regular files; replace folders; make folders of caches private.

A link is refused, because its target would change. A pipe is refused, because it would block.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

log = logging.getLogger("agentrl")

LEFTOVER_PREFIX = ".tmp-"


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading if it is a regular file, and neither a link nor a pipe.

    Raises:
        OSError: it does not exist, or is something else.
    """
    return open(_open(file, os.O_RDONLY), "rb")


def read_regular(file: Path) -> bytes:
    """Return the content of a file or a link to one; a pipe outside of /dev would block for ever.

    Raises:
        OSError: it does not exist, or is something else.
    """
    if not file.is_file() and file.exists() and file.parts[:2] != ("/", "dev"):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return file.read_bytes()


def open_lock(file: Path, flags: int = 0) -> int:
    """Open a file that a process locks and writes, and make it if necessary; return its descriptor.

    Args:
        file: the file.
        flags: more flags of `os.open`.

    Raises:
        OSError: it cannot be written, or is a link or a pipe.
    """
    return _open(file, os.O_RDWR | os.O_CREAT | flags)


def _open(file: Path, flags: int) -> int:
    try:
        fd = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file, but a link or a pipe: delete it", str(file))


def secure_folder(folder: Path) -> bool:
    """Return whether the folder of a cache can be trusted, and warn if not.

    A folder that does not exist can be trusted. A link, or a folder to which another user can
    write, cannot.
    """
    try:
        status = folder.lstat()
    except OSError:
        return True  # the folder is missing, or cannot be used
    if stat.S_ISDIR(status.st_mode) and is_trusted(status):
        return True
    log.warning(
        "the cache %s is not used, because it is a link or another user can write to it. Remove it,"
        " or set AGENTRL_HOME to a folder of your own",
        folder,
    )
    return False


def is_trusted(status: os.stat_result) -> bool:
    """Return whether only this user and root can write to a file or folder."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _staging_path(path: Path) -> Path:
    """Return the path of a new temporary file or folder next to `path`."""
    # Its name ends with the process id, so `checkpoint.recover` removes it after a kill.
    return path.with_name(f"{LEFTOVER_PREFIX}{secrets.token_hex(8)}-{os.getpid()}")


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yield a new file to write, which takes the name of `file` at the end of the block.

    A kill or an exception leaves the old content. If `file` is a link, the link is replaced.
    """
    staging = _staging_path(file)
    os.close(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield staging
        flush(staging)
        staging.replace(file)
    finally:
        staging.unlink(missing_ok=True)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder next to `folder`; remove it if the block has not renamed it."""
    staging = _staging_path(folder)
    try:
        staging.mkdir(parents=True)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk, so that a power cut cannot undo it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
