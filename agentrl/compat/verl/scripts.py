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
    """`hdfs_io.makedirs`: create a folder."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def exists(path: str, **kwargs: Any) -> bool:
    """`hdfs_io.exists`."""
    return os.path.exists(_local(path))


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """`hdfs_io.copy`: copy a file or a folder; an existing folder gets the new files."""
    if os.path.isdir(_local(src)):
        shutil.copytree(src, _local(dst), dirs_exist_ok=True)
    else:
        shutil.copy(src, _local(dst))
    return True


def _local(path: str) -> str:
    """Return a path of this machine.

    Raises:
        UserError: it is on HDFS.
    """
    if path.startswith("hdfs:"):
        raise UserError(f"{path}: agentrl does not read or write HDFS. Use a path of this machine")
    return path
