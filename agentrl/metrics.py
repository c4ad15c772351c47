"""Numbers that describe rollouts, under verl's names where the thing is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from agentrl.trajectory import Group, Trajectory, Turn


def mean(values: Collection[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


def spread(name: str, values: Collection[float]) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min`; nothing for no values."""
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's rollouts were like.

    Rewards, lengths and turns count rollouts. `rollout/<agent_name>/...` repeats success and the
    share of rollouts that called a tool per loop, because a loop whose tool use dies out hides in
    the mean. `waste/dead_group_frac` counts groups whose rewards are all equal: no signal.
    """
    scored = [s for g in groups for s in g.scored]
    total = len(scored) + sum(g.dropped for g in groups)
    if not scored:
        return {"rollout/dropped": float(total)}
    trajectories = [s.trajectory for s in scored]
    turns = [turn for t in trajectories for turn in t.turns]
    responses = [float(sum(len(x.response_ids) for x in t.segments)) for t in trajectories]
    sampled = float(sum(t.sampled_tokens for t in trajectories))
    forged = float(sum(t.control_token_attempts for t in trajectories))
    paying = sum(end - start for turn in turns for start, end, _ in turn.penalties)
    results = [r for turn in turns for r in turn.tool_results]
    metrics = {
        **spread("critic/score", [s.reward for s in scored]),
        **spread("response_length", responses),
        **spread("prompt_length", [float(len(t.segments[0].prompt_ids)) for t in trajectories]),
        **spread("num_turns", [float(len(t.turns)) for t in trajectories]),
        **spread("tool_call_counts", [float(count_calls(t)) for t in trajectories]),
        "rollout/dropped": float(total - len(scored)),
        "rollout/sampled_tokens": sampled,
        "rollout/segments": mean([len(t.segments) for t in trajectories]),
        "rollout/control_token_attempts": forged,
        "waste/dead_group_frac": mean([len({s.reward for s in g.scored}) <= 1 for g in groups]),
    }
    for agent in sorted({t.sample.agent_name for t in trajectories}):
        mine = [s for s in scored if s.trajectory.sample.agent_name == agent]
        metrics[f"rollout/{agent}/reward"] = mean([s.reward for s in mine])
        metrics[f"rollout/{agent}/tool_call_rate"] = mean(
            [count_calls(s.trajectory) > 0 for s in mine]
        )
    # Of all tool calls, the share that failed in each way.
    for name, count in sorted(Counter(r.error for r in results if r.error).items()):
        metrics[f"tool_error/{name}"] = count / len(results)
    if paying:
        metrics["tool_error/penalized_tokens"] = paying / sampled
    metrics |= _cached(trajectories)
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
    """Tool calls that ran, right or wrong."""
    return sum(len(t.tool_results) for t in trajectory.turns)


def _cached(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of prompt tokens that the engine had cached.

    Of all turns, and of all but each conversation's first, since those have mostly been seen.
    """
    later: list[Turn] = []
    for t in trajectories:
        begun: set[int] = set()
        later += [turn for turn in t.turns if turn.thread in begun or begun.add(turn.thread)]
    name = "rollout/cached_token_ratio"
    return {
        **_ratio(name, [turn for t in trajectories for turn in t.turns]),
        **_ratio(f"{name}/later_turns", later),
    }


def _ratio(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    """Nothing where the engine reported no prompts."""
    total = sum(turn.prompt_tokens for turn in turns)
    return {name: sum(turn.cached_tokens for turn in turns) / total} if total else {}
