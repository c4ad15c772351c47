"""Validation: play fixed rows with fixed seeds and the sampling of the `val` keys.

Validation during training, `trainer.val_only` and `agentrl eval` use the same function, so that
their metrics are comparable. Validation needs an engine, but not torch.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config import ValConfig
from agentrl.data import ColumnNames, open_rows
from agentrl.data.rows import Mistakes
from agentrl.engine.base import Sampling
from agentrl.errors import DataError, Infrastructure, RunStopped
from agentrl.metrics import count_calls, grader_metrics, mean, standard_error, t_quantile
from agentrl.player import MAX_ATTEMPTS, retry_pause
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Sample, Scored, Trajectory, Turn
from agentrl.workers import run_all

SCORED_AT_ONCE = 256
"""The number of rows whose stored responses are scored at the same time."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: metrics by name, and the groups that they were computed from."""

    metrics: Mapping[str, float]
    groups: Sequence[Group]
    greedy_groups: Sequence[Group]
    """The groups of the greedy pass; empty if there was none."""


def evaluate(rollouts: Rollouts, samples: Sequence[Sample], val: ValConfig) -> Evaluation:
    """Play each sample `val.n` times, and once more at temperature 0 if `val.greedy` is true.

    Returns:
        `val/reward/mean@n`, `val/acc/mean@n`, `val/acc/pass@k` (k = 2, 4, 8 ... up to n) and
        `val/tool_call_rate`; `val/rows`, the number of rows, and `val/reward/se@n` and
        `val/acc/se@n`, the standard errors of the means (`agentrl.metrics.standard_error`);
        `val/grader/NAME`, the means of the other numbers that reward functions return. The same
        metrics under `val/<agent_name>/` and, with verl's prefix, `val-core/<data_source>/`; those
        of the greedy pass under `val_greedy/`. A rollout passes if `acc` of its reward function (or
        the outcome, if it returns no `acc`) is at least 1.

    Raises:
        RunStopped: too many rollouts were dropped.
    """
    sampling = Sampling(temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)
    groups = rollouts.collect(samples, n=val.n, sampling=sampling, step=0, tag="val")
    metrics = _tables(groups, val.n, "val", "val-core")
    greedy_groups: list[Group] = []
    if val.greedy and val.temperature > 0:
        greedy = Sampling(temperature=0.0)
        greedy_groups = rollouts.collect(samples, n=1, sampling=greedy, step=0, tag="greedy")
        metrics |= _tables(greedy_groups, 1, "val_greedy", "")
    return Evaluation(metrics, groups, greedy_groups)


def _tables(groups: Sequence[Group], n: int, prefix: str, core: str) -> dict[str, float]:
    metrics = _table(groups, n, prefix)
    for agent, part in _split(groups, lambda g: g.sample.agent_name).items():
        metrics |= _table(part, n, f"{prefix}/{agent}")
    if core:
        for source, part in _split(groups, lambda g: g.sample.data_source).items():
            metrics |= _table(part, n, f"{core}/{source}")
    return metrics


def _split(groups: Sequence[Group], key: Callable[[Group], str]) -> dict[str, list[Group]]:
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        parts[key(group) or "none"].append(group)
    return dict(sorted(parts.items()))


def _table(groups: Sequence[Group], n: int, prefix: str) -> dict[str, float]:
    scored = [s for g in groups for s in g.scored]
    if not scored:
        return {}
    metrics = {
        f"{prefix}/rows": float(len(groups)),
        f"{prefix}/reward/mean@{n}": mean([s.reward for s in scored]),
        f"{prefix}/acc/mean@{n}": mean([accuracy(s) for s in scored]),
        f"{prefix}/tool_call_rate": mean([count_calls(s.trajectory) > 0 for s in scored]),
        f"{prefix}/num_turns": mean([len(s.trajectory.turns) for s in scored]),
    }
    for name, value in (("reward", lambda s: s.reward), ("acc", accuracy)):
        error = standard_error([[value(s) for s in g.scored] for g in groups])
        if not math.isnan(error):
            metrics[f"{prefix}/{name}/se@{n}"] = error
    metrics |= {f"{prefix}/{name}": value for name, value in grader_metrics(scored).items()}
    for k in [2**i for i in range(1, n.bit_length())]:
        metrics[f"{prefix}/acc/pass@{k}"] = mean([pass_at_k(g, k) for g in groups])
    return metrics


