"""Tools: calls that fail, calls that are no longer made, and calls that are repeated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np

from agentrl.report.diagnoses.advice import advice, join
from agentrl.report.diagnoses.failures import explain_failures
from agentrl.report.episodes import Episodes, correlation_within_rows, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import (
    MIN_STEPS,
    MIN_WINDOW,
    REWARD,
    Series,
    Z,
    has_risen,
    is_solved,
    read_filled_series,
    read_series,
    reward_range,
    values_by_step,
    z_score,
)

# --- calls that fail -----------------------------------------------------------------------------

BROKEN_CALLS = {"timeout": 0.03, "crash": 0.03}
"""The share of calls with such an error that is a warning. A working tool has none."""
WRONG_CALLS = {"bad_call": 0.5, "schema": 0.5, "unknown_tool": 0.5, "tool_error": 0.5}
"""The share of calls that the policy writes wrongly, or that the tool refuses. A policy that learns
a format begins with many, so only a majority in the last steps counts."""
MIN_BROKEN_CALLS = 5
"""A tool is broken if it had at least this many calls and every one crashed or timed out."""


def tool_errors(run: Run) -> Iterator[Finding]:
    """Tool calls fail, or every call of one tool does."""
    yield from _find_broken_tools(run)
    for error, limit in (BROKEN_CALLS | WRONG_CALLS).items():
        share = read_filled_series(run, f"tool_error/{error}")
        if failing := share.above(limit):
            episodes = training_episodes(run, share.window)
            yield _explain_failed_calls(run, episodes, error, *failing)


def _find_broken_tools(run: Run) -> Iterator[Finding]:
    """Yield a finding for each tool whose calls all crash or time out."""
    episodes = training_episodes(run)
    broken, working = (
        [tools or [] for tools in episodes.table.column(name).to_pylist()]
        for name in ("broken_tools", "working_tools")
    )
    works = set(chain.from_iterable(working))
    for tool, calls in Counter(chain.from_iterable(broken)).items():
        if calls < MIN_BROKEN_CALLS or tool in works:
            continue
        is_shown = np.array([tool in tools for tools in broken])
        yield Finding(
            int(episodes["step"][is_shown].min()),
            f"every valid call of the tool {tool!r} crashes or times out ({calls} of {calls})",
            {"calls": float(calls)},
            **episodes.examples(is_shown, "failed_turn"),
            **advice(run, "tool_errors.tool", tool=tool),
            severity="error",
            subject=tool,
        )


def _explain_failed_calls(
    run: Run, episodes: Episodes, error: str, start: int, share: float
) -> Finding:
    """Describe a kind of error that a share of the calls has since a step."""
    is_broken = error in BROKEN_CALLS
    # A policy that has solved its rows earns its rewards without these calls.
    is_harmless = not is_broken and is_solved(run)
    return Finding(
        start,
        f"since step {start} {share:.0%} of the tool calls fail ({error})",
        {"share": share},
        **episodes.examples(episodes["failed_calls"] > 0, "failed_turn"),
        **advice(run, f"tool_errors.{'broken' if is_broken else 'wrong'}"),
        severity="note" if is_harmless else "warning",
        subject=error,
    )


# --- calls that are no longer made ---------------------------------------------------------------

TOOL_DROP = 0.5
"""The share of its best rate of calls below which a loop's tool use dies out."""
FAST = 2
"""The first steps, whose mean counts as a rate before training."""
TOOL_RATE = 0.3
"""The smallest best rate: below it the policy never used its tools regularly."""
NO_TOOLS = 0.02
"""The rate of calls that counts as none."""
LENGTH_PENALTY = -0.3
"""The correlation of reward and length within rows at which a penalty explains the lost calls."""
GONE = 0.1
"""The largest rate of each of the last steps with which tool use has died out, however much the
rates before varied."""


