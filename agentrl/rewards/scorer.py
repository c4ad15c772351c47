"""From a trajectory to the number that trains: outcome, turn and tool rewards, weights, budgets.

The outcome comes from one reward function, or from several and their weights. A penalty for length
is no part of how good an answer is: only rollouts that train pay it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agentrl.config import RewardConfig, RolloutConfig
from agentrl.errors import ConfigError, DataError, Infrastructure, UserCodeError, UserError
from agentrl.registry import did_you_mean
from agentrl.rewards.base import Grader
from agentrl.rewards.executor import RewardExecutor
from agentrl.rewards.graders import GOLD, PROBLEMS, find_reward, grader_of
from agentrl.trajectory import Sample, Scored, Trajectory
from agentrl.workers import run_all

logger = logging.getLogger(__name__)

BudgetPolicy = Mapping[str, str | float]
"""stop_reason -> what becomes of the reward (a number is subtracted); others keep theirs."""
BY_SOURCE = "grader"
"""In `reward.functions`: the grader of the row's data_source."""

Score = tuple[float, dict[str, float]]
"""A reward, and the other numbers that its function returned."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the functions that the outcome is made of."""

    name: str
    """As metrics have it."""
    weight: float
    grader: Grader | None
    """None: that of the row's data_source."""


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
            max_trajectory_tokens: `rollout.max_trajectory_tokens`, at whose end overlong rollouts
                are.

        Raises:
            UserError: no such reward, or it does not take its arguments; all problems at once.
        """
        self._config = config
        self._budget_policy = budget_policy or {}
        self._max_tokens = max_trajectory_tokens
        self._weights = {
            "outcome": config.outcome_weight,
            "turn": config.turn_weight,
            "tool": config.tool_weight,
        }
        self._warned: set[str] = set()
        self._executor = RewardExecutor(config)
        self._by_source: dict[str, Grader] = {}
        if config.functions:
            self._parts = self._composed(config)
            self._kwargs, self._key = config.kwargs.get(BY_SOURCE, {}), f"reward.kwargs.{BY_SOURCE}"
        else:
            self._kwargs, self._key = config.kwargs, "reward.kwargs"
            grader = self._made(config.function, config.kwargs) if config.function else None
            self._parts = [_Part(config.function, 1.0, grader)]
        self.by_data_source = any(p.grader is None for p in self._parts)
        """Whether rows are judged by the grader of their `data_source`, also or alone."""
        self.compares = any(p.grader and p.grader.options.group for p in self._parts)
        """Whether a reward needs all trajectories of a sample at once."""

    def grader(self, data_source: str) -> Grader:
        """What judges rows of `data_source`: `reward.function`, else the grader known for it.

        Of several functions, the grader, or the first where it is none of them.

        Raises:
            DataError: no grader for it; the message says how to give one.
            ConfigError: the grader does not take `reward.kwargs`.
        """
        if not self.by_data_source:
            grader = self._parts[0].grader
            assert grader is not None
            return grader
        if data_source not in self._by_source:
            self._by_source[data_source] = grader_of(
                data_source, self._kwargs, self._executor, self._key
            )
        return self._by_source[data_source]

    def graders(self, data_source: str) -> list[Grader]:
        """All that judges rows of `data_source`; raises as `grader` does."""
        return [p.grader or self.grader(data_source) for p in self._parts]

    def said(self, data_source: str) -> str:
        """What judges rows of `data_source`, for people: names, and weights where there are."""
        if not self._config.functions:
            kind = "grader" if self.by_data_source else "reward"
            return f"{kind} {self.grader(data_source).name}"
        listed = [
            f"{p.weight:g} x {self.grader(data_source).name if p.grader is None else p.name}"
            for p in self._parts
        ]
        return f"reward {' + '.join(listed)}"

    async def score(self, trajectory: Trajectory, *, trains: bool = True) -> Scored:
        """Outcome, turn and tool rewards, and their weighted sum under the budget policy.

        Args:
            trajectory: what was played.
            trains: take off what it costs to be overlong, the source `overlong`; scores of a
                validation are of the answers alone.

        Raises:
            UserCodeError: the reward raised or returned no finite number: stop the run.
            Infrastructure: as the reward raised it, or it did not end in time.
        """
        return (await self.score_all([trajectory], trains=trains))[0]

    async def score_all(
        self, trajectories: Sequence[Trajectory], *, trains: bool = True
    ) -> list[Scored]:
        """As `score`, of the trajectories of one sample; what compares them sees all of these."""
        by_part = await run_all([self._scores(part, trajectories) for part in self._parts])
        outcomes = [self._sum(scores) for scores in zip(*by_part, strict=True)]
        return [
            self._total(trajectory, outcome, metrics, trains)
            for trajectory, (outcome, metrics) in zip(trajectories, outcomes, strict=True)
        ]

    async def close(self) -> None:
        """Close what rewards hold, threads and processes; scoring on opens it again."""
        try:
            graders = [p.grader for p in self._parts if p.grader]
            await run_all([g.close() for g in (*graders, *self._by_source.values())])
        finally:
            self._executor.close()

    def stop(self) -> None:
        """End threads and processes, from whatever thread. Idempotent."""
        self._executor.close()

    def _total(
        self, trajectory: Trajectory, outcome: float, metrics: Mapping[str, float], trains: bool
    ) -> Scored:
        earned = {
            "outcome": outcome,
            "turn": trajectory.turn_rewards("turn"),
            "tool": trajectory.turn_rewards("tool") + trajectory.tool_reward,
        }
        for source, value in earned.items():
            if not math.isfinite(value):
                raise UserCodeError(
                    f"the {source} rewards of sample {trajectory.sample.id!r} sum to {value}:"
                    " they must be finite numbers"
                )
        self._warn_unused(earned)
        total = sum(self._weights[source] * value for source, value in earned.items())
        policy = self._budget_policy.get(trajectory.stop_reason, "keep")
        if policy == "zero":
            total = 0.0
        elif not isinstance(policy, str):
            total -= policy
        buffer, penalty = self._config.overlong_buffer, self._config.overlong_penalty
        if trains and buffer:
            sampled = trajectory.sampled_tokens
            earned["overlong"] = overlong(sampled, self._max_tokens, buffer, penalty)
            total += earned["overlong"]
        return Scored(trajectory, earned, total, metrics, masked=policy == "mask")

    def _warn_unused(self, earned: Mapping[str, float]) -> None:
        """Say once per source that its rewards train nothing."""
        for source, value in earned.items():
            if value and not self._weights[source] and source not in self._warned:
                self._warned.add(source)
                logger.warning(
                    "%s rewards were earned, but reward.%s_weight is 0: they are kept in the"
                    " trajectory and do not train. Set the weight to use them.",
                    source,
                    source,
                )

    async def _scores(self, part: _Part, trajectories: Sequence[Trajectory]) -> list[Score]:
        if part.grader and part.grader.options.group:
            return await part.grader.compare(trajectories)
        graders = [part.grader or self.grader(t.sample.data_source) for t in trajectories]
        return await run_all([g.grade(t) for g, t in zip(graders, trajectories, strict=True)])

    def _sum(self, scores: Sequence[Score]) -> Score:
        if not self._config.functions:
            return scores[0]
        total, metrics = 0.0, {}
        for part, (score, others) in zip(self._parts, scores, strict=True):
            total += part.weight * score
            metrics[part.name] = score
            for name, value in others.items():
                if name == "acc":
                    metrics.setdefault("acc", value)
                else:
                    metrics[f"{part.name}/{name}"] = value
        return total, metrics

    def _composed(self, config: RewardConfig) -> list[_Part]:
        problems, parts = [], []
        for name in config.kwargs:
            if name not in config.functions:
                problems.append(
                    f"reward.kwargs.{name}: no such function in reward.functions."
                    f"{did_you_mean(name, config.functions)} With several functions reward.kwargs"
                    f" has the arguments by function: {', '.join(config.functions)}"
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
                    f"reward.functions: {name!r} would be two metrics of one name. Give the"
                    " function another name"
                )
            names.add(name)
            kwargs = config.kwargs.get(function, {})
            try:
                ours = function == BY_SOURCE or not isinstance(kwargs, dict)
                grader = None if ours else self._made(function, kwargs, function)
                parts.append(_Part(name, weight, grader))
            except UserError as e:
                problems.append(str(e))
        if problems:
            raise ConfigError("\n".join(problems))
        return parts

    def _made(self, name: str, kwargs: dict, part: str = "") -> Grader:
        key = f"reward.kwargs.{part}" if part else "reward.kwargs"
        where = "reward.functions" if part else "reward.function"
        return Grader(name, find_reward(name, where), kwargs, self._executor, key)


def overlong(sampled: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `penalty`.

        0                                            up to limit - buffer sampled tokens
        -penalty * (sampled - (limit - buffer)) / buffer     within the buffer
        -penalty                                     from limit on

    Args:
        sampled: tokens that the policy sampled: what tools and users said is not its doing.
        limit: tokens that cost the whole penalty.
        buffer: the last so many of them cost a share; at least 1.
        penalty: at least 0.
    """
    over = sampled - (limit - buffer)
    return -penalty * min(over / buffer, 1.0) if over > 0 else 0.0


