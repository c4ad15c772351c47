"""The limit of open files of this process (`ulimit -n`).

Each connection, pipe and file takes a descriptor. `ulimit -n` limits the descriptors of a process.
The soft limit is enforced, and a process may raise its soft limit up to the hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

RESERVED = 128
"""Descriptors for everything but connections and programs: libraries, GPUs, pipes to servers, logs,
files of a step. A CPU run has about 30 open, and a checkpoint adds a few at a time."""
HEADROOM = 64
"""Descriptors that stay free if the process already has more than `RESERVED` - `HEADROOM` open."""
MAX_LIMIT = 2**20
"""The highest soft limit that `raise_limit` sets. Some hosts allow 2**30, and a program that loops
over all possible descriptors would take minutes there."""
SPARE = 16
"""Descriptors that are kept open for a checkpoint in an emergency."""

_reserved = 0
_open_at_start = 0


def raise_limit() -> int:
    """Raise the soft limit to the hard limit; return the soft limit. Children inherit both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return limit()


def limit() -> int:
    """Return the soft limit, at most `MAX_LIMIT`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_LIMIT if soft == resource.RLIM_INFINITY else min(soft, MAX_LIMIT)


def reserve(count: int) -> None:
    """Reserve descriptors for programs and files, so that connections do not use them.

    Each call sets the number of reserved descriptors; the numbers of several calls are not added.
    """
    global _reserved
    _reserved = count


def left_for_connections() -> int:
    """Return how many connections this process may open; at least 1.

    Open files are counted once, at the first call, when no connection is open yet.
    """
    global _open_at_start
    if not _open_at_start:
        with contextlib.suppress(OSError):  # this system does not list its descriptors
            _open_at_start = len(os.listdir("/dev/fd"))
    return max(1, limit() - max(RESERVED, _open_at_start + HEADROOM) - _reserved)


def advice(error: BaseException) -> str:
    """Return the cause and the remedy if an error says that no descriptor is free; else ""."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return (
            f" (this process has opened all {limit()} files that `ulimit -n` allows: raise the"
            " limit, or close files in your tools and rewards)"
        )
    if isinstance(error, OSError) and error.errno == errno.ENFILE:
        return " (the machine has no file descriptors left: raise fs.file-max)"
    return ""


def spare_files() -> contextlib.ExitStack:
    """Open files that only keep descriptors free for a checkpoint in an emergency.

    Closing the returned stack makes the descriptors available.
    """
    files = contextlib.ExitStack()
    for _ in range(SPARE):
        files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    return files
