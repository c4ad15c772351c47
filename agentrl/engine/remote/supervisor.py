"""Recovers the engines of a pool, and checks that each one in use has the published policy.

A replica that fails is excluded, and a recovery thread tries to repair it: by a probe, or by a
restart if agentrl started it and a probe is useless. The policy is sent to a replica before it is
used again. This is correct only while the learner's weights do not change: from `publish` to
`weights_moving`. From then to the next `publish` the thread waits, and that `publish` includes the
replica.

There are two locks: `_weights` is held while a policy is sent, perhaps for minutes, `_lock` only
for moments. The event loop takes only the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from typing import NoReturn

from agentrl.engine.base import Followers, Update
from agentrl.engine.remote.admin import close_opened, in_thread, reading
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.distributor import (
    Calls,
    Distributor,
    reporting_slow,
    run_on_each,
)
from agentrl.engine.remote.senders import FROM_FILES
from agentrl.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    NoEngineLeft,
)

log = logging.getLogger("agentrl")

FAILURES = 3
"""The number of failures in a row after which an engine is excluded."""
CLOSE_SECONDS = 5.0
"""The time to wait for the recovery threads. A thread that is starting a server ends it later."""


Opener = Callable[[], RemoteEngine]
"""Starts an engine or connects to it. To restart an engine, it is closed and opened again."""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The intervals (in seconds) and limits of the recovery of engines."""

    health_interval: float = 10.0
    """The time between two health checks of an engine that has requests in flight."""
    health_timeout: float = 20.0
    """The time limit of a health check. After two failures in a row, the engine hangs."""
    first_backoff: float = 1.0
    """The time from a failure to the first try to use the engine again; doubled each time."""
    max_backoff: float = 60.0
    restarts: int = 3
    """The largest number of restarts of an engine between two updates of the policy. An engine that
    needs more is abandoned."""
    outage: float = 300.0
    """The time to wait for servers that agentrl did not start, once none answers."""


@dataclass(eq=False, slots=True)
class Replica:
    """One engine of a pool. After a restart, `engine` is another object.

    The event loop owns the attributes for routing (`episodes`, `served`, `in_flight`, `watch`). The
    others are written under the lock of the supervisor.
    """

    index: int
    opener: Opener
    engine: RemoteEngine

    episodes: set[str] = field(default_factory=set)
    """The episodes whose turns this replica samples."""
    served: int = 0
    """The number of episodes that were assigned to this replica so far."""
    in_flight: set[asyncio.Timeout] = field(default_factory=set)
    """The timeouts of the requests in flight."""
    watch: asyncio.Task[None] | None = None
    loop: asyncio.AbstractEventLoop | None = None

    is_excluded: bool = False
    """True if the engine is not used until it is repaired."""
    failures: int = 0
    """The number of failures in a row."""
    backoff: float = 0.0
    """The seconds until the next try to repair the engine; 0: the first time. It doubles, also
    after tries that succeed, and is reset once the engine has answered a request."""
    is_broken: bool = False
    """True if a probe is useless: the engine has ended, hangs, or failed a probe. If agentrl
    started the engine, it is restarted."""
    sent_update: Update | None = None
    """The update that the engine loaded last. Two updates may have the same version."""
    awaits_weights: bool = False
    """True if the engine works, but needs the weights, which the trainer is changing."""
    is_abandoned: bool = False
    """True if the engine is not restarted any more."""
    restarts: int = 0
    """The number of restarts since the last update of the policy."""
    excluded_at: float = 0.0
    """The time of the exclusion, in `time.monotonic()` seconds."""
    cause: Exception | None = None
    recovery_thread: threading.Thread | None = None

    def is_unrecoverable(self, outage: float) -> bool:
        """Return whether waiting for this replica is useless."""
        if self.engine.restartable:
            return self.is_abandoned
        return self.is_excluded and time.monotonic() - self.excluded_at > outage

    def cancel_requests(self) -> None:
        """Make the requests in flight fail; from any thread."""

        def drop() -> None:
            for timeout in self.in_flight:
                if timeout.when() is None:  # not cancelled already
                    timeout.reschedule(-1.0)

        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # A closed loop has no requests.
                self.loop.call_soon_threadsafe(drop)


