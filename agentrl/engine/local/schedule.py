"""Decides which turns decode at which step, independently of wall-clock time.

Logical time is a count of decode steps. An episode that was announced, or whose turn has just
ended, will request another turn or end. It is due at a step that follows from the step at which its
last turn ended. At that step the schedule waits until the episode has requested a turn or ended,
however long its tools take. So the rows that decode together at a step depend only on the episodes,
and so does every computed bit. If nothing decodes, time jumps to the next due step. If no episode
is left, time restarts at 0.

The only exception is `stop_waiting`: the schedule no longer waits for an episode that was late
once. Its turns join when they are requested, as all turns do without `deterministic`. From then on,
the guarantee above does not hold for that wave of episodes.

Turns join the decoding rows only at multiples of `ADMIT_EVERY`, several at once: one prefill pass
and one packing of the rows serve them all, and tools run while the other rows decode.

`WaitLimit` is the only part that uses wall-clock time.
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
from agentrl.images import RowImage

ADMIT_EVERY = 8
"""Decode steps between two admissions."""
MIN_TOOL_STEPS = 4
"""The least number of decode steps that an episode has for its tools before others wait."""
MAX_NAMED = 3
"""The most episodes that a warning names; the others are counted."""

log = logging.getLogger("agentrl")


def settle(answer: Future[Any], outcome: Any) -> None:
    """Set the result of a future, or its exception; from any thread.

    Nothing happens if the future is already done or its caller was cancelled.
    """
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """A request for a turn that is in flight."""

    episode_id: str
    prompt: np.ndarray
    """int32: the whole row."""
    sampling: Sampling
    seed: int
    deadline: float
    images: tuple[RowImage, ...] = ()
    answer: Future[Any] = field(default_factory=Future)
    """The future `Generation`. It is also done if the caller was cancelled."""


@dataclass(slots=True, eq=False)
class EpisodeState:
    """The state of an episode in the schedule."""

    id: str
    order: int
    due: int
    row: int = -1
    """The row of the cache that the episode uses from its first turn to its end; -1 before."""
    fresh: bool = True
    """True if no token of this episode has been written to its row yet."""
    awaited: bool = True
    """True if the other episodes wait for it when it is due."""
    turn: TurnRequest | None = None
    next: TurnRequest | None = None
    """A turn that the episode requested after the caller of `turn` was cancelled. It replaces
    `turn` when the engine has dropped or finished `turn`."""
    decoding: bool = False
    ended: bool = False


@dataclass(slots=True)
class DecodeSchedule:
    """The schedule of all episodes. It is not thread-safe; the engine guards it with its lock."""

    slots: int
    deterministic: bool
    step: int = 0
    waiting_for: str = ""
    """The episode that must request a turn or end before the next step; "" if none."""
    rows: list[EpisodeState | None] = field(default_factory=list)
    """The episode that holds each row."""
    decoding: list[EpisodeState] = field(default_factory=list)
    """The episodes whose turns are being sampled."""
    width: int = 0
    """The decoding rows are among the first `width` rows."""
    _entries: dict[str, EpisodeState] = field(default_factory=dict)
    _begin_count: int = 0

    def __post_init__(self):
        self.rows = [None] * self.slots

    # -- called for episodes -----------------------------------------------------------------------

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        """Announce an episode. It is due now if no episode has a row yet, else at a later step."""
        self._start_over()
        if episode_id in self._entries:
            raise EngineError(f"episode {episode_id!r} has already begun. Use an id only once")
        has_started = any(e.row >= 0 for e in self._entries.values())
        entry = EpisodeState(episode_id, self._begin_count, self.step)
        entry.awaited = awaited and self.deterministic
        if has_started:
            entry.due = self._next_due(entry)
        self._entries[episode_id] = entry
        self._begin_count += 1

    def ask(self, turn: TurnRequest) -> None:
        """Add the request of an episode for a turn.

        An earlier turn whose caller was cancelled does not count. But the engine's thread may still
        be sampling it, so the new turn waits until the earlier one was dropped or has finished.
        """
        entry = self._entries.get(turn.episode_id)
        if entry is None or entry.ended:
            raise EngineError(
                f"episode {turn.episode_id!r} is unknown: call begin() before generate(), and"
                " do not call generate() after end()"
            )
        latest = entry.next or entry.turn
        if latest is not None and not latest.answer.done():
            raise EngineError(f"episode {turn.episode_id!r} already has a turn in flight")
        if entry.turn is None:
            entry.turn = turn
        else:
            entry.next = turn

    def end(self, episode_id: str) -> TurnRequest | None:
        """Mark an episode as ended.

        It keeps its row until it is due, so that wall-clock time has no influence.

        Returns:
            The turn that the episode had in flight, which must fail; None if there was none.
        """
        entry = self._entries.get(episode_id)
        if entry is None:
            return None
        entry.ended = True
        latest, entry.next = entry.next or entry.turn, None
        return latest

    # -- called by the engine ----------------------------------------------------------------------

    def admit(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """Admit the turns that are due. If nothing decodes, jump to the next due step.

        Returns:
            The turns that join the decoding rows. Empty, with `waiting_for` set, while a due
            episode has neither requested a turn nor ended.
        """
        self.waiting_for = ""
        if self.decoding and self.step % ADMIT_EVERY:
            return []
        while True:
            joined = self._admit_due()
            if joined or self.waiting_for or self.decoding:
                return joined
            has_free_row = None in self.rows
            coming = [
                e.due for e in self._entries.values() if e.awaited and (e.row >= 0 or has_free_row)
            ]
            if not coming or min(coming) <= self.step:
                return []
            self.step = min(coming)

    def _admit_due(self) -> list[tuple[EpisodeState, TurnRequest]]:
        # Episodes that have a row come first: one that has ended frees its row.
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
        """Stop waiting for the episodes that are due and have neither requested a turn nor ended.

        Their rows are freed, so that no episode that waits for a row is delayed either.

        Returns:
            The ids of these episodes.
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
        """Move the decoding rows to the front.

        Returns:
            Two lists of rows; exchange them pairwise.
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
        """Record that the turn of an episode has ended. The episode is due again later."""
        if entry.decoding:
            self.decoding.remove(entry)
        entry.turn, entry.next = entry.next, None
        entry.decoding = False
        entry.due = self._next_due(entry)

    def drop(self, entry: EpisodeState) -> None:
        """Record that the turn of an episode failed or was given up. The row is free at once.

        A turn that has not joined yet is removed as if it had never been requested. So the other
        episodes do not depend on whether the engine's thread drops the turn before or after the
        next request.
        """
        if entry.decoding:
            self._free_row(entry)
            self.finish(entry)
        else:
            entry.turn, entry.next = entry.next, None

    @property
    def in_flight(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """Return the turns that are not answered yet; an episode's earlier turn comes first."""
        turns = [(e, t) for e in self._entries.values() for t in (e.turn, e.next)]
        return [(e, t) for e, t in turns if t is not None]

    def turn_in_row(self, row: int) -> tuple[EpisodeState, TurnRequest]:
        """Return the turn that is being sampled in a row, with its episode."""
        entry = self.rows[row]
        assert entry is not None and entry.turn is not None
        return entry, entry.turn

    def _next_due(self, entry: EpisodeState) -> int:
        if not entry.awaited:  # Always due: its turns join at the next admission.
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
        """Remove a wave of episodes that has ended, and restart logical time.

        The result must not depend on whether the engine's thread has already handled the ends.
        """
        if all(e.ended and not e.decoding for e in self._entries.values()):
            self._entries.clear()
            self.rows = [None] * self.slots
            self.step = 0


class WaitLimit:
    """Admits turns by the schedule, and ends a wait of the schedule that takes too long.

    The time counts while the schedule waits for an episode and another episode has requested
    tokens. It restarts whenever the engine has made progress.
    """

    def __init__(self, seconds: float, schedule: DecodeSchedule):
        self.ends = math.inf
        """The time at which the current wait becomes too long, in `time.monotonic()` seconds; inf
        without a wait."""
        self._seconds = seconds
        self._schedule = schedule

    def admit(self) -> list[tuple[EpisodeState, TurnRequest]]:
        """Admit turns as `DecodeSchedule.admit` does.

        If a wait takes too long, warn and continue without the late episodes.
        """
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
            more = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
            log.warning(
                "the engine waited %g s for episode %s%s, which neither requested tokens nor ended."
                " It continues without it, so logprobs may differ from those of another run by"
                " floating-point noise",
                self._seconds,
                ", ".join(map(repr, late[:MAX_NAMED])),
                more,
            )
