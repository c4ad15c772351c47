"""Weights in a folder, as servers load them: safetensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from agentrl.engine.base import Update
from agentrl.errors import ConfigError

FILE_BYTES = 2 * 2**30


def transfer_folder() -> TemporaryDirectory[str]:
    """A folder of ours for what goes from process to process, gone when it was read.

    It lies in TMPDIR. Whoever writes or reads it on another machine must see it (`check_folder_visible`).
    """
    return TemporaryDirectory(prefix="agentrl-weights-")


def check_folder_visible(path: Path, where: str = "this machine") -> None:
    """Refuse a machine that does not see what is passed on.

    Args:
        path: in a `transfer_folder`, or one itself; made on the run's own machine.
        where: the name of the machine that this is called on.

    Raises:
        ConfigError: it does not.
    """
    if not path.exists():
        raise ConfigError(
            f"weights go through files in {gettempdir()} of the run's machine, and {where} does"
            f" not see {path}: set TMPDIR to a folder on a file system that all machines see"
        )


def write_update(update: Update, folder: Path) -> int:
    """Write an update's weights, or have them written where they are.

    Returns:
        Their bytes.
    """
    if update.write is not None:
        return update.write(folder, None)
    return write_weights(update.weights(), folder)


def write_weights(weights: Iterable[tuple[str, Any]], folder: Path, dtype: Any = None) -> int:
    """Write named tensors, a file at a time: at most `FILE_BYTES` and a tensor are held.

    Args:
        weights: of floating-point numbers.
        folder: an existing one.
        dtype: what they are cast to; None: as they are.

    Returns:
        Their bytes.
    """
    held: dict[str, Any] = {}
    size = written = files = 0
    for name, tensor in weights:
        tensor = tensor if dtype is None else tensor.to(dtype)
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        if size >= FILE_BYTES:
            save_file(held, folder / f"{files:05d}.safetensors")
            held, written, size, files = {}, written + size, 0, files + 1
    if held:
        save_file(held, folder / f"{files:05d}.safetensors")
    return written + size


def tensor_names(folder: Path) -> set[str]:
    """Of the tensors that were written."""
    named: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            named |= set(tensors.keys())
    return named
