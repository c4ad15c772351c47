"""Rewards over time: outliers, a reward that falls, and a reward that does not rise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.metrics import DEAD_GROUPS, is_close
from agentrl.report.diagnoses.advice import advice, join
from agentrl.report.diagnoses.groups import DEAD_SHARE
from agentrl.report.diagnoses.updates import FALL, MIN_FALL
from agentrl.report.episodes import training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import (
    MIN_STEPS,
    REWARD,
    Series,
    is_solved,
    read_series,
    reward_range,
    z_score,
)

# --- outliers ------------------------------------------------------------------------------------

OUTLIER_GAP = 5.0
"""How far an outlier must be away from all other rewards: so many times their range or, if that is
larger, the largest of them. So a failure with reward 0 next to 0.9 to 1 is none."""
OUTLIERS = 0.2
"""The largest share of rollouts that are outliers: with more, they are a level of the reward."""
MIN_OUTLIERS = 3
"""The fewest outliers: one may be a mistake of a single row."""


def reward_outliers(run: Run) -> Iterator[Finding]:
    """A few rewards are far away from all others, so they outweigh these in the update."""
    episodes = training_episodes(run)
    reward, step = episodes["reward"], episodes["step"]
    split = _split_outliers(reward)
    if split is None:
        return
    mask, others = split
    number, outlier = int(mask.sum()), float(np.median(reward[mask]))
    share = number / int(np.isfinite(reward).sum())
    evidence = {"outliers": float(number), "outlier": outlier, "range": float(np.ptp(others))}
    norm = read_series(run, "actor/grad_norm")
    has_outliers = np.isin(norm.steps, step[mask])
    compared = ""
    if has_outliers.any() and not has_outliers.all():
        norms = [float(np.median(norm.values[w])) for w in (has_outliers, ~has_outliers)]
        evidence |= {"grad_norm_with": norms[0], "grad_norm_without": norms[1]}
        compared = f"; the gradient norm is {norms[0]:.3g} in steps with them, else {norms[1]:.3g}"
    yield Finding(
        int(step[mask].min()),
        f"{share:.1%} of the rollouts have a reward of about {outlier:g}, all others"
        f" {others.min():g} to {others.max():g}: the few dominate the advantages of their groups"
        f" and the update{compared}",
        evidence,
        **episodes.examples(mask, "last"),
        **advice(run, "reward_outliers"),
    )


def _split_outliers(reward: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the mask of the outliers and the levels of the other rewards; None without outliers.

    The rewards are split at the largest gap between two levels.
    """
    levels, counts = np.unique(reward[np.isfinite(reward)], return_counts=True)
    if len(levels) < 3:
        return None
    end = int(np.diff(levels).argmax()) + 1
    below, above = int(counts[:end].sum()), int(counts[end:].sum())
    others = levels[end:] if below < above else levels[:end]
    size = max(float(np.ptp(others)), float(np.abs(others).max()))
    if not MIN_OUTLIERS <= min(below, above) <= OUTLIERS * (below + above):
        return None
    if levels[end] - levels[end - 1] < OUTLIER_GAP * size:
        return None
    if is_close(others[0], others[-1]):  # A rare success next to failures, all of which are equal.
        return None
    return reward <= levels[end - 1] if below < above else reward >= levels[end], others


# --- a reward that falls -------------------------------------------------------------------------

FALL_Z = 5.0
"""The standard errors of a fall. They are more than `Z`, because the best of many windows is high
by chance."""
FALL_WITH_KL = 0.2
"""The loss that is a warning if the KL rose meanwhile, faster than before."""
KL_RISE = 2.0
"""How many times its value at the best rewards the KL must have to be named as the cause."""


def reward_falls(run: Run) -> Iterator[Finding]:
    """The reward falls far below its best level, or less far while the KL rises."""
    reward, rewards = read_series(run, REWARD), reward_range(run)
    if len(reward) < MIN_STEPS:
        return
    means = reward.means
    best = int(means.argmax())
    top, last = float(means[best]), float(reward.last.mean())
    lost = top - last
    if lost < FALL_WITH_KL * (top - rewards.low) or lost < MIN_FALL * rewards.size:
        return
    if z_score(reward.at(best), reward.last) > -FALL_Z:
        return
    start = reward.since(means <= top - 0.5 * lost)
    kl = _compare_kl(run, reward, best, start)
    is_large = lost >= FALL * (top - rewards.low)
    if not is_large and not kl.has_jumped:
        return
    episodes, first = training_episodes(run), reward.steps[best]
    yield Finding(
        start,
        f"the reward fell from {top:.3g} (steps {first} to {first + reward.window - 1}) to"
        f" {last:.3g}; half of this fall happened by step {start}{kl.text}",
        {"best": top, "last": last, **kl.evidence},
        **episodes.examples(episodes["step"] >= start),
        **advice(run, f"reward_falls.{'updates' if kl.text else 'rows'}", "reward_falls"),
        severity="error" if is_large else "warning",
    )


