"""Small functions that verl's scripts and classes import."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Return the function unchanged; in verl, this decorator traces calls."""
    return function


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Create a folder; this is verl's `hdfs_io.makedirs`."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether a path exists; this is verl's `hdfs_io.exists`."""
    return os.path.exists(_local(path))


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file or a folder, into an existing folder too; this is verl's `hdfs_io.copy`."""
    if os.path.isdir(_local(src)):
        shutil.copytree(src, _local(dst), dirs_exist_ok=True)
    else:
        shutil.copy(src, _local(dst))
    return True


def _local(path: str) -> str:
    """Return the path, if it is on this machine.

    Raises:
        UserError: the path is on HDFS.
    """
    if path.startswith("hdfs:"):
        raise UserError(f"{path}: agentrl does not read or write HDFS. Use a path of this machine")
    return path
