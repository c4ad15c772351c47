"""Keeps the engines of a pool alive, and all that are asked at the published policy.

A replica that fails is left out, and a thread of its own tries to take it back: by a probe, or by
starting it anew where it is ours and a probe would be in vain. Before it is asked again it is sent
the policy, which is sound only while the learner's weights stand still: from `publish` to `sleep`.
In between the thread waits, and the next `publish` includes the replica.

Two locks: `_weights` is held while a policy is sent, for minutes perhaps, `_lock` for moments. The
event loop takes the second only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from typing import NoReturn

from safetensors import SafetensorError

from agentrl.engine.base import Update
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.control import in_thread
from agentrl.errors import (
    AgentRLError,
    EngineDead,
    EngineError,
    EngineNonsense,
    EngineOverloaded,
)

log = logging.getLogger("agentrl")

FAILURES = 3
"""In a row: then an engine is asked no more."""
CLOSE_SECONDS = 5.0
"""How long to wait for the threads' end; one that is starting a server ends it later."""


Opener = Callable[[], RemoteEngine]
"""Starts an engine or finds it. One whose process is ours is closed and started again."""


class Breaker:
    """Closed: the engine is asked. Open: it is not, until somebody tried it and it held.

    Three failures in a row open it. The time until the next try doubles, also over tries that
    succeed, and is the first one again once the engine has answered a request. Not guarded: the
    owner's lock is.
    """

    def __init__(self, first_backoff: float = 1.0, max_backoff: float = 60.0):
        """Start closed.

        Args:
            first_backoff: seconds from its opening to the first try.
            max_backoff: what doubling ends at.
        """
        self.open = False
        self._failures = 0
        self._first, self._longest, self._wait = first_backoff, max_backoff, first_backoff

    def succeeded(self) -> None:
        """A request was answered; after its opening that says nothing any more."""
        if not self.open:
            self._failures, self._wait = 0, self._first

    def failed(self) -> bool:
        """A request was not. True where it must be opened."""
        self._failures += 1
        return self._failures >= FAILURES

    def close(self) -> None:
        """The engine held when it was tried."""
        self.open, self._failures = False, 0

    def next_wait(self) -> float:
        """Seconds until the next try."""
        wait = self._wait
        self._wait = min(2 * wait, self._longest)
        return wait


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How patient a pool is, in seconds and times."""

    health_interval: float = 10.0
    """Between two looks at an engine that has requests in flight."""
    health_timeout: float = 20.0
    """That such a look may take. Two in a row that fail: it hangs."""
    first_backoff: float = 1.0
    """From a failure to the first try to take the engine back; doubled from try to try."""
    max_backoff: float = 60.0
    restarts: int = 3
    """Of an engine between two updates of the policy; then it stays out."""
    outage: float = 300.0
    """How long to wait for servers that are not ours, once none answers."""


@dataclass(eq=False, slots=True)
class Replica:
    """One engine. `engine` is another object after each restart.

    What routes requests (`episodes`, `served`, `in_flight`, `watch`) is the event loop's; the rest is
    written under the supervisor's lock.
    """

    index: int
    opener: Opener
    engine: RemoteEngine
    breaker: Breaker

    episodes: set[str] = field(default_factory=set)
    """Those whose turns go here."""
    served: int = 0
    """How many episodes ever."""
    in_flight: set[asyncio.Timeout] = field(default_factory=set)
    """Requests in flight."""
    watch: asyncio.Task[None] | None = None
    loop: asyncio.AbstractEventLoop | None = None

    broken: bool = False
    """A probe would be in vain: it is dead, hangs, or failed one. Ours is started anew."""
    held: Update | None = None
    """What it was sent last, and took; a version alone may have been published twice."""
    waiting: bool = False
    """Fit for use but for the weights, which the trainer is changing."""
    out: bool = False
    """For good."""
    restarts: int = 0
    """Since the last update of the policy."""
    since: float = 0.0
    """When it was left out."""
    cause: Exception | None = None
    recovery_thread: threading.Thread | None = None

    def lost(self, outage: float) -> bool:
        """Whether it is not worth waiting for."""
        if self.engine.restartable:
            return self.out
        return self.breaker.open and time.monotonic() - self.since > outage

    def cancel_requests(self) -> None:
        """Have the requests in flight fail, from any thread."""

        def drop() -> None:
            for flight in self.in_flight:
                if flight.when() is None:  # not dropped already
                    flight.reschedule(-1.0)

        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # a closed loop has none
                self.loop.call_soon_threadsafe(drop)


class Supervisor:
    """See the module."""

    def __init__(self, replicas: Sequence[Replica], pacing: RecoveryPolicy):
        """Look after replicas.

        Args:
            replicas: all open, and asked from now on.
            pacing: how patient to be.
        """
        self.replicas = replicas
        self.version: int | None = None
        """The published one; before, each engine samples from what it was started with."""
        self.restarts = self.sent = 0
        """How often an engine was started anew, and how many bytes of weights were sent, ever."""
        self._pacing = pacing
        self._update: Update | None = None
        self._weights = threading.Condition()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._asleep = self._publishing = False

    # -- for the event loop ------------------------------------------------------------------------

    def is_usable(self, replica: Replica) -> bool:
        """Whether it may be asked: it works, and holds the published policy."""
        if replica.breaker.open or self._closing.is_set():
            return False
        return self.version in (None, replica.engine.version)

    @property
    def standing(self) -> bool:
        """Whether engines need not sample at the moment, however healthy they are."""
        return self._asleep or self._publishing

    def succeeded(self, replica: Replica, engine: RemoteEngine) -> None:
        """A request was answered."""
        if replica.engine is engine:
            replica.breaker.succeeded()

    def failed(self, replica: Replica, engine: RemoteEngine, error: EngineError) -> None:
        """A request was not."""
        with self._lock:
            over = replica.engine is engine and replica.breaker.failed()
        if over or isinstance(error, EngineDead):
            self.exclude(replica, engine, error, broken=isinstance(error, EngineDead))

    def exclude(
        self,
        replica: Replica,
        engine: RemoteEngine,
        cause: Exception,
        *,
        broken: bool = False,
        stale: bool = False,
    ) -> None:
        """Ask a replica no more until it is mended.

        Args:
            replica: the one.
            engine: what failed; where it has been replaced since, nothing happens.
            cause: for messages.
            broken: whether to start it anew without a probe; its requests in flight fail.
            stale: whether its weights must be sent again.
        """
        with self._lock:
            if self._closing.is_set() or replica.engine is not engine:
                return
            replica.cause, replica.waiting = cause, False
            replica.broken |= broken
            replica.held = None if stale else replica.held
            new = not replica.breaker.open
            if new:
                replica.breaker.open = True
                replica.since = time.monotonic()
                replica.recovery_thread = threading.Thread(
                    target=self._recover,
                    args=(replica,),
                    name=f"mend-engine-{replica.index}",
                    daemon=True,
                )
                replica.recovery_thread.start()
        if new:
            said = cause if isinstance(cause, EngineDead) else line(cause)  # its last lines, once
            log.warning("engine %s is left out: %s", engine.url, said)
        if broken:
            replica.cancel_requests()

    def raise_if_hopeless(self) -> None:
        """Raises where no replica is worth waiting for.

        Raises:
            EngineDead: with what each said last.
        """
        if self._closing.is_set():
            raise EngineError("the engine is closed")
        if all(m.lost(self._pacing.outage) for m in self.replicas):
            raise EngineDead(f"no engine is left.\n{self._causes()}")

    def refuse(self) -> NoReturn:
        """No replica can be asked now.

        Raises:
            EngineError: with what each was left out for.
        """
        self.raise_if_hopeless()
        causes = "; ".join(f"{m.engine.url}: {line(m.cause)}" for m in self.replicas if m.cause)
        raise EngineError(f"no engine can be asked now ({causes})")

    # -- for the trainer ---------------------------------------------------------------------------

    def sleep(self) -> None:
        """Tell the replicas, once nothing reads the learner's weights any more."""
        with self._weights:
            self._asleep = True
            for m in self.replicas:
                if not m.breaker.open:
                    self._try(m, lambda e: e.sleep())

    def publish(self, update: Update) -> int:
        """Send the policy to all replicas that can take it, in order.

        Where none can, those that are being mended are waited for, but not those that refuse it.

        Returns:
            Bytes.

        Raises:
            EngineError: none took it; with all causes.
        """
        before = self.sent
        with self._weights:
            self._update, self._asleep, self._publishing = update, False, True
            try:
                fit = [m for m in self.replicas if m.waiting or not m.breaker.open]
                refused = {m for m in fit if not self._publish_to(m, update)}
                self.version = update.version
            finally:
                self._publishing = False
                self._weights.notify_all()
        while not self._taken(update, refused):
            if self._closing.wait(0.05):
                raise EngineError("the engine is closed")
        return self.sent - before

    def close(self) -> None:
        """Close the engines and end the threads. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            engines = [m.engine for m in self.replicas]
            recovery_threads = [
                m.recovery_thread for m in self.replicas if m.recovery_thread is not None
            ]
        with contextlib.ExitStack() as stack:
            for m, engine in zip(self.replicas, engines, strict=True):
                stack.callback(m.cancel_requests)
                stack.callback(engine.close)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in recovery_threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _taken(self, update: Update, refused: set[Replica]) -> bool:
        """Whether a replica samples from it; False where one still may, mended."""
        with self._lock:
            if any(map(self.is_usable, self.replicas)):
                for m in self.replicas:
                    m.restarts = 0
                return True
            hope = (m for m in self.replicas if not m.lost(self._pacing.outage))
            if any(m not in refused or (m.broken and m.engine.restartable) for m in hope):
                return False
            raise EngineError(f"no engine took version {update.version}.\n{self._causes()}")

    def _publish_to(self, m: Replica, update: Update) -> bool:
        """Send it to one; False, and it is left out, where that fails."""
        engine = m.engine
        try:
            self._send(m, update)
        except EngineError as e:
            self.exclude(m, engine, e, broken=died(engine, e), stale=True)
            return False
        self.version = update.version
        self._admit(m)
        return True

    def _try(self, m: Replica, do: Callable[[RemoteEngine], None]) -> None:
        """Have a replica do what it must, or leave it out."""
        engine = m.engine
        try:
            with as_engine_errors(engine):
                do(engine)
        except EngineError as e:
            self.exclude(m, engine, e, broken=True, stale=True)

    # -- mending -----------------------------------------------------------------------------------

    def _recover(self, m: Replica) -> None:
        """A thread's life: until the replica is back, or is out for good."""
        full_since: float | None = None
        while not self._out(m) and not self._closing.wait(m.breaker.next_wait()):
            try:
                self._repair(m)
                if self._readmit(m):
                    return
                full_since = None
            except EngineOverloaded as e:
                full_since = full_since or time.monotonic()
                with self._lock:  # what has no place for one token for so long is not full
                    m.cause, m.broken = e, time.monotonic() - full_since > self._pacing.outage
            except (
                Exception
            ) as e:  # openers are anybody's, and this thread must not end by them
                full_since = None
                with self._lock:
                    m.cause, m.broken = e, True

    def _out(self, m: Replica) -> bool:
        """Whether that was the last restart."""
        with self._lock:
            m.out = m.engine.restartable and m.broken and m.restarts >= self._pacing.restarts
            if m.out:
                m.recovery_thread = None
        if m.out:
            log.error("engine %s stays out: %s", m.engine.url, line(m.cause))
        return m.out

    def _repair(self, m: Replica) -> None:
        """Probe the engine, or replace it."""
        if m.broken and m.engine.restartable:
            self._restart(m)
            return
        try:
            with as_engine_errors(m.engine):
                m.engine.probe()
        except (EngineDead, EngineOverloaded):
            raise
        except EngineError as e:
            # It may be a server that somebody else has started anew: it samples, but from what?
            if self._update is None or not self._healthy(m):
                raise
            log.warning("engine %s is sent the policy again: %s", m.engine.url, line(e))
            m.held = None

    def _healthy(self, replica: Replica) -> bool:
        """Whether an engine samples; waits for it, on another thread than the loop's."""
        if replica.loop is None or not replica.loop.is_running():
            return False
        seconds = self._pacing.health_timeout
        check = replica.engine.check_health(time.monotonic() + seconds)
        answer = asyncio.run_coroutine_threadsafe(check, replica.loop)
        try:
            answer.result(seconds + 1)
        except (EngineError, TimeoutError):
            answer.cancel()
            return False
        return True

    def _restart(self, m: Replica) -> None:
        """Replace the engine, once the trainer is not at work on the GPU that it may share."""
        while self._asleep:
            if self._closing.wait(0.05):
                return
        with self._lock:
            m.restarts += 1
            self.restarts += 1
        log.warning("engine %s is started anew (%d)", m.engine.url, m.restarts)
        with contextlib.suppress(Exception):
            m.engine.close()
        try:
            engine = m.opener()
        except Exception:
            if self._asleep:  # since it began: no fault of the engine's
                m.restarts -= 1
            raise
        with self._lock:
            if not self._closing.is_set():
                m.engine, m.held = engine, None
                return
        engine.close()
        raise EngineError("the engine is closed")

    def _readmit(self, m: Replica) -> bool:
        """Give an engine that works the policy and its place; False where `publish` could not."""
        with self._weights:
            if self._asleep:
                m.engine.sleep()
                m.waiting = True
                while self._asleep and not self._closing.is_set():
                    self._weights.wait(0.2)
                if m.recovery_thread is not threading.current_thread():
                    return True  # `publish` has taken it in
                if not m.waiting:
                    return False
            if self._closing.is_set():
                return True
            if self._update is not None and m.held is not self._update:
                self._send(m, self._update)
            self._admit(m)
        log.warning("engine %s is back (policy version %d)", m.engine.url, m.engine.version)
        return True

    def _send(self, m: Replica, update: Update) -> None:
        with as_engine_errors(m.engine):
            self.sent += m.engine.publish(update)
        m.held = update

    def _admit(self, m: Replica) -> None:
        with self._lock:
            m.breaker.close()
            m.broken = m.waiting = False
            m.recovery_thread = m.cause = None

    def _causes(self) -> str:
        return "\n".join(f"{m.engine.url}: {m.cause}" for m in self.replicas if m.cause)


