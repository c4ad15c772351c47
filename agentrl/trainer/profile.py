"""Profiles of single steps (`trainer.profile_steps`): what ran when, as files of Chrome traces.

    runs/demo/profile/step_00000003/
      controller.json.gz   the parts of the step, and what each episode waited for
      rank_0.json.gz       the operations and kernels of rank 0, from `torch.profiler`
      ray.json.gz          the calls of Ray's processes, if the ranks run on Ray

https://ui.perfetto.dev and chrome://tracing open them. All timestamps count from the same moment.
Nothing is recorded in other steps: `annotate` finds no recorder and does nothing.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function

from agentrl.errors import ConfigError
from agentrl.regular_files import LEFTOVER_PREFIX
from agentrl.trainer.dispatch import Placement, RankGroup
from agentrl.trainer.traces import summary, times
from agentrl.trajectory import Group, Scored

PROFILE = "profile"
"""The folder of profiles in a run's folder."""
NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Nsight Systems sets this environment variable in the processes that it profiles."""
COMPRESSION = 6
"""gzip's level. Level 9, Python's default, takes four times as long for a tenth fewer bytes."""
EPOCH_S = 7_889_238
"""torch's timestamps count from the last multiple of this number of seconds (three months) since
1970, because Chrome's format has not enough digits for microseconds since 1970."""

Event = dict[str, Any]
"""An event of Chrome's trace format; times are in microseconds."""


class Recorder(Protocol):
    """Records the blocks that `annotate` names."""

    def record(self, name: str) -> Any:
        """Return a context manager that records a block."""
        ...

    def stop(self) -> None:
        """Record no further blocks."""
        ...


_recorders: list[Recorder] = []
"""The recorders of this process while a step is profiled; empty in all other steps."""


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name what the block does in the profile of the present step, if there is one."""
    if not _recorders:
        yield
        return
    with ExitStack() as stack:
        for recorder in _recorders:
            stack.enter_context(recorder.record(name))
        yield


def annotate_episodes(name: str, groups: Iterable[Group]) -> None:
    """Add played episodes to the profile of the present step, if there is one."""
    for recorder in _recorders:
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
    folder: Path, ranks: RankGroup, placement: Placement | None
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
        for recorder in [*_recorders]:  # Ranks in other processes end with the run.
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
        _recorders.append(self)

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
        _recorders.remove(self)

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
    for scored in sorted(episodes, key=lambda e: times(e.trajectory)):
        trajectory = scored.trajectory
        start, end = times(trajectory)
        for thread in sorted({0, *(span.thread for span in trajectory.spans)}):
            if free and free[0][0] <= start:
                tid = heapq.heappop(free)[1]
            else:
                tid = tracks = tracks + 1
            heapq.heappush(free, (end, tid))
            name = f"row {trajectory.sample.id}, rollout {trajectory.rollout}"
            name += f", conversation {thread}" if thread else ""
            yield _slice(pid, tid, name, start, end, **summary(scored))
            for span in trajectory.spans:
                if span.thread == thread:
                    yield _slice(pid, tid, span.name, start + span.start, start + span.end)


class RankProfile:
    """Records the operations of a rank, and on a GPU its kernels.

    On a GPU the named blocks are also ranges of NVTX, and the recorded time is what Nsight Systems
    captures with `--capture-range=cudaProfilerApi`. Only one program can read a GPU's counters, so
    under Nsight Systems this class records no kernels.
    """

    def __init__(self, *, gpu: bool):
        """Start to record the work of this thread.

        Args:
            gpu: True if the rank is on a GPU.
        """
        self._gpu = gpu
        activities = [ProfilerActivity.CPU]
        if gpu and NSIGHT not in os.environ:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        if gpu:
            torch.cuda.profiler.start()
        _recorders.append(self)

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Record a block."""
        if self._gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            with record_function(name):
                yield
        finally:
            if self._gpu:
                torch.cuda.nvtx.range_pop()

    def stop(self) -> None:
        """Record no further operations."""
        _recorders.remove(self)
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        self._profiler.stop()

    def write(self, file: Path) -> str:
        """Write the trace; returns why it could not be written, or ""."""
        return _write(file, self._export)

    def _export(self, file: Path) -> None:
        self._profiler.export_chrome_trace(str(file))
        # torch raises nothing if it could not write the file, or only a part of it.
        tail = b""
        if file.exists():
            with file.open("rb") as written:
                written.seek(max(0, file.stat().st_size - 16))
                tail = written.read()
        if not tail.rstrip().endswith(b"}"):
            raise OSError("torch could not write the trace. Is the disk full?")


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

    return _write(file, write)


def _write(file: Path, write: Callable[[Path], object]) -> str:
    """Write a compressed file; returns why it could not be written, or "".

    Args:
        file: the file; its folder is made.
        write: writes the content into an uncompressed file.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=LEFTOVER_PREFIX, suffix=f"-{os.getpid()}", dir=file.parent
        ) as folder:
            plain, packed = Path(folder, "trace.json"), Path(folder, file.name)
            write(plain)
            with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION) as target:
                shutil.copyfileobj(source, target, 2**20)
            packed.rename(file)
    except (OSError, RuntimeError) as e:
        return f"cannot write {file}: {e}"
    return ""
