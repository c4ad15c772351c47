"""How long the engine stands still for an episode: the one place where wall clock gets in."""

from __future__ import annotations

import logging
import math
import time

from agentrl.engine.local.schedule import Entry, Schedule
from agentrl.engine.local.turn import Turn

NAMED = 3
"""A warning names so many episodes; more are counted."""

log = logging.getLogger("agentrl")


class Patience:
    """Admits by the schedule, and ends a wait of the schedule's that lasts too long.

    The clock runs while the schedule waits for an episode and another one wants tokens; it starts
    anew whenever the engine has moved on.
    """

    def __init__(self, seconds: float, schedule: Schedule):
        self.ends = math.inf
        """When, by `time.monotonic()`, the present wait will have lasted too long; else inf."""
        self._seconds = seconds
        self._schedule = schedule

    def admit(self) -> list[tuple[Entry, Turn]]:
        """As `Schedule.admit`; a wait that is too long ends in a warning, and without the late."""
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
