"""Metrics of rollouts. A metric that verl also has keeps verl's name."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from agentrl.trajectory import Group, Scored, Trajectory, Turn

DEAD_STEP = "waste/dead_step"
"""The metric: 1 for a step whose tokens have no advantage from the rewards, else 0."""
DEAD_GROUPS = "waste/dead_group_frac"
"""The metric: the share of groups whose rewards are all equal."""


def mean(values: Collection[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


def standard_error(values: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean over all values, clustered by row.

    The rollouts of a row have its difficulty in common, so they are not independent. With the sum
    d_g of (value - mean) over row g, G rows and N values, the standard error is

        sqrt(G / (G - 1) * sum over g of d_g^2) / N

    (the cluster-robust variance of a mean: Miller, "Adding Error Bars to Evals", arXiv:2411.00640,
    section 2.2, with the factor G / (G - 1) for few clusters of Cameron and Miller, 2015, eq. 12).
    With one value per row it is the usual s / sqrt(G). It covers the choice of the rows and the
    sampling of the rollouts.

    Args:
        values: for each row, the values of its rollouts; rows without values are left out.

    Returns:
        NaN for fewer than two rows.
    """
    rows = [row for row in values if row]
    if len(rows) < 2:
        return math.nan
    n = sum(map(len, rows))
    center = math.fsum(x for row in rows for x in row) / n
    squares = math.fsum(math.fsum(x - center for x in row) ** 2 for row in rows)
    return math.sqrt(len(rows) / (len(rows) - 1) * squares) / n


def t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution.

    It inverts the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4, to 12 digits.

    Args:
        p: the probability, between 0.5 and 1 (0.975 for a two-sided interval of 95 %).
        degrees: degrees of freedom, at least 1.
    """
    # With t = sqrt(degrees) * tan(angle), the probability of |T| <= t is a sum in cos(angle).
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_between(angle, degrees) < 2 * p - 1 else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _t_between(angle: float, degrees: int) -> float:
    """Return P(|T| <= sqrt(degrees) * tan(angle))."""
    odd = degrees % 2
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


def summarize(name: str, values: Collection[float]) -> dict[str, float]:
    """Return `name/mean`, `name/max` and `name/min`, or nothing if there are no values."""
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def is_close(a: Any, b: Any) -> Any:
    """Return whether rewards are equal up to rounding: at most 1e-6 apart, relative to their mean.

    So the rounding of a sum makes no difference, such as in 0.1 + 0.2 + 0.3 in another order.
    Values that differ by at most 1e-12 are equal, too: 0.1 + 0.2 - 0.3 is 5.6e-17 and must equal 0,
    from which its relative difference is large. So all rewards of a scale below 1e-12 are equal.

    Args:
        a: a number, an array or a tensor.
        b: the same; the order does not matter.
    """
    return abs(a - b) <= 0.5e-6 * (abs(a) + abs(b)) + 1e-12


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a step's rollouts.

    Means of rewards, lengths and turns are over rollouts. `rollout/<agent_name>/...` repeats the
    reward and the share of rollouts with tool calls for each loop, because the mean hides a loop
    that stops calling tools. `waste/dead_group_frac` is the share of groups whose rewards are all
    equal (`is_close`): they have no learning signal.
    """
    scored = [s for g in groups for s in g.scored]
    total = len(scored) + sum(g.dropped for g in groups)
    if not scored:
        return {"rollout/dropped": float(total)}
    trajectories = [s.trajectory for s in scored]
    turns = [turn for t in trajectories for turn in t.turns]
    responses = [float(sum(len(x.response_ids) for x in t.segments)) for t in trajectories]
    sampled = float(sum(t.sampled_tokens for t in trajectories))
    control_token_attempts = float(sum(t.control_token_attempts for t in trajectories))
    penalized = sum(end - start for turn in turns for start, end, _ in turn.penalties)
    results = [r for turn in turns for r in turn.tool_results]
    rewards = [[s.reward for s in group.scored] for group in groups]
    metrics = {
        **summarize("critic/score", [s.reward for s in scored]),
        **summarize("response_length", responses),
        **summarize("prompt_length", [float(len(t.segments[0].prompt_ids)) for t in trajectories]),
        **summarize("num_turns", [float(len(t.turns)) for t in trajectories]),
        **summarize("tool_call_counts", [float(count_calls(t)) for t in trajectories]),
        "rollout/dropped": float(total - len(scored)),
        "rollout/sampled_tokens": sampled,
        "rollout/segments": mean([len(t.segments) for t in trajectories]),
        "rollout/control_token_attempts": control_token_attempts,
        DEAD_GROUPS: mean([not r or is_close(min(r), max(r)) for r in rewards]),
    }
    for name in sorted({name for t in trajectories for name in t.counts}):
        metrics[name] = float(sum(t.counts.get(name, 0) for t in trajectories))
    for agent in sorted({t.sample.agent_name for t in trajectories}):
        of_agent = [s for s in scored if s.trajectory.sample.agent_name == agent]
        calls_tools = [count_calls(s.trajectory) > 0 for s in of_agent]
        metrics[f"rollout/{agent}/reward"] = mean([s.reward for s in of_agent])
        metrics[f"rollout/{agent}/tool_call_rate"] = mean(calls_tools)
    metrics |= _episode_seconds(trajectories)
    # The share of tool calls with each kind of error.
    for error, count in sorted(Counter(r.error for r in results if r.error).items()):
        metrics[f"tool_error/{error}"] = count / len(results)
    if penalized:  # the share of sampled tokens that belong to failed calls with a penalty
        metrics["tool_error/penalized_tokens"] = penalized / sampled
    metrics |= _cache_ratios(trajectories)
    for reason, count in sorted(Counter(t.stop_reason for t in trajectories).items()):
        metrics[f"stop/{reason}"] = count / len(scored)
    for source in dict.fromkeys(["outcome", "turn", "tool", *scored[0].rewards]):
        metrics[f"reward/{source}"] = mean([s.rewards.get(source, 0.0) for s in scored])
    metrics |= grader_metrics(scored)
    if greedy := [g.greedy.reward for g in groups if g.greedy]:
        metrics["reward/greedy"] = mean(greedy)
    return metrics


