"""From a trajectory to the number that trains: outcome, turn and tool rewards, weights, budgets."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from agentrl.answers import plain_number
from agentrl.config import RewardConfig
from agentrl.errors import ConfigError, DataError, UserCodeError
from agentrl.registry import did_you_mean, load_file, rewards
from agentrl.rewards.base import Grader
from agentrl.trajectory import Sample, Scored, Trajectory

logger = logging.getLogger(__name__)

BudgetPolicy = Mapping[str, Literal["keep", "zero", "mask"] | float]
"""stop_reason -> what becomes of the reward; reasons that are not in it keep theirs."""


GRADERS = {"openai/gsm8k": "gsm8k", "agentrl/arithmetic": "gsm8k"}
"""data_source -> the registered `compute_score` that judges its rows."""
GOLD: Mapping[str, Callable[[Any], str]] = {"gsm8k": lambda truth: f"#### {plain_number(truth)}"}
"""Per grader, the shortest text that deserves full marks, made from a ground truth."""


class Scorer:
    """Scores trajectories; built once per run by `make_scorer`."""

    def __init__(self, config: RewardConfig, budget_policy: BudgetPolicy):
        self._config = config
        self._budget_policy = budget_policy
        self._weights = {
            "outcome": config.outcome_weight,
            "turn": config.turn_weight,
            "tool": config.tool_weight,
        }
        self._function = (
            Grader(config.function, find_reward(config.function), config.kwargs)
            if config.function
            else None
        )
        self._graders: dict[str, Grader] = {}
        self._warned: set[str] = set()

    def grader(self, data_source: str) -> Grader:
        """What judges rows of `data_source`: `reward.function`, else the grader known for it.

        Raises:
            DataError: no grader for it; the message says how to give one.
            ConfigError: the grader does not take `reward.kwargs`.
        """
        if self._function is not None:
            return self._function
        if data_source not in self._graders:
            if data_source not in GRADERS:
                raise DataError(_unknown_source(data_source))
            name = GRADERS[data_source]
            self._graders[data_source] = Grader(name, rewards.get(name), self._config.kwargs)
        return self._graders[data_source]

    async def score(self, trajectory: Trajectory) -> Scored:
        """Outcome, turn and tool rewards, and their weighted sum under the budget policy.

        Raises:
            UserCodeError: the reward raised or returned no finite number: stop the run.
            Infrastructure: as the reward raised it.
        """
        outcome, metrics = await self.grader(trajectory.sample.data_source).grade(trajectory)
        earned = {
            "outcome": outcome,
            "turn": trajectory.turn_rewards("turn"),
            "tool": trajectory.turn_rewards("tool") + trajectory.tool_reward,
        }
        for source, value in earned.items():
            if not math.isfinite(value):
                raise UserCodeError(
                    f"the {source} rewards of sample {trajectory.sample.id!r} sum to {value}:"
                    " a reward must be a finite number"
                )
        self._warn_unused(earned)
        total = sum(self._weights[source] * value for source, value in earned.items())
        policy = self._budget_policy.get(trajectory.stop_reason, "keep")
        if policy == "zero":
            total = 0.0
        elif not isinstance(policy, str):
            total -= policy
        return Scored(trajectory, earned, total, metrics, masked=policy == "mask")

    def check(self, samples: Iterable[Sample]) -> None:
        """Refuse rows that nothing can judge, before anything is played; all of them at once.

        Where the grader goes by `data_source`, it grades each row's own ground truth: a row where
        that falls short of full marks could never be solved by a model either.

        Raises:
            DataError: rows without a grader, or with a ground truth that theirs cannot read.
            ConfigError: `reward.kwargs` that a grader does not take.
        """
        if self._function is not None:
            return
        rows: dict[tuple[str, bool], list[int]] = defaultdict(list)
        said: dict[tuple[str, bool], str] = {}
        for sample in samples:
            source, truth = sample.data_source, sample.ground_truth
            known = source in GRADERS
            if known and self._solvable(source, truth):
                continue
            rows[source, known].append(sample.row)
            said.setdefault(
                (source, known),
                f"ground truth {truth!r} is not one that the grader {GRADERS[source]!r} can read:"
                " give it the final answer alone"
                if known
                else _unknown_source(source),
            )
        if rows:
            raise DataError("\n".join(f"{_some(rows[k])}: {said[k]}" for k in rows))

    def _solvable(self, data_source: str, truth: Any) -> bool:
        grader = self.grader(data_source)
        text = GOLD[grader.name](truth)
        return grader.function(text, truth, **grader.kwargs)["acc"] == 1.0

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


def make_scorer(config: RewardConfig, budget_policy: BudgetPolicy | None = None) -> Scorer:
    """The run's scorer.

    Args:
        config: the section `reward`.
        budget_policy: `rollout.budget_policy`.

    Raises:
        UserError: no such reward, or it does not take `reward.kwargs`.
    """
    return Scorer(config, budget_policy or {})


def find_reward(name: str) -> Callable[..., Any]:
    """The function behind `reward.function`: a registered name, or `path.py:function`.

    Raises:
        ConfigError: no such reward; the message lists what there is.
        UserError: the file is missing or does not load.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        if name.endswith(".py"):
            raise ConfigError(f"reward.function={name!r} must name its function: {name}:FUNCTION")
        if name not in rewards:
            raise ConfigError(
                f"reward.function={name!r}: {rewards.unknown(name)}. Another one is named by its"
                " file (path.py:function), or registered by a file listed in `files`"
            )
        return rewards.get(name)
    functions = {
        k: v for k, v in vars(load_file(path)).items() if callable(v) and not k.startswith("_")
    }
    if attribute not in functions:
        raise ConfigError(
            f"reward.function={name!r}: no function {attribute!r} in {path}."
            f"{did_you_mean(attribute, functions)} It has: {', '.join(functions) or 'none'}"
        )
    return functions[attribute]


def _some(rows: list[int]) -> str:
    """`row 3`, or `rows 3, 5, 8, ... (120 in all)`."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    listed = ", ".join(map(str, rows[:3]))
    return f"rows {listed}" + (f", ... ({len(rows)} in all)" if len(rows) > 3 else "")


def _unknown_source(data_source: str) -> str:
    said = f"no grader for data_source {data_source!r}" if data_source else "no data_source"
    return (
        f"{said}.{did_you_mean(data_source, GRADERS)} Known: {', '.join(GRADERS)}. Or set"
        f" reward.function to a registered reward ({', '.join(rewards.names())}) or to"
        " your own (path.py:function)"
    )
