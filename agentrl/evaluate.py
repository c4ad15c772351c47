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
from itertools import product

from agentrl.comparison import (
    WITHOUT_TOOLS,
    accuracy,
    has_answers,
    maj_at_k,
    pass_at_k,
    powers_of_two,
    tool_metrics,
)
from agentrl.config import ValConfig
from agentrl.data import ColumnNames, open_rows
from agentrl.data.rows import Mistakes
from agentrl.engine.base import Sampling
from agentrl.errors import Infrastructure, RunStopped
from agentrl.metrics import count_calls, grader_metrics, mean, standard_error
from agentrl.player import MAX_ATTEMPTS, retry_pause
from agentrl.rewards import Scorer
from agentrl.rollout import GroupRecord, Rollouts
from agentrl.trajectory import Group, Message, Sample, Scored, Trajectory, Turn
from agentrl.workers import run_all

SCORED_AT_ONCE = 256
"""The number of rows whose stored responses are scored at the same time."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: metrics by name, and the groups that they were computed from."""

    metrics: Mapping[str, float]
    splits: Mapping[str, Sequence[Group]]
    """The groups by the split in which they are stored: "val", and "greedy" and "without" if there
    was a greedy pass, and one without tools."""


def evaluate(
    rollouts: Rollouts,
    samples: Sequence[Sample],
    val: ValConfig,
    record: Callable[[str], GroupRecord | None] = lambda split: None,
) -> Evaluation:
    """Play each sample `val.n` times, and once more at temperature 0 if `val.greedy` is true.

    With `val.without_tools`, rows with tools are also played `val.n` times without them, with the
    same seeds.

    Args:
        rollouts: plays the episodes.
        samples: the rows.
        val: the sampling.
        record: returns the record of a split; None: nothing is recorded.

    Returns:
        `val/reward/mean@n`, `val/acc/mean@n`, `val/acc/pass@k` (k = 2, 4, 8 ... up to n) and
        `val/tool_call_rate`; `val/rows`, the number of rows, and `val/reward/se@n` and
        `val/acc/se@n`, the standard errors of the means (`agentrl.metrics.standard_error`);
        `val/acc/maj@k` if the reward returns an `answer`; `val/acc/pass@k/se`, `val/acc/maj@k/se`;
        `val/grader/NAME`, the means of the other numbers that reward functions return. The same
        metrics under `val/<agent_name>/` and, with verl's prefix, `val-core/<data_source>/`; those
        of the greedy pass under `val_greedy/`, those without tools under `val_without_tools/`, and
        `val/tool_dependence` (`agentrl.comparison.tool_metrics`). A rollout passes if `acc` of its
        reward function (or the outcome, if it returns no `acc`) is at least 1.

    Raises:
        RunStopped: too many rollouts were dropped.
    """
    sampling = Sampling.of(val)

    def play(split: str, samples: Sequence[Sample], n: int, sampling: Sampling) -> list[Group]:
        return rollouts.collect(
            samples, n=n, sampling=sampling, step=0, tag=split, record=record(split)
        )

    splits = {"val": play("val", samples, val.n, sampling)}
    metrics = _tables(splits["val"], val.n, "val", "val-core")
    if val.greedy and val.temperature > 0:
        splits["greedy"] = play("greedy", samples, 1, Sampling(temperature=0.0))
        metrics |= _tables(splits["greedy"], 1, "val_greedy", "")
    if val.without_tools and (bare := without_tools(samples)):
        splits[WITHOUT_TOOLS] = play(WITHOUT_TOOLS, bare, val.n, sampling)
        metrics |= _tables(splits[WITHOUT_TOOLS], val.n, "val_without_tools", "")
        metrics |= tool_metrics(splits["val"], splits[WITHOUT_TOOLS])
    return Evaluation(metrics, splits)


def without_tools(samples: Sequence[Sample]) -> list[Sample]:
    """Return the rows with tools, without them. Rows with an environment are left out.

    Their chat template gets no tools. An environment is the world of its row, not only its tools.
    """
    tooled = (sample for sample in samples if sample.tools and not sample.environment)
    return [replace(sample, tools=(), tools_kwargs={}) for sample in tooled]


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
    votes = {"pass": pass_at_k} | ({"maj": maj_at_k} if has_answers(groups) else {})
    for name, k in product(votes, powers_of_two(n)):
        values = [[votes[name](group, k)] for group in groups]
        metrics[f"{prefix}/acc/{name}@{k}"] = mean([x for [x] in values])
        if len(values) > 1:
            metrics[f"{prefix}/acc/{name}@{k}/se"] = standard_error(values)
    return metrics


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
