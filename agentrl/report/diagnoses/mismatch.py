"""Engine and trainer: logprobs of the same tokens that differ."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.report.diagnoses.advice import advice
from agentrl.report.finding import Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import MIN_STEPS, MIN_WINDOW, Series, Z, read_series, z_score

MISMATCH = "rollout_corr/logprob_diff_mean"
MISMATCH_TURNS = ("turn_1", "turn_2", "turn_3", "turn_4plus")
MIN_MISMATCH = 2e-3
"""The smallest mean difference of logprobs, in nats, that is reported: a tenth of what bfloat16
gives (0.01 to 0.02), and a thousand times what float32 gives."""
MAX_MISMATCH = 0.05
"""The mean difference that is too large for any precision in use: several times that of bfloat16.
"""
TURN_GROWTH = 3.0
"""How many times the difference of the first turn a later turn, or the first token after an
observation, may have. Later turns contain rarer tokens, which doubles it."""
RUN_GROWTH = 5.0
"""How many times the difference of the first steps the last steps may have. The run itself stops at
ten times the one before training."""


def mismatch(run: Run) -> Iterator[Finding]:
    """The engine's logprobs of the sampled tokens differ from the trainer's."""
    overall = read_series(run, MISMATCH)
    # The tokens of older versions differ from the trainer because the policy has moved.
    if len(overall) < MIN_WINDOW or config_value(run, "trainer.max_staleness"):
        return
    turns = {turn: read_series(run, f"{MISMATCH}/{turn}") for turn in MISMATCH_TURNS}
    turns = {turn: series for turn, series in turns.items() if len(series) >= MIN_WINDOW}
    largest = _find_largest(run, overall, turns)
    if largest is None:
        return
    subject, series, limit = largest
    (first, mean), own = overall.ends, series.ends[1]
    evidence = {"all": mean} | {turn: later.ends[1] for turn, later in turns.items()}
    by_turn = ", ".join(
        f"{turn.replace('_', ' ').replace('4plus', '4 and later')} {evidence[turn]:.2g}"
        for turn in turns
    )
    if subject == "turns":
        text = f"more in later turns ({by_turn} nats): the two see different histories"
    elif subject == "after_observation":
        evidence[subject] = own
        text = (
            f"at the first token after an observation ({own:.2g} nats, {mean:.2g} over all tokens)"
        )
    else:
        evidence["first_steps"] = first
        text = (
            f"by {mean:.2g} nats on average ({first:.2g} in the first steps; by turn: {by_turn}):"
            " the samples are not those of the policy that trains"
        )
    yield Finding(
        series.since(series.means > limit),
        f"the logprobs of engine and trainer differ {text}",
        evidence,
        **advice(run, f"mismatch.{subject or 'run'}", "mismatch"),
        subject=subject,
    )


def _find_largest(
    run: Run, overall: Series, turns: dict[str, Series]
) -> tuple[str, Series, float] | None:
    """Return the subject that differs, its differences and the limit; None if nothing does.

    The subject is "turns", "after_observation", or "" for all tokens.
    """
    # Rounding changes uncertain tokens most, so a turn or a position with many of them may differ
    # by as much as uncertain tokens do.
    measured = read_series(run, "canary/rounding").last
    rounding = max(MIN_MISMATCH, float(measured.mean()) if len(measured) else 0.0)
    after = read_series(run, f"{MISMATCH}/after_observation")
    compared = [("turns", s, turns["turn_1"]) for s in turns.values() if "turn_1" in turns]
    if len(after) >= MIN_WINDOW:
        compared.append(("after_observation", after, overall))
    for subject, series, base in compared:
        limit = max(rounding, TURN_GROWTH * base.ends[1])
        if series.ends[1] > limit and z_score(base.last, series.last) > Z:
            return subject, series, limit
    first, mean = overall.ends
    growth = max(rounding, RUN_GROWTH * first)
    if len(overall) >= MIN_STEPS and mean > growth and z_score(overall.first, overall.last) > Z:
        return "", overall, growth
    largest = max(rounding, MAX_MISMATCH)
    return ("", overall, largest) if mean > largest else None
