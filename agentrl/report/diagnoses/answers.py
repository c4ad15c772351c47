"""Answers and ground truths: right and wrong answers that the reward does not tell apart."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl.config.sections import BUDGETS
from agentrl.metrics import is_close
from agentrl.report.diagnoses.advice import advice
from agentrl.report.episodes import Episodes, group_by, shorten, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import (
    MAX_WINDOW,
    MIN_WINDOW,
    NOTHING,
    REWARD,
    read_series,
    reward_range,
)

MIXED_GROUPS = 12
"""The fewest groups with right and wrong answers that do not all have a high reward. In fewer, all
rewards may be equal by chance."""
EQUAL_SHARE = 0.8
"""The share of these groups with equal rewards from which on it is reported. If a reward reads the
answer, no such group has equal rewards."""


def equal_rewards(run: Run) -> Iterator[Finding]:
    """Right and wrong answers of a group have equal rewards, but rewards differ between groups."""
    episodes, solved = training_episodes(run, MAX_WINDOW), reward_range(run).solved
    mixed, reward = _find_mixed_groups(episodes), episodes["reward"]
    for name in ("agent_name", "data_source"):
        names = episodes[name]
        by_subset = group_by((names[group[0]] for group in mixed), mixed)
        texts, shares, shown = [], [], []
        for subset, groups in sorted(by_subset.items()):
            # A right answer in another notation looks wrong here. Then the group is a solved one.
            failing = [group for group in groups if reward[group].min() < solved]
            equal = [g for g in failing if is_close(reward[g].min(), reward[g].max())]
            if len(failing) < MIXED_GROUPS or len(equal) < EQUAL_SHARE * len(failing):
                continue
            # If no group has a high reward, the reward may be for something else than the answer.
            if len(failing) == len(groups):
                continue
            shares.append(len(equal) / len(failing))
            texts.append(f"in {shares[-1]:.0%} of the {len(failing)} groups of {subset}")
            shown += equal
        if texts:
            mask = np.zeros(len(episodes), bool)
            mask[np.concatenate(shown)] = True
            yield Finding(
                int(episodes["step"].min()),
                "right and wrong answers to the same row have the same reward"
                f" {' and '.join(texts)} that contain both and are not solved: no learning signal",
                {"share": min(shares), "groups": float(len(shown))},
                **episodes.examples(mask, "last"),
                **advice(run, "equal_rewards"),
            )
            return


def _find_mixed_groups(episodes: Episodes) -> list[list[int]]:
    """Return the groups with right and wrong answers, each as the indexes of its episodes."""
    right = episodes.answered(right=True)
    is_known = (right | episodes.answered(right=False)) & ~np.isnan(episodes["reward"])
    indexes = np.flatnonzero(is_known)
    groups = group_by(episodes.groups[indexes], indexes.tolist())
    return [group for group in groups.values() if 0 < right[group].sum() < len(group)]


MIN_REJECTED_GROUPS, ALL_REJECTED = 8, 0.9
"""The fewest groups whose right answers all fail, and their share of the groups in which right
answers fail. If some right answers of a group fail and others do not, their form differs, or they
lack something else, such as a tool call: that is for the policy to learn."""
MIN_ACCEPTED, MAX_WRONG_ACCEPTED = 0.2, 0.05
"""The reward is for the answer if it accepts at least so many right answers, and no more than so
many wrong ones. The others are other notations of right answers."""


def rejected_answers(run: Run) -> Iterator[Finding]:
    """Rollouts that end with the ground truth fail, as if their answers were wrong."""
    steps, rewards = len(read_series(run, REWARD)), reward_range(run)
    episodes = training_episodes(run, max(MIN_WINDOW, steps // 2))
    if not len(episodes) or (rewards.size <= 0 and rewards.low > 0):
        return
    reward = episodes["reward"]
    has_ended = ~episodes["masked"] & ~np.isin(episodes["stop_reason"], [*BUDGETS])
    right, wrong = (episodes.answered(is_right) & has_ended for is_right in (True, False))
    rejected = right & (reward <= rewards.at(NOTHING))
    if not _are_groups_rejected(episodes.groups[right], rejected[right]):
        return
    if rewards.size > 0:
        is_accepted = reward >= rewards.solved
        accepted_wrong = is_accepted[wrong].mean() if wrong.any() else 0.0
        if is_accepted[right].mean() < MIN_ACCEPTED or accepted_wrong > MAX_WRONG_ACCEPTED:
            return  # the reward is for something else than the answer
    last = int(np.flatnonzero(rejected)[-1])
    answer, truth = (shorten(episodes[name][last]) for name in ("answer", "ground_truth"))
    share = float(rejected.sum() / right.sum())
    yield Finding(
        int(episodes["step"].min()),
        f"{share:.0%} of the rollouts that end with the ground truth ({rejected.sum()} of"
        f" {right.sum()}) fail: the answer {answer!r} to the ground truth {truth!r} has the reward"
        f" {reward[last]:.3g}",
        {"share": share, "rollouts": float(rejected.sum())},
        **episodes.examples(rejected, "last"),
        **advice(run, "rejected_answers"),
        severity="error" if is_close(rewards.low, rewards.high) else "warning",
    )


def _are_groups_rejected(groups: np.ndarray, rejected: np.ndarray) -> bool:
    """Return whether right answers of most groups fail together.

    Args:
        groups: the group of each right answer.
        rejected: whether it failed.
    """
    several = [g for g in group_by(groups, rejected.tolist()).values() if any(g) and len(g) > 1]
    every = sum(map(all, several))
    return every >= MIN_REJECTED_GROUPS and every >= ALL_REJECTED * len(several)
