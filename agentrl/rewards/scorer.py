"""`Scorer` computes the reward of a trajectory that training uses.

The reward is the weighted sum of outcome, turn and tool rewards, changed by the budget policy. The
outcome comes from one reward function or is a weighted sum of several. The penalty for long
rollouts applies to training only, because it does not measure how good an answer is.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentrl.config import RewardConfig, RolloutConfig
from agentrl.config.environment import REFERENCE
from agentrl.errors import ConfigError, DataError, Infrastructure, UserCodeError, UserError
from agentrl.plural import plural
from agentrl.registry import did_you_mean
from agentrl.rewards.base import Grader
from agentrl.rewards.executor import RewardExecutor
from agentrl.rewards.graders import GOLD, PROBLEMS, find_reward, grader_of, no_outcome
from agentrl.trajectory import Sample, Scored, Scores, Trajectory
from agentrl.workers import run_all

log = logging.getLogger(__name__)

BudgetPolicy = Mapping[str, str | float]
"""For each stop reason: "zero", "mask", "keep" (the default), or a number to subtract from the
reward."""
GRADED_AT_ONCE = 4096
"""The number of ground truths that `check_graders` grades at once; each is a task of asyncio."""
BY_SOURCE = "grader"
"""The name in `reward.functions` for the grader of the row's data_source."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One term of the outcome: a reward function with its weight."""

    name: str
    """The name in metrics."""
    weight: float
    grader: Grader | None
    """None: the grader of the row's data_source."""