def tool_use(run: Run) -> Iterator[Finding]:
    """The policy stops calling tools, or never calls them."""
    episodes = training_episodes(run)
    with_tools = set(episodes["agent_name"][episodes["has_tools"]])
    for name in run.metrics.column_names:
        match, rate = re.fullmatch(r"rollout/(.+)/tool_call_rate", name), read_series(run, name)
        if not match or len(rate) < MIN_STEPS:
            continue
        agent = match[1]
        if decline := _find_decline(rate):
            yield _explain_decline(run, episodes, agent, rate, *decline)
        elif (
            rate.means.max() <= NO_TOOLS
            and agent in with_tools
            and not has_risen(read_series(run, REWARD), 0)
        ):
            yield _explain_no_calls(run, episodes, agent, rate)


def _find_decline(rate: Series) -> tuple[int, float, int] | None:
    """Return the decline of a rate of tool calls to half of its best value; None if it has none.

    Returns:
        The index of the best window, its rate, and the step since which the rate is low.
    """
    means, last = rate.means, float(rate.last.mean())
    best = int(means.argmax())
    before = rate.at(best)
    # A fast fall is over before a window is full.
    if rate.values[:FAST].mean() > before.mean():
        best, before = 0, rate.values[:FAST]
    best_rate = float(before.mean())
    if best_rate < TOOL_RATE or last > TOOL_DROP * best_rate:
        return None
    is_gone = rate.last.max() <= GONE and (rate.values >= TOOL_RATE).sum() >= FAST
    if z_score(before, rate.last) > -Z and not is_gone:
        return None
    return best, best_rate, rate.since(means <= TOOL_DROP * best_rate)


def _explain_decline(
    run: Run, episodes: Episodes, agent: str, rate: Series, best: int, best_rate: float, start: int
) -> Finding:
    """Describe an agent loop that stops calling tools, with what its failed calls had in common."""
    own, has_called = episodes["agent_name"] == agent, episodes["tool_calls"] > 0
    last = float(rate.last.mean())
    earned, is_better = "", False
    reward = read_series(run, f"rollout/{agent}/reward")
    if len(reward) == len(rate):
        is_better = z_score(reward.at(best), reward.last) > 3.0
        earned = f"; its reward went from {reward.at(best).mean():.3g} to {reward.last.mean():.3g}"
    is_before = has_called & (episodes["step"] <= start)
    failed = own & is_before & (episodes["reward"] <= reward_range(run).failed)
    common = explain_failures(run, episodes.where(failed))
    if common.text:
        common.text = f"; of its {failed.sum()} failed rollouts with calls before that{common.text}"
    # A fast fall is over in the first step; its rewards are not enough.
    end = max(start, int(rate.steps[min(rate.window, len(rate) - 1)]))
    early = episodes.where(own & (episodes["step"] <= end))
    correlation = correlation_within_rows(early, "sampled_tokens")
    reason = f"tool_use.{'better' if is_better else 'worse'}"
    causes = [*common.advice, advice(run, reason, "tool_use.penalty")]
    if correlation <= LENGTH_PENALTY:  # The penalty is the likeliest cause.
        common.evidence["length_correlation"] = correlation
        common.text += f"; within a row, longer rollouts earn less (correlation {correlation:.2f})"
        causes = [advice(run, "tool_use.penalty"), *common.advice]
        causes.append(advice(run, reason, "tool_use.rescore"))
    return Finding(
        start,
        f"{agent} stops calling tools: {best_rate:.0%} of its rollouts called one around"
        f" step {rate.steps[best]}, {last:.0%} in the last {rate.window} steps{earned}"
        f"{common.text}",
        {"best_rate": best_rate, "last_rate": last, **common.evidence},
        **episodes.examples(own & ~has_called),
        **join(*causes, advice(run, "tool_use")),
        severity="audit" if is_better else "warning",
        subject=agent,
    )


