"""Rollouts that are cut by a budget, or lost to errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agentrl.config.sections import BUDGETS
from agentrl.metrics import standard_error
from agentrl.plural import plural
from agentrl.report.diagnoses.advice import advice, budget
from agentrl.report.diagnoses.groups import STOP
from agentrl.report.episodes import Episodes, group_by, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import (
    MIN_WINDOW,
    REWARD,
    read_filled_series,
    read_series,
    reward_range,
)

DROPPED_SHARE = 0.02
"""The share of dropped rollouts that is a warning. The run itself stops at 5 % in one step."""
AGENT_ERRORS = 0.2
"""The share of episodes that end with an error of the agent that is a warning."""


def agent_error(run: Run) -> Iterator[Finding]:
    """An external agent raises where it could return an error to the policy."""
    if errors := read_series(run, f"{STOP}agent_error").above(AGENT_ERRORS):
        start, share = errors
        yield Finding(
            start,
            f"{share:.0%} of the episodes end with an error of the agent: their outcome is 0, or"
            " the reward that the agent had posted (agent.on_error=zero)",
            {"agent_errors": share},
            **advice(run, "agent_error"),
        )


def dropped(run: Run) -> Iterator[Finding]:
    """Infrastructure or code errors lose rollouts."""
    lost = read_series(run, "rollout/dropped")
    rows, rollouts = config_value(run, "data.batch_size"), config_value(run, "rollout.n")
    if not isinstance(rows, int) or not isinstance(rollouts, int):
        return
    losing = lost.above(DROPPED_SHARE * rows * rollouts)
    if losing and np.count_nonzero(lost.last) > len(lost.last) // 2:
        start, number = losing
        share = number / (rows * rollouts)
        yield Finding(
            start,
            f"{share:.1%} of the rollouts are lost to errors of infrastructure or code",
            {"dropped_share": share},
            **advice(run, "dropped"),
        )


TRUNCATED = 0.25
"""The share of truncated rollouts that is a warning, as a mean of the last steps. A tenth is usual
for a policy that still learns to stop."""
TRUNCATED_ERROR = 0.75
"""The share at which the reward is decided by the budget, not by the policy: an error."""
HARD_BUDGETS = ("turn_tokens", "trajectory_tokens", "time")
"""Budgets that end a rollout in the middle of a turn. The others (turns, calls) may be the regular
end of a game, so they count only if such rollouts earn less than the others."""
CUT_LOOP = 0.4
"""The share of truncated rollouts of one agent loop that is a warning. It is larger than
`TRUNCATED`, because loops with long turns are cut more often than others while they learn."""
CUT_CALLS, CUT_ROLLOUTS, CUT_SHARE, CUT_GOOD = 0.95, 50, 0.08, 0.35
"""In the second half of a run, a budget is too small if it cuts 95 % of the rollouts with n or more
tool calls, these are at least 50 and 8 % of all, and the others earn little (a third of the range).
A policy that learned to avoid such calls is seldom cut."""
MANY_CALLS = (1, 2, 3)
"""The numbers n that are tried. With more calls, rollouts that repeat a call would count."""


def truncation(run: Run) -> Iterator[Finding]:
    """A budget ends the rollouts before the policy does."""
    for reason in BUDGETS:
        share = read_filled_series(run, STOP + reason)
        if len(share) < MIN_WINDOW:
            continue
        cut = share.above(TRUNCATED)
        if cut and share.values[-MIN_WINDOW:].mean() >= TRUNCATED:
            yield from _explain_truncation(run, reason, share.window, *cut)
        elif reason in HARD_BUDGETS:
            calls = [*_find_cut_calls(run, reason)]
            yield from calls or _find_cut_loops(run, reason, share.window)


def _explain_truncation(
    run: Run, reason: str, steps: int, start: int, share: float
) -> Iterator[Finding]:
    """Yield a finding for a budget that cuts many rollouts, unless these earn as much as others."""
    episodes = training_episodes(run, steps)
    is_cut = episodes["stop_reason"] == reason
    costs, rewards = _reward_of_cut(episodes, is_cut)
    if costs is False or (costs is None and reason not in HARD_BUDGETS):
        return
    earned = ""
    if rewards:
        earned = (
            f"; their mean reward is {rewards['cut']:.3g}, that of the others"
            f" {rewards['other']:.3g}"
        )
    yield Finding(
        start,
        f"since step {start} the budget {reason!r} cuts {share:.0%} of the rollouts{earned}",
        {"share": share, **rewards},
        **episodes.examples(is_cut, "last"),
        **advice(run, "truncation", "truncation.run", rows="this task", **budget(run, reason)),
        severity="error" if share >= TRUNCATED_ERROR else "warning",
        subject=reason,
    )


def _find_cut_loops(run: Run, reason: str, steps: int) -> Iterator[Finding]:
    """Yield a finding for each agent loop of which a budget cuts many rollouts."""
    episodes = training_episodes(run, steps)
    agents = episodes["agent_name"]
    for agent in filter(None, dict.fromkeys(agents.tolist())):
        own = episodes.where(agents == agent)
        is_cut, played = own["stop_reason"] == reason, own["step"]
        costs, rewards = _reward_of_cut(own, is_cut)
        if is_cut.sum() < CUT_ROLLOUTS or is_cut.mean() < CUT_LOOP or not costs:
            continue
        yield Finding(
            int(played.min()),
            f"in steps {played.min()} to {played.max()} the budget {reason!r} cuts"
            f" {is_cut.mean():.0%} of the rollouts of {agent}; their mean reward is"
            f" {rewards['cut']:.3g}, that of its other rollouts {rewards['other']:.3g}",
            {"share": float(is_cut.mean()), **rewards},
            **own.examples(is_cut, "last"),
            **advice(run, "truncation", rows=f"rows of {agent}", **budget(run, reason)),
            subject=f"{reason} of {agent}",
        )


def _find_cut_calls(run: Run, reason: str) -> Iterator[Finding]:
    """Yield a finding if a budget cuts all rollouts with n or more tool calls.

    Only if the others earn little: otherwise rollouts with so many calls repeat a call.
    """
    episodes = training_episodes(run, max(MIN_WINDOW, len(read_series(run, REWARD)) // 2))
    rewards = reward_range(run)
    if not len(episodes) or rewards.size <= 0:
        return
    reward, calls, played = (episodes[name] for name in ("reward", "tool_calls", "step"))
    is_cut = episodes["stop_reason"] == reason
    for number in MANY_CALLS:
        many = calls >= number
        if many.sum() < max(CUT_ROLLOUTS, CUT_SHARE * len(calls)):
            return
        share, earned = float(is_cut[many].mean()), float(reward[many].mean())
        others = float(reward[~many].mean()) if not many.all() else rewards.low
        if share < CUT_CALLS or earned > rewards.failed or others > rewards.at(CUT_GOOD):
            continue
        yield Finding(
            int(played[many].min()),
            f"in steps {played[many].min()} to {played[many].max()} the budget {reason!r} cuts"
            f" {share:.0%} of the {many.sum()} rollouts with {plural(number, 'tool call')} or more;"
            f" their mean reward is {earned:.3g}, that of all rollouts {reward.mean():.3g}",
            {"share": share, "calls": float(number), "cut": earned},
            **episodes.examples(many & is_cut, "last"),
            **advice(run, "truncation", rows="this task", **budget(run, reason)),
            subject=f"{reason} and calls",
        )
        return


def _reward_of_cut(episodes: Episodes, is_cut: np.ndarray) -> tuple[bool | None, dict[str, float]]:
    """Return whether cut rollouts earn less (None: unknown), and both mean rewards.

    Standard errors are clustered by row. If all rollouts are cut, nothing can be compared.
    """
    if not is_cut.any() or is_cut.all():
        return None, {}
    means, errors = {}, []
    for name, mask in (("cut", is_cut), ("other", ~is_cut)):
        reward = episodes["reward"][mask]
        means[name] = float(reward.mean())
        rows = group_by(episodes["sample_id"][mask], reward.tolist())
        errors.append(standard_error(list(rows.values())))
    error = math.hypot(*errors)
    return None if math.isnan(error) else means["other"] - means["cut"] > 2 * error, means
