"""LoRA alone: an adapter beside the base, under a name of its version.

A server applies an adapter only where a request names it, and says nothing where none is named. So
the name is in one place, `request`, and every request is made with it.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

from agentrl.engine.base import Update
from agentrl.engine.server.control import Control
from agentrl.engine.server.files import passing_folder
from agentrl.engine.server.sender import SEND_SECONDS
from agentrl.errors import EngineError, EngineNonsense

RESIDENT = 2
"""How many adapters of a run a server holds: the last two, so that turns in flight can end."""


class AdapterSender:
    """Sends to a server that was started with `--enable-lora`."""

    def __init__(self, control: Control):
        """Send nothing yet."""
        self._control = control
        # A server that outlives runs may hold adapters of others: names are ours alone.
        self._prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._loaded: list[str] = []
        self._times = 0

    def send(self, update: Update) -> int:
        """See `Sender`; then proves that the server lists it, and that it forgot the stale ones."""
        assert update.adapter is not None, "an adapter is sent of a policy that has one"
        # A name of its own each time: of one whose answer was lost nobody knows what it holds.
        self._times += 1
        name = f"{self._prefix}{update.version}-{self._times}"
        listed = self._listed()
        self._loaded = [known for known in self._loaded if known in listed]
        for lost in listed - set(self._loaded):
            self._control.manage("/unload_lora_adapter", {"lora_name": lost})
        while len(self._loaded) >= RESIDENT:
            self._unload(self._loaded[0])
        with passing_folder() as folder:
            update.adapter(Path(folder))
            body = {"lora_name": name, "lora_path": folder}
            self._control.manage("/load_lora_adapter", body, seconds=SEND_SECONDS)
            sent = sum(file.stat().st_size for file in Path(folder).iterdir())
        self._loaded.append(name)
        self._prove()
        return sent

    def request(self) -> dict[str, Any]:
        """See `Sender`: the newest adapter's name."""
        return {"lora_path": self._loaded[-1]} if self._loaded else {}

    def close(self) -> None:
        """Unload what a server that is not ours would keep."""
        with contextlib.suppress(EngineError):
            while self._loaded:
                self._unload(self._loaded[0])

    def _unload(self, name: str) -> None:
        self._control.manage("/unload_lora_adapter", {"lora_name": name})
        self._loaded.remove(name)

    def _prove(self) -> None:
        """The server lists our adapters: these and no others.

        Raises:
            EngineError: it does not.
        """
        if (listed := self._listed()) != set(self._loaded):
            raise EngineError(
                f"{self._control.url}: its adapters are {sorted(listed)}, not"
                f" {sorted(self._loaded)}"
            )

    def _listed(self) -> set[str]:
        """Those of our adapters that the server has."""
        answer = self._control.ask("/v1/models")
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (LookupError, TypeError) as e:
            raise EngineNonsense(f"{self._control.url}/v1/models: not a list: {e}") from e
        return {name for name in names if name.startswith(self._prefix)}