class Scorer:
    """Scores the trajectories of a run."""

    def __init__(
        self,
        config: RewardConfig,
        budget_policy: BudgetPolicy | None = None,
        max_trajectory_tokens: int = RolloutConfig().max_trajectory_tokens,
    ):
        """Find the run's reward functions and check their arguments.

        Args:
            config: the section `reward`.
            budget_policy: `rollout.budget_policy`.
            max_trajectory_tokens: `rollout.max_trajectory_tokens`, the limit for overlong rollouts.

        Raises:
            UserError: there is no such reward, it does not take its arguments, or one of them is an
                environment variable that is not set. The message has all problems.
        """
        if match := REFERENCE.search(str(config)):
            raise ConfigError(f"reward: the environment variable {match[1]} is not set. Export it")
        self._config = config
        self._budget_policy = budget_policy or {}
        self._max_tokens = max_trajectory_tokens
        self._warned_sources: set[str] = set()
        self._executor = RewardExecutor(config)
        self._by_source: dict[str, Grader] = {}
        if config.functions:
            self._parts = self._make_parts(config)
            self._kwargs, self._key = config.kwargs.get(BY_SOURCE, {}), f"reward.kwargs.{BY_SOURCE}"
        else:
            self._kwargs, self._key = config.kwargs, "reward.kwargs"
            grader = self._make_grader(config.function, config.kwargs) if config.function else None
            self._parts = [_Part(config.function, 1.0, grader)]
        self.uses_data_source = any(p.grader is None for p in self._parts)
        """True if a term of the outcome is the grader of the row's `data_source`."""
        self.has_group_reward = any(p.grader and p.grader.options.group for p in self._parts)
        """True if a reward needs all trajectories of a sample at once."""

    def grader(self, data_source: str) -> Grader:
        """Return the grader of rows of `data_source`.

        This is `reward.function`, or the grader that agentrl ships for the data source. If
        `reward.functions` does not include the latter, it is the first of `reward.functions`. If
        there is no grader and `reward.outcome_weight` is 0, the outcome is 0.

        Raises:
            DataError: there is no grader, and its outcome has a weight. The message says how to
                set one.
            ConfigError: the grader does not take `reward.kwargs`.
        """
        if not self.uses_data_source:
            grader = self._parts[0].grader
            assert grader is not None
            return grader
        if data_source not in self._by_source:
            try:
                grader = grader_of(data_source, self._kwargs, self._executor, self._key)
            except DataError:
                if self._config.outcome_weight:
                    raise
                grader = Grader("none", no_outcome, executor=self._executor)
            self._by_source[data_source] = grader
        return self._by_source[data_source]

    def graders(self, data_source: str) -> list[Grader]:
        """Return all graders of rows of `data_source`; raises as `grader` does."""
        return [p.grader or self.grader(data_source) for p in self._parts]

    def describe(self, data_source: str) -> str:
        """Return the names and weights of the graders of `data_source`, for people to read."""
        if not self._config.functions:
            kind = "grader" if self.uses_data_source else "reward"
            return f"{kind} {self.grader(data_source).name}"
        listed = [
            f"{p.weight:g} x {self.grader(data_source).name if p.grader is None else p.name}"
            for p in self._parts
        ]
        return f"reward {' + '.join(listed)}"

    async def score(self, trajectory: Trajectory, *, trains: bool = True) -> Scored:
        """Return the outcome, turn and tool rewards, and their sum under the budget policy.

        Args:
            trajectory: a finished rollout.
            trains: True in training: the penalty for overlong rollouts (the source `overlong`) is
                subtracted. False in validation.

        Raises:
            UserCodeError: a reward raised, or did not return a finite number. The run must stop.
            Infrastructure: a reward raised this, or did not return in time.
        """
        return (await self.score_all([trajectory], trains=trains))[0]

    async def score_all(
        self, trajectories: Sequence[Trajectory], *, trains: bool = True
    ) -> list[Scored]:
        """Score the trajectories of one sample. A group reward is called with all of them.

        A trajectory whose environment or agent has reported its outcome is not graded.
        """
        graded = [t for t in trajectories if t.scores is None]
        by_part = await run_all([self._scores(part, graded) for part in self._parts if graded])
        sums = (self._sum(scores) for scores in zip(*by_part, strict=True))
        return [self._total(t, t.scores or next(sums), trains) for t in trajectories]

    async def close(self) -> None:
        """Close the rewards, threads and processes. A later `score` opens them again."""
        try:
            graders = [p.grader for p in self._parts if p.grader]
            await run_all([g.close() for g in (*graders, *self._by_source.values())])
        finally:
            self._executor.close()

    def stop(self) -> None:
        """End the threads and processes. It may be called from any thread. Idempotent."""
        self._executor.close()

    def _total(self, trajectory: Trajectory, scores: Scores, trains: bool) -> Scored:
        tokens = self._max_tokens if trains else None
        trajectory = with_turn_scores(trajectory, scores.turns)
        outcome, metrics = scores.outcome, scores.metrics
        scored = combine(trajectory, outcome, metrics, self._config, self._budget_policy, tokens)
        self._warn_unused(scored.rewards)
        return replace(scored, answer=scores.answer)

    def _warn_unused(self, rewards: Mapping[str, float]) -> None:
        """Warn once per source that its rewards have no effect on training."""
        weights = source_weights(self._config)
        for source, value in rewards.items():
            weight = weights.get(source, 1.0)
            if value and not weight and source not in self._warned_sources:
                self._warned_sources.add(source)
                log.warning(
                    "rollouts have %s rewards, but reward.%s_weight is 0: the rewards are stored"
                    " and do not train. Set the weight to use them.",
                    source,
                    source,
                )

    async def _scores(self, part: _Part, trajectories: Sequence[Trajectory]) -> list[Scores]:
        if part.grader and part.grader.options.group:
            return await part.grader.compare(trajectories)
        graders = [part.grader or self.grader(t.sample.data_source) for t in trajectories]
        return await run_all([g.grade(t) for g, t in zip(graders, trajectories, strict=True)])

    def _sum(self, part_scores: Sequence[Scores]) -> Scores:
        """Return the weighted sum of the parts' scores of one trajectory."""
        if not self._config.functions:
            return part_scores[0]
        total, metrics = 0.0, {}
        turns: defaultdict[int, float] = defaultdict(float)
        for part, scores in zip(self._parts, part_scores, strict=True):
            total += part.weight * scores.outcome
            metrics[part.name] = scores.outcome
            for index, score in scores.turns.items():
                turns[index] += part.weight * score
            for name, value in scores.metrics.items():
                if name == "acc":
                    metrics.setdefault("acc", value)
                else:
                    metrics[f"{part.name}/{name}"] = value
        answers = [scores.answer for scores in part_scores if scores.answer is not None]
        return Scores(total, turns, metrics, answers[0] if answers else None)

    def _make_parts(self, config: RewardConfig) -> list[_Part]:
        problems, parts = [], []
        for name in config.kwargs:
            if name not in config.functions:
                problems.append(
                    f"reward.kwargs.{name}: no such function in reward.functions."
                    f"{did_you_mean(name, config.functions)} With reward.functions, the keys of"
                    f" reward.kwargs are functions: {', '.join(config.functions)}"
                )
            elif not isinstance(config.kwargs[name], dict):
                problems.append(
                    f"reward.kwargs.{name}={config.kwargs[name]!r} must be a mapping: the arguments"
                    f" of {name}"
                )
        names: set[str] = set()
        for function, weight in config.functions.items():
            name = function.rpartition(":")[2]
            if name in names or name == "acc":
                problems.append(
                    f"reward.functions: {name!r} would be the name of two metrics. Rename the"
                    " function"
                )
            names.add(name)
            kwargs = config.kwargs.get(function, {})
            try:
                by_source = function == BY_SOURCE or not isinstance(kwargs, dict)
                grader = None if by_source else self._make_grader(function, kwargs, function)
                parts.append(_Part(name, weight, grader))
            except UserError as e:
                problems.append(str(e))
        if problems:
            raise ConfigError("\n".join(problems))
        return parts

    def _make_grader(self, name: str, kwargs: dict, part: str = "") -> Grader:
        key = f"reward.kwargs.{part}" if part else "reward.kwargs"
        where = "reward.functions" if part else "reward.function"
        return Grader(name, find_reward(name, where), kwargs, self._executor, key)


