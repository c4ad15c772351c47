"""Profiles of single steps (`trainer.profile_steps`): what ran when, as files of Chrome traces.

    runs/demo/profile/step_00000003/
      controller.json.gz   the parts of the step, and what each episode waited for
      rank_0.json.gz       the operations and kernels of rank 0, from `torch.profiler`
      ray.json.gz          the calls of Ray's processes, if the ranks run on Ray

https://ui.perfetto.dev and chrome://tracing open them. All timestamps count from the same moment.
Nothing is recorded in other steps: `annotate` finds no recorder and does nothing.
"""

from __future__ import annotations

import heapq
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.learner.dispatch import Placement
from agentrl.learner.profile import recorders, write_trace
from agentrl.learner.rank import LearnerRanks
from agentrl.trajectory import Group, Scored

PROFILE = "profile"
"""The folder of profiles in a run's folder."""
EPOCH_S = 7_889_238
"""torch's timestamps count from the last multiple of this number of seconds (three months) since
1970, because Chrome's format has not enough digits for microseconds since 1970."""

Event = dict[str, Any]
"""An event of Chrome's trace format; times are in microseconds."""


def annotate_episodes(name: str, groups: Iterable[Group]) -> None:
    """Add played episodes to the profile of the present step, if there is one."""
    for recorder in recorders:
        if isinstance(recorder, StepTrace):
            recorder.episodes.setdefault(name, []).extend(s for g in groups for s in g.scored)


def check_profile_steps(steps: Sequence[int], total: int) -> None:
    """Raise `ConfigError` if a run of `total` steps never makes one of the steps."""
    late = [step for step in steps if step > total]
    if late:
        raise ConfigError(
            f"trainer.profile_steps={late}: the run ends after step {total}. Choose earlier steps"
        )


def profile_folder(run: Path, step: int) -> Path:
    """Return the folder of the profile of a step."""
    return run / PROFILE / f"step_{step:08}"


def remove_later_profiles(run: Path, step: int) -> None:
    """Remove the profiles of later steps: the run makes these steps again, or is another run."""
    for folder in (run / PROFILE).glob("step_*"):
        if folder.name > profile_folder(run, step).name:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def profile_step(
    folder: Path, ranks: LearnerRanks, placement: Placement | None
) -> Iterator[list[str]]:
    """Write a profile of the block, which makes one step.

    If the block raises, no file is written.

    Args:
        folder: the folder of the files.
        ranks: the learner's ranks.
        placement: where they run; None: in this process.

    Yields:
        A list. After the block it has a message for each file that could not be written.
    """
    problems: list[str] = []
    ranks.start_profile()
    trace = StepTrace()
    try:
        yield problems
    except BaseException:
        for recorder in [*recorders]:  # Ranks in other processes end with the run.
            recorder.stop()
        raise
    trace.stop()
    files = [folder / f"rank_{rank}.json.gz" for rank in range(ranks.size)]
    found = ranks.stop_profile(files)
    found.append(_write_events(folder / "controller.json.gz", trace.events))
    if placement is not None:
        calls = partial(placement.timeline, trace.start)
        found.append(_write_events(folder / "ray.json.gz", calls))
    problems += filter(None, found)


class StepTrace:
    """Records the parts of a step and its episodes, in the process of the controller."""

    def __init__(self):
        """Start to record."""
        self.start = time.time()
        self._offset = self.start - time.perf_counter()
        self._parts: list[tuple[str, float, float]] = []
        self.episodes: dict[str, list[Scored]] = {}
        """The episodes that were played, by the name of their track."""
        recorders.append(self)

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Record a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._parts.append((name, start + self._offset, end + self._offset))

    def stop(self) -> None:
        """Record no further blocks."""
        recorders.remove(self)

    def events(self) -> list[Event]:
        """Return the events, with times in microseconds since 1970."""
        parts = sorted(self._parts, key=lambda part: (part[1], -part[2]))  # the outer one first
        events = [_process(1, "step"), *(_slice(1, 0, *part) for part in parts)]
        for pid, (name, episodes) in enumerate(self.episodes.items(), 2):
            events += [_process(pid, name), *_counts(pid, episodes)]
            events += _episode_slices(pid, episodes)
        return events


def _process(pid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, end: float, **args: Any) -> Event:
    """Return a slice of a track; times are in seconds since 1970."""
    at = {"ph": "X", "pid": pid, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, **at, "args": args}


def _counts(pid: int, episodes: Sequence[Scored]) -> list[Event]:
    """Return how many episodes wait for each thing, whenever a number changes."""
    changes = sorted(
        (trajectory.started + at, -change, span.name)
        for trajectory in (e.trajectory for e in episodes)
        for span in trajectory.spans
        for at, change in ((span.start, 1), (span.end, -1))
    )
    numbers = dict.fromkeys(sorted({name for _, _, name in changes}), 0)
    events = []
    for at, fall, name in changes:
        numbers[name] -= fall
        counter = {"name": "episodes that wait for", "ph": "C", "pid": pid, "ts": at * 1e6}
        events.append(counter | {"args": dict(numbers)})
    return events


def _episode_slices(pid: int, episodes: Sequence[Scored]) -> Iterator[Event]:
    """Yield a slice for each episode and each of its spans.

    Episodes that do not overlap share a track. Further conversations of an episode have their own.
    """
    free: list[tuple[float, int]] = []
    """The tracks, with the time from which each is free, as a heap."""
    tracks = 0
    for scored in sorted(episodes, key=lambda e: (e.trajectory.started, e.trajectory.ended)):
        trajectory = scored.trajectory
        start, end = trajectory.started, trajectory.ended
        for thread in sorted({0, *(span.thread for span in trajectory.spans)}):
            if free and free[0][0] <= start:
                tid = heapq.heappop(free)[1]
            else:
                tid = tracks = tracks + 1
            heapq.heappush(free, (end, tid))
            name = f"row {trajectory.sample.id}, rollout {trajectory.rollout}"
            name += f", conversation {thread}" if thread else ""
            yield _slice(pid, tid, name, start, end, **scored.summary())
            for span in trajectory.spans:
                if span.thread == thread:
                    yield _slice(pid, tid, span.name, start + span.start, start + span.end)


def _write_events(file: Path, collect: Callable[[], Sequence[Event]]) -> str:
    """Write a trace; returns why it could not be written, or "".

    Args:
        file: the file.
        collect: returns the events, with times in microseconds since 1970.
    """

    def write(plain: Path) -> None:
        base = int(time.time()) // EPOCH_S * EPOCH_S
        events = [e | {"ts": round(e["ts"] - base * 1e6, 3)} if "ts" in e else e for e in collect()]
        trace = {"baseTimeNanoseconds": base * 10**9, "traceEvents": events}
        plain.write_text(json.dumps(trace | {"displayTimeUnit": "ms"}))

    return write_trace(file, write)
