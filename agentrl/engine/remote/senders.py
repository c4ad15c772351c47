"""Send the policy to a server: weights through files, or a LoRA adapter with a name.

The module `buckets` sends weights within one machine.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from agentrl.engine.base import Update
from agentrl.engine.remote.admin import ADMIN_SECONDS, AdminClient
from agentrl.engine.remote.files import tensor_names, transfer_folder, write_update
from agentrl.engine.remote.launch import MAX_ADAPTERS
from agentrl.engine.remote.weights_check import check_norms
from agentrl.errors import ConfigError, EngineError, InvalidEngineResponse

log = logging.getLogger("agentrl")

SEND_SECONDS = 1800.0
"""The time limit for a server to load weights or an adapter."""


class Sender(ABC):
    """A way to send the policy to one server."""

    def __init__(self, admin: AdminClient):
        """Store the client of the server; send nothing yet."""
        self._admin = admin

    @abstractmethod
    def send(self, update: Update) -> int:
        """Send the policy. When this returns, the server has loaded it.

        Returns:
            The number of bytes that were sent.

        Raises:
            EngineError: the server did not load the policy.
        """

    def request_fields(self) -> dict[str, Any]:
        """Return the fields that make a request use the policy that was sent last.

        Empty if the server samples from its own weights.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Remove everything that was sent, also from a server that agentrl did not start."""


class SGLangDiskSender(Sender):
    """Sends all weights through files, to any SGLang server that can read them."""

    def send(self, update: Update) -> int:
        """Send all weights. Tensors that are not in the update keep their values."""
        with transfer_folder() as folder:
            size = write_update(update, Path(folder))
            # Do not flush the cache with the update: SGLang crashes if the cache is in use then.
            body = {
                "model_path": folder,
                "weight_version": str(update.version),
                "flush_cache": False,
            }
            self._admin.manage("/update_weights_from_disk", body, seconds=SEND_SECONDS)
        return size


class VLLMDiskSender(Sender):
    """Sends all weights through files, to a server in vLLM's development mode."""

    def __init__(self, admin: AdminClient, names: frozenset[str], *, stale_head: bool = False):
        """Store the options; send nothing yet.

        Args:
            admin: the client of the server.
            names: the names of all tensors of the model.
            stale_head: whether the server runs on a CPU and ties the head to the embeddings. There,
                vLLM keeps a packed copy of the head that an update does not change.
        """
        super().__init__(admin)
        self._names = names
        self.stale_head = stale_head
        self._has_warned = False
        """True if the log says already that the server's weights are not checked."""

    def send(self, update: Update) -> int:
        """Send all weights. The server must be paused, without turns in flight.

        Raises:
            ConfigError: weights cannot be sent to this server, or a tensor is missing. vLLM loads
                whole layers (q, k and v are one layer): the parts of a layer that are not in the
                files become uninitialized memory.
            EngineError: the server does not load the weights, or holds other weights afterwards.
        """
        if self.stale_head:
            raise ConfigError(
                "rollout.name=vllm on a CPU cannot train all weights of this model: its head is"
                " tied to its embeddings, and vLLM would keep using the old head. Train LoRA"
                " (model.lora_rank), or set rollout.name=sglang"
            )
        with transfer_folder() as folder:
            size = write_update(update, Path(folder))
            if missing := sorted(self._names - tensor_names(Path(folder))):
                raise ConfigError(
                    f"vLLM needs all weights at once, but {len(missing)} of {len(self._names)} are"
                    f" not published ({missing[0]}, ...). Send LoRA as an adapter:"
                    " rollout.lora=adapter"
                )
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._admin.manage("/collective_rpc", body, seconds=SEND_SECONDS)
        if not check_norms(self._admin, update) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s has no checksums of its weights, so it is not checked that it holds those that"
                " were sent",
                self._admin.url,
            )
        return size


