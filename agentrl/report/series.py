"""Metrics over training steps, and the statistics of them that diagnoses use.

A step's rollouts share the weights of that step, so the standard errors here take a step as one
observation: that of a mean over W steps is the standard deviation between them, divided by sqrt(W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from agentrl.report.run import Run

REWARD = "critic/score/mean"

MIN_STEPS = 10
"""The fewest steps of a trend. With fewer, noise looks like one."""
MIN_WINDOW, MAX_WINDOW = 5, 20
"""The fewest and the most steps of a mean. Five steps give a standard error; more than 20 would mix
phases of a run."""
Z = 4.0
"""How many standard errors a change must have. With the five steps of the smallest window, 4 occur
by chance in less than one of 100 comparisons; a live run makes many, so each diagnosis asks for a
large change too."""
SOLVED = 0.9
"""The share of the range of rewards above which rows count as solved: then equal rewards, a reward
that does not rise, and small updates are the expected end of a run."""
FAILED = 0.1
"""The share of the range of rewards up to which a rollout counts as failed."""
NOTHING = 0.01
"""The share of the range of rewards up to which a rollout earned nothing."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over training steps, without the steps that lack it."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def window(self) -> int:
        """The number of steps of the first and of the last window: a quarter of the run."""
        return int(np.clip(len(self) // 4, MIN_WINDOW, MAX_WINDOW))

    @property
    def first(self) -> np.ndarray:
        return self.values[: self.window]

    @property
    def last(self) -> np.ndarray:
        return self.values[-self.window :]

    @property
    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last window."""
        return float(self.first.mean()), float(self.last.mean())

    @property
    def means(self) -> np.ndarray:
        """The means of all windows of `window` consecutive steps."""
        return np.lib.stride_tricks.sliding_window_view(self.values, self.window).mean(1)

    def at(self, window: int) -> np.ndarray:
        """The values of the window that begins at an index."""
        return self.values[window : window + self.window]

    def since(self, holds: np.ndarray) -> int:
        """Return the step since which a condition holds in all windows.

        Args:
            holds: for each window of `means`, whether the condition holds.
        """
        broken = np.flatnonzero(~holds)
        start = broken[-1] + 1 if len(broken) else 0
        return int(self.steps[min(start, len(self) - 1)])

    def above(self, limit: float) -> tuple[int, float] | None:
        """Return the step since which all means reach a limit, and the last mean.

        None if the last mean is below the limit, or no window is full.
        """
        if len(self) < MIN_WINDOW or not (holds := self.means >= limit)[-1]:
            return None
        return self.since(holds), float(self.last.mean())


def read_series(run: Run, name: str) -> Series:
    """Return a metric over the training steps of a run; empty if the run lacks it."""
    table = run.metrics
    if name not in table.column_names or REWARD not in table.column_names:
        return Series(np.empty(0, np.int64), np.empty(0))
    values = table.column(name).to_numpy()
    is_training = ~np.isnan(table.column(REWARD).to_numpy().astype(float))
    chosen = is_training & ~np.isnan(values.astype(float))
    return Series(table.column("step").to_numpy()[chosen], values[chosen].astype(float))


def read_filled_series(run: Run, name: str) -> Series:
    """Return a metric whose absence in a step means 0, from the run's first training step on."""
    known, reward = read_series(run, name), read_series(run, REWARD)
    if not len(known):
        return known
    values = dict(zip(known.steps.tolist(), known.values.tolist(), strict=True))
    return Series(reward.steps, np.array([values.get(s, 0.0) for s in reward.steps.tolist()]))


def values_by_step(run: Run, name: str) -> dict[int, float]:
    """Return a metric by step, validations without training included; empty if no step has it."""
    table = run.metrics
    if name not in table.column_names:
        return {}
    pairs = zip(table.column("step").to_pylist(), table.column(name).to_pylist(), strict=True)
    return {step: value for step, value in pairs if value is not None}


def z_score(before: np.ndarray, after: np.ndarray) -> float:
    """Return the difference of two means in standard errors (Welch's statistic)."""
    difference = float(after.mean() - before.mean())
    error = math.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
    if error == 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The smallest and the largest reward of all rollouts."""

    low: float
    high: float

    @property
    def size(self) -> float:
        return self.high - self.low

    def at(self, share: float) -> float:
        """Return the reward that is a share of the range above the smallest one."""
        return self.low + share * (self.high - self.low)

    @property
    def solved(self) -> float:
        """The smallest reward of a solved row."""
        return self.at(SOLVED)

    @property
    def failed(self) -> float:
        """The largest reward of a failed rollout."""
        return self.at(FAILED)


def reward_range(run: Run) -> RewardRange:
    """Return the range of the rewards of a run; 0 to 0 if they are not recorded."""
    low = read_series(run, "critic/score/min").values
    high = read_series(run, "critic/score/max").values
    known = len(low) and len(high)
    return RewardRange(float(low.min()), float(high.max())) if known else RewardRange(0.0, 0.0)


def is_solved(run: Run) -> bool:
    """Return whether the last rewards are nearly the largest ones that the run has seen."""
    rewards, reward = reward_range(run), read_series(run, REWARD)
    return len(reward) > 0 and rewards.size > 0 and reward.last.mean() >= rewards.solved


def has_risen(reward: Series, window: int) -> bool:
    """Return whether the last rewards are significantly above those of a window of steps."""
    return z_score(reward.at(window), reward.last) > 2.0
