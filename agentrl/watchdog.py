"""A watchdog: if no episode makes progress, it prints what each episode waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from agentrl.agent_loops.attempt import Attempt
from agentrl.plural import plural
from agentrl.terminal import printable


class Watchdog:
    """A thread that prints the states of all episodes if no state has changed for some time."""

    def __init__(
        self, seconds: float, out: TextIO | None = None, causes: Callable[[], Iterable[str]] = tuple
    ):
        """Start the thread of the watchdog. It is active only within `armed`.

        Args:
            seconds: the time without a change of state after which the watchdog prints a report.
            out: the stream to print to; by default standard error.
            causes: returns additional lines for the report, such as the server for which many
                episodes wait.
        """
        self._seconds = seconds
        self._causes = causes
        self._out = out
        self._episodes: dict[str, Attempt] = {}
        self._armed = 0
        """The number of blocks of `armed` that are running."""
        self._since = 0.0
        """The time from which on a lack of progress counts, in `time.monotonic()` seconds."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def add(self, episode: Attempt) -> None:
        """Watch an episode that starts."""
        self._episodes[episode.episode_id] = episode

    def set_state(self, episode_id: str, state: str) -> None:
        """Set the state of an episode: the thing that it waits for."""
        if episode := self._episodes.get(episode_id):
            episode.enter(state)

    def remove(self, episode_id: str) -> None:
        """Stop watching an episode that ended."""
        self._episodes.pop(episode_id, None)

    def longest_wait(self) -> Attempt | None:
        """Return the episode whose state has not changed for the longest time; None without any."""
        return min(self.episodes(), key=lambda e: e.since, default=None)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Activate the watchdog within this block. Blocks may overlap."""
        if not self._armed:
            self.restart()
        self._armed += 1
        try:
            yield
        finally:
            self._armed -= 1

    def restart(self) -> None:
        """Count the time without progress from now on."""
        self._since = time.monotonic()

    def episodes(self) -> list[Attempt]:
        """Return the episodes that are in flight."""
        return [*self._episodes.values()]

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(min(5.0, self._seconds / 4)):
            if not self._armed:
                continue
            episodes, now = self.episodes(), time.monotonic()
            last_change = max([self._since, *(e.since for e in episodes)])
            if now - last_change >= self._seconds:
                report = printable(self.report(episodes, now))
                print(report, file=self._out or sys.stderr, flush=True)
                self.restart()

    def report(self, episodes: list[Attempt], now: float) -> str:
        """Return a line for each episode: id, turn, state and its duration, longest waits first."""
        lines = [
            f"  {e.episode_id}  turn {len(e.turns)}  {e.state}  {now - e.since:.0f} s"
            for e in sorted(episodes, key=lambda e: e.since)
        ]
        return "\n".join(
            [
                f"watchdog: no progress for {self._seconds:.0f} s;"
                f" {plural(len(episodes), 'episode')} in flight:",
                *(f"  {cause}" for cause in self._causes()),
                *lines,
            ]
        )
