"""Keeps the engines of a pool alive, and all that are asked at the published policy.

A member that fails is left out, and a thread of its own tries to take it back: by a probe, or by
starting it anew where it is ours and a probe would be in vain. Before it is asked again it is sent
the policy, which is sound only while the learner's weights stand still: from `publish` to `sleep`.
In between the thread waits, and the next `publish` includes the member.

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

    def __init__(self, first_wait: float = 1.0, longest_wait: float = 60.0):
        """Start closed.

        Args:
            first_wait: seconds from its opening to the first try.
            longest_wait: what doubling ends at.
        """
        self.open = False
        self._failures = 0
        self._first, self._longest, self._wait = first_wait, longest_wait, first_wait

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
class Pacing:
    """How patient a pool is, in seconds and times."""

    health_every: float = 10.0
    """Between two looks at an engine that has requests in flight."""
    health_seconds: float = 20.0
    """That such a look may take. Two in a row that fail: it hangs."""
    first_wait: float = 1.0
    """From a failure to the first try to take the engine back; doubled from try to try."""
    longest_wait: float = 60.0
    restarts: int = 3
    """Of an engine between two updates of the policy; then it stays out."""
    outage: float = 300.0
    """How long to wait for servers that are not ours, once none answers."""


@dataclass(eq=False, slots=True)
class Member:
    """One engine. `engine` is another object after each restart.

    What routes requests (`episodes`, `served`, `flights`, `watch`) is the event loop's; the rest is
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
    flights: set[asyncio.Timeout] = field(default_factory=set)
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
    mender: threading.Thread | None = None

    def lost(self, outage: float) -> bool:
        """Whether it is not worth waiting for."""
        if self.engine.restartable:
            return self.out
        return self.breaker.open and time.monotonic() - self.since > outage

    def drop_flights(self) -> None:
        """Have the requests in flight fail, from any thread."""

        def drop() -> None:
            for flight in self.flights:
                if flight.when() is None:  # not dropped already
                    flight.reschedule(-1.0)

        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # a closed loop has none
                self.loop.call_soon_threadsafe(drop)