@dataclass(slots=True)
class _KL:
    """The KL at the best rewards and after they fell."""

    evidence: dict[str, float]
    text: str = ""
    """The first KL that rose: ", while actor/ppo_kl rose from 0.001 to 0.05"."""
    has_jumped: bool = False
    """Whether a KL has grown faster than until the best rewards."""


def _compare_kl(run: Run, reward: Series, best: int, start: int) -> _KL:
    """Compare each KL in the window of the best rewards with its values since a step."""
    kl = _KL({})
    for name in ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl", "canary/drift"):
        series = read_series(run, name)
        if len(series) < MIN_STEPS:
            continue
        sizes, offset = np.abs(series.values), series.steps - reward.steps[best]
        around = sizes[(offset >= 0) & (offset < reward.window)]
        before = float(around.mean()) if len(around) else 0.0
        after = float(sizes[series.steps >= start].mean())
        kl.evidence |= {f"{name} before": before, f"{name} after": after}
        if after < KL_RISE * max(before, 1e-9):
            continue
        kl.text = kl.text or f", while {name} rose from {before:.2g} to {after:.2g}"
        # The KL to the reference grows in every run: it must grow faster than until the best step.
        first = float(np.abs(series.first).mean())
        speed = (after - before) / max(reward.steps[-1] - reward.steps[best], 1)
        speed_before = (before - first) / max(reward.steps[best] - reward.steps[0], 1)
        kl.has_jumped |= bool(speed > KL_RISE * max(speed_before, 0.0))
    return kl


# --- a reward that does not rise -----------------------------------------------------------------

FLAT_STEPS = 20
"""The fewest steps of a run that is called flat."""
FLAT = 0.05
"""The largest gain of reward as a share of the range of rewards, two standard errors included."""
STRONG_KL = 0.1
"""A coefficient of the KL penalty that may keep the policy where it is; usual are 0.001 to 0.01."""
FLAT_STRONG_KL = 0.15
"""The largest gain with such a penalty, which is a reason to look closer."""
NO_DRIFT = 1e-3
"""The change of logprobs in a step, in nats, below which the policy does not move. Runs that learn
have 0.02 to 0.1; a hundredth of that needs thousands of steps."""
NO_KL = 1e-6
"""The KL within a step below which the policy does not move; usual are 1e-4 to 1e-2."""
MOVES = {
    "drift": "canary/drift",
    "kl": "actor/ppo_kl",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
}
"""The metrics that tell whether the policy moves, by their names in the evidence."""


def reward_flat(run: Run) -> Iterator[Finding]:
    """The reward does not rise; with a KL near 0, because the policy does not move."""
    reward, size = read_series(run, REWARD), reward_range(run).size
    if len(reward) < FLAT_STEPS or size <= 0 or is_solved(run):
        return
    if config_value(run, "algorithm.adv_estimator") == "opd":  # Rewards do not train.
        return
    dead = read_series(run, DEAD_GROUPS)
    if len(dead) and dead.last.mean() >= DEAD_SHARE:  # `dead_groups` says why it does not rise
        return
    first, last = reward.ends
    gain, best_gain = last - first, float(reward.means.max()) - first
    error = math.hypot(*(x.std(ddof=1) / math.sqrt(len(x)) for x in (reward.first, reward.last)))
    series = {name: read_series(run, metric) for name, metric in MOVES.items()}
    moves = {name: float(np.abs(s.last).mean()) for name, s in series.items() if len(s)}
    is_still = moves["drift"] < NO_DRIFT if "drift" in moves else moves.get("kl", math.inf) < NO_KL
    text = (
        f"the reward is flat: {first:.3g} in the first {reward.window} steps, {last:.3g} in the"
        f" last ({gain:+.3g} ± {error:.2g})"
    )
    numbers = ", ".join(f"{name} {value:.2g}" for name, value in moves.items())
    evidence = {"first": first, "last": last, "error": error, **moves}
    if is_still and gain <= max(2 * error, FLAT * size):
        yield Finding(
            int(reward.steps[0]),
            f"{text}, and the policy hardly moves ({numbers})",
            evidence,
            **advice(run, "reward_flat.still"),
            severity="error",
        )
        return
    strong = _strong_penalties(run)
    largest = FLAT_STRONG_KL if strong else FLAT
    if gain + 2 * error < largest * size and best_gain < 2 * FLAT * size:
        yield Finding(
            int(reward.steps[0]),
            f"{text}, although the policy moves ({numbers})",
            evidence,
            **join(*strong, advice(run, "reward_flat.moving")),
        )


def _strong_penalties(run: Run) -> list[dict[str, Any]]:
    """Return a cause for each coefficient of a KL penalty that is large."""
    keys = ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef")
    return [
        advice(run, "reward_flat.penalty", key=key, value=value)
        for key in keys
        if isinstance(value := config_value(run, key), float | int) and value >= STRONG_KL
    ]
