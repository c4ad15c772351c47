"""Validation: rewards that fall, or that stay far below training rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentrl.report.diagnoses.advice import advice
from agentrl.report.diagnoses.updates import FALL
from agentrl.report.episodes import Episodes, most_common, shorten, training_episodes
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import (
    MIN_STEPS,
    MIN_WINDOW,
    REWARD,
    Z,
    reward_range,
    values_by_step,
)

# --- a reward that falls -------------------------------------------------------------------------

SUBSET_REWARDS = re.compile(r"(?:val|val_greedy|val-core)/(.+)/reward/mean@\d+")
"""The mean rewards of an agent loop or a data source in a validation, sampled or greedy."""
MIN_VALIDATION_FALL = 0.1
"""The smallest fall as a share of the range of rewards."""
MIN_KIND = 8
"""The rollouts of a kind of rows in a validation below which its mean says little."""
SHARED_ANSWER = 0.2
"""The share of rewarded rollouts with one and the same answer, over rows with different ones, that
is worth reading."""


@dataclass(frozen=True, slots=True)
class ValidationFall:
    """The best and the last value of a validation metric, and the largest standard error."""

    step: int
    best: float
    last_step: int
    last: float
    error: float

    @property
    def size(self) -> float:
        return self.best - self.last

    def exceeds(self, errors: float) -> bool:
        """Return whether the fall is more than so many standard errors of a difference."""
        return self.size > errors * math.sqrt(2) * self.error

    @property
    def evidence(self) -> dict[str, float]:
        return {"best": self.best, "last": self.last, "standard_error": self.error}


def find_validation_fall(run: Run, name: str) -> ValidationFall | None:
    """Return the fall of a metric `.../mean@N`; None without two values and a standard error."""
    values, errors = (
        {step: value for step, value in values_by_step(run, key).items() if math.isfinite(value)}
        for key in (name, name.replace("/mean@", "/se@"))
    )
    if len(values) < 2 or not errors:
        return None
    step, last = max(values, key=values.__getitem__), max(values)
    return ValidationFall(step, values[step], last, values[last], max(errors.values()))


def validation_falls(run: Run) -> Iterator[Finding]:
    """The validation reward of an agent loop or data source falls far below an earlier one."""
    episodes = training_episodes(run, MIN_WINDOW)
    largest: dict[bytes, tuple[float, Finding]] = {}
    for name in run.metrics.column_names:
        if not (match := SUBSET_REWARDS.fullmatch(name)):
            continue
        fall = find_validation_fall(run, name)
        rows = values_by_step(run, name.rpartition("/reward/")[0] + "/rows").values()
        if not fall or min(rows, default=MIN_KIND) < MIN_KIND or not _is_large(run, fall):
            continue
        subset = match[1]
        own = (episodes["agent_name"] == subset) | (episodes["data_source"] == subset)
        # The metrics of an agent loop and of a data source, sampled or greedy, may describe the
        # same rows: report the largest fall of them.
        key = own.tobytes() if own.any() else subset.encode()
        if key not in largest or fall.size > largest[key][0]:
            largest[key] = fall.size, _explain_validation_fall(run, episodes, own, subset, fall)
    yield from (finding for _, finding in largest.values())


def _is_large(run: Run, fall: ValidationFall) -> bool:
    rewards = reward_range(run)
    least = max(MIN_VALIDATION_FALL * rewards.size, FALL * (fall.best - rewards.low))
    return fall.exceeds(Z) and fall.size >= least


def _explain_validation_fall(
    run: Run, episodes: Episodes, own: np.ndarray, subset: str, fall: ValidationFall
) -> Finding:
    common_answer = ""
    if own.any():
        answer, count = most_common(episodes["answer"][own])
        if count >= SHARED_ANSWER * own.sum():
            common_answer = (
                f"; in the last training steps {count / own.sum():.0%} of its rollouts answer"
                f" {shorten(answer)!r}"
            )
    return Finding(
        fall.step,
        f"the validation reward of {subset} fell from {fall.best:.3g} (step {fall.step}) to"
        f" {fall.last:.3g} (step {fall.last_step}){common_answer}",
        fall.evidence,
        **episodes.examples(own, "last"),
        **advice(run, "validation_falls"),
        subject=subset,
    )


# --- a reward far below that of the training rows ------------------------------------------------

VAL_REWARDS = re.compile(r"val-core/.*/reward/mean@\d+")
"""The mean rewards of a data source's sampled rollouts in a validation."""
OVERFIT_GAP = 0.15
"""How far the reward of training must be above that of validation, in ranges of rewards. The tiny
model's healthy runs have up to 0.09."""
OVERFIT_STEPS = 5
"""The training steps before a validation with which it is compared."""
MEMORIZED = 0.75
"""The epochs from which on rows can have been memorized."""


