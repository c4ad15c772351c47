"""How one server loads the policy: from memory, from files, or a LoRA adapter with a name.

The weights themselves are sent by `senders`.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

from agentrl.engine.remote.admin import ADMIN_SECONDS, AdminClient
from agentrl.engine.remote.senders import Route, Sent, Target, this_machine
from agentrl.engine.remote.weights_check import check_norms
from agentrl.errors import ConfigError, EngineError, InvalidEngineResponse

log = logging.getLogger("agentrl")

LOAD_SECONDS, FILE_BYTES_PER_SECOND = 60.0, 1e8
"""A server must load N bytes of files within `LOAD_SECONDS + N / FILE_BYTES_PER_SECOND`."""


class Loader(ABC):
    """Makes one server load the policy."""

    source: ClassVar[Literal["memory", "files", "shared adapter", "adapter"]]
    """What the server loads: weights that `target` receives, files with weights, an adapter in
    shared memory, or a folder with an adapter."""
    is_adapter: ClassVar[bool] = False
    """True if requests name the policy, and the server's own weights stay."""
    target: Target | None = None
    """The server as a target of weights in memory."""
    readers: int = 0
    """How many processes of the server read an adapter from shared memory."""
    kept_folders: int = 0
    """How many folders of adapters must exist after loading."""
    files: Loader | None = None
    """The loader to use if the policy cannot come through memory; None: there is no other way."""

    def __init__(self, admin: AdminClient):
        """Store the client of the server; load nothing yet."""
        self._admin = admin
        self.has_loaded = False
        """True once the server has received the policy through memory. Until then, `files` replaces
        this loader if it fails: some machines share no memory between processes, or have no network
        for NCCL."""

    def check(self) -> None:  # noqa: B027
        """Check that weights can be sent to this server.

        Raises:
            ConfigError: they cannot.
        """

    @abstractmethod
    def load(self, route: Route, sent: Sent) -> None:
        """Load the policy. When this returns, the server has loaded it.

        Args:
            route: the route of the update.
            sent: the weights that were sent; empty for an adapter.

        Raises:
            EngineError: the server did not load it.
        """

    def request_fields(self) -> dict[str, Any]:
        """Return the fields that make a request use the policy that was loaded last.

        Empty if the server samples from its own weights.
        """
        return {}

    def in_use(self, fields: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Keep the policy that a request names loaded within the block."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Remove everything that was loaded, also from a server that agentrl did not start."""


class MemoryLoader(Loader):
    """Weights come to an SGLang server through memory or by broadcast, with their version."""

    source = "memory"

    def __init__(
        self,
        admin: AdminClient,
        *,
        processes: int = 1,
        ranks: tuple[int, ...] = (),
        may_use_files: bool = False,
        **options: Any,
    ):
        """Make the target. agentrl must have started the server.

        Args:
            admin: the client of the server.
            processes: the number of the server's processes that share a model.
            ranks: see `Target`.
            may_use_files: whether weights may come in files if they cannot come through memory.
            **options: see `Target`.
        """
        super().__init__(admin)
        self.target = Target(admin.url, admin.key, admin.admin_key, processes, ranks, **options)
        self.files = SGLangFileLoader(admin) if may_use_files else None

    def load(self, route: Route, sent: Sent) -> None:
        """Record the update: the server loaded the weights when it received them."""
        self.has_loaded = True


class SGLangFileLoader(Loader):
    """Loads all weights from files, into any SGLang server that can read them.

    Tensors that are not in the files keep their values.
    """

    source = "files"

    def load(self, route: Route, sent: Sent) -> None:
        # Do not flush the cache with the update: SGLang crashes if the cache is in use then.
        body = {
            "model_path": str(route.folder),
            "weight_version": str(route.version),
            "flush_cache": False,
        }
        self._admin.manage("/update_weights_from_disk", body, seconds=_load_seconds(sent))


class VLLMFileLoader(Loader):
    """Loads all weights from files, into a server in vLLM's development mode."""

    source = "files"

    def __init__(self, admin: AdminClient, names: frozenset[str], *, stale_head: bool = False):
        """Store the options; load nothing yet.

        Args:
            admin: the client of the server.
            names: the names of all tensors of the model in transformers.
            stale_head: whether the server runs on a CPU and ties the head to the embeddings. There,
                vLLM keeps a packed copy of the head that an update does not change.
        """
        super().__init__(admin)
        self._names = names
        self.stale_head = stale_head
        self._has_warned = False
        """True once the log has said that the server's weights are not checked."""

    def check(self) -> None:
        if self.stale_head:
            raise ConfigError(
                "rollout.name=vllm on a CPU cannot train all weights of this model: its head is"
                " tied to its embeddings, and vLLM would keep using the old head. Train LoRA"
                " (model.lora_rank), or set rollout.name=sglang"
            )

    def load(self, route: Route, sent: Sent) -> None:
        """Load all weights. The server must be paused, without turns in flight.

        Raises:
            ConfigError: a tensor is missing. vLLM loads whole layers (q, k and v are one layer):
                the parts of a layer that are not in the files become uninitialized memory.
            EngineError: the server does not load the weights, or holds other weights afterwards.
        """
        # The names in files may be others, and more: see `with_published_names`.
        if len(sent.names) < len(self._names):
            missing = sorted(self._names.difference(sent.names))
            raise ConfigError(
                f"vLLM needs all weights at once, but {len(missing)} of {len(self._names)} are"
                f" not published ({missing[0]}, ...). Send LoRA as an adapter:"
                " rollout.lora=adapter"
            )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(route.folder)}}
        self._admin.manage("/collective_rpc", body, seconds=_load_seconds(sent))
        if not check_norms(self._admin, route.version, sent) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s has no checksums of its weights, so it is not checked that it holds those that"
                " were sent",
                self._admin.url,
            )