class Availability(ABC):
    """Which replicas of a pool can be used now."""

    replicas: Sequence[Replica]
    version: int | None
    """The published version; None before the first: each engine samples from the weights of its
    start."""
    is_publishing: bool
    """True while a policy is being published. Some engines have it before the others."""
    _lock: threading.Lock

    def is_usable(self, replica: Replica) -> bool:
        """Return whether a replica works and has the published policy."""
        if replica.is_excluded:
            return False
        return self.version in (None, replica.engine.version)

    @property
    @abstractmethod
    def newest(self) -> int | None:
        """The version that is published, or is being published."""

    @property
    @abstractmethod
    def is_suspended(self) -> bool:
        """Whether engines need not sample now, even if they are healthy."""

    def record_success(self, replica: Replica, engine: RemoteEngine) -> None:
        """Record that a request was answered."""
        if replica.engine is engine and not replica.is_excluded:
            replica.failures, replica.backoff = 0, 0.0

    def record_failure(self, replica: Replica, engine: RemoteEngine, error: EngineError) -> None:
        """Record that a request failed; exclude the replica if it failed too often."""
        with self._lock:
            is_current = replica.engine is engine
            replica.failures += is_current
            is_failing = is_current and replica.failures >= FAILURES
        if is_failing or isinstance(error, EngineDead):
            self.exclude(replica, engine, error, broken=isinstance(error, EngineDead))

    @abstractmethod
    def exclude(
        self,
        replica: Replica,
        engine: RemoteEngine,
        cause: Exception,
        *,
        broken: bool = False,
        stale: bool = False,
    ) -> None:
        """Stop using a replica until it is repaired.

        Args:
            replica: the replica.
            engine: the engine that failed. If it was replaced since, nothing happens.
            cause: the error, for messages.
            broken: restart the engine without a probe; its requests in flight fail.
            stale: send the weights again.
        """

    @abstractmethod
    def raise_if_unrecoverable(self) -> None:
        """Raise an error if waiting for every replica is useless.

        Raises:
            NoEngineLeft: no replica can be recovered; the message has the last error of each.
        """

    def raise_unavailable(self) -> NoReturn:
        """Raise the error that no replica can be used now.

        Raises:
            EngineError: always; the message has the reason why each replica was excluded.
        """
        self.raise_if_unrecoverable()
        causes = "; ".join(
            f"{replica.engine.url}: {first_line(replica.cause)}"
            for replica in self.replicas
            if replica.cause
        )
        raise EngineError(f"no engine can be used now ({causes})")