def open_all(openers: Sequence[Opener]) -> list[RemoteEngine]:
    """One engine of each opener, side by side.

    Raises:
        AgentRLError: what the first opener that failed raised; the other engines are closed, also
            those that open only later.
    """
    if len(openers) == 1:
        return [openers[0]()]
    opened = [in_thread(o, f"open-engine-{i}") for i, o in enumerate(openers)]
    try:
        for future in as_completed(opened):
            future.result()
    except BaseException:
        for future in opened:
            future.add_done_callback(_close_opened)
        raise
    return [future.result() for future in opened]


def _close_opened(opened: Future[RemoteEngine]) -> None:
    if opened.exception() is None:
        opened.result().close()


@contextlib.contextmanager
def as_engine_errors(engine: RemoteEngine) -> Iterator[None]:
    """Lay at an engine's door what its client raises of its own: no answer of one ends the run.

    Raises:
        EngineNonsense: an answer, or what it was sent, was not what the client took it for.
        EngineError: a file or a socket failed.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (OSError, SafetensorError) as e:
        raise EngineError(f"{engine.url}: {type(e).__name__}: {e}") from e
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise EngineNonsense(f"{engine.url}: {type(e).__name__}: {e}") from e


def died(engine: RemoteEngine, error: EngineError) -> bool:
    """Whether an engine that failed is gone: connections break a moment before it is seen."""
    if isinstance(error, EngineDead) or not engine.restartable:
        return isinstance(error, EngineDead)
    time.sleep(0.2)
    try:
        with as_engine_errors(engine):
            engine.probe()
    except EngineDead:
        return True
    except EngineError:
        pass
    return False


def line(cause: Exception | None) -> str:
    """The first line of what an error says."""
    return str(cause).partition("\n")[0]