def _load_seconds(sent: Sent) -> float:
    return LOAD_SECONDS + sent.size / FILE_BYTES_PER_SECOND


class AdapterLoader(Loader):
    """Loads only LoRA, to a server that was started with `--enable-lora`.

    A server applies an adapter only to requests that name it, and reports no error if a request
    names none. It also uses the name to distinguish cached prefixes. So every adapter has a unique
    name, only `request_fields` returns it, and every request contains those fields.

    Turns in flight end with the adapter that they name. So a server keeps several adapters, and
    only one without requests is unloaded.
    """

    source = "adapter"
    is_adapter = True
    request_field: ClassVar[str]
    """The field of a request that contains the name of an adapter."""
    folders_per_adapter: ClassVar[int] = 0
    """How many folders of adapters must exist after loading, for each adapter that is kept."""

    def __init__(self, admin: AdminClient, *, adapters: int = 2):
        """Store the options; load nothing yet.

        Args:
            admin: the client of the server.
            adapters: how many adapters the server keeps, at least 2.
        """
        super().__init__(admin)
        self.adapters = adapters
        self.kept_folders = adapters * self.folders_per_adapter
        self._requests = Counter[str]()
        """The number of requests in flight that name each adapter."""
        # A server may hold adapters of other runs, so the names of this run are unique.
        self._name_prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._load_count = 0
        self._adapters: list[str] = []

    def load(self, route: Route, sent: Sent) -> None:
        """Load the adapter; check that the server lists it, and no longer lists the old ones."""
        self._sync_with_server()
        while len(self._adapters) >= self.adapters:
            unused = [name for name in self._adapters[:-1] if not self._requests[name]]
            if not unused:
                raise EngineError(
                    f"{self._admin.url}: turns in flight use all its {self.adapters} adapters"
                )
            self._unload(unused[0])
        # Use a new name each time: if an answer was lost, the adapter of the old name is unknown.
        self._load_count += 1
        name = f"{self._name_prefix}{route.version}-{self._load_count}"
        self._load(name, route, sent)
        self._adapters.append(name)
        self._check_listed()

    def request_fields(self) -> dict[str, Any]:
        """Return the field with the name of the newest adapter."""
        return {self.request_field: self._adapters[-1]} if self._adapters else {}

    @contextlib.contextmanager
    def in_use(self, fields: Mapping[str, Any]) -> Iterator[None]:
        name = fields.get(self.request_field, "")
        self._requests[name] += 1
        try:
            yield
        finally:
            self._requests[name] -= 1

    def check_limit(self, limit: int | None) -> None:
        """Check that a server can keep the adapters.

        Args:
            limit: the most adapters that the server keeps; None: any number.

        Raises:
            ConfigError: they are too few.
        """
        if limit is not None and limit < self.adapters:
            raise ConfigError(
                f"{self._admin.url} keeps at most {limit} adapters, but needs {self.adapters}"
                " (2 more than trainer.max_staleness), so that turns in flight can end. Start it"
                f" with --max-loaded-loras {self.adapters} --max-loras-per-batch {self.adapters}"
            )

    def close(self) -> None:
        """Unload the adapters of this run, which a server that agentrl did not start would keep."""
        with contextlib.suppress(EngineError):
            while self._adapters:
                self._unload(self._adapters[0])

    def _load(self, name: str, route: Route, sent: Sent) -> None:
        """Make the server load the adapter under a name."""
        self._manage("load", {"lora_name": name, "lora_path": str(route.adapter_folder)})

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