def source_weights(config: RewardConfig) -> dict[str, float]:
    """Return the weights of the sources of rewards."""
    return {
        "outcome": config.outcome_weight,
        "turn": config.turn_weight,
        "tool": config.tool_weight,
    }


def check_turns(sample_id: str, scores: Collection[int], count: int) -> None:
    """Raise `UserCodeError` if a reward scored a turn that an episode of `count` turns lacks."""
    if unknown := [index for index in scores if index >= count]:
        raise UserCodeError(
            f"a reward scored turn {unknown[0]} of sample {sample_id!r}, which has"
            f" {plural(count, 'turn')}; they are counted from 0"
        )


def with_turn_scores(trajectory: Trajectory, scores: Mapping[int, float]) -> Trajectory:
    """Return a trajectory whose turns have the scores of a reward, and no earlier scores.

    Args:
        trajectory: the rollout. A stored one may have scores of an earlier reward.
        scores: the scores, by the index of the turn.

    Raises:
        UserCodeError: there is no such turn.
    """
    check_turns(trajectory.sample.id, scores, len(trajectory.turns))
    if not scores and not any("scores" in turn.rewards for turn in trajectory.turns):
        return trajectory
    turns = []
    for index, turn in enumerate(trajectory.turns):
        rewards = {k: v for k, v in turn.rewards.items() if k != "scores"}
        own = {"scores": scores[index]} if index in scores else {}
        turns.append(replace(turn, rewards={**rewards, **own}))
    return replace(trajectory, turns=tuple(turns))


def combine(
    trajectory: Trajectory,
    outcome: float,
    metrics: Mapping[str, float],
    config: RewardConfig,
    budget_policy: BudgetPolicy,
    max_tokens: int | None,
) -> Scored:
    """Return a trajectory with its reward: the weighted sum of its parts under the budget policy.

    Args:
        trajectory: a finished rollout.
        outcome: the result of the reward functions.
        metrics: other numbers that the reward functions returned.
        config: the section `reward`.
        budget_policy: `rollout.budget_policy`.
        max_tokens: `rollout.max_trajectory_tokens`, for the penalty of overlong rollouts; None for
            validations, which have no such penalty.

    Raises:
        UserCodeError: a part is not a finite number.
    """
    rewards = {
        "outcome": outcome,
        "turn": trajectory.turn_rewards("turn") + trajectory.turn_rewards("scores"),
        "tool": trajectory.turn_rewards("tool") + trajectory.tool_reward,
    }
    for source, value in rewards.items():
        if not math.isfinite(value):
            raise UserCodeError(
                f"the {source} rewards of sample {trajectory.sample.id!r} sum to {value}:"
                " they must be finite numbers"
            )
    weights = source_weights(config)
    total = sum(weights[source] * value for source, value in rewards.items())
    policy = budget_policy.get(trajectory.stop_reason, "keep")
    if policy == "zero":
        total = 0.0
    elif not isinstance(policy, str):
        total -= policy
    buffer, penalty = config.overlong_buffer, config.overlong_penalty
    if max_tokens is not None and buffer:
        rewards["overlong"] = overlong(trajectory.sampled_tokens, max_tokens, buffer, penalty)
        total += rewards["overlong"]
    return Scored(trajectory, rewards, total, metrics, masked=policy == "mask")


