"""Who decodes when: a function of episodes and turns, not of wall clock.

Logical time is a count of decode steps. An episode that was announced, or whose turn has just
ended, is owed: it will ask for another turn or end. It is due at a step that follows from the step
its last turn ended at; there the schedule waits until it has asked or ended, however long its tools
take. So which rows decode together at which step depends on what episodes say alone, and so does
every bit that is computed. Where nothing decodes, time jumps to the next due step; where no episode
is left, it begins again at 0.

The one exception is `stop_waiting`: an episode that was late once is waited for no more, and its
turns join when they come, as every episode's do without `deterministic`. Nothing above is promised
of a wave from there on.

Turns join decoding rows at multiples of `ADMIT_EVERY` only, several at once: one prefill pass and one
packing of the rows serve them all, and tools run while the others decode.

`WaitLimit` is the one place where wall clock gets in.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.engine.base import Sampling
from agentrl.errors import EngineError

ADMIT_EVERY = 8
"""Decode steps between two admissions."""
MIN_TOOL_STEPS = 4
"""Decode steps that an episode has at least, to run its tools before anybody waits for it."""
NAMED = 3
"""A warning names so many episodes; more are counted."""

log = logging.getLogger("agentrl")


def settle(answer: Future[Any], outcome: Any) -> None:
    """Answer with a result, or with an exception to raise; from any thread, and once.

    A caller that was cancelled gets nothing.
    """
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """A request in flight."""

    episode_id: str
    prompt: np.ndarray
    """int32: the whole row."""
    sampling: Sampling
    seed: int
    deadline: float
    answer: Future[Any] = field(default_factory=Future)
    """A `Generation`, awaited on some asyncio loop. Done once it is given or the caller is gone."""


@dataclass(slots=True, eq=False)
class EpisodeState:
    """An episode as the schedule knows it."""

    id: str
    order: int
    due: int
    row: int = -1
    """Its row of the cache from its first turn to its end; -1 before."""
    fresh: bool = True
    """Nothing of it lies in its row yet."""
    awaited: bool = True
    """When it is due, the others wait until it has asked or ended."""
    turn: TurnRequest | None = None
    next: TurnRequest | None = None
    """What it asked for since `turn` lost its caller; it takes that one's place when it is over."""
    decoding: bool = False
    ended: bool = False


