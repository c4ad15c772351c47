"""Weights as safetensors in a folder that servers read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from agentrl.engine.base import Update
from agentrl.errors import ConfigError
from agentrl.workers.owned_folder import OwnedFolder

FILE_BYTES = 2 * 2**30


def transfer_folder() -> TemporaryDirectory[str]:
    """Create a temporary folder that passes files from process to process.

    It is in TMPDIR. Processes on other machines that write or read it must see it
    (`check_folder_visible`).
    """
    return TemporaryDirectory(dir=_owned_folder(gettempdir(), os.getpid()))


def _owned_folder(parent: str, pid: int) -> Path:
    """Return the folder of this process for its temporary folders."""
    folder = _owned_folders.get((parent, pid))
    if folder is None or not folder.path.exists():  # A machine may remove what is old in /tmp.
        folder = _owned_folders[parent, pid] = OwnedFolder("weights", parent)
    return folder.path


_owned_folders: dict[tuple[str, int], OwnedFolder] = {}


def check_folder_visible(path: Path, where: str = "this machine") -> None:
    """Check that this machine sees a folder that passes weights.

    Args:
        path: a `transfer_folder`, or a path in one, created on the machine of the run.
        where: the name of this machine.

    Raises:
        ConfigError: this machine does not see the folder.
    """
    if not path.exists():
        raise ConfigError(
            f"weights are passed through files in {gettempdir()} of the run's machine, but {where}"
            f" does not see {path}. Set TMPDIR to a folder on a file system that all machines see"
        )


def write_update(update: Update, folder: Path) -> int:
    """Write the weights of an update, or let the processes that hold them write them.

    Returns:
        The number of bytes.
    """
    if update.write is not None:
        return update.write(folder, None)
    return write_weights(update.weights(), folder)


def write_weights(weights: Iterable[tuple[str, Any]], folder: Path, dtype: Any = None) -> int:
    """Write named tensors to files. At most `FILE_BYTES` and one tensor are in memory at a time.

    Args:
        weights: named floating-point tensors.
        folder: an existing folder.
        dtype: the dtype to write; None keeps the dtype of each tensor.

    Returns:
        The number of bytes.
    """
    tensors: dict[str, Any] = {}
    size = total = files = 0
    for name, tensor in weights:
        tensor = tensor if dtype is None else tensor.to(dtype)
        tensors[name] = tensor.contiguous()
        size += tensor.nbytes
        if size >= FILE_BYTES:
            save_file(tensors, folder / f"{files:05d}.safetensors")
            tensors, total, size, files = {}, total + size, 0, files + 1
    if tensors:
        save_file(tensors, folder / f"{files:05d}.safetensors")
    return total + size


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names
