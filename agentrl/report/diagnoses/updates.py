"""Updates: steps that move the policy too far, and a policy that becomes random."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from agentrl.report.diagnoses.advice import advice
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import (
    MIN_STEPS,
    MIN_WINDOW,
    REWARD,
    Series,
    Z,
    has_risen,
    is_solved,
    read_series,
    reward_range,
    z_score,
)

FALL = 0.5
"""The loss that is an error, as a share of the best level above the smallest reward."""
MIN_FALL = 0.05
"""The smallest fall as a share of the range of rewards, so that a run that never rose has none."""
CLIPPED = 0.3
"""The share of clipped tokens that is a warning; below 0.2 is usual."""
MAX_DRIFT = 0.5
"""The mean change of logprobs in a step, in nats, that is too large. Half a nat changes the
probability of a token by a factor of 1.6 each step; runs that learn have 0.02 to 0.1, at their
first steps up to 0.4."""
JUMPS = 3
"""The number of updates in a row whose mean is compared with `MAX_DRIFT`."""
LARGE_DRIFT, LARGE_UPDATES = 0.2, 5
"""The mean drift of so many updates in a row, in nats, that explains why a reward fell after them.
Runs that learn are below 0.2 after their first one or two updates."""
ONE_DRIFT = 1.0
"""The drift of one update, in nats, that explains why the reward fell after it: twice the largest
of runs that learn. Before it there may be a single step, so the fall is not compared with noise:
it must last to the end."""
SPIKE = 10.0
"""How many times the median of the steps before it a gradient norm must have to be a spike. Norms
vary by a factor of 3 with the number of live groups."""
SPIKES = 3
"""The number of spikes among the last `SPIKE_STEPS` steps. One outlier is clipped away."""
SPIKE_STEPS = 20


def unstable_update(run: Run) -> Iterator[Finding]:
    """Steps move the policy too far, many tokens are clipped, or the gradient norm jumps."""
    drift = read_series(run, "canary/drift")
    drift = Series(drift.steps[drift.values > 0], drift.values[drift.values > 0])
    reward = read_series(run, REWARD)
    harm = None
    if len(reward) >= MIN_STEPS:
        harm = _find_harmful_update(run, drift, reward) or _find_harmful_updates(run, drift)
    if harm:
        step, text, evidence = harm
        yield Finding(
            step,
            text,
            evidence,
            **advice(run, "unstable_update.reward"),
            severity="error",
            subject="reward",
        )
    else:
        yield from _find_jumps(run, drift)
    yield from _find_clipping(run)
    yield from _find_spikes(run)


def _find_jumps(run: Run, drift: Series) -> Iterator[Finding]:
    """Yield a finding if a few updates in a row change the logprobs by much."""
    sizes = [drift.values[i : i + JUMPS].mean() for i in range(len(drift) - JUMPS + 1)]
    jump = next((i for i, size in enumerate(sizes) if size >= MAX_DRIFT), None)
    if jump is None:
        return
    yield Finding(
        int(drift.steps[jump]),
        f"from step {drift.steps[jump]} each update changed the logprobs of tokens by"
        f" {sizes[jump]:.2g} nats (canary/drift): the policy jumps instead of learning",
        {"drift": float(sizes[jump]), "largest": float(drift.values.max())},
        **advice(run, "unstable_update.drift"),
        subject="drift",
    )


def _find_clipping(run: Run) -> Iterator[Finding]:
    """Yield a finding if the loss clips many tokens."""
    if clipped := read_series(run, "actor/pg_clipfrac").above(CLIPPED):
        start, share = clipped
        yield Finding(
            start,
            f"since step {start} {share:.0%} of the tokens are clipped: the policy moves too far"
            " from the one that sampled them",
            {"clipped": share},
            **advice(run, "unstable_update.clip"),
            subject="clip",
        )


def _find_spikes(run: Run) -> Iterator[Finding]:
    """Yield a finding if the gradient norm jumped several times in the last steps."""
    norm = read_series(run, "actor/grad_norm")
    if len(norm) < MIN_STEPS or is_solved(run):
        return
    spikes = []
    for i in range(max(MIN_WINDOW, len(norm) - SPIKE_STEPS), len(norm)):
        before = norm.values[max(0, i - SPIKE_STEPS) : i]
        before = before[before > 0]
        if len(before) >= MIN_WINDOW and norm.values[i] > SPIKE * np.median(before):
            spikes.append(i)
    if len(spikes) < SPIKES:
        return
    largest = max(spikes, key=lambda i: norm.values[i])
    yield Finding(
        int(norm.steps[spikes[0]]),
        f"the gradient norm jumped {len(spikes)} times in the last"
        f" {min(SPIKE_STEPS, len(norm))} steps, to {norm.values[largest]:.3g} in step"
        f" {norm.steps[largest]} (median {np.median(norm.values):.3g})",
        {"spikes": float(len(spikes)), "largest": float(norm.values[largest])},
        **advice(run, "unstable_update.grad_norm"),
        subject="grad_norm",
    )


Harm = tuple[int, str, dict[str, float]]
"""The first step, a sentence and the evidence of updates after which a reward fell."""


def _find_harmful_update(run: Run, drift: Series, reward: Series) -> Harm | None:
    """Return one large update after which the reward fell, and stayed low until the end."""
    end = float(reward.last.mean())
    for step, size in zip(drift.steps, drift.values, strict=True):
        before = reward.values[reward.steps <= step][-reward.window :]
        after = reward.values[reward.steps > step][: reward.window]
        if size < ONE_DRIFT or len(after) < MIN_WINDOW:
            continue
        best, last = float(before.mean()), float(after.mean())
        if _has_fallen(run, best, last) and _has_fallen(run, best, end):
            text = (
                f"the update of step {step} changed the logprobs of tokens by {size:.2g} nats"
                f" (canary/drift), and the reward fell from {best:.3g} to {last:.3g}: the update"
                " was too large"
            )
            return int(step), text, {"drift": float(size), "best": best, "last": last}
    return None


def _find_harmful_updates(run: Run, drift: Series) -> Harm | None:
    """Return a stretch of large updates during or soon after which a reward fell."""
    is_large = [
        drift.values[i : i + LARGE_UPDATES].mean() >= LARGE_DRIFT
        for i in range(len(drift) - LARGE_UPDATES + 1)
    ]
    for large, windows in groupby(range(len(is_large)), key=is_large.__getitem__):
        first, *rest = windows
        updates = slice(first, first + len(rest) + LARGE_UPDATES)
        steps, size = drift.steps[updates], float(drift.values[updates].mean())
        if large and (fall := _find_fallen_reward(run, int(steps[0]), len(steps))):
            name, best, last = fall
            text = (
                f"the updates of steps {steps[0]} to {steps[-1]} changed the logprobs of tokens by"
                f" {size:.2g} nats on average (canary/drift), and the reward{name} fell from"
                f" {best:.3g} to {last:.3g}: the updates are too large"
            )
            return int(steps[0]), text, {"drift": size, "best": best, "last": last}
    return None


def _has_fallen(run: Run, best: float, last: float) -> bool:
    rewards = reward_range(run)
    low = rewards.low
    return best - low >= MIN_FALL * rewards.size and last - low <= FALL * (best - low)


def _find_fallen_reward(run: Run, start: int, updates: int) -> tuple[str, float, float] | None:
    """Return a reward that fell to half of its best level while or soon after updates were large.

    The rewards of all rollouts come first, then the rewards of each agent loop.

    Args:
        run: the run.
        start: the step of the first of these updates.
        updates: their number.

    Returns:
        " of LOOP" or "", the best level and the last one.
    """
    low = reward_range(run).low
    loops = [n for n in run.metrics.column_names if re.fullmatch(r"rollout/(.+)/reward", n)]
    for name in (REWARD, *loops):
        reward = read_series(run, name)
        if len(reward) < MIN_STEPS:
            continue
        means = reward.means
        best, last = float(means.max()), float(reward.last.mean())
        fall = reward.since(means <= low + FALL * (best - low))
        if not _has_fallen(run, best, last) or not 0 <= fall - start <= updates + reward.window:
            continue
        if z_score(reward.at(int(means.argmax())), reward.last) <= -Z:
            return "" if name == REWARD else f" of {name.split('/')[1]}", best, last
    return None


ENTROPY_RISE = 5.0
"""How many times its first value the entropy must have. While a policy learns it usually falls."""
HIGH_ENTROPY = 1.0
"""The entropy in nats that is too high: the likeliest token has a probability of about a half."""


def entropy(run: Run) -> Iterator[Finding]:
    """The policy becomes random."""
    series = read_series(run, "actor/entropy")
    if len(series) < MIN_STEPS:
        return
    first, last = float(series.values[:MIN_WINDOW].min()), float(series.last.mean())
    limit = max(HIGH_ENTROPY, ENTROPY_RISE * first)
    if last < limit or has_risen(read_series(run, REWARD), 0):
        return
    coefficient = config_value(run, "algorithm.entropy_coef")
    causes = ["entropy.bonus", "entropy"] if coefficient else ["entropy"]
    yield Finding(
        series.since(series.means >= limit),
        f"the entropy of the policy rose from {first:.2g} to {last:.2g} nats a token, and the"
        " reward did not rise: the policy becomes random",
        {"first": first, "last": last},
        **advice(run, *causes, coefficient=coefficient),
    )
