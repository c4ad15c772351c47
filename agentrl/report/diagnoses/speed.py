"""Time: the share of each part of a step, and what makes it faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from agentrl.report.diagnoses.advice import advice
from agentrl.report.episodes import Episodes, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import Series, read_series, values_by_step

PARTS = {
    "timing_s/gen": "generation and tools",
    "timing_s/update_actor": "the update",
    "timing_s/update_weights": "sending the weights",
    "timing_s/canary": "the canary",
    "timing_s/old_log_prob": "logprobs before the update",
    "timing_s/ref": "reference logprobs",
    "timing_s/teacher": "the teacher",
    "timing_s/values": "values",
    "timing_s/store": "storing trajectories",
    "timing_s/metrics": "metrics",
    "timing_s/collate": "making the batch",
    "timing_s/adv": "advantages",
}
"""The parts of a step, which follow each other."""
PARTS_OF_ROLLOUTS = {
    "generation": "generate_seconds",
    "waiting for the engine": "queue_seconds",
    "tools": "tool_seconds",
    "interactions": "interaction_seconds",
    "opening tools": "open_seconds",
    "rewards": "reward_seconds",
}
"""The parts of a rollout, and the columns of `Run.behaviour` with their seconds."""
WAITING = "waiting for the last rollouts"
BETWEEN_STEPS = {"timing_s/testing": "validations", "timing_s/save_checkpoint": "checkpoints"}
"""The phases between two steps."""
BETWEEN_SHARE = 0.25
"""The share of the run's time that validations or checkpoints may take."""
LATE = 0.9
"""The share of rollouts after whose end the step waits for the last ones."""
MIN_SHARE = 0.005
"""The smallest share of a step that is named."""
FASTER = {
    "generation": ["engines", "generation"],
    "generation and tools": ["engines", "tools"],
    "waiting for the engine": ["engines"],
    "tools": ["tools"],
    "interactions": ["interactions"],
    "opening tools": ["opening_tools"],
    "rewards": ["rewards"],
    WAITING: ["last_rollouts"],
    "the update": ["several_passes", "update"],
    "sending the weights": ["weights"],
}
"""The entries of advice.yaml that make a part of a step faster."""


def step_time(run: Run) -> Iterator[Finding]:
    """The share of each part in the time of a step."""
    step = read_series(run, "timing_s/step")
    if not len(step):
        return
    steps = step.steps[-step.window :]
    total = float(step.values[-len(steps) :].mean())
    shares = _shares_of_parts(run, steps, total)
    if not shares:
        return
    parts = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
    yield Finding(
        int(steps[0]),
        f"a step takes {total:.3g} s: {parts}",
        {"seconds": total, **shares},
        **_make_faster(run, next(iter(shares))),
        severity="note",
    )
    yield from _find_time_between_steps(run, step)


def _shares_of_parts(run: Run, steps: np.ndarray, total: float) -> dict[str, float]:
    """Return the share of each part in the seconds of some steps, the largest first."""
    shares: dict[str, float] = {}
    for name, label in PARTS.items():
        part = read_series(run, name)
        seconds = part.values[np.isin(part.steps, steps)].sum() / len(steps)
        shares[label] = float(seconds / total)
    if inside := _time_of_rollouts(run, steps):
        generation = shares.pop("generation and tools")
        waiting = shares[WAITING] = inside.pop(WAITING) * generation
        for label, share in inside.items():
            shares[label] = share * (generation - waiting)
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return {label: share for label, share in largest_first if share >= MIN_SHARE}


def _make_faster(run: Run, part: str) -> dict[str, Any]:
    """Return what makes a part of a step faster in this run."""
    passes = read_series(run, "perf/micro_batches")
    names = FASTER.get(part, [])
    if config_value(run, "rollout.name") == "local":  # It is always one, in this process.
        names = ["local_engine" if name == "engines" else name for name in names]
    if len(passes) and passes.last.max() <= 1:  # A larger limit changes nothing.
        names = [name for name in names if name != "several_passes"]
    return advice(run, *(f"step_time.{name}" for name in names))


def _find_time_between_steps(run: Run, step: Series) -> Iterator[Finding]:
    """Yield a finding if validations or checkpoints take much of the time of a run."""
    for name, what in BETWEEN_STEPS.items():
        seconds = values_by_step(run, name).values()
        share = sum(seconds) / (sum(seconds) + float(step.values.sum()))
        if share >= BETWEEN_SHARE:
            yield Finding(
                int(step.steps[0]),
                f"{what} take {share:.0%} of the time of the run: {len(seconds)} of"
                f" {sum(seconds) / len(seconds):.3g} s; a step takes"
                f" {float(step.values.mean()):.3g} s",
                {"share": share, "number": float(len(seconds))},
                **advice(run, f"step_time.{what}"),
                severity="note",
                subject=what,
            )


def _time_of_rollouts(run: Run, steps: np.ndarray) -> dict[str, float]:
    """Return the shares of the time of generation, without and with the wait for the last rollouts.

    A step waits for the last rollouts from the time when `LATE` of them have ended until the last
    one ends. Before that its time is divided as the rollouts' own time is: generation, waiting for
    the engine, tools, interactions, opening tools and rewards.
    """
    episodes = training_episodes(run)
    episodes = episodes.where(np.isin(episodes["step"], steps))
    if not len(episodes):
        return {}
    step, started = episodes["step"], episodes["started"]
    # `seconds` begins when the tools are open.
    ends = started + episodes["open_seconds"] + episodes["seconds"]
    waits = spans = 0.0
    for number in np.unique(step):
        own = step == number
        spans += ends[own].max() - started[own].min()
        waits += ends[own].max() - np.quantile(ends[own], LATE)
    sums = {part: episodes[column].sum() for part, column in PARTS_OF_ROLLOUTS.items()}
    total = sum(sums.values()) or 1.0
    parts = {part: float(seconds / total) for part, seconds in sums.items()}
    waiting = parts["tools"] + parts["interactions"]
    if config_value(run, "rollout.name") == "local" and spans and waiting:
        # The local engine samples the turns of all rollouts together: while one rollout waits for a
        # tool, all do, and the wait counts as generation in the others.
        more = max(0.0, _seconds_in_tools(episodes) / spans - waiting)
        more = min(more, parts["generation"])
        for part in ("tools", "interactions"):
            parts[part] += more * parts[part] / waiting
        parts["generation"] -= more
    return parts | {WAITING: float(waits / spans) if spans else 0.0}


def _seconds_in_tools(episodes: Episodes) -> float:
    """Return the seconds in which at least one rollout waited for a tool or an interaction.

    They are summed over the steps.
    """
    total = 0.0
    for number in np.unique(episodes["step"]):
        own = episodes.where(episodes["step"] == number)
        waits = sorted(
            (started + begin, started + end)
            for started, times in zip(own["started"], own["tool_times"], strict=True)
            for begin, end in zip(times[::2], times[1::2], strict=True)
        )
        until = -np.inf
        for begin, end in waits:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
    return total
