"""Groups without a learning signal: all their rewards are equal, so no rollout has an advantage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa

from agentrl.config.sections import BUDGETS
from agentrl.metrics import DEAD_GROUPS, DEAD_STEP
from agentrl.plural import plural
from agentrl.report.diagnoses.advice import advice
from agentrl.report.episodes import Episodes, group_by, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import (
    MIN_STEPS,
    MIN_WINDOW,
    REWARD,
    Series,
    is_solved,
    read_series,
    reward_range,
)

MAX_DEAD_STEPS = 3
"""The number of dead steps in a row that is an error. With small batches one or two occur by
chance."""
DEAD_SHARE = 0.8
"""The share of dead groups that is a warning, as a mean of the last steps. With a success rate of
5 % and 8 rollouts, 66 % of the groups are dead, and such a run still learns."""
FAILING_SHARE = 0.2
"""The share of groups whose rollouts all fail that makes dead groups a problem. Otherwise most of
them are solved."""
FAILING_GROUPS, MIN_GROUPS, MIN_GROUP = 0.5, 20, 4
"""The share of groups without a success, and the fewest groups, at which most rows are too hard if
the policy is good at the others: then most of the rollouts are wasted. Groups have at least four
rollouts: of two, half succeed in each group with a success."""
GOOD = 0.5
"""The mean reward of a policy that is good at rows, as a share of the range."""
STOP = "stop/"


def dead_groups(run: Run) -> Iterator[Finding]:
    """All rewards of a group are equal, so no rollout has an advantage.

    A step is dead if no token has an advantage from the rewards: the budget policy masks all its
    rollouts, or all rewards of every group are equal. Then the policy does not change, or only a KL
    or an entropy term moves it.
    """
    dead, groups = read_series(run, DEAD_STEP), read_series(run, DEAD_GROUPS)
    stretch = _longest_dead_stretch(dead)
    if len(stretch) >= MAX_DEAD_STEPS and not is_solved(run):
        yield _explain_dead_steps(run, stretch[0], stretch[-1], dead)
    elif config_value(run, "teacher.model"):  # It teaches in all groups.
        return
    elif len(groups) >= MIN_STEPS and config_value(run, "rollout.n") != 1:
        if lasting := groups.above(DEAD_SHARE):
            yield _explain_dead_groups(run, groups, *lasting)
        else:
            yield from _find_failing_rows(run, max(groups.window, len(groups) // 2))


def _longest_dead_stretch(dead: Series) -> list[int]:
    """Return the most dead steps in a row, the last ones if there are several such stretches."""
    steps = zip(dead.steps.tolist(), dead.values.tolist(), strict=True)
    stretches = [
        [step for step, _ in part]
        for is_dead, part in groupby(steps, key=lambda pair: bool(pair[1]))
        if is_dead
    ]
    return max(reversed(stretches), key=len, default=[])


def _explain_dead_groups(run: Run, groups: Series, start: int, share: float) -> Finding:
    """Describe groups that are dead because rollouts fail, or because nearly all succeed."""
    reward, low = float(read_series(run, REWARD).last.mean()), reward_range(run).low
    failing = _share_of_failing_groups(run, groups.window)
    evidence = {"dead_groups": share, "reward": reward}
    if failing is not None:
        evidence["failing_groups"] = failing
    text = f"since step {start} all rewards are equal in {share:.0%} of the groups"
    if is_solved(run) or (failing is not None and failing < FAILING_SHARE):
        return Finding(
            start,
            f"{text}, because nearly all rollouts succeed (mean reward {reward:.3g}): little is"
            " left to learn on these rows",
            evidence,
            **advice(run, "dead_groups.solved"),
            severity="note",
        )
    failed = "" if failing is None else f"; in {failing:.0%} all rollouts fail"
    return Finding(
        start,
        f"{text} (mean reward {reward:.3g}, smallest {low:.3g}{failed}): most rollouts teach"
        " nothing",
        evidence,
        **advice(run, "dead_groups.groups"),
    )


def _find_failing_rows(run: Run, steps: int) -> Iterator[Finding]:
    """Yield a finding if no rollout of most groups succeeds, and the policy is good at others."""
    rewards = reward_range(run)
    # Without evicted groups: algorithm.filter_groups replaced them.
    episodes = training_episodes(run, steps)
    episodes = episodes.where(episodes["split"] == "train")
    groups = {key: g for key, g in _rewards_of_groups(episodes).items() if len(g) >= MIN_GROUP}
    failing = {key for key, group in groups.items() if max(group) <= rewards.failed}
    others = [x for key, group in groups.items() if key not in failing for x in group]
    if len(groups) < MIN_GROUPS or len(failing) < FAILING_GROUPS * len(groups) or not others:
        return
    earned, still = sum(others) / len(others), _share_of_failing_groups(run, MIN_WINDOW)
    if earned < rewards.at(GOOD) or still is None or still < FAILING_GROUPS:
        return
    share, played = len(failing) / len(groups), episodes["step"]
    yield Finding(
        int(played.min()),
        f"in steps {played.min()} to {played.max()} all rollouts fail in {share:.0%} of the groups,"
        f" and the mean reward of the other groups is {earned:.3g}: groups without a success give"
        " no gradient",
        {"failing_groups": share, "others": earned},
        **episodes.examples(np.array([key in failing for key in episodes.groups])),
        **advice(run, "dead_groups.rows", failed=rewards.failed),
        subject="rows",
    )


def _rewards_of_groups(episodes: Episodes) -> dict[str, list[float]]:
    """Return the rewards of each group, by its key."""
    return group_by(episodes.groups, episodes["reward"].tolist())


def _share_of_failing_groups(run: Run, steps: int) -> float | None:
    """Return the share of groups of the last steps whose rollouts all fail; None if unknown."""
    groups = _rewards_of_groups(training_episodes(run, steps))
    if not groups:
        return None
    limit = reward_range(run).failed
    return sum(max(group) <= limit for group in groups.values()) / len(groups)


def _explain_dead_steps(run: Run, first: int, last: int, dead: Series) -> Finding:
    """Describe a stretch of dead steps: what their rollouts have in common."""
    table = run.metrics
    step = table.column("step").to_numpy()
    part = table.filter(pa.array((step >= first) & (step <= last)))

    def mean_of(name: str, unknown: float) -> float:
        if name not in table.column_names:
            return unknown
        values = [x or 0.0 for x in part.column(name).to_pylist()]
        return sum(values) / len(values)

    equal, reward = mean_of(DEAD_GROUPS, 1.0), mean_of(REWARD, math.nan)
    stops = {
        n.removeprefix(STOP): mean_of(n, 0.0) for n in table.column_names if n.startswith(STOP)
    }
    reason = max(stops, key=stops.__getitem__, default="")
    number, masked, causes = int(dead.values.sum()), "", []
    if equal < 0.995:  # a dead step's other groups are masked
        masked = ", rollouts of the others are masked by rollout.budget_policy"
    if reason in BUDGETS:
        causes += ["dead_groups.budget", *(["dead_groups.masked"] if masked else [])]
    rewards = reward_range(run)
    if rewards.low == rewards.high:
        causes.append("dead_groups.one_reward")
    else:
        causes.append(f"dead_groups.{'failing' if reward <= rewards.failed else 'mixed'}")
    episodes = training_episodes(run)
    return Finding(
        first,
        f"steps {first} to {last} had no learning signal ({DEAD_STEP}; {number} of"
        f" {plural(len(dead), 'step')} in all): all rewards are equal in {equal:.0%} of the"
        f" groups{masked}, and the most frequent stop reason is {reason or 'unknown'!r}"
        f" ({stops.get(reason, 0.0):.0%} of the rollouts)",
        {"dead_steps": float(number), "dead_groups": equal, "reward": reward},
        **episodes.examples(episodes["step"] == last),
        **advice(run, *causes, "dead_groups.steps", reason=reason, reward=reward, low=rewards.low),
        severity="error",
    )
