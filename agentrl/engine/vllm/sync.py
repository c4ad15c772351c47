"""How the policy goes to a vLLM server: all weights through files, or an adapter under a name."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.engine.base import Update
from agentrl.engine.server.answers import refusal
from agentrl.engine.server.control import Control
from agentrl.engine.server.files import names_in, passing_folder, write_update
from agentrl.engine.server.sender import SEND_SECONDS
from agentrl.engine.vllm.proof import prove
from agentrl.errors import ConfigError, EngineError

RESIDENT = 2
"""How many adapters of a run a server holds: the last two, so that turns in flight can end."""
KEPT = 2 * RESIDENT
"""How many adapters' folders are kept: vLLM reads one again that it had put aside."""


class DiskSender:
    """Sends all weights to a server in vLLM's development mode that reads our files."""

    def __init__(self, control: Control, names: frozenset[str], *, stale_head: bool = False):
        """Send nothing yet.

        Args:
            control: the server's.
            names: of all the model's tensors.
            stale_head: whether it runs on a CPU and ties the head to the embeddings. There vLLM
                keeps a packed copy of the head, and an update leaves it as it was.
        """
        self._control = control
        self._names = names
        self._stale_head = stale_head

    def send(self, update: Update) -> int:
        """See `Sender`. The server must be paused, with no turn in flight.

        Raises:
            ConfigError: this server cannot be sent weights, or a tensor is missing. vLLM loads
                layers, and the parts of a layer (q, k and v are one) that are not in the files it
                fills with whatever memory held.
            EngineError: it does not take them, or holds others now.
        """
        if self._stale_head:
            raise ConfigError(
                "rollout.name=vllm on a CPU cannot train all weights of this model: its head is"
                " tied to its embeddings, and vLLM would go on with the old head. Train LoRA"
                " (model.lora_rank), or set rollout.name=sglang"
            )
        with passing_folder() as folder:
            sent = write_update(update, Path(folder))
            if missing := sorted(self._names - names_in(Path(folder))):
                raise ConfigError(
                    f"vLLM takes all weights at once, but {len(missing)} of {len(self._names)} are"
                    f" not published ({missing[0]}, ...). Send LoRA as an adapter:"
                    " rollout.lora=adapter"
                )
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._control.manage("/collective_rpc", body, seconds=SEND_SECONDS)
        prove(self._control, update)
        return sent

    def request(self) -> dict[str, Any]:
        """See `Sender`: the server's weights are what it samples from."""
        return {}

    def close(self) -> None:
        """See `Sender`."""


class AdapterSender:
    """Sends LoRA alone to a server that was started with `--enable-lora`.

    Every adapter has a name of its own: by it the server tells apart what it cached. The name is in
    one place, `request`, and every request is made with it.
    """

    def __init__(self, control: Control):
        """Send nothing yet."""
        self._control = control
        # A server that outlives runs may hold adapters of others: names are ours alone.
        self._prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._sent = 0
        self._loaded: list[str] = []
        self._folders: list[TemporaryDirectory[str]] = []

    def send(self, update: Update) -> int:
        """See `Sender`; then proves that the server lists it, and that it forgot the stale ones."""
        assert update.adapter is not None, "an adapter is sent of a policy that has one"
        while len(self._loaded) >= RESIDENT:
            self._unload(self._loaded[0])
        while len(self._folders) >= KEPT:
            self._folders.pop(0).cleanup()
        self._folders.append(passing_folder())
        folder = Path(self._folders[-1].name)
        update.adapter(folder)
        self._sent += 1
        name = f"{self._prefix}{update.version}-{self._sent}"
        self._manage("load", {"lora_name": name, "lora_path": str(folder)}, SEND_SECONDS)
        self._loaded.append(name)
        self._prove()
        return sum(file.stat().st_size for file in folder.iterdir())

    def request(self) -> dict[str, Any]:
        """See `Sender`: the newest adapter's name."""
        return {"model": self._loaded[-1]} if self._loaded else {}

    def close(self) -> None:
        """Unload what a server that is not ours would keep."""
        with contextlib.suppress(EngineError):
            while self._loaded:
                self._unload(self._loaded[0])
        while self._folders:
            self._folders.pop().cleanup()

    def _unload(self, name: str) -> None:
        self._manage("unload", {"lora_name": name}, SEND_SECONDS)
        self._loaded.remove(name)

    def _manage(self, verb: str, body: dict[str, str], seconds: float) -> None:
        """The answer of success is a sentence, not JSON."""
        path = f"/v1/{verb}_lora_adapter"
        status, content = self._control.attempt(path, body, seconds=seconds)
        if status != 200:
            said = content.decode("utf-8", "replace")
            raise refusal(status, said, f"{self._control.url}{path}")

    def _prove(self) -> None:
        """The server lists our adapters: these and no others.

        Raises:
            EngineError: it does not.
        """
        listed = [str(model["id"]) for model in self._control.ask("/v1/models")["data"]]
        ours = sorted(name for name in listed if name.startswith(self._prefix))
        if ours != sorted(self._loaded):
            raise EngineError(
                f"{self._control.url}: its adapters are {ours}, not {sorted(self._loaded)}"
            )