def accuracy(scored: Scored) -> float:
    """Return `acc` of the reward function, or the outcome if it returns no `acc`."""
    return float(scored.metrics.get("acc", scored.rewards.get("outcome", scored.reward)))


def pass_at_k(group: Group, k: int) -> float:
    """Return the probability that at least one of k rollouts of a sample passes.

    The estimate is 1 - C(n-c, k) / C(n, k) for n rollouts of which c passed (Chen et al., 2021). It
    is unbiased for n >= k. If fewer than k rollouts were not dropped, k is their number.
    """
    n = len(group.scored)
    c = sum(accuracy(s) >= 1 for s in group.scored)
    k = min(k, n)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


# -- comparing runs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Validation:
    """The rollouts of one validation, read from the folder of a run or of `agentrl eval`."""

    step: int
    groups: Mapping[str, Group]
    """The sampled rollouts of each row, by the row's id."""


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference between two validations over the rows that both played."""

    rows: int
    mean: float
    low: float
    """The lower end of the interval of 95 %; NaN for one row."""
    high: float


def read_validation(folder: Path, step: int | None = None) -> Validation:
    """Read a validation of a run, or the result of `agentrl eval --output`.

    Args:
        folder: the folder with `trajectories/`.
        step: the step of the validation; None: the last one.

    Raises:
        DataError: there is no such validation, or its file is damaged.
    """
    store = TrajectoryStore(folder / "trajectories")
    steps = store.steps("val")
    if not steps:
        raise DataError(
            f"{folder} has no validation: there is no val-*.parquet in {store.folder}. Name the"
            " folder of a run with data.val, or of `agentrl eval --output`"
        )
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise DataError(f"{folder} was not validated at step {step}. Its validations: {listed}")
    step = steps[-1] if step is None else step
    scored: dict[str, list[Scored]] = defaultdict(list)
    for rollout in store.read(step, "val"):
        scored[rollout.scored.trajectory.sample.id].append(rollout.scored)
    groups = {key: Group(s[0].trajectory.sample, tuple(s)) for key, s in scored.items()}
    return Validation(step, groups)


def merge_seeds(validations: Sequence[Validation]) -> Validation:
    """Return one validation with the rollouts of runs that differ in their seeds alone.

    Its rows are those that all runs validated. A row's value is then the mean over the seeds.
    """
    first, *others = validations
    keys = [key for key in first.groups if all(key in other.groups for other in others)]
    groups = {key: [v.groups[key] for v in validations] for key in keys}
    return Validation(
        max(v.step for v in validations),
        {
            key: Group(same[0].sample, tuple(s for group in same for s in group.scored))
            for key, same in groups.items()
        },
    )


def shared_rows(first: Validation, second: Validation) -> list[str]:
    """Return the ids of the rows that both validations played, with the same prompt and truth.

    Rows of different files may have the same id, because an id may be the row's number.
    """

    def content(group: Group) -> tuple[object, ...]:
        return group.sample.prompt, group.sample.agent_name, group.sample.ground_truth

    return [
        key
        for key, group in first.groups.items()
        if key in second.groups and content(second.groups[key]) == content(group)
    ]


def paired_difference(
    first: Validation, second: Validation, value: Callable[[Scored], float]
) -> PairedDifference:
    """Return the mean of `second - first` over their shared rows, with an interval of 95 %.

    A row's value is the mean over its rollouts. The interval is that of the paired t-test: with the
    difference d of each of R rows, mean(d) ± t(0.975, R - 1) * s(d) / sqrt(R). The difficulty of
    a row is in both values, so the interval is narrower than for independent rows (Miller,
    arXiv:2411.00640, section 4.2).

    Raises:
        DataError: there is no shared row.
    """
    differences = [
        mean([value(s) for s in second.groups[key].scored])
        - mean([value(s) for s in first.groups[key].scored])
        for key in shared_rows(first, second)
    ]
    if not differences:
        raise DataError("they share no rows")
    center, half = mean(differences), math.nan
    if len(differences) > 1:
        error = standard_error([[d] for d in differences])
        half = t_quantile(0.975, len(differences) - 1) * error
    return PairedDifference(len(differences), center, center - half, center + half)


# -- stored responses -----------------------------------------------------------------------------


def read_responses(
    path: str,
    response_key: str = "responses",
    names: ColumnNames | None = None,
    reward_model_key: str = "reward_model",
) -> list[tuple[Sample, list[str]]]:
    """Read rows with a column of stored responses, as `agentrl generate` and verl write them.

    Args:
        path: a .parquet or .jsonl file.
        response_key: the column with a row's responses: a list of texts, or one text.
        names: the names of the columns of prompt and data source.
        reward_model_key: the column with `{"ground_truth": ...}`. A column `ground_truth` is read
            too.

    Raises:
        DataError: the file cannot be read, or rows have mistakes. The message has all of them.
    """
    rows = open_rows(path, names=names or ColumnNames())
    mistakes, read = Mistakes(path), []
    for sample in rows:
        extra = dict(sample.extra)
        responses = extra.pop(response_key, None)
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not all(isinstance(r, str) for r in responses):
            columns = ", ".join(rows.columns(sample.row))
            problem = f"must be a list of texts, not {responses!r:.60}"
            if responses is None:
                problem = f"is missing; found: {columns}. Name the column: --response-key NAME"
            mistakes.add(sample.row, response_key, problem)
            continue
        truth = sample.ground_truth
        if reward_model_key != "reward_model":
            model = extra.pop(reward_model_key, None)
            if not isinstance(model, dict) or "ground_truth" not in model:
                mistakes.add(sample.row, reward_model_key, "has no ground_truth")
                continue
            truth = model["ground_truth"]
        read.append((replace(sample, extra=extra, ground_truth=truth), responses))
    mistakes.raise_any()
    return read


async def score_responses(rows: Sequence[tuple[Sample, list[str]]], scorer: Scorer) -> list[Group]:
    """Score stored responses as validation scores rollouts; rows without responses are left out.

    A response counts as the only assistant message of an episode: rewards of tools and interactions
    are 0.

    Raises:
        UserCodeError: a reward function raised.
        RunStopped: a server or a process of a reward failed three times.
    """
    groups: list[Group] = []
    for start in range(0, len(rows), SCORED_AT_ONCE):
        part = [row for row in rows[start : start + SCORED_AT_ONCE] if row[1]]
        scored = await run_all([_score_row(*row, scorer) for row in part])
        groups += [Group(sample, s) for (sample, _), s in zip(part, scored, strict=True)]
    return groups


async def _score_row(sample: Sample, responses: list[str], scorer: Scorer) -> tuple[Scored, ...]:
    turn = Turn(0, 0, 0, "stop", message_index=len(sample.prompt))
    trajectories = []
    for k, response in enumerate(responses):
        episode_id = f"stored-{sample.row}-{k}"
        messages = (*sample.prompt, Message("assistant", response))
        trajectories.append(Trajectory(sample, episode_id, k, (), (turn,), messages, {}, "done"))
    return await score_stored(trajectories, scorer, trains=False)


async def score_stored(
    trajectories: Sequence[Trajectory], scorer: Scorer, *, trains: bool
) -> tuple[Scored, ...]:
    """Score trajectories of one row that are not played now; try again if a server fails.

    Args:
        trajectories: at least one.
        scorer: the rewards.
        trains: False for those of a validation.

    Raises:
        UserCodeError: a reward function raised.
        RunStopped: a server or a process of a reward failed three times.
    """
    cause = ""
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            await asyncio.sleep(retry_pause(attempt))
        try:
            return tuple(await scorer.score_all(trajectories, trains=trains))
        except Infrastructure as e:
            cause = f"{type(e).__name__}: {e}"
    sample = trajectories[0].sample
    raise RunStopped(f"row {sample.row} ({sample.id}) cannot be scored: {cause}")
