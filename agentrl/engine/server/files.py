"""Weights in a folder, as servers load them: safetensors alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

FILE_BYTES = 2 * 2**30


def write_weights(weights: Iterable[tuple[str, Any]], folder: Path) -> int:
    """Write named tensors, a file at a time: at most `FILE_BYTES` and a tensor are held.

    Returns:
        Their bytes.
    """
    held: dict[str, Any] = {}
    size = written = files = 0
    for name, tensor in weights:
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        if size >= FILE_BYTES:
            save_file(held, folder / f"{files:05d}.safetensors")
            held, written, size, files = {}, written + size, 0, files + 1
    if held:
        save_file(held, folder / f"{files:05d}.safetensors")
    return written + size