def overlong(sampled: int, limit: int, buffer: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `penalty`.

        0                                            up to limit - buffer sampled tokens
        -penalty * (sampled - (limit - buffer)) / buffer     within the buffer
        -penalty                                     from limit on

    Args:
        sampled: the number of tokens that the policy sampled; text of tools and users is not
            penalized.
        limit: the number of tokens at which the whole penalty applies.
        buffer: the number of tokens before the limit over which the penalty grows; at least 1.
        penalty: at least 0.
    """
    over = sampled - (limit - buffer)
    return -penalty * min(over / buffer, 1.0) if over > 0 else 0.0


def check_graders(
    samples: Iterable[Sample], scorer: Scorer, file: str = "", first: int = 0
) -> None:
    """Raise `DataError` if rows cannot be graded. It is called before anything is played.

    A grader that is chosen by `data_source` grades each row's own ground truth. If the ground truth
    does not get full marks, no model can solve the row.

    Args:
        samples: the rows of one file.
        scorer: the run's scorer.
        file: the name of the file, for the message.
        first: the index of the file's first row.

    Raises:
        DataError: rows have no grader, or a ground truth that their grader cannot read. The message
            has all such rows.
        ConfigError: a grader does not take `reward.kwargs`.
    """
    if not scorer.uses_data_source:
        return
    by_source: dict[str, list[_Truth]] = defaultdict(list)
    for sample in samples:
        by_source[sample.data_source].append(_Truth(sample.row - first, sample.ground_truth))
    problems = []
    for data_source, rows in by_source.items():
        try:
            grader = scorer.grader(data_source)
        except DataError as e:
            problems.append(f"{_list_rows(rows)}: {e}")
            continue
        unsolvable = _find_unsolvable(rows, grader)
        if unsolvable:
            explain = PROBLEMS.get(grader.name, lambda _: "it must be the final answer only")
            truth = unsolvable[0].ground_truth
            problems.append(
                f"{_list_rows(unsolvable)}: the grader {grader.name!r} cannot read"
                f" ground_truth={truth!r:.200}: {explain(truth)}"
            )
    scorer.stop()  # The run starts its own processes.
    if problems:
        raise DataError("\n".join(f"{file}: {p}" if file else p for p in problems))


class _Truth(NamedTuple):
    """The ground truth of a row."""

    row: int
    ground_truth: Any


def _find_unsolvable(rows: Sequence[_Truth], grader: Grader) -> list[_Truth]:
    """Return the rows whose own ground truth does not get full marks."""
    if grader.name in PROBLEMS:
        return [row for row in rows if PROBLEMS[grader.name](row.ground_truth)]

    async def solves(row: _Truth) -> bool:
        gold = GOLD[grader.name](row.ground_truth, **grader.kwargs)
        try:
            marks = await grader.grade_text(gold, row.ground_truth)
        except Infrastructure:
            return False
        return marks["acc"] == 1.0

    async def solve_all() -> list[bool]:
        solved: list[bool] = []
        for part in range(0, len(rows), GRADED_AT_ONCE):
            solved += await asyncio.gather(*map(solves, rows[part : part + GRADED_AT_ONCE]))
        return solved

    # In a separate thread, because the caller may be on a running event loop.
    with ThreadPoolExecutor(1) as thread:
        solved = thread.submit(asyncio.run, solve_all()).result()
    return [row for row, is_right in zip(rows, solved, strict=True) if not is_right]


def _list_rows(rows: Sequence[_Truth]) -> str:
    """Return `row 3`, or `rows 3, 5, 8, ... (120 in all)`."""
    listed = ", ".join(str(s.row) for s in rows[:3])
    suffix = f", ... ({len(rows)} in all)" if len(rows) > 3 else ""
    return f"row{'s' * (len(rows) > 1)} {listed}{suffix}"