make_scorer = Scorer
"""The former name, until 0.2."""


def check_graders(samples: Iterable[Sample], scorer: Scorer, file: str = "") -> None:
    """Refuse rows that nothing can judge, before anything is played; all of them at once.

    Where the grader goes by `data_source`, it grades each row's own ground truth: a row where that
    falls short of full marks could not be solved by a model either.

    Args:
        samples: the rows of one file.
        scorer: the run's.
        file: its name, for the message.

    Raises:
        DataError: rows without a grader, or with a ground truth that theirs cannot read.
        ConfigError: `reward.kwargs` that a grader does not take.
    """
    if not scorer.by_data_source:
        return
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_source[sample.data_source].append(sample)
    problems = []
    for data_source, rows in by_source.items():
        try:
            grader = scorer.grader(data_source)
        except DataError as e:
            problems.append(f"{_some(rows)}: {e}")
            continue
        wrong = _unsolvable(rows, grader)
        if wrong:
            why = PROBLEMS.get(grader.name, lambda _: "give it the final answer alone")
            truth = wrong[0].ground_truth
            problems.append(
                f"{_some(wrong)}: the grader {grader.name!r} cannot read"
                f" ground_truth={truth!r:.200}: {why(truth)}"
            )
    scorer.stop()  # processes that graded; the run, if there is one, starts its own
    if problems:
        raise DataError("\n".join(f"{file}: {p}" if file else p for p in problems))


def _unsolvable(rows: Sequence[Sample], grader: Grader) -> list[Sample]:
    """The rows whose own ground truth falls short of full marks, or blows its grader up."""
    if grader.name in PROBLEMS:
        return [row for row in rows if PROBLEMS[grader.name](row.ground_truth)]

    async def solves(row: Sample) -> bool:
        gold = GOLD[grader.name](row.ground_truth, **grader.kwargs)
        try:
            marks = await grader.grade_text(gold, row.ground_truth)
        except Infrastructure:
            return False
        return marks["acc"] == 1.0

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*map(solves, rows))

    # In a thread of its own: whoever asks may have a running event loop.
    with ThreadPoolExecutor(1) as thread:
        solved = thread.submit(asyncio.run, all_of_them()).result()
    return [row for row, right in zip(rows, solved, strict=True) if not right]


def _some(rows: list[Sample]) -> str:
    """`row 3`, or `rows 3, 5, 8, ... (120 in all)`."""
    listed = ", ".join(str(s.row) for s in rows[:3])
    more = f", ... ({len(rows)} in all)" if len(rows) > 3 else ""
    return f"row{'s' * (len(rows) > 1)} {listed}{more}"
