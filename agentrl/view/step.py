"""Describe one step of a run: its rollouts over time, the untrained ones, the slowest tool calls.

A number that the run did not record is None, never 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.report.run import Run
from agentrl.store import TRAINING, calls_of, parse_json
from agentrl.view.query import Query, Term, find_episodes

LAST_SHARE = 0.05
"""The share of the rollouts that are named as the last ones."""
MAX_SPANS = 20_000
"""The most spans of a step that are returned; the rollouts that ended last come first."""
SLOW_CALLS = 5


def describe_step(run: Run, step: int) -> dict[str, Any]:
    """Return a step as data for JSON.

    Returns:
        `rollouts` (the rows of `find_episodes`, each with `start` and `end` in seconds since the
        start of the step, and `spans`), `time` (see `_summarize_time`), `untrained` (see
        `_find_untrained`) and `slow_calls`, those of training if the step trained.

    Raises:
        DataError: a file is damaged.
    """
    rollouts, calls = [], []
    for path, file_step, split in run.store.files():
        if file_step != step:
            continue
        query = Query([Term("step", "=", step), Term("split", "=", split)])
        rows = find_episodes(run, query).rows.to_pylist()
        names = ["episode_id", "started", "spans", "turns", "drop_causes"]
        for index, (row, cells) in enumerate(
            zip(rows, run.store.read_columns(path, names).to_pylist(), strict=True)
        ):
            with run.store.row_of(path, index):
                row["spans"] = parse_json(cells["spans"])
                calls += _find_calls(row, parse_json(cells["turns"]))
            row |= {name: cells[name] for name in ("started", "drop_causes")}
            rollouts.append(row)
    time = _summarize_time(rollouts)
    untrained = _find_untrained(run, rollouts)
    _limit_spans(rollouts)
    of_training = {row["episode"] for row in rollouts if row["split"] in TRAINING}
    calls = [call for call in calls if not of_training or call["episode"] in of_training]
    calls.sort(key=lambda call: -call["seconds"])
    return {
        "rollouts": [
            {k: v for k, v in row.items() if k not in ("started", "drop_causes")}
            for row in rollouts
        ],
        "time": time,
        "untrained": untrained,
        "slow_calls": calls[:SLOW_CALLS],
    }


def _find_calls(row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "episode": row["episode"],
            "turn": index,
            "tool": call["name"],
            "error": result["error"],
            "seconds": result["seconds"],
        }
        for index, call, result in calls_of(turns)
    ]


def _summarize_time(rollouts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Set `start` and `end` of the rollouts, and return how their time was spent.

    If a step has rollouts of training and of a validation, only the training rollouts are counted.

    Returns:
        None if there is no rollout. Else `seconds` from the first start to the last end;
        `parts`: for each kind of span the sum over all rollouts, and `loop` for the time between
        spans; `others_end`: when the last of the other rollouts ended; and `last`: the
        `LAST_SHARE` of the rollouts that ended last, each with `parts` after `others_end`.
    """
    timed = [row for row in rollouts if row["split"] in TRAINING] or [*rollouts]
    for row in rollouts:
        row["start"] = row["end"] = None
    if not timed:
        return None
    first = min(row["started"] for row in timed)
    parts: dict[str, float] = defaultdict(float)
    for row in timed:
        row["start"] = row["started"] - first
        ends = [span["end"] for span in row["spans"]]
        row["end"] = row["start"] + max([row["seconds"], *ends])
        for name, seconds in _sum_spans(row, 0.0, math.inf).items():
            parts[name] += seconds
    timed.sort(key=lambda row: -row["end"])
    n_last = max(1, round(LAST_SHARE * len(timed)))
    last, others = timed[:n_last], timed[n_last:]
    others_end = max((row["end"] for row in others), default=0.0)
    return {
        "seconds": timed[0]["end"],
        "rollouts": len(timed),
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "others_end": others_end,
        "last": [
            {"episode": row["episode"], "end": row["end"]}
            | {"parts": _sum_spans(row, others_end - row["start"], math.inf)}
            for row in last
        ],
    }


def _sum_spans(row: Mapping[str, Any], start: float, end: float) -> dict[str, float]:
    """Return the seconds of each kind of span between two times since the rollout's start.

    If spans of several conversations overlap, their sum exceeds the time.
    """
    seconds: dict[str, float] = defaultdict(float)
    for span in row["spans"]:
        if (inside := min(end, span["end"]) - max(start, span["start"])) > 0:
            seconds[span["name"]] += inside
    rest = row["end"] - row["start"] - max(0.0, start) - sum(seconds.values())
    if rest > 0:
        seconds["loop"] = rest
    return dict(sorted(seconds.items(), key=lambda part: -part[1]))


def _limit_spans(rollouts: Sequence[dict[str, Any]]) -> None:
    """If there are too many spans, set those of the rollouts that ended first to None."""
    left = MAX_SPANS
    for row in sorted(rollouts, key=lambda row: -(row["end"] or 0.0)):
        left -= len(row["spans"])
        row["spans"] = (
            [[s["name"], s["start"], s["end"], s["thread"]] for s in row["spans"]]
            if left >= 0
            else None
        )


def _find_untrained(run: Run, rollouts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts that were not trained on, by kind: dropped, masked or evicted.

    Returns:
        Of each kind: `what` (its name), `count` (of rollouts), `why`, some `episodes`, `groups`.
    """
    causes: dict[tuple[str, str], list[int]] = defaultdict(list)
    groups = {(row["split"], row["group"]): row for row in rollouts}
    for row in groups.values():
        for cause in row["drop_causes"]:
            causes[row["split"], cause].append(row["group"])
    found: list[dict[str, Any]] = []

    def add(what: str, count: int, why: str, **shown: list[Any]) -> None:
        found.append(
            {"what": what, "count": count, "why": why, "groups": [], "episodes": []} | shown
        )

    for (split, cause), of in causes.items():
        where = "" if split in TRAINING else f" ({split})"
        add(f"dropped after an error{where}", len(of), cause, groups=sorted(set(of)))
    masked: dict[str, list[str]] = defaultdict(list)
    for row in rollouts:
        if row["masked"] and row["split"] in TRAINING:
            masked[row["stop"]].append(row["episode"])
    for stop, episodes in masked.items():
        why = f"excluded from the loss: the budget {stop!r} ended it (rollout.budget_policy)"
        add("masked", len(episodes), why, episodes=episodes[:SLOW_CALLS])
    evicted = [row for row in rollouts if row["split"] == "evicted"]
    if evicted:
        why = "all advantages of the group are 0 (algorithm.filter_groups)"
        add("evicted", len(evicted), why, groups=sorted({row["group"] for row in evicted}))
    return found
