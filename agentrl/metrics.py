"""Metrics of rollouts. A metric that verl also has keeps verl's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from agentrl.trajectory import Group, Trajectory, Turn


def mean(values: Collection[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


def summarize(name: str, values: Collection[float]) -> dict[str, float]:
    """Return `name/mean`, `name/max` and `name/min`, or nothing if there are no values."""
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a step's rollouts.

    Means of rewards, lengths and turns are over rollouts. `rollout/<agent_name>/...` repeats the
    reward and the share of rollouts with tool calls for each loop, because the mean hides a loop
    that stops calling tools. `waste/dead_group_frac` is the share of groups whose rewards are all
    equal: they have no learning signal.
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
        "waste/dead_group_frac": mean([len({s.reward for s in g.scored}) <= 1 for g in groups]),
    }
    for agent in sorted({t.sample.agent_name for t in trajectories}):
        of_agent = [s for s in scored if s.trajectory.sample.agent_name == agent]
        calls_tools = [count_calls(s.trajectory) > 0 for s in of_agent]
        metrics[f"rollout/{agent}/reward"] = mean([s.reward for s in of_agent])
        metrics[f"rollout/{agent}/tool_call_rate"] = mean(calls_tools)
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
    for name in sorted({name for s in scored for name in s.metrics}):
        metrics[f"grader/{name}"] = mean([s.metrics[name] for s in scored if name in s.metrics])
    if greedy := [g.greedy.reward for g in groups if g.greedy]:
        metrics["reward/greedy"] = mean(greedy)
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