def overfitting(run: Run) -> Iterator[Finding]:
    """The reward of the training rows is far above that of the validation rows, and was not."""
    limit, means = OVERFIT_GAP * reward_range(run).size, _validation_means(run)
    if not means or limit <= 0:
        return
    gaps = _gaps(run, means)
    late = [step for step in gaps if step][-2:]
    # Validation rows that are harder from the start, or another reward, are no overfitting.
    if len(late) < 2 or 0 not in gaps or gaps[0] > limit / 2:
        return
    if any(gaps[step] < limit for step in late):
        return
    last = late[-1]
    epoch = values_by_step(run, "training/epoch").get(last)
    rewards = {"training": means[last] + gaps[last], "validation": means[last]}
    text = (
        f"the training rows earn {rewards['training']:.3g}, the validation rows"
        f" {rewards['validation']:.3g} at step {last}. Before training they earned the same"
    )
    if epoch is None or epoch >= MEMORIZED:
        played = f", of which each row was played about {epoch:.3g} times" if epoch else ""
        text += f": the policy memorizes the training rows{played}"
        cause = "overfitting.memorized"
    else:
        text += (
            f". That is not memorized, because most training rows were not played yet ({epoch:.0%}"
            f" of an epoch): they reward something else{_widest_gap(run, last)}"
        )
        cause = "overfitting.other"
    yield Finding(
        next(step for step in gaps if step and gaps[step] >= limit),
        text,
        rewards | {"epoch": epoch or 0.0},
        **advice(run, cause, "overfitting", last=last),
    )


def _validation_means(run: Run) -> dict[int, float]:
    """Return the mean reward of the data sources in each validation of all of them."""
    names = [name for name in run.metrics.column_names if VAL_REWARDS.fullmatch(name)]
    validations = [values_by_step(run, name) for name in names]
    steps = sorted(set.intersection(*map(set, validations))) if validations else []
    return {step: sum(values[step] for values in validations) / len(names) for step in steps}


def _gaps(run: Run, means: dict[int, float]) -> dict[int, float]:
    """Return how far the training steps before each validation are above it; {} in short runs."""
    training = values_by_step(run, REWARD)
    gaps = {}
    for step, mean in means.items() if len(training) >= MIN_STEPS else ():
        near = range(step - OVERFIT_STEPS + 1, step + 1) if step else range(1, 3)
        rewards = [training[s] for s in near if s in training]
        if rewards:
            gaps[step] = sum(rewards) / len(rewards) - mean
    return gaps


def _widest_gap(run: Run, step: int) -> str:
    """Return a clause about the kind of rows whose training and validation rewards differ most.

    It names the answer that these training rows get most often; it is "" if no kind stands out.
    """
    training, validation = training_episodes(run, OVERFIT_STEPS), Episodes(run.behaviour)
    validation = validation.where((validation["step"] == step) & (validation["split"] == "val"))
    widest, clause = 1.5 * OVERFIT_GAP, ""
    for name in ("agent_name", "data_source"):
        kinds = np.unique(validation[name])
        for kind in kinds if len(kinds) > 1 else ():
            rows, others = (e.where(e[name] == kind) for e in (training, validation))
            if min(len(rows), len(others)) < MIN_KIND:
                continue
            means = [float(np.nanmean(e["reward"])) for e in (rows, others)]
            if means[0] - means[1] > widest:
                widest = means[0] - means[1]
                clause = f". Rows with {name}={kind} earn {means[0]:.3g} against {means[1]:.3g}"
                answer, count = most_common(rows["answer"])
                if count >= len(rows) / 3:
                    share = count / len(rows)
                    clause += f", and {share:.0%} of them are answered with {answer[-60:]!r}"
    return clause
