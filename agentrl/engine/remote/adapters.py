"""The LoRA adapters of the policy that one server has loaded.

A server applies an adapter only to requests that name it, and reports no error if a request names
none. It also uses the name to distinguish cached prefixes. So every adapter has a unique name, only
`Adapters` knows it, and every request contains its `request_fields`.

Turns in flight end with the adapter that they name. So a server keeps several adapters, and only
one without requests is unloaded.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.engine.remote.admin import AdminClient, reading
from agentrl.errors import ConfigError, EngineError

LOAD_SECONDS = 60.0
"""The time limit of a server for loading an adapter."""


class Adapters:
    """Loads adapters into a server that was started with `--enable-lora`, and unloads them."""

    def __init__(
        self,
        admin: AdminClient,
        *,
        field: str,
        path: str,
        limit: int = 2,
        used_elsewhere: Callable[[], Collection[str]] = tuple,
    ):
        """Load nothing yet.

        Args:
            admin: the client of the server.
            field: the field of a request that contains the name of an adapter.
            path: the path to load or unload an adapter, with {} for the verb.
            limit: how many adapters the server keeps, at least 2.
            used_elsewhere: returns the adapters that requests of other processes name.
        """
        self._admin, self._field, self._path = admin, field, path
        self.limit, self._used_elsewhere = limit, used_elsewhere
        self._requests = Counter[str]()
        """The number of requests in flight that name each adapter."""
        # A server may hold adapters of other runs, so the names of this run are unique.
        self._name_prefix = f"agentrl-{uuid.uuid4().hex[:8]}-"
        self._load_count = 0
        self._names: list[str] = []
        """The adapters that are loaded, the newest last."""

    def load(self, version: int, folder: Path) -> None:
        """Load an adapter; check that the server lists it, and no longer lists the old ones.

        Raises:
            EngineError: the server does not load it.
        """
        self._sync_with_server()
        while len(self._names) >= self.limit:
            used = self.used() | {*self._used_elsewhere()}
            unused = [name for name in self._names[:-1] if name not in used]
            if not unused:
                raise EngineError(
                    f"{self._admin.url}: turns in flight use all its {self.limit} adapters"
                )
            self._unload(unused[0])
        # Use a new name each time: if an answer was lost, the adapter of the old name is unknown.
        self._load_count += 1
        name = f"{self._name_prefix}{version}-{self._load_count}"
        self._manage("load", {"lora_name": name, "lora_path": str(folder)})
        self._names.append(name)
        if (listed := self.listed()) != set(self._names):
            raise EngineError(
                f"{self._admin.url}: its adapters are {sorted(listed)}, not {sorted(self._names)}"
            )

    def used(self) -> frozenset[str]:
        """Return the adapters that requests in flight of this process name."""
        return frozenset(name for name, requests in self._requests.items() if requests)

    def request_fields(self) -> dict[str, Any]:
        """Return the field that makes a request use the newest adapter; {} if none is loaded."""
        return {self._field: self._names[-1]} if self._names else {}

    @contextlib.contextmanager
    def in_use(self, fields: Mapping[str, Any]) -> Iterator[None]:
        """Keep the adapter that a request names loaded within the block."""
        name = fields.get(self._field, "")
        self._requests[name] += 1
        try:
            yield
        finally:
            self._requests[name] -= 1

    def check_limit(self, server_limit: int | None) -> None:
        """Check that a server can keep the adapters.

        Args:
            server_limit: the most adapters that the server keeps; None: any number.

        Raises:
            ConfigError: they are too few.
        """
        if server_limit is not None and server_limit < self.limit:
            raise ConfigError(
                f"{self._admin.url} keeps at most {server_limit} adapters, but needs {self.limit}"
                " (2 more than trainer.max_staleness), so that turns in flight can end. Start it"
                f" with --max-loaded-loras {self.limit} --max-loras-per-batch {self.limit}"
            )

    def close(self) -> None:
        """Unload the adapters of this run, which a server that agentrl did not start would keep."""
        with contextlib.suppress(EngineError):
            while self._names:
                self._unload(self._names[0])

    def listed(self) -> set[str]:
        """Return the adapters of this run that the server lists."""
        answer = self._admin.ask("/v1/models")
        with reading("the server", f"{self._admin.url}/v1/models"):
            names = [str(model["id"]) for model in answer["data"]]
        return {name for name in names if name.startswith(self._name_prefix)}

    def _manage(self, verb: str, body: dict[str, str]) -> None:
        # vLLM does not answer with JSON.
        self._admin.manage(self._path.format(verb), body, seconds=LOAD_SECONDS, json=False)

    def _unload(self, name: str) -> None:
        self._manage("unload", {"lora_name": name})
        self._names.remove(name)

    def _sync_with_server(self) -> None:
        """Make the list of adapters of this object and that of the server equal.

        An answer may have been lost, or the server restarted.
        """
        listed = self.listed()
        self._names = [name for name in self._names if name in listed]
        for extra in listed - set(self._names):
            self._manage("unload", {"lora_name": extra})
