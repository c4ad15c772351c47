"""Responses that get longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentrl.report.diagnoses.advice import advice
from agentrl.report.episodes import Episodes, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import (
    MIN_STEPS,
    REWARD,
    Series,
    Z,
    has_risen,
    read_series,
    reward_range,
    z_score,
)

GROWTH = 1.5
"""How many times as long responses must be: half as long again is no noise of lengths."""
MIN_GROWTH = 10
"""The fewest tokens by which they must be longer."""


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The response lengths and rewards of an agent loop, or of all rollouts ("")."""

    agent: str
    size: Series
    reward: Series


def length(run: Run) -> Iterator[Finding]:
    """Responses get longer, of all rollouts or of an agent loop; a warning if they earn no more."""
    episodes, rewards, notes = training_episodes(run), reward_range(run), []
    for lengths in _read_lengths(run, episodes):
        start, reward = _find_growth(lengths), lengths.reward
        if start is None:
            continue
        is_paid = has_risen(reward, start) or bool(
            rewards.size > 0 and reward.last.mean() >= rewards.solved
        )
        finding = _explain_growth(run, episodes, lengths, start, is_paid)
        if is_paid:
            notes.append(finding)
            continue
        yield finding
        if not lengths.agent:
            return  # The findings of single agent loops would repeat it.
    yield from notes[:1]


def _read_lengths(run: Run, episodes: Episodes) -> Iterator[_Lengths]:
    """Yield the lengths of all rollouts, and of each agent loop if there are several."""
    yield _Lengths("", read_series(run, "response_length/mean"), read_series(run, REWARD))
    agents = episodes["agent_name"]
    for agent in sorted(set(agents)) if len(set(agents)) > 1 else ():
        own = episodes.where(agents == agent)
        yield _Lengths(agent, _mean_by_step(own, "sampled_tokens"), _mean_by_step(own, "reward"))


def _mean_by_step(episodes: Episodes, name: str) -> Series:
    """Return the mean of a column over the episodes of each step."""
    values = episodes[name].astype(float)
    known = ~np.isnan(values)
    steps, position = np.unique(episodes["step"][known], return_inverse=True)
    return Series(steps, np.bincount(position, values[known]) / np.bincount(position))


def _find_growth(lengths: _Lengths) -> int | None:
    """Return the first step's index of the window since which responses grew; None if not."""
    size, reward = lengths.size, lengths.reward
    if len(size) < MIN_STEPS or len(size) != len(reward):
        return None
    last = float(size.last.mean())
    # Compare with the best steps, and with the first ones: a run may first learn, then grow.
    for start in (int(reward.means.argmax()), 0):
        before = float(size.at(start).mean())
        limit = max(GROWTH * before, before + MIN_GROWTH)
        if last >= limit and z_score(size.at(start), size.last) >= Z:
            return start
    return None


def _explain_growth(
    run: Run, episodes: Episodes, lengths: _Lengths, start: int, is_paid: bool
) -> Finding:
    """Describe responses that grew since the window that begins at `start`.

    `is_paid`: whether the reward rose as well, or nearly all rollouts succeed.
    """
    agent, size, reward = lengths.agent, lengths.size, lengths.reward
    before, last = float(size.at(start).mean()), float(size.last.mean())
    rewards = float(reward.at(start).mean()), float(reward.last.mean())
    is_late = episodes["step"] >= size.steps[-size.window]
    if agent:
        is_late &= episodes["agent_name"] == agent
    sizes = episodes["sampled_tokens"]
    long = is_late & (sizes >= np.quantile(sizes[is_late], 0.9)) if is_late.any() else is_late
    change = f"the reward went from {rewards[0]:.3g} to {rewards[1]:.3g}"
    if not is_paid:
        change = f"the reward did not rise ({rewards[1] - rewards[0]:+.3g})"
    return Finding(
        size.since(size.means >= (1 + (GROWTH - 1) / 2) * before),
        f"responses{' of ' if agent else ''}{agent} grew from {before:.0f} to {last:.0f} tokens"
        f" since step {size.steps[start]}, and {change}",
        {"before": before, "last": last, "reward_gain": rewards[1] - rewards[0]},
        **episodes.examples(long),
        **advice(run, f"length.{'paid' if is_paid else 'unpaid'}", "length"),
        severity="note" if is_paid else "warning",
        subject=agent,
    )