class Supervisor(Availability):
    """Excludes, repairs and readmits the replicas of a pool."""

    def __init__(self, replicas: Sequence[Replica], recovery: RecoveryPolicy):
        """Use all replicas from now on.

        Args:
            replicas: open engines.
            recovery: intervals and limits.
        """
        self.replicas = replicas
        self.version = None
        self.followers: Followers | None = None
        """Other processes that sample from the engines."""
        self.restarts = self.sent = 0
        """The number of restarts, and of bytes of weights that were sent, in total."""
        self._recovery = recovery
        self._distributor = Distributor()
        self._update: Update | None = None
        self._weights = threading.Condition()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._asleep = self._moving = False
        self.is_publishing = False

    # -- for the event loop ------------------------------------------------------------------------

    def is_usable(self, replica: Replica) -> bool:
        return not self._closing.is_set() and super().is_usable(replica)

    @property
    def newest(self) -> int | None:
        """Return the version that is published, or is being published."""
        return None if self._update is None else self._update.version

    @property
    def is_suspended(self) -> bool:
        """Return whether engines need not sample now, even if they are healthy."""
        return self._asleep or self.is_publishing

    def exclude(
        self,
        replica: Replica,
        engine: RemoteEngine,
        cause: Exception,
        *,
        broken: bool = False,
        stale: bool = False,
    ) -> None:
        with self._lock:
            if self._closing.is_set() or replica.engine is not engine:
                return
            replica.cause, replica.awaits_weights = cause, False
            replica.is_broken |= broken
            replica.sent_update = None if stale else replica.sent_update
            is_new = not replica.is_excluded
            if is_new:
                replica.is_excluded = True
                replica.excluded_at = time.monotonic()
                replica.recovery_thread = threading.Thread(
                    target=self._recover,
                    args=(replica,),
                    name=f"recover-engine-{replica.index}",
                    daemon=True,
                )
                replica.recovery_thread.start()
        if is_new:
            # The error of a server that ended has the last lines of its output.
            message = cause if isinstance(cause, EngineDead) else first_line(cause)
            log.warning("engine %s is excluded: %s", engine.url, message)
        if broken:
            replica.cancel_requests()
        self._changed()

    def raise_if_unrecoverable(self) -> None:
        if self._closing.is_set():
            raise EngineError("the engine is closed")
        if all(replica.is_unrecoverable(self._recovery.outage) for replica in self.replicas):
            raise NoEngineLeft(f"no engine is left.\n{self._causes()}")

    # -- for the trainer ---------------------------------------------------------------------------

    def weights_moving(self) -> None:
        """Wait until nothing reads the learner's weights. Then the trainer may change them."""
        with self._weights:
            self._moving = True

    def sleep(self) -> None:
        """Let all engines release memory; see also `weights_moving`."""
        with self._weights:
            self._asleep = self._moving = True
            self._changed()
            engines = {
                replica.engine: replica
                for replica in self.replicas
                if replica.awaits_weights or not replica.is_excluded
            }
            calls: Calls = {}
            with reporting_slow("engines are not asleep", calls):
                errors = run_on_each([*engines], methodcaller("sleep"), calls)
            for engine, error in errors.items():
                self.exclude(engines[engine], engine, error, broken=True, stale=True)

    def send_update(self, update: Update) -> int:
        """Send the policy to all replicas that can load it, at the same time.

        If the policy has not changed and all replicas hold it, they only get its version. If no
        replica can load it, wait for replicas that are being repaired, except for those that
        refused it.

        Returns:
            The number of bytes that were sent.

        Raises:
            EngineError: no replica loaded the policy; the message has all causes.
        """
        before = self.sent
        with self._weights:
            candidates = [
                replica
                for replica in self.replicas
                if replica.awaits_weights or not replica.is_excluded
            ]
            if not all(r.sent_update is self._update and r.engine.has_weights for r in candidates):
                update = replace(update, is_changed=True)
            self._update, self.is_publishing = update, True
            self._asleep = self._moving = False
            self._changed()
            try:
                refused = self._publish_to(candidates, update)
            finally:
                self.is_publishing = False
                self._changed()
                self._weights.notify_all()
        while not self._is_published(update, refused):
            if self._closing.wait(0.05):
                raise EngineError("the engine is closed")
        return self.sent - before

    def close(self) -> None:
        """Close the engines and end the threads. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            engines = [replica.engine for replica in self.replicas]
            recovery_threads = [
                replica.recovery_thread
                for replica in self.replicas
                if replica.recovery_thread is not None
            ]
        with contextlib.ExitStack() as stack:
            stack.callback(self._distributor.close)
            for replica, engine in zip(self.replicas, engines, strict=True):
                stack.callback(replica.cancel_requests)
                stack.callback(engine.close)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in recovery_threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _is_published(self, update: Update, refused: set[Replica]) -> bool:
        """Return whether a replica samples from an update; False if one may after its repair.

        Raises:
            EngineError: no replica will sample from the update.
        """
        with self._lock:
            if any(map(self.is_usable, self.replicas)):
                for replica in self.replicas:
                    replica.restarts = 0
                return True
            recoverable = (
                replica
                for replica in self.replicas
                if not replica.is_unrecoverable(self._recovery.outage)
            )
            if any(
                replica not in refused or (replica.is_broken and replica.engine.restartable)
                for replica in recoverable
            ):
                return False
            raise EngineError(f"no engine loaded version {update.version}.\n{self._causes()}")

    def _publish_to(self, replicas: Sequence[Replica], update: Update) -> set[Replica]:
        """Send the update to replicas; return those that failed, which are excluded."""
        engines = {replica.engine: replica for replica in replicas}
        size, errors = self._distributor.send(list(engines), update)
        self.sent += size
        # Exclude engines first: one that failed a check may have the new version already.
        dead = [in_thread(partial(is_dead, engine, error)) for engine, error in errors.items()]
        for (engine, error), broken in zip(errors.items(), dead, strict=True):
            self.exclude(engines[engine], engine, error, broken=broken.result(), stale=True)
        # From now on the replicas that have loaded it are usable. If none has, none may sample from
        # older weights.
        self.version = update.version
        for engine, replica in engines.items():
            if engine not in errors:
                replica.sent_update = update
                self._admit(replica)
        return {engines[engine] for engine in errors}

    # -- recovery ----------------------------------------------------------------------------------

    def _recover(self, replica: Replica) -> None:
        """Run as a thread until the replica is used again, or is abandoned."""
        full_since: float | None = None
        while not self._give_up_if_exhausted(replica) and not self._closing.wait(
            self._next_wait(replica)
        ):
            try:
                self._repair(replica)
                if self._readmit(replica):
                    return
                full_since = None
            except EngineOverloaded as e:
                full_since = full_since or time.monotonic()
                with self._lock:  # An engine that accepts no request for so long is not full.
                    replica.cause, replica.is_broken = (
                        e,
                        time.monotonic() - full_since > self._recovery.outage,
                    )
            except Exception as e:  # Openers may raise anything. This thread must not end.
                full_since = None
                with self._lock:
                    replica.cause, replica.is_broken = e, True

    def _next_wait(self, replica: Replica) -> float:
        """Return the seconds until the next try, and double them for the one after it."""
        seconds = replica.backoff or self._recovery.first_backoff
        replica.backoff = min(2 * seconds, self._recovery.max_backoff)
        return seconds

    def _give_up_if_exhausted(self, replica: Replica) -> bool:
        """Abandon a replica that has used up its restarts; return whether it has."""
        with self._lock:
            replica.is_abandoned = (
                replica.engine.restartable
                and replica.is_broken
                and replica.restarts >= self._recovery.restarts
            )
            if replica.is_abandoned:
                replica.recovery_thread = None
        if replica.is_abandoned:
            log.error("engine %s is abandoned: %s", replica.engine.url, first_line(replica.cause))
            self._changed()
        return replica.is_abandoned

    def _repair(self, replica: Replica) -> None:
        """Probe the engine, or replace it."""
        if replica.is_broken and replica.engine.restartable:
            self._restart(replica)
            return
        try:
            with reading("the server", replica.engine.url):
                replica.engine.probe()
        except (EngineDead, EngineOverloaded):
            raise
        except EngineError as e:
            # The owner of the server may have restarted it: it samples from unknown weights.
            if self._update is None or not replica.engine.is_healthy(self._recovery.health_timeout):
                raise
            log.warning("engine %s is sent the policy again: %s", replica.engine.url, first_line(e))
            replica.sent_update = None

    def _restart(self, replica: Replica) -> None:
        """Close the engine and open it again, while the trainer does not use a shared GPU."""
        while self._asleep:
            if self._closing.wait(0.05):
                return
        with self._lock:
            replica.restarts += 1
            self.restarts += 1
        log.warning("engine %s is restarted (%d)", replica.engine.url, replica.restarts)
        with contextlib.suppress(Exception):
            replica.engine.close()
        try:
            engine = replica.opener()
        except Exception:
            if self._asleep:  # The trainer began to work during the start: do not count it.
                replica.restarts -= 1
            raise
        engine.delivery = replica.engine.delivery  # The one that ended may have got files.
        engine.reprefilled = replica.engine.reprefilled
        engine.followers = self.followers
        with self._lock:
            if not self._closing.is_set():
                replica.engine, replica.sent_update = engine, None
                return
        engine.close()
        raise EngineError("the engine is closed")

    def _readmit(self, replica: Replica) -> bool:
        """Send the policy to an engine that works, and use it again.

        Returns:
            False if `publish` could not send the policy to the engine.
        """
        with self._weights:
            if self._must_wait(replica):
                if self._asleep:
                    replica.engine.sleep()
                else:
                    log.warning(
                        "engine %s works again. It is used from the next version of the policy on",
                        replica.engine.url,
                    )
                replica.awaits_weights = True
                while self._must_wait(replica) and not self._closing.is_set():
                    self._weights.wait(0.2)
                if replica.recovery_thread is not threading.current_thread():
                    return True  # `publish` has included it.
                if not replica.awaits_weights:
                    return False
                replica.awaits_weights = False
            if self._closing.is_set():
                return True
            if self._update is not None and replica.sent_update is not self._update:
                self._send(replica, self._update)
            self._admit(replica)
        log.warning(
            "engine %s is used again (policy version %d)",
            replica.engine.url,
            replica.engine.version,
        )
        return True

    def _must_wait(self, replica: Replica) -> bool:
        """Return whether an engine that works must wait for `publish` to get the policy.

        It waits while the trainer changes the weights. If it receives weights through memory, it
        also waits while other engines sample: they would leave their group for one with a new
        member.
        """
        if self._asleep:
            return True
        if self._update is None or replica.sent_update is self._update:  # It needs no weights.
            return False
        return self._moving or (
            replica.engine.delivery.source == "memory" and any(map(self.is_usable, self.replicas))
        )

    def _send(self, replica: Replica, update: Update) -> None:
        """Send the update to one replica, through files if possible: they need no group.

        Raises:
            EngineError: it did not load the update.
        """
        engine, delivery = replica.engine, replica.engine.delivery
        if delivery.may_use_files:
            engine.delivery = FROM_FILES
        try:
            size, errors = self._distributor.send([engine], replace(update, is_changed=True))
        finally:
            engine.delivery = delivery
        for error in errors.values():
            raise error
        self.sent += size
        replica.sent_update = update

    def _admit(self, replica: Replica) -> None:
        with self._lock:
            replica.is_excluded = replica.is_broken = replica.awaits_weights = False
            replica.failures = 0
            replica.recovery_thread = replica.cause = None
        self._changed()

    def _changed(self) -> None:
        """Tell other processes that a replica or the published version has changed."""
        if self.followers:
            self.followers.changed()

    def _causes(self) -> str:
        return "\n".join(
            f"{replica.engine.url}: {replica.cause}" for replica in self.replicas if replica.cause
        )


def open_all(openers: Sequence[Opener]) -> list[RemoteEngine]:
    """Open all engines at the same time.

    Raises:
        AgentRLError: the error of the first opener that failed. The other engines are closed, also
            those that open later.
    """
    if len(openers) == 1:
        return [openers[0]()]
    opened = [in_thread(o, f"open-engine-{i}") for i, o in enumerate(openers)]
    try:
        for future in as_completed(opened):
            future.result()
    except BaseException:
        for future in opened:
            future.add_done_callback(close_opened)
        raise
    return [future.result() for future in opened]


def is_dead(engine: RemoteEngine, error: EngineError) -> bool:
    """Return whether an engine that failed has ended. Its connections break a moment before."""
    if isinstance(error, EngineDead) or not engine.restartable:
        return isinstance(error, EngineDead)
    time.sleep(0.2)
    return engine.has_ended()  # No request: an engine that hangs would not answer it.


def first_line(cause: Exception | None) -> str:
    """Return the first line of the message of an error."""
    return str(cause).partition("\n")[0]