def grader_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Return `grader/NAME`: the means of the other numbers that reward functions returned."""
    return {
        f"grader/{name}": mean([s.metrics[name] for s in scored if name in s.metrics])
        for name in sorted({name for s in scored for name in s.metrics})
    }


def _episode_seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the seconds that episodes spent on each thing, by the name of the `Span`."""
    seconds = [defaultdict[str, float](float) for _ in trajectories]
    for trajectory, sums in zip(trajectories, seconds, strict=True):
        for span in trajectory.spans:
            sums[span.name] += span.end - span.start
    verls_names = {"generate": "generate_sequences", "tools": "tool_calls"}
    metrics = {}
    for name in sorted({name for sums in seconds for name in sums}):
        prefix = f"timing_s/agent_loop/{verls_names.get(name, name)}"
        metrics |= summarize(prefix, [sums[name] for sums in seconds])
    return metrics


def count_calls(trajectory: Trajectory) -> int:
    """Return the number of tool calls that got a result, errors included."""
    return sum(len(t.tool_results) for t in trajectory.turns)


def _cache_ratios(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of prompt tokens that were in the engine's prefix cache.

    There are two shares: of all turns, and of all turns except the first of each conversation. The
    prompt of a later turn repeats earlier tokens, so most of its tokens should be in the cache.
    """
    later_turns: list[Turn] = []
    for t in trajectories:
        conversations: set[int] = set()
        for turn in t.turns:
            if turn.thread in conversations:
                later_turns.append(turn)
            conversations.add(turn.thread)
    name = "rollout/cached_token_ratio"
    return {
        **_ratio(name, [turn for t in trajectories for turn in t.turns]),
        **_ratio(f"{name}/later_turns", later_turns),
    }


def _ratio(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    """Return the share of cached prompt tokens, or nothing if the engine does not report it."""
    total = sum(turn.prompt_tokens for turn in turns)
    return {name: sum(turn.cached_tokens for turn in turns) / total} if total else {}
