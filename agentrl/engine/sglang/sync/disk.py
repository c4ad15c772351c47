"""All weights through files: safetensors in a folder that the server can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.engine.base import Update
from agentrl.engine.server.control import Control
from agentrl.engine.server.files import passing_folder, write_update
from agentrl.engine.server.sender import SEND_SECONDS


class DiskSender:
    """Sends to any server that reads our files, whatever it runs on."""

    def __init__(self, control: Control):
        """Send nothing yet."""
        self._control = control

    def send(self, update: Update) -> int:
        """See `Sender`. Tensors that are not named keep their values."""
        with passing_folder() as folder:
            sent = write_update(update, Path(folder))
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
