"""Sample from the servers of a run in another process: a rollout worker.

    the run's process                              a worker
    EnginePool ── PoolView, whenever it changes ──► FollowingPool
               ◄── engines that failed ───────────

The run starts, repairs and updates the servers. A worker sends its requests itself, by the rules of
`EnginePool`, and has the state of the servers from the run. Before the run changes the weights of a
server, it waits for the workers' turns, too (`RemoteEngine.turns_in_flight`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.engine.base import ServerUsage
from agentrl.engine.remote.client import EngineView, RemoteEngine
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.supervisor import Availability, RecoveryPolicy, Replica
from agentrl.errors import EngineDead, EngineError, NoEngineLeft

ASK_SECONDS = 1.0
"""How often a worker without a usable engine asks for the state of the servers."""

Note = Callable[..., None]
"""Calls a function of the run's process by name, without an answer."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """An engine of the pool as a worker sees it."""

    engine: EngineView
    is_excluded: bool
    is_broken: bool
    cause: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """The state of a pool."""

    replicas: tuple[ReplicaView, ...]
    version: int | None
    newest: int | None
    is_publishing: bool
    is_suspended: bool
    no_engine_left: str
    """Why waiting is useless; "" if it is not."""


def view_of(pool: EnginePool) -> PoolView:
    """Return the state of a pool for other processes."""
    supervisor, no_engine_left = pool.supervisor, ""
    try:
        supervisor.raise_if_unrecoverable()
    except EngineError as e:
        no_engine_left = str(e)
    return PoolView(
        replicas=tuple(
            ReplicaView(r.engine.view(), r.is_excluded, r.is_broken, str(r.cause or ""))
            for r in pool.replicas
        ),
        version=supervisor.version,
        newest=supervisor.newest,
        is_publishing=supervisor.is_publishing,
        is_suspended=supervisor.is_suspended,
        no_engine_left=no_engine_left,
    )


class Follower(Availability):
    """The availability of engines as the run reports it."""

    def __init__(self, replicas: list[Replica], note: Note):
        self.replicas, self._note = replicas, note
        self._lock = threading.Lock()
        self._asked = 0.0
        self.view: PoolView

    @property
    def newest(self) -> int | None:
        return self.view.newest

    @property
    def is_suspended(self) -> bool:
        return self.view.is_suspended

    def update(self, view: PoolView) -> None:
        """Take over the state of the run's pool."""
        self.view, self.version, self.is_publishing = view, view.version, view.is_publishing
        for replica, seen in zip(self.replicas, view.replicas, strict=True):
            if replica.engine.serial != seen.engine.serial:
                replica.cancel_requests()
                replica.engine = RemoteEngine.follow(seen.engine)
            replica.engine.update_view(seen.engine)
            if replica.is_excluded and not seen.is_excluded:
                replica.failures = 0
            replica.is_excluded = seen.is_excluded
            replica.cause = EngineError(seen.cause) if seen.cause else None
            if seen.is_broken:
                replica.cancel_requests()

    def exclude(
        self,
        replica: Replica,
        engine: RemoteEngine,
        cause: Exception,
        *,
        broken: bool = False,
        stale: bool = False,
    ) -> None:
        """Report it to the run, which excludes the engine for all workers."""
        if replica.engine is engine:
            replica.is_excluded, replica.cause = True, cause
            self._note("engine_failed", engine.serial, str(cause), broken, True)

    def record_failure(self, replica: Replica, engine: RemoteEngine, error: EngineError) -> None:
        """Report also a single failure: the run knows whether the server has ended."""
        super().record_failure(replica, engine, error)
        if not replica.is_excluded:
            self._note("engine_failed", engine.serial, str(error), False, False)

    def raise_if_unrecoverable(self) -> None:
        if self.view.no_engine_left:
            raise NoEngineLeft(self.view.no_engine_left)
        if not any(map(self.is_usable, self.replicas)):
            now = time.monotonic()
            if now - self._asked > ASK_SECONDS:
                self._asked = now
                self._note("engines_wanted")


class FollowingPool(EnginePool):
    """Samples from the servers of the run's pool; it neither opens nor closes any."""

    def __init__(self, view: PoolView, channel: Any, number: int):
        """Create a client for each server.

        Args:
            view: the state of the pool.
            channel: the connection to the run's process.
            number: the number of the worker, so that workers begin with different servers.
        """
        size = len(view.replicas)
        self.replicas = [
            Replica((i - number) % size, _no_opener, RemoteEngine.follow(seen.engine))
            for i, seen in enumerate(view.replicas)
        ]
        self.supervisor = follower = Follower(self.replicas, channel.note)
        follower.update(view)
        self._start(RecoveryPolicy())
        self.max_length = min(replica.engine.max_length for replica in self.replicas)
        self.functions = {"follow": follower.update, "usage": self._usage}

    def _usage(self, server: int) -> ServerUsage:
        """Return how this process uses a server."""
        engines = (r.engine for r in self.replicas if r.engine.serial == server)
        return next((engine.usage() for engine in engines), ServerUsage())


def report_failure(pool: EnginePool, server: int, error: str, broken: bool, failed: bool) -> None:
    """Handle the report of a worker about a request that failed.

    Args:
        pool: the run's pool.
        server: the number of the engine (`RemoteEngine.serial`).
        error: what happened.
        broken: whether the engine hangs.
        failed: whether requests failed so often that the engine is not used any more.
    """
    for replica in pool.replicas:
        engine = replica.engine
        if engine.serial != server:
            continue
        has_ended = engine.has_ended()
        if has_ended or failed:
            kind = EngineDead if has_ended else EngineError
            broken = broken or has_ended
            pool.supervisor.exclude(replica, engine, kind(error), broken=broken)


def _no_opener() -> RemoteEngine:
    raise AssertionError("a worker opens no engine")
