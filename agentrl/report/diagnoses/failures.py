"""Rollouts that fail: rows that never earn anything, and what failed rollouts have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.config.sections import BUDGETS
from agentrl.report.diagnoses.advice import advice, budget, join
from agentrl.report.episodes import Episodes, shorten, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import MIN_WINDOW, NOTHING, reward_range

UNREWARDED_ROLLOUTS, UNREWARDED_GROUPS = 100, 10
"""The fewest rollouts and groups of rows that never earn. If a policy succeeded in one of 30
rollouts, all of 100 would fail in 3 % of the cases."""
UNREWARDED = 0.99
"""The share of rollouts that fail. Less than all, because a guess may be right by chance."""
RIGHT = 0.2
"""The share of failed rollouts with the right answer above which the reward is at fault."""
CUT = 0.25
"""The share of failed rollouts that a budget cuts above which the budget is a likely cause."""
BROKEN = 0.5
"""The share of failed rollouts with a failed tool call above which tools are a likely cause."""
MIN_FAILED = 5
"""The fewest failed rollouts that are compared with each other."""


def unrewarded(run: Run) -> Iterator[Finding]:
    """No rollout of an agent loop or a data source has earned anything; others' rollouts have."""
    episodes, rewards = training_episodes(run), reward_range(run)
    if not len(episodes) or rewards.size <= 0:
        return
    reward = episodes["reward"]
    failed = reward <= rewards.at(NOTHING)
    labels, mask = _find_unrewarded(episodes, failed)
    number, groups = int(mask.sum()), set(episodes.groups[mask])
    if number < UNREWARDED_ROLLOUTS or len(groups) < UNREWARDED_GROUPS or mask.all():
        return
    steps, others = episodes["step"][mask], float(reward[~mask].mean())
    common = explain_failures(run, episodes.where(mask))
    yield Finding(
        int(steps.min()),
        f"{int((~failed[mask]).sum()) or 'none'} of {number} rollouts of {' and '.join(labels)}"
        f" earned more than the smallest reward ({rewards.low:.3g}) in steps {steps.min()} to"
        f" {steps.max()}{common.text}; the other rows earn {others:.3g}",
        {"rollouts": float(number), "others": others, **common.evidence},
        **episodes.examples(mask),
        **join(*common.advice, advice(run, "unrewarded")),
        severity="error" if common.evidence.get("right", 0.0) >= RIGHT else "warning",
    )


def _find_unrewarded(episodes: Episodes, failed: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the agent loops and data sources that always fail, and the mask of their episodes.

    If neither all rows of a loop nor all rows of a data source fail, the two are named together
    ("tool_agent with gsm8k").
    """
    agents, sources = episodes["agent_name"], episodes["data_source"]
    labels, mask = [], np.zeros(len(failed), bool)
    for names in (agents, sources, agents + " with " + sources):
        for name in dict.fromkeys(names[~mask].tolist()):
            own = names == name
            if own.sum() >= MIN_WINDOW and failed[own].mean() >= UNREWARDED:
                labels.append(name or "rows without data_source")
                mask |= own
    return labels, mask


@dataclass(slots=True)
class Failures:
    """What failed rollouts have in common."""

    text: str = ""
    """A clause for each of it: ", a tool call fails in 60%"."""
    evidence: dict[str, float] = field(default_factory=dict)
    advice: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, share: float, clause: str, advice: dict[str, Any]) -> None:
        self.evidence[name] = share
        self.text += f", {clause}"
        self.advice.append(advice)


def explain_failures(run: Run, episodes: Episodes) -> Failures:
    """Return what failed rollouts have in common: right answers, a budget, failed tool calls."""
    common = Failures()
    if len(episodes) < MIN_FAILED:
        return common
    right = episodes.where(episodes.answered(right=True))
    compared = len(right) + int(episodes.answered(right=False).sum())
    if compared and len(right) >= RIGHT * compared:
        share = len(right) / compared
        answer, truth = (shorten(right[name][-1]) for name in ("answer", "ground_truth"))
        common.add(
            "right",
            share,
            f"{share:.0%} of them end with the ground truth (the answer {answer!r}, the ground"
            f" truth {truth!r})",
            advice(run, "failures.right"),
        )
    reasons = Counter(episodes["stop_reason"].tolist())
    for reason in BUDGETS:
        if reasons[reason] >= CUT * len(episodes):
            share = reasons[reason] / len(episodes)
            cause = advice(run, "failures.budget", **budget(run, reason))
            common.add(f"cut by {reason}", share, f"the budget {reason!r} cuts {share:.0%}", cause)
    broken = float((episodes["failed_calls"] > 0).mean())
    if broken >= BROKEN:
        clause = f"a tool call fails in {broken:.0%}"
        common.add("failed calls", broken, clause, advice(run, "failures.calls"))
    return common
