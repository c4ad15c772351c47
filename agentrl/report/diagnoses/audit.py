"""Audits: the reward may be exploited. None of this is proof."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from agentrl.report.diagnoses.advice import advice
from agentrl.report.diagnoses.rows import COLLAPSE_GROUPS, COLLAPSE_ROLLOUTS
from agentrl.report.diagnoses.validation import SHARED_ANSWER, find_validation_fall
from agentrl.report.episodes import (
    Episodes,
    correlation_within_rows,
    most_common,
    training_episodes,
    without_group_means,
)
from agentrl.report.finding import Finding
from agentrl.report.run import Run
from agentrl.report.series import (
    MIN_STEPS,
    MIN_WINDOW,
    REWARD,
    Series,
    has_risen,
    read_series,
    reward_range,
    z_score,
)

RISE_Z = 3.0
"""The standard errors of a rise."""
FOLLOWS = 0.8
"""The correlation within rows of reward and length, or number of calls, that is worth reading."""


def audit(run: Run) -> Iterator[Finding]:
    """The reward may be exploited: what to read. None of this is proof."""
    reward = read_series(run, REWARD)
    if _rises(reward):
        yield from _compare_validation(run, reward)
        yield from _compare_accuracy(run, reward)
    yield from _find_paid_parts(run)
    episodes, rewards = training_episodes(run, MIN_WINDOW), reward_range(run)
    if len(episodes) and rewards.size > 0:
        yield from _find_what_pays(run, episodes)
        yield from _find_paid_answer(run, episodes, episodes["reward"] >= rewards.solved)


def _rises(series: Series) -> bool:
    return len(series) >= MIN_STEPS and z_score(series.first, series.last) > RISE_Z


def _compare_validation(run: Run, reward: Series) -> Iterator[Finding]:
    """Yield a finding if training rewards rose and validation rewards fell."""
    for name in run.metrics.column_names:
        if not re.fullmatch(r"val/reward/mean@\d+", name):
            continue
        fall = find_validation_fall(run, name)
        if fall and fall.exceeds(RISE_Z):
            yield Finding(
                fall.step,
                f"the training reward rose to {reward.last.mean():.3g}, but the validation fell"
                f" from {fall.best:.3g} (step {fall.step}) to {fall.last:.3g}",
                fall.evidence,
                **advice(run, "audit.validation"),
                severity="audit",
                subject="validation",
            )


def _compare_accuracy(run: Run, reward: Series) -> Iterator[Finding]:
    """Yield a finding if the reward rose and the accuracy fell."""
    accuracy = read_series(run, "grader/acc")
    if len(accuracy) != len(reward) or z_score(accuracy.first, accuracy.last) >= -2.0:
        return
    (first, last), (reward_first, reward_last) = accuracy.ends, reward.ends
    yield Finding(
        int(accuracy.steps[0]),
        f"the reward rose ({reward_first:.3g} to {reward_last:.3g}) and the accuracy fell"
        f" ({first:.3g} to {last:.3g})",
        {"acc_first": first, "acc_last": last},
        **advice(run, "audit.accuracy"),
        severity="audit",
        subject="accuracy",
    )


def _find_paid_parts(run: Run) -> Iterator[Finding]:
    """Yield a finding for each part of a reward that rises while the accuracy does not."""
    accuracy = read_series(run, "grader/acc")
    if len(accuracy) < MIN_STEPS or has_risen(accuracy, 0):
        return
    acc_first, acc_last = accuracy.ends
    for name in run.metrics.column_names:
        if not name.startswith("grader/") or name == "grader/acc":
            continue
        part = read_series(run, name)
        if not _rises(part):
            continue
        first, last = part.ends
        yield Finding(
            int(part.steps[0]),
            f"{name} rose from {first:.3g} to {last:.3g}, and the accuracy did not rise"
            f" ({acc_first:.3g} to {acc_last:.3g})",
            {"first": first, "last": last, "acc_last": acc_last},
            **advice(run, "audit.part", part=name.removeprefix("grader/")),
            severity="audit",
            subject=name,
        )


def _find_what_pays(run: Run, episodes: Episodes) -> Iterator[Finding]:
    """Yield a finding if the reward follows the length or the number of calls within rows."""
    for name, what in (("sampled_tokens", "length"), ("tool_calls", "number of tool calls")):
        correlation = correlation_within_rows(episodes, name)
        if correlation >= FOLLOWS:
            x = without_group_means(episodes, name)
            yield Finding(
                int(episodes["step"].min()),
                f"within a row the reward follows the {what} (correlation {correlation:.2f})",
                {"correlation": correlation},
                **episodes.examples(x >= np.quantile(x, 0.9)),
                **advice(run, "audit.length", what=what),
                severity="audit",
                subject=name,
            )


def _find_paid_answer(run: Run, episodes: Episodes, best: np.ndarray) -> Iterator[Finding]:
    """Yield a finding if many rollouts with the best rewards give the same answer."""
    if best.sum() < COLLAPSE_ROLLOUTS:
        return
    answers = episodes["answer"]
    answer, count = most_common(answers[best])
    of_answer = best & (answers == answer)
    rows, share = len(set(episodes["sample_id"][of_answer])), float(count / best.sum())
    if count < SHARED_ANSWER * best.sum() or rows < COLLAPSE_GROUPS:
        return
    shown = answer if len(answer) <= 60 else answer[:57] + "..."
    yield Finding(
        int(episodes["step"].min()),
        f"{share:.0%} of the rollouts with the best rewards end with the same message ({shown!r}),"
        f" over {rows} rows",
        {"share": share, "rows": float(rows)},
        **episodes.examples(of_answer, "last"),
        **advice(run, "audit.answers"),
        severity="audit",
        subject="answers",
    )
