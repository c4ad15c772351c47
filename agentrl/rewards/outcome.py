"""What a whole trajectory earned: by one reward function, or by several and their weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config import RewardConfig
from agentrl.errors import ConfigError, UserError
from agentrl.registry import did_you_mean
from agentrl.rewards.base import Grader
from agentrl.rewards.graders import find_reward, grader_of
from agentrl.rewards.runner import Runner
from agentrl.trajectory import Trajectory

BY_SOURCE = "grader"
"""In `reward.functions`: the grader of the row's data_source."""

Score = tuple[float, dict[str, float]]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the functions."""

    name: str
    """As metrics have it."""
    weight: float
    grader: Grader | None
    """None: that of the row's data_source."""


class Outcome:
    """The reward function of a run, or its functions."""

    def __init__(self, config: RewardConfig):
        """Find them and check their arguments.

        Raises:
            UserError: no such reward, or it does not take its arguments; all problems at once.
        """
        self.runner = Runner(config)
        self._kwargs = config.kwargs
        self._by_source: dict[str, Grader] = {}
        self.several = bool(config.functions)
        if self.several:
            self._parts = self._composed(config)
            chosen = config.kwargs.get(BY_SOURCE, {})
            self._kwargs, self._key = chosen, f"reward.kwargs.{BY_SOURCE}"
        else:
            self._key = "reward.kwargs"
            grader = self._made(config.function, config.kwargs) if config.function else None
            self._parts = [_Part(config.function, 1.0, grader)]
        self.by_data_source = any(p.grader is None for p in self._parts)
        """Whether rows are judged by the grader of their `data_source`, also or alone."""
        self.compares = any(p.grader and p.grader.way.group for p in self._parts)
        """Whether a function needs all trajectories of a sample at once."""

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
                data_source, self._kwargs, self.runner, self._key
            )
        return self._by_source[data_source]

    def graders(self, data_source: str) -> list[Grader]:
        """All that judges rows of `data_source`; raises as `grader` does."""
        return [p.grader or self.grader(data_source) for p in self._parts]

    def said(self, data_source: str) -> str:
        """What judges rows of `data_source`, for people: names, and weights where there are."""
        if not self.several:
            kind = "grader" if self.by_data_source else "reward"
            return f"{kind} {self.grader(data_source).name}"
        listed = [
            f"{p.weight:g} x {self.grader(data_source).name if p.grader is None else p.name}"
            for p in self._parts
        ]
        return f"reward {' + '.join(listed)}"

    async def of(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """What each earned, and metrics: other numbers of the function; with several, their scores.

        Raises:
            UserCodeError: a function raised or returned no finite number.
            Infrastructure: as a function raised it, or it did not end in time.
        """
        if not self.several and len(trajectories) == 1 and not self.compares:
            only = trajectories[0]
            return [await self.grader(only.sample.data_source).grade(only)]
        by_part = await _all([self._scores(part, trajectories) for part in self._parts])
        return [self._sum(scores) for scores in zip(*by_part, strict=True)]

    async def close(self) -> None:
        """Close what functions hold, threads and processes; what is scored later opens it again."""
        try:
            graders = [p.grader for p in self._parts if p.grader]
            await _all([g.close() for g in (*graders, *self._by_source.values())])
        finally:
            self.runner.close()

    async def _scores(self, part: _Part, trajectories: Sequence[Trajectory]) -> list[Score]:
        if part.grader and part.grader.way.group:
            return await part.grader.compare(trajectories)
        graders = [part.grader or self.grader(t.sample.data_source) for t in trajectories]
        return await _all([g.grade(t) for g, t in zip(graders, trajectories, strict=True)])

    def _sum(self, scores: Sequence[Score]) -> Score:
        if not self.several:
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
        return Grader(name, find_reward(name, where), kwargs, self.runner, key)


async def _all(work: Sequence) -> list:
    """The results in order; the first exception cancels the rest and is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