class SGLangAdapterLoader(AdapterLoader):
    """Loads adapters into SGLang, which reads an adapter's folder once."""

    request_field = "lora_path"

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        seconds = LOAD_SECONDS if verb == "load" else ADMIN_SECONDS
        self._admin.manage(f"/{verb}_lora_adapter", body, seconds=seconds)


class SharedAdapterLoader(SGLangAdapterLoader):
    """Lets SGLang read adapters from shared memory, or from a folder if the server cannot.

    agentrl must have started the server on the machine of rank 0, because SGLang ends if it cannot
    read the memory.
    """

    source = "shared adapter"

    def __init__(self, admin: AdminClient, *, processes: int = 1, adapters: int = 2):
        """Store the options; load nothing yet.

        Args:
            admin: the client of the server.
            processes: the number of the server's processes that share a model.
            adapters: see `AdapterLoader`.
        """
        super().__init__(admin, adapters=adapters)
        self.readers = processes
        self.files = SGLangAdapterLoader(admin, adapters=adapters)
        self._takes_text = False
        """True for servers before 0.5.17: they take one text for all their processes."""

    def _load(self, name: str, route: Route, sent: Sent) -> None:
        assert sent.adapter is not None
        if sent.adapter.error or sent.adapter.machine != this_machine():
            raise EngineError(sent.adapter.error or f"rank 0 is on {sent.adapter.machine}")
        own = [sent.adapter.handles.pop() for _ in range(self.readers)]
        body = {"lora_name": name, "config_dict": sent.adapter.config}
        if not self._takes_text:
            try:
                self._load_tensors(body | {"serialized_named_tensors": own})
            except EngineError:
                if self.has_loaded or self.readers > 1:
                    raise
                self._takes_text = True
        if self._takes_text:
            self._load_tensors(body | {"serialized_tensors": own[0]})
        self.has_loaded = True

    def _load_tensors(self, body: dict[str, Any]) -> None:
        # SGLang wants the API key for this endpoint, not the admin key as for the other one.
        self._admin.ask("/load_lora_adapter_from_tensors", body, seconds=LOAD_SECONDS)


class VLLMAdapterLoader(AdapterLoader):
    """Loads adapters into vLLM, which reads the folder of an unloaded adapter again."""

    request_field, folders_per_adapter = "model", 2

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        path = f"/v1/{verb}_lora_adapter"
        self._admin.manage(path, body, seconds=LOAD_SECONDS, json=False)  # Not JSON.