def _explain_no_calls(run: Run, episodes: Episodes, agent: str, rate: Series) -> Finding:
    own = episodes["agent_name"] == agent
    return Finding(
        int(rate.steps[0]),
        f"{agent} never calls the tools of its rows ({rate.values.mean():.1%} of the rollouts)",
        {"last_rate": float(rate.last.mean())},
        **episodes.examples(own & (episodes["tool_calls"] == 0)),
        **advice(run, "tool_use.format", "tool_use"),
        subject=agent,
    )


# --- what the tools are worth --------------------------------------------------------------------

MIN_WORTH = 0.05
"""The reward that tools must add, as a share of the range of rewards, to be worth their calls."""


def tool_worth(run: Run) -> Iterator[Finding]:
    """The policy stops calling tools that help, or calls tools that do not.

    `val.without_tools` measures it: the validation with tools minus the one without.
    """
    name = "val/tool_dependence"
    worth, low, high, calls = (
        values_by_step(run, name + part) for part in ("", "/low", "/high", "/calls")
    )
    if not low:
        return
    last = max(low)
    helped = [step for step in low if low[step] > 0 and calls[step] >= TOOL_RATE]
    best = max(helped, key=calls.__getitem__, default=last)
    is_lost = calls[last] <= TOOL_DROP * calls[best] and bool(helped)
    at = best if is_lost else last
    if is_lost:
        text = f"stops calling tools that help: {calls[best]:.0%} of its rollouts called one"
    elif calls[last] >= TOOL_RATE and high[last] < MIN_WORTH * reward_range(run).size:
        text = f"calls tools that do not help: {calls[last]:.0%} of its rollouts call one"
    else:
        return
    then = f"; {calls[last]:.0%} in the validation of step {last}" if is_lost else ""
    yield Finding(
        last,
        f"the policy {text} in the validation of step {at}, where it earns {worth[at]:+.3g} by"
        f" them (95 %: {low[at]:+.3g} to {high[at]:+.3g}){then}",
        {"tool_dependence": worth[at], "calls": calls[at], "last_calls": calls[last]},
        **advice(run, f"tool_worth.{'lost' if is_lost else 'useless'}"),
    )


# --- calls that are repeated ---------------------------------------------------------------------

REPEATED = 0.25
"""The share of calls that repeat an earlier call of the conversation with the same result. One
repetition after a mistake is normal, so a quarter of all calls is not reached by it."""
MIN_CALLS = 50
"""The fewest calls of the last steps."""


def repeated_calls(run: Run) -> Iterator[Finding]:
    """The policy makes the same call again and gets the same result."""
    episodes = training_episodes(run)
    steps, position = np.unique(episodes["step"], return_inverse=True)
    if len(steps) < MIN_WINDOW:
        return
    calls, again = (
        np.bincount(position, episodes[name]) for name in ("tool_calls", "repeated_calls")
    )
    share = Series(steps, again / np.maximum(calls, 1))
    total = calls[-share.window :].sum()
    mean = float(again[-share.window :].sum() / max(total, 1))
    repeating = share.above(REPEATED)
    if total < MIN_CALLS or mean < REPEATED or not repeating:
        return
    start, _ = repeating
    is_last = position >= len(steps) - share.window
    repeats = is_last & (episodes["repeated_calls"] > 0)
    evidence = {"share": mean, "rollouts": float(repeats[is_last].mean())}
    causes = ["repeated_calls.unread", "repeated_calls.paid"]
    compared = ""
    if repeats.any() and not repeats[is_last].all():
        with_repeats, without = (
            float(episodes["reward"][mask].mean()) for mask in (repeats, is_last & ~repeats)
        )
        evidence |= {"reward_with": with_repeats, "reward_without": without}
        compared = f"; such rollouts earn {with_repeats:.3g}, the others {without:.3g}"
        if with_repeats > without:
            causes.reverse()
    yield Finding(
        start,
        f"since step {start} {mean:.0%} of the tool calls repeat an earlier call of the"
        f" conversation and get the same result{compared}",
        evidence,
        **episodes.examples(repeats, "repeated_turn"),
        **advice(run, *causes, "repeated_calls"),
    )