class Supervisor:
    """See the module."""

    def __init__(self, members: Sequence[Member], pacing: Pacing):
        """Look after members.

        Args:
            members: all open, and asked from now on.
            pacing: how patient to be.
        """
        self.members = members
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

    def usable(self, member: Member) -> bool:
        """Whether it may be asked: it works, and holds the published policy."""
        if member.breaker.open or self._closing.is_set():
            return False
        return self.version in (None, member.engine.version)

    @property
    def standing(self) -> bool:
        """Whether engines need not sample at the moment, however healthy they are."""
        return self._asleep or self._publishing

    def succeeded(self, member: Member, engine: RemoteEngine) -> None:
        """A request was answered."""
        if member.engine is engine:
            member.breaker.succeeded()

    def failed(self, member: Member, engine: RemoteEngine, error: EngineError) -> None:
        """A request was not."""
        with self._lock:
            over = member.engine is engine and member.breaker.failed()
        if over or isinstance(error, EngineDead):
            self.leave_out(member, engine, error, broken=isinstance(error, EngineDead))

    def leave_out(
        self,
        member: Member,
        engine: RemoteEngine,
        cause: Exception,
        *,
        broken: bool = False,
        stale: bool = False,
    ) -> None:
        """Ask a member no more until it is mended.

        Args:
            member: the one.
            engine: what failed; where it has been replaced since, nothing happens.
            cause: for messages.
            broken: whether to start it anew without a probe; its requests in flight fail.
            stale: whether its weights must be sent again.
        """
        with self._lock:
            if self._closing.is_set() or member.engine is not engine:
                return
            member.cause, member.waiting = cause, False
            member.broken |= broken
            member.held = None if stale else member.held
            new = not member.breaker.open
            if new:
                member.breaker.open = True
                member.since = time.monotonic()
                member.mender = threading.Thread(
                    target=self._mend,
                    args=(member,),
                    name=f"mend-engine-{member.index}",
                    daemon=True,
                )
                member.mender.start()
        if new:
            said = cause if isinstance(cause, EngineDead) else line(cause)  # its last lines, once
            log.warning("engine %s is left out: %s", engine.url, said)
        if broken:
            member.drop_flights()

    def check_hope(self) -> None:
        """Raises where no member is worth waiting for.

        Raises:
            EngineDead: with what each said last.
        """
        if self._closing.is_set():
            raise EngineError("the engine is closed")
        if all(m.lost(self._pacing.outage) for m in self.members):
            raise EngineDead(f"no engine is left.\n{self._causes()}")

    def refuse(self) -> NoReturn:
        """No member can be asked now.

        Raises:
            EngineError: with what each was left out for.
        """
        self.check_hope()
        causes = "; ".join(f"{m.engine.url}: {line(m.cause)}" for m in self.members if m.cause)
        raise EngineError(f"no engine can be asked now ({causes})")

    # -- for the trainer ---------------------------------------------------------------------------

    def sleep(self) -> None:
        """Tell the members, once nothing reads the learner's weights any more."""
        with self._weights:
            self._asleep = True
            for m in self.members:
                if not m.breaker.open:
                    self._try(m, lambda e: e.sleep())

    def publish(self, update: Update) -> int:
        """Send the policy to all members that can take it, in order.

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
                fit = [m for m in self.members if m.waiting or not m.breaker.open]
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
            engines = [m.engine for m in self.members]
            menders = [m.mender for m in self.members if m.mender is not None]
        with contextlib.ExitStack() as stack:
            for m, engine in zip(self.members, engines, strict=True):
                stack.callback(m.drop_flights)
                stack.callback(engine.close)
        end = time.monotonic() + CLOSE_SECONDS
        for thread in menders:
            thread.join(max(0.0, end - time.monotonic()))

    def _taken(self, update: Update, refused: set[Member]) -> bool:
        """Whether a member samples from it; False where one still may, mended."""
        with self._lock:
            if any(map(self.usable, self.members)):
                for m in self.members:
                    m.restarts = 0
                return True
            hope = (m for m in self.members if not m.lost(self._pacing.outage))
            if any(m not in refused or (m.broken and m.engine.restartable) for m in hope):
                return False
            raise EngineError(f"no engine took version {update.version}.\n{self._causes()}")

    def _publish_to(self, m: Member, update: Update) -> bool:
        """Send it to one; False, and it is left out, where that fails."""
        engine = m.engine
        try:
            self._send(m, update)
        except EngineError as e:
            self.leave_out(m, engine, e, broken=died(engine, e), stale=True)
            return False
        self.version = update.version
        self._admit(m)
        return True

    def _try(self, m: Member, do: Callable[[RemoteEngine], None]) -> None:
        """Have a member do what it must, or leave it out."""
        engine = m.engine
        try:
            with laid_at(engine):
                do(engine)
        except EngineError as e:
            self.leave_out(m, engine, e, broken=True, stale=True)

    # -- mending -----------------------------------------------------------------------------------

    def _mend(self, m: Member) -> None:
        """A thread's life: until the member is back, or is out for good."""
        full_since: float | None = None
        while not self._out(m) and not self._closing.wait(m.breaker.next_wait()):
            try:
                self._revive(m)
                if self._return(m):
                    return
                full_since = None
            except EngineOverloaded as e:
                full_since = full_since or time.monotonic()
                with self._lock:  # what has no place for one token for so long is not full
                    m.cause, m.broken = e, time.monotonic() - full_since > self._pacing.outage
            except Exception as e:  # openers are anybody's, and this thread must not end by them
                full_since = None
                with self._lock:
                    m.cause, m.broken = e, True

    def _out(self, m: Member) -> bool:
        """Whether that was the last restart."""
        with self._lock:
            m.out = m.engine.restartable and m.broken and m.restarts >= self._pacing.restarts
            if m.out:
                m.mender = None
        if m.out:
            log.error("engine %s stays out: %s", m.engine.url, line(m.cause))
        return m.out

    def _revive(self, m: Member) -> None:
        """Probe the engine, or replace it."""
        if m.broken and m.engine.restartable:
            self._start_anew(m)
            return
        try:
            with laid_at(m.engine):
                m.engine.probe()
        except (EngineDead, EngineOverloaded):
            raise
        except EngineError as e:
            # It may be a server that somebody else has started anew: it samples, but from what?
            if self._update is None or not self._healthy(m):
                raise
            log.warning("engine %s is sent the policy again: %s", m.engine.url, line(e))
            m.held = None

    def _healthy(self, member: Member) -> bool:
        """Whether an engine samples; waits for it, on another thread than the loop's."""
        if member.loop is None or not member.loop.is_running():
            return False
        seconds = self._pacing.health_seconds
        check = member.engine.check_health(time.monotonic() + seconds)
        answer = asyncio.run_coroutine_threadsafe(check, member.loop)
        try:
            answer.result(seconds + 1)
        except (EngineError, TimeoutError):
            answer.cancel()
            return False
        return True

    def _start_anew(self, m: Member) -> None:
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

    def _return(self, m: Member) -> bool:
        """Give an engine that works the policy and its place; False where `publish` could not."""
        with self._weights:
            if self._asleep:
                m.engine.sleep()
                m.waiting = True
                while self._asleep and not self._closing.is_set():
                    self._weights.wait(0.2)
                if m.mender is not threading.current_thread():
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

    def _send(self, m: Member, update: Update) -> None:
        with laid_at(m.engine):
            self.sent += m.engine.publish(update)
        m.held = update

    def _admit(self, m: Member) -> None:
        with self._lock:
            m.breaker.close()
            m.broken = m.waiting = False
            m.mender = m.cause = None

    def _causes(self) -> str:
        return "\n".join(f"{m.engine.url}: {m.cause}" for m in self.members if m.cause)


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
def laid_at(engine: RemoteEngine) -> Iterator[None]:
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
        with laid_at(engine):
            engine.probe()
    except EngineDead:
        return True
    except EngineError:
        pass
    return False


def line(cause: Exception | None) -> str:
    """The first line of what an error says."""
    return str(cause).partition("\n")[0]
