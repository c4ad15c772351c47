"""From a trajectory to the number that trains: outcome, turn and tool rewards, weights, budgets.

A penalty for length is no part of how good an answer is: only rollouts that train pay it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from agentrl.config import RewardConfig, RolloutConfig
from agentrl.errors import DataError, Infrastructure, UserCodeError
from agentrl.rewards.base import Grader
from agentrl.rewards.graders import GOLD, PROBLEMS
from agentrl.rewards.outcome import Outcome
from agentrl.rewards.overlong import overlong
from agentrl.trajectory import Sample, Scored, Trajectory

logger = logging.getLogger(__name__)

BudgetPolicy = Mapping[str, str | float]
"""stop_reason -> what becomes of the reward (a number is subtracted); others keep theirs."""


class Scorer:
    """Scores trajectories; built once per run by `make_scorer`."""

    def __init__(self, config: RewardConfig, budget_policy: BudgetPolicy, max_tokens: int):
        self._config = config
        self._budget_policy = budget_policy
        self._max_tokens = max_tokens
        self._weights = {
            "outcome": config.outcome_weight,
            "turn": config.turn_weight,
            "tool": config.tool_weight,
        }
        self._outcome = Outcome(config)
        self._warned: set[str] = set()

    @property
    def by_data_source(self) -> bool:
        """Whether rows are judged by the grader of their `data_source`, also or alone."""
        return self._outcome.by_data_source

    @property
    def compares(self) -> bool:
        """Whether a reward needs all trajectories of a sample at once."""
        return self._outcome.compares

    def grader(self, data_source: str) -> Grader:
        """What judges rows of `data_source`: `reward.function`, else the grader known for it.

        Raises:
            DataError: no grader for it; the message says how to give one.
            ConfigError: the grader does not take `reward.kwargs`.
        """
        return self._outcome.grader(data_source)

    def graders(self, data_source: str) -> list[Grader]:
        """All that judges rows of `data_source`; raises as `grader` does."""
        return self._outcome.graders(data_source)

    def said(self, data_source: str) -> str:
        """What judges rows of `data_source`, for people."""
        return self._outcome.said(data_source)

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
        outcomes = await self._outcome.of(trajectories)
        return [
            self._total(trajectory, outcome, metrics, trains)
            for trajectory, (outcome, metrics) in zip(trajectories, outcomes, strict=True)
        ]

    async def close(self) -> None:
        """Close what rewards hold, threads and processes; scoring on opens it again."""
        await self._outcome.close()

    def stop(self) -> None:
        """End threads and processes, from whatever thread. Idempotent."""
        self._outcome.runner.close()

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
        config = self._config
        if trains and config.overlong_buffer:
            earned["overlong"] = overlong(
                trajectory.sampled_tokens,
                self._max_tokens,
                config.overlong_buffer,
                config.overlong_penalty,
            )
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


def make_scorer(
    config: RewardConfig,
    budget_policy: BudgetPolicy | None = None,
    max_trajectory_tokens: int = RolloutConfig().max_trajectory_tokens,
) -> Scorer:
    """The run's scorer.

    Args:
        config: the section `reward`.
        budget_policy: `rollout.budget_policy`.
        max_trajectory_tokens: `rollout.max_trajectory_tokens`, at whose end overlong rollouts are.

    Raises:
        UserError: no such reward, or it does not take `reward.kwargs`.
    """
    return Scorer(config, budget_policy or {}, max_trajectory_tokens)


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
