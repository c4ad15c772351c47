"""Numbers that describe rollouts, under verl's names where the thing is the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from agentrl.trajectory import Group, Scored, Trajectory, Turn


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min`; nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": sum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


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
    responses = [float(sum(len(x.response_ids) for x in t.segments)) for t in trajectories]
    metrics = {
        **spread("critic/score", [s.reward for s in scored]),
        **spread("response_length", responses),
        **spread("prompt_length", [float(len(t.segments[0].prompt_ids)) for t in trajectories]),
        **spread("num_turns", [float(len(t.turns)) for t in trajectories]),
        **spread("tool_call_counts", [float(_calls(t)) for t in trajectories]),
        "rollout/dropped": float(total - len(scored)),
        "rollout/sampled_tokens": float(sum(t.sampled_tokens for t in trajectories)),
        "rollout/segments": float(sum(len(t.segments) for t in trajectories)) / len(scored),
        "rollout/control_token_attempts": float(
            sum(t.control_token_attempts for t in trajectories)
        ),
        "waste/dead_group_frac": _dead(groups),
        **_per_agent("rollout", scored),
        **_errors(trajectories),
        **_penalized(trajectories),
        **_cached(trajectories),
    }
    for reason, count in sorted(Counter(t.stop_reason for t in trajectories).items()):
        metrics[f"stop/{reason}"] = count / len(scored)
    for source in dict.fromkeys(["outcome", "turn", "tool", *scored[0].rewards]):
        metrics[f"reward/{source}"] = sum(s.rewards.get(source, 0.0) for s in scored) / len(scored)
    for name in sorted({name for s in scored for name in s.metrics}):
        told = [s.metrics[name] for s in scored if name in s.metrics]
        metrics[f"grader/{name}"] = sum(told) / len(told)
    greedy = [g.greedy.reward for g in groups if g.greedy]
    if greedy:
        metrics["reward/greedy"] = sum(greedy) / len(greedy)
    return metrics


def _per_agent(prefix: str, scored: Iterable[Scored]) -> dict[str, float]:
    by_agent: dict[str, list[Scored]] = defaultdict(list)
    for s in scored:
        by_agent[s.trajectory.sample.agent_name].append(s)
    metrics = {}
    for agent, mine in sorted(by_agent.items()):
        metrics[f"{prefix}/{agent}/reward"] = sum(s.reward for s in mine) / len(mine)
        metrics[f"{prefix}/{agent}/tool_call_rate"] = sum(
            _calls(s.trajectory) > 0 for s in mine
        ) / len(mine)
    return metrics


def _calls(trajectory: Trajectory) -> int:
    """Tool calls that ran, right or wrong."""
    return sum(len(t.tool_results) for t in trajectory.turns)


def _errors(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`tool_error/<class>`: the share of tool calls that failed in that way."""
    results = [r for t in trajectories for turn in t.turns for r in turn.tool_results]
    if not results:
        return {}
    classes = Counter(r.error for r in results if r.error)
    return {f"tool_error/{name}": n / len(results) for name, n in sorted(classes.items())}


def _penalized(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of sampled tokens that pay for calls that failed; nothing where none does."""
    paying = sum(
        end - start for t in trajectories for turn in t.turns for start, end, _ in turn.penalties
    )
    sampled = sum(t.sampled_tokens for t in trajectories)
    return {"tool_error/penalized_tokens": paying / sampled} if paying else {}


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


def _dead(groups: Sequence[Group]) -> float:
    """The share of groups whose rewards are exactly equal."""
    if not groups:
        return 0.0
    return sum(len({s.reward for s in g.scored}) <= 1 for g in groups) / len(groups)