@dataclass(slots=True)
class DecodeSchedule:
    """Single-threaded; the engine guards it with its lock."""

    slots: int
    deterministic: bool
    step: int = 0
    waiting_for: str = ""
    """The episode that must ask or end before the next step; "" if none."""
    rows: list[EpisodeState | None] = field(default_factory=list)
    """Who holds each row."""
    decoding: list[EpisodeState] = field(default_factory=list)
    """Whose turns are being sampled."""
    width: int = 0
    """The rows that decode lie among the first `width`."""
    _entries: dict[str, EpisodeState] = field(default_factory=dict)
    _begun: int = 0

    def __post_init__(self):
        self.rows = [None] * self.slots

    # -- what episodes do --------------------------------------------------------------------------

    def begin(self, episode_id: str) -> None:
        """Announce an episode: due now if all others are over, else at a coming tick."""
        self._start_over()
        if episode_id in self._entries:
            raise EngineError(f"episode {episode_id!r} has begun already; an id is used once")
        started = any(e.row >= 0 for e in self._entries.values())
        entry = EpisodeState(episode_id, self._begun, self.step, awaited=self.deterministic)
        if started:
            entry.due = self._next_due(entry)
        self._entries[episode_id] = entry
        self._begun += 1

    def ask(self, turn: TurnRequest) -> None:
        """An episode asks for a turn.

        One in flight that nobody awaits any more is in nobody's way; but the engine's thread may be
        sampling it, so the new one waits until that has dropped or finished it.
        """
        entry = self._entries.get(turn.episode_id)
        if entry is None or entry.ended:
            raise EngineError(
                f"episode {turn.episode_id!r} is unknown: announce it by begin() before generate(),"
                " and do not generate after end()"
            )
        latest = entry.next or entry.turn
        if latest is not None and not latest.answer.done():
            raise EngineError(f"episode {turn.episode_id!r} has a turn in flight already")
        if entry.turn is None:
            entry.turn = turn
        else:
            entry.next = turn

    def end(self, episode_id: str) -> TurnRequest | None:
        """An episode is over. It keeps its row until it is due, for time must not leak in here.

        Returns:
            The turn it had in flight, which nobody should await any more.
        """
        entry = self._entries.get(episode_id)
        if entry is None:
            return None
        entry.ended = True
        latest, entry.next = entry.next or entry.turn, None
        return latest

    # -- what the engine does ----------------------------------------------------------------------

    def admit(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """Let in who is due; where nothing decodes, go on to the next due step.

        Returns:
            Who joins the decoding rows. Empty, with `waiting_for` set, while a due episode has
            neither asked nor ended.
        """
        self.waiting_for = ""
        if self.decoding and self.step % ADMIT_EVERY:
            return []
        while True:
            joined = self._admit_due()
            if joined or self.waiting_for or self.decoding:
                return joined
            room = None in self.rows
            coming = [e.due for e in self._entries.values() if e.awaited and (e.row >= 0 or room)]
            if not coming or min(coming) <= self.step:
                return []
            self.step = min(coming)

    def _admit_due(self) -> list[tuple[EpisodeState, TurnRequest]]:
        # Those that hold a row first: who ends among them makes room.
        due = [e for e in self._entries.values() if not e.decoding and e.due <= self.step]
        due.sort(key=lambda e: (e.row < 0, e.due, e.order))
        joined = []
        for entry in due:
            if entry.row < 0 and None not in self.rows:
                break
            if entry.ended:
                self._remove(entry)
            elif entry.turn is not None:
                if entry.row < 0:
                    entry.row = self.rows.index(None)
                    self.rows[entry.row] = entry
                joined.append((entry, entry.turn))
            elif entry.awaited:
                self.waiting_for = entry.id
                return []
        for entry, _ in joined:
            entry.decoding = True
            self.decoding.append(entry)
        return joined

    def stop_waiting(self) -> list[str]:
        """Wait no more, now or later, for those that are due and have neither asked nor ended.

        A row of theirs is freed, so that they hold up nobody who waits for one either.

        Returns:
            Their ids.
        """
        late = [
            e
            for e in self._entries.values()
            if e.awaited and e.turn is None and not e.ended and e.due <= self.step
        ]
        for entry in late:
            entry.awaited = False
            self._free_row(entry)
        return [e.id for e in late]

    def pack(self) -> tuple[list[int], list[int]]:
        """Bring the decoding rows to the front.

        Returns:
            Rows to exchange, pairwise.
        """
        rows = [e.row for e in self.decoding]
        self.width = len(rows)
        inside = set(rows)
        holes = [r for r in range(self.width) if r not in inside]
        outside = sorted(r for r in rows if r >= self.width)
        for a, b in zip(outside, holes, strict=True):
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            for r in (a, b):
                entry = self.rows[r]
                if entry is not None:
                    entry.row = r
        return outside, holes

    def finish(self, entry: EpisodeState) -> None:
        """The entry's turn has ended: it is owed, unless it has asked for the next already."""
        if entry.decoding:
            self.decoding.remove(entry)
        entry.turn, entry.next = entry.next, None
        entry.decoding = False
        entry.due = self._next_due(entry)

    def drop(self, entry: EpisodeState) -> None:
        """The entry's turn has failed or was given up: its row is free at once.

        One that has not joined yet is taken back as if never asked for: it must not matter for the
        others whether the engine's thread drops it before the episode asks again or after.
        """
        if entry.decoding:
            self._free_row(entry)
            self.finish(entry)
        else:
            entry.turn, entry.next = entry.next, None

    @property
    def in_flight(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """Who has asked and not been answered; of one episode, the turn that comes first first."""
        asked = [(e, t) for e in self._entries.values() for t in (e.turn, e.next)]
        return [(e, t) for e, t in asked if t is not None]

    def turn_in_row(self, row: int) -> tuple[EpisodeState, TurnRequest]:
        """Whose turn is being sampled in a row."""
        entry = self.rows[row]
        assert entry is not None and entry.turn is not None
        return entry, entry.turn

    def _next_due(self, entry: EpisodeState) -> int:
        if not entry.awaited:  # due at all times: who has asked joins at the next tick
            return 0
        return -(-(self.step + MIN_TOOL_STEPS) // ADMIT_EVERY) * ADMIT_EVERY

    def _free_row(self, entry: EpisodeState) -> None:
        if entry.row >= 0:
            self.rows[entry.row] = None
            entry.row = -1
            entry.fresh = True

    def _remove(self, entry: EpisodeState) -> None:
        self._free_row(entry)
        del self._entries[entry.id]

    def _start_over(self) -> None:
        """Forget a wave of episodes that is over, and begin logical time again.

        Whether the engine's thread has come to that already must not matter for the next wave.
        """
        if all(e.ended and not e.decoding for e in self._entries.values()):
            self._entries.clear()
            self.rows = [None] * self.slots
            self.step = 0


class WaitLimit:
    """Admits by the schedule, and ends a wait of the schedule's that lasts too long.

    The clock runs while the schedule waits for an episode and another one wants tokens; it starts
    anew whenever the engine has moved on.
    """

    def __init__(self, seconds: float, schedule: DecodeSchedule):
        self.ends = math.inf
        """When, by `time.monotonic()`, the present wait will have lasted too long; else inf."""
        self._seconds = seconds
        self._schedule = schedule

    def admit(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """As `DecodeSchedule.admit`; a wait that is too long ends in a warning, and without the late."""
        while True:
            joined = self._schedule.admit()
            if not self._schedule.waiting_for or not self._schedule.in_flight:
                self.ends = math.inf
                return joined
            now = time.monotonic()
            self.ends = min(self.ends, now + self._seconds)
            if now < self.ends:
                return joined
            self.ends = math.inf
            late = self._schedule.stop_waiting()
            more = f" and {len(late) - NAMED} more" if len(late) > NAMED else ""
            log.warning(
                "the engine stood still for %g s for episode %s%s, which neither asked for tokens"
                " nor ended; it goes on without, so logprobs may differ by floating-point noise"
                " from another run's",
                self._seconds,
                ", ".join(map(repr, late[:NAMED])),
                more,
            )
