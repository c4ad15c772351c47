"""All weights through files: safetensors in a folder that the server can read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from agentrl.engine.base import Update
from agentrl.engine.sglang.control import Control
from agentrl.engine.sglang.sync.sender import SEND_SECONDS

FILE_BYTES = 2 * 2**30


class DiskSender:
    """Sends to any server that reads our files, whatever it runs on."""

    def __init__(self, control: Control):
        """Send nothing yet."""
        self._control = control

    def send(self, update: Update) -> int:
        """See `Sender`. Tensors that are not named keep their values."""
        with TemporaryDirectory(prefix="agentrl-weights-") as folder:
            sent = write_weights(update.weights(), Path(folder))
            # Not flushed with the update: there SGLang ends over a cache that is in use.
            body = {
                "model_path": folder,
                "weight_version": str(update.version),
                "flush_cache": False,
            }
            self._control.manage("/update_weights_from_disk", body, seconds=SEND_SECONDS)
        return sent

    def request(self) -> dict[str, Any]:
        """See `Sender`: the server's weights are what it samples from."""
        return {}

    def close(self) -> None:
        """See `Sender`."""


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