class AdapterSender(Sender):
    """Sends only LoRA, to a server that was started with `--enable-lora`.

    A server applies an adapter only to requests that name it, and reports no error if a request
    names none. It also uses the name to distinguish cached prefixes. So every adapter has a unique
    name, only `request_fields` returns it, and every request contains those fields.
    """

    request_field: ClassVar[str]
    """The field of a request that contains the name of an adapter."""
    kept_folders: ClassVar[int]
    """The number of adapter folders that are kept after loading."""

    def __init__(self, admin: AdminClient):
        """Store the client of the server; send nothing yet."""
        super().__init__(admin)
        # A server may hold adapters of other runs, so the names of this run are unique.
        self._name_prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._send_count = 0
        self._adapters: list[str] = []
        self._folders: list[TemporaryDirectory[str]] = []

    def send(self, update: Update) -> int:
        """Send the adapter; check that the server lists it, and no longer lists the old ones."""
        assert update.adapter is not None, "only a policy with LoRA has an adapter"
        self._sync_with_server()
        while len(self._adapters) >= MAX_ADAPTERS:
            self._unload(self._adapters[0])
        # Use a new name each time: if an answer was lost, the adapter of the old name is unknown.
        self._send_count += 1
        name = f"{self._name_prefix}{update.version}-{self._send_count}"
        self._folders.append(transfer_folder())
        try:
            folder = Path(self._folders[-1].name)
            update.adapter(folder)
            self._manage("load", {"lora_name": name, "lora_path": str(folder)})
            size = sum(file.stat().st_size for file in folder.iterdir())
        finally:
            self._clear_folders(self.kept_folders)
        self._adapters.append(name)
        self._check_listed()
        return size

    def request_fields(self) -> dict[str, Any]:
        """Return the field with the name of the newest adapter."""
        return {self.request_field: self._adapters[-1]} if self._adapters else {}

    def close(self) -> None:
        """Unload the adapters of this run, which a server that agentrl did not start would keep."""
        with contextlib.suppress(EngineError):
            while self._adapters:
                self._unload(self._adapters[0])
        self._clear_folders(0)

    @abstractmethod
    def _manage(self, verb: str, body: dict[str, str]) -> None:
        """Make the server load or unload an adapter."""

    def _unload(self, name: str) -> None:
        self._manage("unload", {"lora_name": name})
        self._adapters.remove(name)

    def _sync_with_server(self) -> None:
        """Make the list of adapters of this object and that of the server equal.

        An answer may have been lost, or the server restarted.
        """
        server_adapters = self._list_adapters()
        self._adapters = [adapter for adapter in self._adapters if adapter in server_adapters]
        for extra in server_adapters - set(self._adapters):
            self._manage("unload", {"lora_name": extra})

    def _check_listed(self) -> None:
        """Check that the server lists exactly the adapters of this object.

        Raises:
            EngineError: the lists differ.
        """
        if (server_adapters := self._list_adapters()) != set(self._adapters):
            raise EngineError(
                f"{self._admin.url}: its adapters are {sorted(server_adapters)}, not"
                f" {sorted(self._adapters)}"
            )

    def _list_adapters(self) -> set[str]:
        """Return the adapters of this run that the server has."""
        answer = self._admin.ask("/v1/models")
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (LookupError, TypeError) as e:
            raise InvalidEngineResponse(f"{self._admin.url}/v1/models: not a list: {e}") from e
        return {name for name in names if name.startswith(self._name_prefix)}

    def _clear_folders(self, kept_folders: int) -> None:
        while len(self._folders) > kept_folders:
            self._folders.pop(0).cleanup()


class SGLangAdapterSender(AdapterSender):
    """Sends adapters to SGLang, which reads an adapter's folder once."""

    request_field, kept_folders = "lora_path", 0

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        seconds = SEND_SECONDS if verb == "load" else ADMIN_SECONDS
        self._admin.manage(f"/{verb}_lora_adapter", body, seconds=seconds)


class VLLMAdapterSender(AdapterSender):
    """Sends adapters to vLLM, which reads the folder of an unloaded adapter again."""

    request_field, kept_folders = "model", 2 * MAX_ADAPTERS

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        path = f"/v1/{verb}_lora_adapter"
        self._admin.manage(path, body, seconds=SEND_SECONDS, json=False)  # Not JSON.
