"""The ways of the policy to a server: weights through files, or a LoRA adapter under a name.

Weights within a machine's memory go by `buckets` and `nccl`.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from agentrl.engine.base import Update
from agentrl.engine.remote.control import CONTROL_SECONDS, Control
from agentrl.engine.remote.files import tensor_names, transfer_folder, write_update
from agentrl.engine.remote.launch import MAX_ADAPTERS
from agentrl.engine.remote.proof import check_norms
from agentrl.errors import ConfigError, EngineError, EngineNonsense

SEND_SECONDS = 1800.0
"""Most seconds that a server may take to load what it was sent."""


class Sender(ABC):
    """A way for the policy to one server."""

    def __init__(self, control: Control):
        """Send nothing yet."""
        self._control = control

    @abstractmethod
    def send(self, update: Update) -> int:
        """Have the server hold the policy when this returns.

        Returns:
            How many bytes were sent.

        Raises:
            EngineError: the server does not hold it.
        """

    def request(self) -> dict[str, Any]:
        """What every request says to be answered by what was sent last.

        Nothing where the server's weights are what it samples from.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Leave nothing behind, also at a server that is not ours."""


class SGLangDiskSender(Sender):
    """Sends all weights to any SGLang server that reads our files, whatever it runs on."""

    def send(self, update: Update) -> int:
        """See `Sender`. Tensors that are not named keep their values."""
        with transfer_folder() as folder:
            sent = write_update(update, Path(folder))
            # Not flushed with the update: there SGLang ends over a cache that is in use.
            body = {
                "model_path": folder,
                "weight_version": str(update.version),
                "flush_cache": False,
            }
            self._control.manage("/update_weights_from_disk", body, seconds=SEND_SECONDS)
        return sent


class VLLMDiskSender(Sender):
    """Sends all weights to a server in vLLM's development mode that reads our files."""

    def __init__(self, control: Control, names: frozenset[str], *, stale_head: bool = False):
        """Send nothing yet.

        Args:
            control: the server's.
            names: of all the model's tensors.
            stale_head: whether it runs on a CPU and ties the head to the embeddings. There vLLM
                keeps a packed copy of the head, and an update leaves it as it was.
        """
        super().__init__(control)
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
        with transfer_folder() as folder:
            sent = write_update(update, Path(folder))
            if missing := sorted(self._names - tensor_names(Path(folder))):
                raise ConfigError(
                    f"vLLM takes all weights at once, but {len(missing)} of {len(self._names)} are"
                    f" not published ({missing[0]}, ...). Send LoRA as an adapter:"
                    " rollout.lora=adapter"
                )
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._control.manage("/collective_rpc", body, seconds=SEND_SECONDS)
        check_norms(self._control, update)
        return sent


class AdapterSender(Sender):
    """Sends LoRA alone to a server that was started with `--enable-lora`.

    A server applies an adapter only where a request names it, and says nothing where none is named;
    by the name it also tells apart what it cached. So every adapter has a name of its own, which is
    in one place, `request`, and every request is made with it.
    """

    key: ClassVar[str]
    """Of a request, whose value is an adapter's name."""
    kept: ClassVar[int]
    """How many adapters' folders outlive their loading."""

    def __init__(self, control: Control):
        """Send nothing yet."""
        super().__init__(control)
        # A server that outlives runs may hold adapters of others: names are ours alone.
        self._prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._sent = 0
        self._loaded: list[str] = []
        self._folders: list[TemporaryDirectory[str]] = []

    def send(self, update: Update) -> int:
        """See `Sender`; then proves that the server lists it, and that it forgot the stale ones."""
        assert update.adapter is not None, "an adapter is sent of a policy that has one"
        self._forget_lost()
        while len(self._loaded) >= MAX_ADAPTERS:
            self._unload(self._loaded[0])
        # A name of its own each time: of one whose answer was lost nobody knows what it holds.
        self._sent += 1
        name = f"{self._prefix}{update.version}-{self._sent}"
        self._folders.append(transfer_folder())
        try:
            folder = Path(self._folders[-1].name)
            update.adapter(folder)
            self._manage("load", {"lora_name": name, "lora_path": str(folder)})
            sent = sum(file.stat().st_size for file in folder.iterdir())
        finally:
            self._clear_folders(self.kept)
        self._loaded.append(name)
        self._check_listed()
        return sent

    def request(self) -> dict[str, Any]:
        """See `Sender`: the newest adapter's name."""
        return {self.key: self._loaded[-1]} if self._loaded else {}

    def close(self) -> None:
        """Unload what a server that is not ours would keep."""
        with contextlib.suppress(EngineError):
            while self._loaded:
                self._unload(self._loaded[0])
        self._clear_folders(0)

    @abstractmethod
    def _manage(self, verb: str, body: dict[str, str]) -> None:
        """Have the server load or unload an adapter."""

    def _unload(self, name: str) -> None:
        self._manage("unload", {"lora_name": name})
        self._loaded.remove(name)

    def _forget_lost(self) -> None:
        """Agree with the server on what it holds, where an answer was lost or it was restarted."""
        listed = self._listed()
        self._loaded = [known for known in self._loaded if known in listed]
        for lost in listed - set(self._loaded):
            self._manage("unload", {"lora_name": lost})

    def _check_listed(self) -> None:
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

    def _clear_folders(self, kept: int) -> None:
        while len(self._folders) > kept:
            self._folders.pop(0).cleanup()


class SGLangAdapterSender(AdapterSender):
    """To SGLang, which reads an adapter's folder once."""

    key, kept = "lora_path", 0

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        seconds = SEND_SECONDS if verb == "load" else CONTROL_SECONDS
        self._control.manage(f"/{verb}_lora_adapter", body, seconds=seconds)


class VLLMAdapterSender(AdapterSender):
    """To vLLM, which reads the folder of one again that it had put aside."""

    key, kept = "model", 2 * MAX_ADAPTERS

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        path = f"/v1/{verb}_lora_adapter"
        self._control.manage(path, body, seconds=SEND_SECONDS, json=False)  # a sentence
