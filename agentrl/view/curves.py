"""Numbers of the training rollouts over the steps: mean, standard error and n, for each part.

The parts are data sources, agent loops or tools. `metrics.jsonl` has means without n; these
numbers come from the stored episodes, so they have both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.parquet as pq

from agentrl.metrics import standard_error
from agentrl.report.run import Run
from agentrl.store import TrajectoryStore, calls_of, parse_json

Part = Literal["all", "source", "agent", "tool"]
MAX_EPISODES = 50_000
"""The most episodes that are read. If a run has more, only every n-th step is read."""
MAX_PARTS = 12
"""The largest number of parts. The most frequent ones are shown."""
_INVALID_CALLS: dict[str, str] = {
    "unknown_tool": "(unknown tools)",
    "bad_call": "(malformed calls)",
}
"""The parts of calls that name no tool of the run, by their kind of error."""
_SPLITS = ("train", "evicted")


class _Call(NamedTuple):
    tool: str
    ok: bool
    seconds: float


class _Rollout(NamedTuple):
    """The fields of a rollout from which curves are computed."""

    sample: str
    source: str
    agent: str
    reward: float
    seconds: float
    turns: int
    tokens: int
    calls: list[_Call]


def rollout_curves(run: Run, by: Part) -> dict[str, Any]:
    """Return curves of the training rollouts, one line for each part.

    Args:
        run: the run.
        by: how to divide the rollouts: by data source, agent loop, tool, or not at all.

    Returns:
        `every`: n if every n-th step was read; `curves`: each has a `name` and `lines`, and each
        line a `part` and `points`. A point is step, mean, standard error (None if the step has a
        single row), n values and rows. The standard error is clustered by row
        (`agentrl.metrics.standard_error`).

    Raises:
        DataError: a file is damaged.
    """
    steps, every = _choose_steps(run)
    rollouts = {step: [r for path in paths for r in _read(path)] for step, paths in steps.items()}
    parts = Counter(
        part for of_step in rollouts.values() for r in of_step for part in _parts(r, by)
    )
    curves: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for part in sorted(part for part, _ in parts.most_common(MAX_PARTS)):
        lines: dict[str, list[Any]] = defaultdict(list)
        for step, of_step in rollouts.items():
            for name, by_row in _values(of_step, by, part).items():
                if rows := [values for values in by_row.values() if values]:
                    lines[name].append([step, *_mean(rows)])
        for name, points in lines.items():
            curves[name].append({"part": part, "points": points})
    return {"every": every, "curves": [{"name": n, "lines": c} for n, c in curves.items()]}


def _choose_steps(run: Run) -> tuple[dict[int, list[Path]], int]:
    """Return the files of the chosen steps, and n if every n-th step was chosen."""
    steps: dict[int, list[Path]] = defaultdict(list)
    for path, step, split in run.store.files():
        if split in _SPLITS and run.has_step(step):
            steps[step].append(path)
    if not steps:
        return {}, 1
    episodes = sum(pq.read_metadata(path).num_rows for path in steps[max(steps)])
    every = max(1, math.ceil(episodes * len(steps) / MAX_EPISODES))
    return dict(list(steps.items())[::every]), every


def _parts(rollout: _Rollout, by: Part) -> Sequence[str]:
    if by == "tool":
        return [call.tool for call in rollout.calls]
    return ["all rollouts" if by == "all" else getattr(rollout, by)]


def _values(
    rollouts: Sequence[_Rollout], by: Part, part: str
) -> Mapping[str, Mapping[str, list[float]]]:
    """Return for each curve the values of a part in a step, by dataset row."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(name: str, rollout: _Rollout, *numbers: float) -> None:
        values[name][rollout.sample] += numbers

    for r in rollouts:
        calls = r.calls
        if by == "tool":
            calls = [call for call in calls if call.tool == part]
            add("share of rollouts that call it", r, float(bool(calls)))
            add("seconds of a call", r, *(call.seconds for call in calls))
        elif part in _parts(r, by):
            add("reward", r, r.reward)
            add("share of rollouts that call a tool", r, float(bool(calls)))
            add("turns of a rollout", r, float(r.turns))
            add("sampled tokens of a rollout", r, float(r.tokens))
            add("seconds of a rollout", r, r.seconds)
        else:
            continue
        add("tool calls of a rollout", r, float(len(calls)))
        add("share of calls that fail", r, *(float(not call.ok) for call in calls))
    return values


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, float | None, int, int]:
    n, error = sum(map(len, rows)), standard_error(rows)
    return math.fsum(map(math.fsum, rows)) / n, None if math.isnan(error) else error, n, len(rows)


def _read(path: Path) -> list[_Rollout]:
    stat = path.stat()
    return _read_version(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(1024)
def _read_version(path: Path, modified: int, size: int) -> list[_Rollout]:
    """Return the rollouts of a file; a file that is replaced has another time or size."""
    store = TrajectoryStore(path.parent)
    names = ["sample_id", "data_source", "agent_name", "reward", "seconds", "turns"]
    rollouts = []
    for index, row in enumerate(store.read_columns(path, names).to_pylist()):
        with store.row_of(path, index):
            turns = parse_json(row["turns"])
            calls = [
                _Call(_part_of(call, result), result["ok"], result["seconds"])
                for _, call, result in calls_of(turns)
            ]
            tokens = sum(turn["end"] - turn["start"] for turn in turns)
            numbers = (row["reward"], row["seconds"], len(turns), tokens)
            texts = (row["sample_id"], row["data_source"], row["agent_name"])
            rollouts.append(_Rollout(*texts, *numbers, calls))
    return rollouts


def _part_of(call: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    name: str = call["name"]
    return _INVALID_CALLS.get(result["error"], name)
