"""The shipped diagnoses. Each one states its thresholds as constants, with the reason.

They are in the order of causes: a problem is before those that it may cause. Two rules keep healthy
runs free of alarms. A change counts only if it is large, and if it is several times the noise
between steps. And a run that has solved its rows is not reported for having nothing left to learn.

A step's rollouts share the weights of that step, so the standard errors here take a step as one
observation: that of a mean over W steps is the standard deviation between them, divided by sqrt(W).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from agentrl.config.checks import doubtful
from agentrl.config.sections import BUDGETS, Config
from agentrl.metrics import DEAD_GROUPS, DEAD_STEP, is_close, standard_error
from agentrl.plural import plural
from agentrl.report.diagnosis import Finding, diagnosis
from agentrl.report.run import Run

REWARD = "critic/score/mean"

# --- tools of the diagnoses ----------------------------------------------------------------------

MIN_STEPS = 10
"""The fewest steps of a trend. With fewer, noise looks like one."""
MIN_WINDOW, MAX_WINDOW = 5, 20
"""The fewest and the most steps of a mean. Five steps give a standard error; more than 20 would mix
phases of a run."""
Z = 4.0
"""How many standard errors a change must have. With the five steps of the smallest window, 4 occur
by chance in less than one of 100 comparisons; a live run makes many, so each diagnosis asks for a
large change too."""
SOLVED = 0.9
"""The share of the range of rewards above which rows count as solved: then equal rewards, a reward
that does not rise, and small updates are the expected end of a run."""
FAILED = 0.1
"""The share of the range of rewards up to which a rollout counts as failed."""
EXAMPLES = 5
"""The number of episodes that a finding names."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over training steps, without the steps that lack it."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def window(self) -> int:
        """The number of steps of the first and of the last window: a quarter of the run."""
        return int(np.clip(len(self) // 4, MIN_WINDOW, MAX_WINDOW))

    @property
    def first(self) -> np.ndarray:
        return self.values[: self.window]

    @property
    def last(self) -> np.ndarray:
        return self.values[-self.window :]

    @property
    def means(self) -> np.ndarray:
        """The means of all windows of `window` consecutive steps."""
        return np.lib.stride_tricks.sliding_window_view(self.values, self.window).mean(1)

    def at(self, window: int) -> np.ndarray:
        """The values of the window that begins at an index."""
        return self.values[window : window + self.window]

    def since(self, holds: np.ndarray) -> int:
        """Return the step since which a condition holds in all windows.

        Args:
            holds: for each window of `means`, whether the condition holds.
        """
        broken = np.flatnonzero(~holds)
        start = broken[-1] + 1 if len(broken) else 0
        return int(self.steps[min(start, len(self) - 1)])


def read_series(run: Run, name: str) -> Series:
    """Return a metric over the training steps of a run; empty if the run lacks it."""
    table = run.metrics
    if name not in table.column_names or REWARD not in table.column_names:
        return Series(np.empty(0, np.int64), np.empty(0))
    values = table.column(name).to_numpy()
    is_training = ~np.isnan(table.column(REWARD).to_numpy().astype(float))
    chosen = is_training & ~np.isnan(values.astype(float))
    return Series(table.column("step").to_numpy()[chosen], values[chosen].astype(float))


def values_by_step(run: Run, name: str) -> dict[int, float]:
    """Return a metric by step, validations without training included; empty if no step has it."""
    table = run.metrics
    if name not in table.column_names:
        return {}
    pairs = zip(table.column("step").to_pylist(), table.column(name).to_pylist(), strict=True)
    return {step: value for step, value in pairs if value is not None}


def z_score(before: np.ndarray, after: np.ndarray) -> float:
    """Return the difference of two means in standard errors (Welch's statistic)."""
    difference = float(after.mean() - before.mean())
    error = math.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
    if error == 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


def reward_range(run: Run) -> tuple[float, float]:
    """Return the smallest and the largest reward of all rollouts."""
    low = read_series(run, "critic/score/min").values
    high = read_series(run, "critic/score/max").values
    return (float(low.min()), float(high.max())) if len(low) and len(high) else (0.0, 0.0)


def failure_limit(run: Run) -> float:
    """Return the largest reward of a failed rollout: a tenth of the range above the smallest."""
    low, high = reward_range(run)
    return low + FAILED * (high - low)


def is_solved(run: Run) -> bool:
    """Return whether the last rewards are nearly the largest ones that the run has seen."""
    low, high = reward_range(run)
    reward = read_series(run, REWARD)
    return len(reward) > 0 and high > low and reward.last.mean() >= low + SOLVED * (high - low)


def has_risen(reward: Series, window: int) -> bool:
    """Return whether the last rewards are significantly above those of a window of steps."""
    return z_score(reward.at(window), reward.last) > 2.0


def training_episodes(run: Run, steps: int = 0) -> pa.Table:
    """Return the behaviour of the training rollouts; of the last `steps` steps, 0 for all."""
    table = run.behaviour
    is_training = [split in ("train", "evicted") for split in table.column("split").to_pylist()]
    table = table.filter(pa.array(is_training, pa.bool_()))
    if not steps or not table.num_rows:
        return table
    step = column(table, "step")
    return table.filter(pa.array(step >= np.unique(step)[-steps:][0]))


def column(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as an array; a null of a number is NaN."""
    return table.column(name).to_numpy()


def examples(table: pa.Table, mask: np.ndarray, turn: str = "") -> dict[str, Any]:
    """Return `episodes` and `turns` of a finding: the last episodes that a mask selects.

    Args:
        table: rows of `Run.behaviour`.
        mask: which of its rows show the problem.
        turn: the turn that shows it: "last", a column with its index, or "" for the whole episode.
    """
    chosen = table.take(np.flatnonzero(mask)[-EXAMPLES:])
    found: dict[str, Any] = {"episodes": chosen.column("episode_id").to_pylist()}
    if turn == "last":
        found["turns"] = [n - 1 if n else None for n in chosen.column("turns").to_pylist()]
    elif turn:
        found["turns"] = chosen.column(turn).to_pylist()
    return found


def group_keys(episodes: pa.Table) -> list[str]:
    """Return a key of each episode's group: its step, split and number."""
    names = ("step", "split", "group")
    values = zip(*(episodes.column(name).to_pylist() for name in names), strict=True)
    return ["/".join(map(str, key)) for key in values]


def config_value(run: Run, key: str) -> object:
    """Return the value of a config key; None if the run's config lacks it."""
    section, _, name = key.partition(".")
    return (run.config.get(section) or {}).get(name)


# --- broken tools, and wrong calls ---------------------------------------------------------------

BROKEN_CALLS = {"timeout": 0.03, "crash": 0.03}
"""The share of calls with such an error that is a warning. A working tool has none."""
WRONG_CALLS = {"bad_call": 0.5, "schema": 0.5, "unknown_tool": 0.5, "tool_error": 0.5}
"""The share of calls that the policy writes wrongly, or that the tool refuses. A policy that learns
a format begins with many, so only a majority in the last steps counts."""
MIN_BROKEN_CALLS = 5
"""A tool is broken if it had at least this many calls and every one crashed or timed out."""


@diagnosis("tool_errors")
def tool_errors(run: Run) -> Iterator[Finding]:
    """Tool calls fail, or every call of one tool does."""
    episodes = training_episodes(run)
    broken, working = (
        Counter(itertools.chain.from_iterable(filter(None, episodes.column(name).to_pylist())))
        for name in ("broken_tools", "working_tools")
    )
    for tool in [t for t, n in broken.items() if n >= MIN_BROKEN_CALLS and t not in working]:
        is_shown = np.array(
            [tool in (t or ()) for t in episodes.column("broken_tools").to_pylist()]
        )
        yield Finding(
            int(column(episodes, "step")[is_shown].min()),
            f"every valid call of the tool {tool!r} crashes or times out ({broken[tool]} of"
            f" {broken[tool]})",
            {"calls": float(broken[tool])},
            **examples(episodes, is_shown, "failed_turn"),
            causes=["the tool has a bug, or what it needs is missing"],
            tries=[
                "read the log for the call and its traceback",
                f"call it yourself: agentrl tools call {tool} ARGUMENTS --file FILE",
            ],
            severity="error",
            subject=tool,
        )
    for error, limit in (BROKEN_CALLS | WRONG_CALLS).items():
        share = _filled_series(run, f"tool_error/{error}")
        if len(share) < MIN_WINDOW or not (holds := share.means >= limit)[-1]:
            continue
        mean, start = float(share.last.mean()), share.since(holds)
        is_broken = error in BROKEN_CALLS
        is_harmless = not is_broken and is_solved(run)  # It earns its rewards without these calls.
        episodes = training_episodes(run, share.window)
        yield Finding(
            start,
            f"since step {start} {mean:.0%} of the tool calls fail ({error})",
            {"share": mean},
            **examples(episodes, column(episodes, "failed_calls") > 0, "failed_turn"),
            causes=[
                "the tool is slow or has a bug"
                if is_broken
                else "the policy does not know the tool's name, arguments or format of calls"
            ],
            tries=[
                "read the log for the call and its traceback",
                "more processes of the tool server: tools.workers",
            ]
            if is_broken
            else [
                f"agentrl check-template {config_value(run, 'model.path') or 'MODEL'}",
                "a clearer docstring and clearer parameter names of the tool: the model reads them",
                "rollout.tool_format",
                "imitate first: docs/debugging.md",
            ],
            severity="note" if is_harmless else "warning",
            subject=error,
        )


# --- engine and trainer --------------------------------------------------------------------------

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


@diagnosis("mismatch")
def mismatch(run: Run) -> Iterator[Finding]:
    """The engine's logprobs of the sampled tokens are not those of the trainer."""
    overall = read_series(run, MISMATCH)
    # The tokens of older versions differ from the trainer because the policy has moved.
    if len(overall) < MIN_WINDOW or config_value(run, "trainer.max_staleness"):
        return
    turns = {turn: read_series(run, f"{MISMATCH}/{turn}") for turn in MISMATCH_TURNS}
    turns = {turn: s for turn, s in turns.items() if len(s) >= MIN_WINDOW}
    after = read_series(run, f"{MISMATCH}/after_observation")
    mean = float(overall.last.mean())
    # Rounding changes uncertain tokens most, so a turn or a position with many of them may differ
    # by as much as uncertain tokens do.
    measured = read_series(run, "canary/rounding").last
    rounding = max(MIN_MISMATCH, float(measured.mean()) if len(measured) else 0.0)
    evidence = {"all": mean} | {turn: float(s.last.mean()) for turn, s in turns.items()}
    common = [
        "agentrl check-template " + str(config_value(run, "model.path") or "MODEL"),
        "correct the updates: algorithm.tis_cap=2",
        "rollout.name=local on a small model: if that differs by 1e-6, the engine is the cause",
    ]
    by_turn = ", ".join(
        f"{t.replace('_', ' ').replace('4plus', '4 and later')} {evidence[t]:.2g}" for t in turns
    )
    first = turns.get("turn_1")
    if first is not None:
        limit = max(rounding, TURN_GROWTH * float(first.last.mean()))
        for s in list(turns.values())[1:]:
            if s.last.mean() > limit and z_score(first.last, s.last) > Z:
                yield Finding(
                    s.since(s.means > limit),
                    f"the logprobs of engine and trainer differ more in later turns ({by_turn}"
                    " nats): the two see different histories",
                    evidence,
                    causes=[
                        "the engine's prompt of a later turn is not the row of tokens that trains",
                        "an option of the engine: a KV cache with fewer bits, a prefix cache that"
                        " outlives a weight update",
                    ],
                    tries=common,
                    subject="turns",
                )
                return
    if len(after) >= MIN_WINDOW:
        limit = max(rounding, TURN_GROWTH * mean)
        if after.last.mean() > limit and z_score(overall.last, after.last) > Z:
            yield Finding(
                after.since(after.means > limit),
                f"the logprobs of engine and trainer differ at the first token after an observation"
                f" ({after.last.mean():.2g} nats, {mean:.2g} over all tokens)",
                evidence | {"after_observation": float(after.last.mean())},
                causes=["the tokens between two turns differ in engine and trainer"],
                tries=common,
                subject="after_observation",
            )
            return
    growth = max(rounding, RUN_GROWTH * float(overall.first.mean()))
    has_grown = (
        len(overall) >= MIN_STEPS and mean > growth and z_score(overall.first, overall.last) > Z
    )
    largest = max(rounding, MAX_MISMATCH)
    if has_grown or mean > largest:
        limit = growth if has_grown else largest
        yield Finding(
            overall.since(overall.means > limit),
            f"the logprobs of engine and trainer differ by {mean:.2g} nats on average"
            f" ({overall.first.mean():.2g} in the first steps; by turn: {by_turn}): the samples are"
            " not those of the policy that trains",
            evidence | {"first_steps": float(overall.first.mean())},
            causes=[
                "the engine does not have the trainer's weights: a weight sync failed or is late",
                "the engine samples at another temperature, or serves another model",
                "the engine's arithmetic: quantization, another attention backend",
            ],
            tries=common,
        )


# --- updates --------------------------------------------------------------------------------------


OUTLIER_GAP = 5.0
"""How far an outlier must be away from all other rewards: so many times their range or, if that is
larger, the largest of them. So a failure with reward 0 next to 0.9 to 1 is none."""
OUTLIERS = 0.2
"""The largest share of rollouts that are outliers: with more, they are a level of the reward."""
MIN_OUTLIERS = 3
"""The fewest outliers: one may be a mistake of a single row."""


@diagnosis("reward_outliers")
def reward_outliers(run: Run) -> Iterator[Finding]:
    """A few rewards are far away from all others, so they outweigh these in the update."""
    episodes = training_episodes(run)
    reward = column(episodes, "reward")
    levels, counts = np.unique(reward[np.isfinite(reward)], return_counts=True)
    if len(levels) < 3:
        return
    gap = int(np.diff(levels).argmax())
    below, above = counts[: gap + 1].sum(), counts[gap + 1 :].sum()
    is_low = below < above
    others = levels[gap + 1 :] if is_low else levels[: gap + 1]
    distance, spread = float(levels[gap + 1] - levels[gap]), float(np.ptp(others))
    number, total = int(min(below, above)), int(below + above)
    size = max(spread, float(np.abs(others).max()))
    if number < MIN_OUTLIERS or number > OUTLIERS * total or distance < OUTLIER_GAP * size:
        return
    if is_close(others[0], others[-1]):  # A rare success next to failures, all of which are equal.
        return
    mask = reward <= levels[gap] if is_low else reward >= levels[gap + 1]
    outlier = float(np.median(reward[mask]))
    step = column(episodes, "step")
    evidence = {"outliers": float(number), "outlier": outlier, "range": spread}
    norm = read_series(run, "actor/grad_norm")
    with_outliers = np.isin(norm.steps, step[mask])
    compared = ""
    if with_outliers.any() and not with_outliers.all():
        norms = [float(np.median(norm.values[w])) for w in (with_outliers, ~with_outliers)]
        evidence |= {"grad_norm_with": norms[0], "grad_norm_without": norms[1]}
        compared = f"; the gradient norm is {norms[0]:.3g} in steps with them, else {norms[1]:.3g}"
    yield Finding(
        int(step[mask].min()),
        f"{number / total:.1%} of the rollouts have a reward of about {outlier:g}, all others"
        f" {others.min():g} to {others.max():g}: the few dominate the advantages of their groups"
        f" and the update{compared}",
        evidence,
        **examples(episodes, mask, "last"),
        causes=[
            "the reward function returns a sentinel, such as -100 for an answer that it cannot read"
        ],
        tries=[
            "return a value within the range of the other rewards: 0 for a wrong answer",
            "optim.max_grad_norm",
        ],
    )


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


@diagnosis("unstable_update")
def unstable_update(run: Run) -> Iterator[Finding]:
    """Steps move the policy too far, many tokens are clipped, or the gradient norm jumps."""
    tries = [
        "a lower optim.lr, with optim.lr_warmup_steps",
        "fewer algorithm.ppo_epochs, a larger algorithm.mini_batch_size",
        "optim.max_grad_norm",
    ]
    causes = [
        f"optim.lr ({config_value(run, 'optim.lr')}) is too high",
        "too many optimizer steps on one batch",
        "rewards of very different size",
    ]
    drift = read_series(run, "canary/drift")
    drift = Series(drift.steps[drift.values > 0], drift.values[drift.values > 0])
    jumps = [
        i for i in range(len(drift) - JUMPS + 1) if drift.values[i : i + JUMPS].mean() >= MAX_DRIFT
    ]
    if found := _find_large_updates(run, drift):
        start, text, evidence = found
        yield Finding(
            start,
            text,
            evidence,
            causes=causes[:2],
            tries=["optim.lr three to ten times lower", *tries[1:]],
            severity="error",
            subject="reward",
        )
    elif jumps:
        size, start = float(drift.values[jumps[0] :][:JUMPS].mean()), int(drift.steps[jumps[0]])
        yield Finding(
            start,
            f"from step {start} each update changed the logprobs of tokens by {size:.2g} nats"
            " (canary/drift): the policy jumps instead of learning",
            {"drift": size, "largest": float(drift.values.max())},
            causes=causes[:2],
            tries=["optim.lr ten times lower", *tries],
            subject="drift",
        )
    clipped = read_series(run, "actor/pg_clipfrac")
    if len(clipped) >= MIN_WINDOW and (holds := clipped.means >= CLIPPED)[-1]:
        start, share = clipped.since(holds), float(clipped.last.mean())
        yield Finding(
            start,
            f"since step {start} {share:.0%} of the tokens are clipped: the policy moves too far"
            " from the one that sampled them",
            {"clipped": share},
            causes=causes,
            tries=tries,
            subject="clip",
        )
    norm = read_series(run, "actor/grad_norm")
    if len(norm) < MIN_STEPS or is_solved(run):
        return
    spikes = []
    for i in range(MIN_WINDOW, len(norm)):
        before = norm.values[max(0, i - SPIKE_STEPS) : i]
        before = before[before > 0]
        if len(before) >= MIN_WINDOW and norm.values[i] > SPIKE * np.median(before):
            spikes.append(i)
    recent = [i for i in spikes if i >= len(norm) - SPIKE_STEPS]
    if len(recent) >= SPIKES:
        largest = max(recent, key=lambda i: norm.values[i])
        yield Finding(
            int(norm.steps[recent[0]]),
            f"the gradient norm jumped {len(recent)} times in the last"
            f" {min(SPIKE_STEPS, len(norm))} steps, to {norm.values[largest]:.3g} in step"
            f" {norm.steps[largest]} (median {np.median(norm.values):.3g})",
            {"spikes": float(len(recent)), "largest": float(norm.values[largest])},
            causes=causes,
            tries=tries,
            subject="grad_norm",
        )


def _find_large_updates(run: Run, drift: Series) -> tuple[int, str, dict[str, float]] | None:
    """Return the first step, a sentence and the evidence of updates after which a reward fell."""
    reward = read_series(run, REWARD)
    if len(reward) < MIN_STEPS:
        return None
    for step, size in zip(drift.steps, drift.values, strict=True):
        if size < ONE_DRIFT:
            continue
        before = reward.values[reward.steps <= step][-reward.window :]
        after = reward.values[reward.steps > step][: reward.window]
        if len(after) < MIN_WINDOW:
            continue
        best, last = float(before.mean()), float(after.mean())
        end = float(reward.last.mean())
        if _has_fallen(run, best, last) and _has_fallen(run, best, end):
            return (
                int(step),
                f"the update of step {step} changed the logprobs of tokens by {size:.2g} nats"
                f" (canary/drift), and the reward fell from {best:.3g} to {last:.3g}: the update"
                " was too large",
                {"drift": float(size), "best": best, "last": last},
            )
    is_large = [
        drift.values[i : i + LARGE_UPDATES].mean() >= LARGE_DRIFT
        for i in range(len(drift) - LARGE_UPDATES + 1)
    ]
    first = 0
    for large, windows in itertools.groupby(is_large):
        end = first + len([*windows]) + LARGE_UPDATES - 2
        if large and (fall := _find_fallen_reward(run, int(drift.steps[first]), end - first + 1)):
            name, best, last = fall
            updates = drift.values[first : end + 1]
            return (
                int(drift.steps[first]),
                f"the updates of steps {drift.steps[first]} to {drift.steps[end]} changed the"
                f" logprobs of tokens by {updates.mean():.2g} nats on average (canary/drift), and"
                f" the reward{name} fell from {best:.3g} to {last:.3g}: the updates are too large",
                {"drift": float(updates.mean()), "best": best, "last": last},
            )
        first = end - LARGE_UPDATES + 2
    return None


def _has_fallen(run: Run, best: float, last: float) -> bool:
    low, high = reward_range(run)
    return best - low >= MIN_FALL * (high - low) and last - low <= FALL * (best - low)


def _find_fallen_reward(run: Run, start: int, updates: int) -> tuple[str, float, float] | None:
    """Return a reward that fell to half of its best level while or soon after updates were large.

    The rewards of all rollouts come first, then those of each agent loop.

    Args:
        run: the run.
        start: the step of the first of these updates.
        updates: their number.

    Returns:
        " of LOOP" or "", the best level and the last one.
    """
    low = reward_range(run)[0]
    loops = [n for n in run.metrics.column_names if re.fullmatch(r"rollout/(.+)/reward", n)]
    for name in (REWARD, *loops):
        reward = read_series(run, name)
        if len(reward) < MIN_STEPS:
            continue
        means = reward.means
        best, last = float(means.max()), float(reward.last.mean())
        if not _has_fallen(run, best, last):
            continue
        fall = reward.since(means <= low + FALL * (best - low))
        if not start <= fall <= start + updates + reward.window:
            continue
        if z_score(reward.at(int(means.argmax())), reward.last) <= -Z:
            return "" if name == REWARD else f" of {name.split('/')[1]}", best, last
    return None


ENTROPY_RISE = 5.0
"""How many times its first value the entropy must have. While a policy learns it usually falls."""
HIGH_ENTROPY = 1.0
"""The entropy in nats that is too high: the likeliest token has a probability of about a half."""


@diagnosis("entropy")
def entropy(run: Run) -> Iterator[Finding]:
    """The policy becomes random."""
    series = read_series(run, "actor/entropy")
    if len(series) < MIN_STEPS:
        return
    first, last = float(series.values[:MIN_WINDOW].min()), float(series.last.mean())
    if last < max(HIGH_ENTROPY, ENTROPY_RISE * first) or has_risen(read_series(run, REWARD), 0):
        return
    coefficient = config_value(run, "algorithm.entropy_coef")
    start = series.since(series.means >= max(HIGH_ENTROPY, ENTROPY_RISE * first))
    causes = ["updates are too large: optim.lr", "the reward does not depend on the tokens"]
    tries = ["a lower optim.lr", "a KL penalty: algorithm.kl_loss_coef"]
    if coefficient:
        causes.insert(0, f"algorithm.entropy_coef ({coefficient}) outweighs the rewards")
        tries.insert(0, "algorithm.entropy_coef=0")
    yield Finding(
        start,
        f"the entropy of the policy rose from {first:.2g} to {last:.2g} nats a token, and the"
        " reward did not rise: the policy becomes random",
        {"first": first, "last": last},
        causes=causes,
        tries=tries,
    )


# --- rows without any reward ---------------------------------------------------------------------

UNREWARDED_ROLLOUTS, UNREWARDED_GROUPS = 100, 10
"""The fewest rollouts and groups of rows that never earn. If a policy succeeded in one of 30
rollouts, all of 100 would fail in 3 % of the cases."""
NOTHING = 0.01
"""The share of the range of rewards up to which a rollout earned nothing."""
UNREWARDED = 0.99
"""The share of rollouts that fail. Less than all, because a guess may be right by chance."""
RIGHT = 0.2
"""The share of failed rollouts with the right answer above which the reward is at fault."""
CUT = 0.25
"""The share of failed rollouts that a budget cuts above which the budget is a likely cause."""
BROKEN = 0.5
"""The share of failed rollouts with a failed tool call above which tools are a likely cause."""


@diagnosis("unrewarded")
def unrewarded(run: Run) -> Iterator[Finding]:
    """No rollout of an agent loop or a data source has earned anything; those of others have."""
    episodes = training_episodes(run)
    low, high = reward_range(run)
    if not episodes.num_rows or high <= low:
        return
    reward = column(episodes, "reward")
    failed = reward <= low + NOTHING * (high - low)
    labels, mask = _find_unrewarded(episodes, failed)
    groups = {key for key, chosen in zip(group_keys(episodes), mask, strict=True) if chosen}
    if mask.sum() < UNREWARDED_ROLLOUTS or len(groups) < UNREWARDED_GROUPS or mask.all():
        return
    steps = column(episodes, "step")[mask]
    described, evidence, causes, tries = _explain_failures(run, episodes.filter(pa.array(mask)))
    succeeded = int((~failed[mask]).sum())
    yield Finding(
        int(steps.min()),
        f"{succeeded or 'none'} of {int(mask.sum())} rollouts of {' and '.join(labels)} earned more"
        f" than the smallest reward ({low:.3g}) in steps {steps.min()} to"
        f" {steps.max()}{described}; the other rows earn {reward[~mask].mean():.3g}",
        {"rollouts": float(mask.sum()), "others": float(reward[~mask].mean()), **evidence},
        **examples(episodes, mask),
        causes=[*causes, "these rows are too hard for the policy, or their prompt is unclear"],
        tries=[
            *tries,
            f"read some episodes: agentrl show {run.folder}",
            "other rewards for the same episodes: agentrl rescore",
            "imitate first: docs/debugging.md",
        ],
        severity="error" if evidence.get("right", 0.0) >= RIGHT else "warning",
    )


def _find_unrewarded(episodes: pa.Table, failed: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the agent loops and data sources that always fail, and the mask of their episodes.

    If neither all rows of a loop nor all rows of a data source fail, the two are named together
    ("tool_agent with gsm8k").
    """
    agents = np.array(episodes.column("agent_name").to_pylist(), object)
    sources = np.array(episodes.column("data_source").to_pylist(), object)
    labels, mask = [], np.zeros(len(failed), bool)
    for names in (agents, sources, agents + " with " + sources):
        for name in dict.fromkeys(names[~mask].tolist()):
            own = names == name
            if own.sum() >= MIN_WINDOW and failed[own].mean() >= UNREWARDED:
                labels.append(name or "rows without data_source")
                mask |= own
    return labels, mask


MIN_FAILED = 5
"""The fewest failed rollouts that are compared with each other."""


def _explain_failures(
    run: Run, episodes: pa.Table
) -> tuple[str, dict[str, float], list[str], list[str]]:
    """Return what failed rollouts have in common: a clause, evidence, causes and what to try."""
    clauses, evidence, causes, tries = [], {}, [], []
    if episodes.num_rows < MIN_FAILED:
        return "", evidence, causes, tries
    right = episodes.filter(episodes.column("right"))
    compared = episodes.num_rows - episodes.column("right").null_count
    if compared and right.num_rows >= RIGHT * compared:
        answer, truth = (right.column(name)[-1].as_py() for name in ("answer", "ground_truth"))
        evidence["right"] = right.num_rows / compared
        clauses.append(
            f"{evidence['right']:.0%} of them end with the ground truth (the answer"
            f" {shorten(answer)!r}, the ground truth {shorten(truth)!r})"
        )
        causes.append("the reward does not accept right answers of these rows in their form")
        tries.append("compare the reward function with the column of the ground truth")
    reasons = Counter(episodes.column("stop_reason").to_pylist())
    for reason in BUDGETS:
        if reasons[reason] >= CUT * episodes.num_rows:
            share = reasons[reason] / episodes.num_rows
            evidence[f"cut by {reason}"] = share
            key = BUDGETS[reason]
            clauses.append(f"the budget {reason!r} cuts {share:.0%}")
            causes.append(f"{key} ({config_value(run, key)}) is too small for these rows")
            tries.append(f"raise {key}")
    broken = float((column(episodes, "failed_calls") > 0).mean())
    if broken >= BROKEN:
        evidence["failed calls"] = broken
        clauses.append(f"a tool call fails in {broken:.0%}")
        causes.append("the tools of these rows do not work")
        tries.append(f"read the error that the model gets: agentrl show {run.folder} 'failed>0'")
    return "".join(f", {clause}" for clause in clauses), evidence, causes, tries


def shorten(text: str) -> str:
    """Return the last 60 characters of a text."""
    return text if len(text) <= 60 else f"...{text[-57:]}"


# --- nothing can be learned ----------------------------------------------------------------------

MIXED_GROUPS = 12
"""The fewest groups with right and wrong answers that do not all have a high reward. In fewer, all
rewards may be equal by chance."""
EQUAL_SHARE = 0.8
"""The share of these groups with equal rewards from which on it is reported. If a reward reads the
answer, no such group has equal rewards."""


@diagnosis("equal_rewards")
def equal_rewards(run: Run) -> Iterator[Finding]:
    """Right and wrong answers of a group have equal rewards, but rewards differ between groups."""
    episodes = training_episodes(run, MAX_WINDOW)
    mixed, reward = _find_mixed_groups(episodes), column(episodes, "reward")
    low, high = reward_range(run)
    solved = low + SOLVED * (high - low)
    for name in ("agent_name", "data_source"):
        by_subset: dict[str, list[list[int]]] = defaultdict(list)
        names = episodes.column(name).to_pylist()
        for group in mixed:
            by_subset[names[group[0]]].append(group)
        texts, shares, shown = [], [], []
        for subset, groups in sorted(by_subset.items()):
            # A right answer in another notation looks wrong here. Then the group is a solved one.
            failing = [group for group in groups if reward[group].min() < solved]
            equal = [g for g in failing if is_close(reward[g].min(), reward[g].max())]
            if len(failing) < MIXED_GROUPS or len(equal) < EQUAL_SHARE * len(failing):
                continue
            # If no group has a high reward, the reward may be for something else than the answer.
            if len(failing) == len(groups):
                continue
            shares.append(len(equal) / len(failing))
            texts.append(f"in {shares[-1]:.0%} of the {len(failing)} groups of {subset}")
            shown += equal
        if texts:
            mask = np.zeros(episodes.num_rows, bool)
            mask[np.concatenate(shown)] = True
            yield Finding(
                int(column(episodes, "step").min()),
                "right and wrong answers to the same row have the same reward"
                f" {' and '.join(texts)} that contain both and are not solved: no learning signal",
                {"share": min(shares), "groups": float(len(shown))},
                **examples(episodes, mask, "last"),
                causes=[
                    "the reward of a rollout is that of another one of its row: a cache whose key"
                    " lacks the answer, or a score of the whole group",
                    "the reward does not read the answer of these rows",
                ],
                tries=[
                    f"read the episodes of such a group: agentrl show {run.folder}",
                    f"score them with a corrected reward: agentrl rescore {run.folder}",
                ],
            )
            return


MIN_REJECTED_GROUPS, ALL_REJECTED = 8, 0.9
"""The fewest groups whose right answers all fail, and their share of the groups in which right
answers fail. If some right answers of a group fail and others do not, their form differs, or they
lack something else, such as a tool call: that is for the policy to learn."""
MIN_ACCEPTED, MAX_WRONG_ACCEPTED = 0.2, 0.05
"""The reward is for the answer if it accepts at least so many right answers, and no more than so
many wrong ones. The others are other notations of right answers."""


@diagnosis("rejected_answers")
def rejected_answers(run: Run) -> Iterator[Finding]:
    """Rollouts that end with the ground truth fail, as if their answers were wrong."""
    steps = len(read_series(run, REWARD))
    episodes = training_episodes(run, max(MIN_WINDOW, steps // 2))
    low, high = reward_range(run)
    if not episodes.num_rows or (high <= low and low > 0):
        return
    reward, masked = column(episodes, "reward"), column(episodes, "masked")
    ended = ~masked & ~np.isin(column(episodes, "stop_reason"), [*BUDGETS])
    right, wrong = ((column(episodes, "right") == is_right) & ended for is_right in (True, False))
    rejected = right & (reward <= low + NOTHING * (high - low))
    by_group: dict[str, list[bool]] = defaultdict(list)
    keys = group_keys(episodes)
    for i in np.flatnonzero(right):
        by_group[keys[i]].append(bool(rejected[i]))
    some = [group for group in by_group.values() if any(group)]
    every = [group for group in some if all(group) and len(group) > 1]
    if len(every) < MIN_REJECTED_GROUPS or len(every) < ALL_REJECTED * sum(
        len(group) > 1 for group in some
    ):
        return
    if high > low:
        solved = reward >= low + SOLVED * (high - low)
        accepted_wrong = solved[wrong].mean() if wrong.any() else 0.0
        if solved[right].mean() < MIN_ACCEPTED or accepted_wrong > MAX_WRONG_ACCEPTED:
            return  # the reward is for something else than the answer
    last = int(np.flatnonzero(rejected)[-1])
    answer, truth = (episodes.column(name)[last].as_py() for name in ("answer", "ground_truth"))
    share = float(rejected.sum() / right.sum())
    yield Finding(
        int(column(episodes, "step").min()),
        f"{share:.0%} of the rollouts that end with the ground truth ({rejected.sum()} of"
        f" {right.sum()}) fail: the answer {shorten(answer)!r} to the ground truth"
        f" {shorten(truth)!r} has the reward {reward[last]:.3g}",
        {"share": share, "rollouts": float(rejected.sum())},
        **examples(episodes, rejected, "last"),
        causes=[
            "the reward does not accept right answers in their form: it expects another pattern,"
            " or compares texts of numbers ('19' and '19.0')",
            "the reward is for something else than the answer",
        ],
        tries=[
            "compare the reward function with the column of the ground truth and the prompt",
            f"score them with a corrected reward: agentrl rescore {run.folder}",
        ],
        severity="error" if is_close(low, high) else "warning",
    )


def _find_mixed_groups(episodes: pa.Table) -> list[list[int]]:
    """Return the groups with right and wrong answers, each as the indexes of its episodes."""
    names = ("right", "reward")
    known: dict[str, list[int]] = defaultdict(list)
    right: dict[str, set[bool]] = defaultdict(set)
    cells = zip(*(episodes.column(name).to_pylist() for name in names), strict=True)
    keys = group_keys(episodes)
    for index, (is_right, reward) in enumerate(cells):
        if is_right is not None and reward is not None and not math.isnan(reward):
            known[keys[index]].append(index)
            right[keys[index]].add(is_right)
    return [known[key] for key in known if len(right[key]) > 1]


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


@diagnosis("dead_groups")
def dead_groups(run: Run) -> Iterator[Finding]:
    """All rewards of a group are equal, so no rollout has an advantage.

    A step is dead if no token has an advantage from the rewards: the budget policy masks all its
    rollouts, or all rewards of every group are equal. Then the policy does not change, or only a KL
    or an entropy term moves it.
    """
    dead = read_series(run, DEAD_STEP)
    if len(dead) and not is_solved(run):
        in_a_row = longest = end = 0
        for i, value in enumerate(dead.values):
            in_a_row = in_a_row + 1 if value else 0
            if in_a_row >= longest:
                longest, end = in_a_row, i
        if longest >= MAX_DEAD_STEPS:
            first, last = (int(dead.steps[i]) for i in (end - longest + 1, end))
            yield _explain_dead_steps(run, first, last, int(dead.values.sum()), len(dead))
            return
    groups = read_series(run, DEAD_GROUPS)
    if len(groups) < MIN_STEPS:
        return
    holds = groups.means >= DEAD_SHARE
    if not holds[-1]:
        yield from _find_failing_rows(run, max(groups.window, len(groups) // 2))
        return
    share, low = float(groups.last.mean()), reward_range(run)[0]
    reward = float(read_series(run, REWARD).last.mean())
    start = groups.since(holds)
    failing = _share_of_failing_groups(run, groups.window)
    evidence = {"dead_groups": share, "reward": reward}
    if failing is not None:
        evidence["failing_groups"] = failing
    if is_solved(run) or (failing is not None and failing < FAILING_SHARE):
        yield Finding(
            start,
            f"since step {start} all rewards are equal in {share:.0%} of the groups, because nearly"
            f" all rollouts succeed (mean reward {reward:.3g}): little is left to learn on these"
            " rows",
            evidence,
            tries=["harder rows", "algorithm.filter_groups=true", "stop: trainer.patience"],
            severity="note",
        )
        return
    failed = "" if failing is None else f"; in {failing:.0%} all rollouts fail"
    yield Finding(
        start,
        f"since step {start} all rewards are equal in {share:.0%} of the groups (mean reward"
        f" {reward:.3g}, smallest {low:.3g}{failed}): most rollouts teach nothing",
        evidence,
        causes=[
            "rows that the policy always fails, or always solves",
            "a reward with two values, where partial success counts as failure",
        ],
        tries=[
            "more rollouts of a row: rollout.n",
            "replace such rows within a step: algorithm.filter_groups=true",
            "easier or harder rows, or a reward with more than two values",
        ],
    )


def _find_failing_rows(run: Run, steps: int) -> Iterator[Finding]:
    """Yield a finding if no rollout of most groups succeeds, and the policy is good at others."""
    low, high = reward_range(run)
    # Without evicted groups: algorithm.filter_groups replaced them.
    episodes = training_episodes(run, steps)
    episodes = episodes.filter(
        pa.array([split == "train" for split in episodes.column("split").to_pylist()], pa.bool_())
    )
    rewards = {key: g for key, g in _rewards_of_groups(episodes).items() if len(g) >= MIN_GROUP}
    limit = failure_limit(run)
    failing = {key for key, group in rewards.items() if max(group) <= limit}
    others = [x for key, group in rewards.items() if key not in failing for x in group]
    if len(rewards) < MIN_GROUPS or len(failing) < FAILING_GROUPS * len(rewards) or not others:
        return
    earned = sum(others) / len(others)
    still = _share_of_failing_groups(run, MIN_WINDOW)
    if earned < low + GOOD * (high - low) or still is None or still < FAILING_GROUPS:
        return
    share, played = len(failing) / len(rewards), column(episodes, "step")
    yield Finding(
        int(played.min()),
        f"in steps {played.min()} to {played.max()} all rollouts fail in {share:.0%} of the groups,"
        f" and the mean reward of the other groups is {earned:.3g}: groups without a success give"
        " no gradient",
        {"failing_groups": share, "others": earned},
        **examples(episodes, np.array([key in failing for key in group_keys(episodes)])),
        causes=[
            "most rows are too hard for the policy",
            "the ground truth or the reward of these rows is wrong",
        ],
        tries=[
            f"read some episodes: agentrl show {run.folder} 'reward<={limit:.3g}'",
            "easier rows first",
            "replace such rows within a step: algorithm.filter_groups=true",
        ],
        subject="rows",
    )


def _rewards_of_groups(episodes: pa.Table) -> dict[str, list[float]]:
    """Return the rewards of each group, by its key."""
    groups: dict[str, list[float]] = defaultdict(list)
    rewards = column(episodes, "reward").tolist()
    for group, value in zip(group_keys(episodes), rewards, strict=True):
        groups[group].append(value)
    return groups


def _share_of_failing_groups(run: Run, steps: int) -> float | None:
    """Return the share of groups of the last steps whose rollouts all fail; None if unknown."""
    rewards = _rewards_of_groups(training_episodes(run, steps))
    if not rewards:
        return None
    limit = failure_limit(run)
    return sum(max(group) <= limit for group in rewards.values()) / len(rewards)


def _explain_dead_steps(run: Run, first: int, last: int, dead: int, steps: int) -> Finding:
    """Describe a stretch of dead steps: what their rollouts have in common."""
    table = run.metrics
    step = table.column("step").to_numpy()
    part = table.filter(pa.array((step >= first) & (step <= last)))

    def mean_of(name: str) -> float:
        values = [x or 0.0 for x in part.column(name).to_pylist()]
        return sum(values) / len(values)

    equal = mean_of(DEAD_GROUPS) if DEAD_GROUPS in table.column_names else 1.0
    stops = {n.removeprefix(STOP): mean_of(n) for n in table.column_names if n.startswith(STOP)}
    reason = max(stops, key=stops.__getitem__, default="")
    low, high = reward_range(run)
    masked, causes, tries = "", [], []
    if equal < 0.995:  # a dead step's other groups are masked
        masked = ", rollouts of the others are masked by rollout.budget_policy"
    if reason in BUDGETS:
        causes.append(f"the budget {reason!r} ends most rollouts before they succeed")
        tries.append(f"raise the budget {reason!r} (docs/run_folder.md, stop reasons)")
        if masked:
            tries.append(f"rollout.budget_policy.{reason}=keep")
    if low == high:
        causes.append(
            f"every rollout of the run has the reward {low:g}: the reward function never matches,"
            " or the rows are too hard"
        )
    elif REWARD in table.column_names and mean_of(REWARD) <= failure_limit(run):
        causes.append(
            f"nearly all rollouts of these steps fail (mean reward {mean_of(REWARD):.3g}): the rows"
            " are too hard for the policy, or the reward function does not match their answers"
        )
    else:
        causes.append("within each row all rollouts fail, or all succeed")
    tries += [
        f"read some episodes: agentrl show {run.folder}",
        "easier or harder rows, or a reward with more than two values",
        "imitate first: docs/debugging.md",
    ]
    episodes = training_episodes(run)
    of_step = column(episodes, "step") == last
    reward = mean_of(REWARD) if REWARD in table.column_names else math.nan
    return Finding(
        first,
        f"steps {first} to {last} had no learning signal ({DEAD_STEP}; {dead} of"
        f" {plural(steps, 'step')} in all): all rewards are equal in {equal:.0%} of the"
        f" groups{masked}, and the most frequent stop reason is {reason or 'unknown'!r}"
        f" ({stops.get(reason, 0.0):.0%} of the rollouts)",
        {"dead_steps": float(dead), "dead_groups": equal, "reward": reward},
        **examples(episodes, of_step),
        causes=causes,
        tries=tries,
        severity="error",
    )


# --- lost and cut rollouts -----------------------------------------------------------------------

DROPPED_SHARE = 0.02
"""The share of dropped rollouts that is a warning. The run itself stops at 5 % in one step."""


AGENT_ERRORS = 0.2
"""The share of episodes that end with an error of the agent that is a warning."""


@diagnosis("agent_error")
def agent_error(run: Run) -> Iterator[Finding]:
    """An external agent raises where it could return an error to the policy."""
    errors = read_series(run, f"{STOP}agent_error")
    if len(errors) >= MIN_WINDOW and (share := float(errors.last.mean())) >= AGENT_ERRORS:
        yield Finding(
            errors.since(errors.means >= AGENT_ERRORS),
            f"{share:.0%} of the episodes end with an error of the agent: their outcome is 0, or"
            " the reward that the agent had posted (agent.on_error=zero)",
            {"agent_errors": share},
            causes=["the agent raises if the policy calls a tool wrongly; the log has an error"],
            tries=["agentrl gateway check", "docs/agents.md, Mistakes of the policy"],
        )


@diagnosis("dropped")
def dropped(run: Run) -> Iterator[Finding]:
    """Infrastructure or code errors lose rollouts."""
    lost = read_series(run, "rollout/dropped")
    per_step = (config_value(run, "data.batch_size"), config_value(run, "rollout.n"))
    if len(lost) < MIN_WINDOW or not all(isinstance(x, int) for x in per_step):
        return
    size = per_step[0] * per_step[1]  # type: ignore[operator]
    share = float(lost.last.mean()) / size
    if share >= DROPPED_SHARE and np.count_nonzero(lost.last) > len(lost.last) // 2:
        yield Finding(
            lost.since(lost.means >= DROPPED_SHARE * size),
            f"{share:.1%} of the rollouts are lost to errors of infrastructure or code",
            {"dropped_share": share},
            causes=["a tool server, an engine or the reward fails; the log names the error"],
            tries=["read the log for the cause", "rollout.timeout_s", "agentrl doctor"],
        )


TRUNCATED = 0.25
"""The share of truncated rollouts that is a warning, as a mean of the last steps. A tenth is usual
for a policy that still learns to stop."""
TRUNCATED_ERROR = 0.75
"""The share at which the reward is decided by the budget, not by the policy: an error."""
HARD_BUDGETS = ("turn_tokens", "trajectory_tokens", "time")
"""Budgets that end a rollout in the middle of a turn. The others (turns, calls) may be the regular
end of a game, so they count only if such rollouts earn less than the others."""


CUT_LOOP = 0.4
"""The share of truncated rollouts of one agent loop that is a warning. It is larger than
`TRUNCATED`, because loops with long turns are cut more often than others while they learn."""
CUT_CALLS, CUT_ROLLOUTS, CUT_SHARE, CUT_GOOD = 0.95, 50, 0.08, 0.35
"""In the second half of a run, a budget is too small if it cuts 95 % of the rollouts with n or more
tool calls, these are at least 50 and 8 % of all, and the others earn little (a third of the range).
A policy that learned to avoid such calls is seldom cut."""
MANY_CALLS = (1, 2, 3)
"""The numbers n that are tried. With more calls, rollouts that repeat a call would count."""


@diagnosis("truncation")
def truncation(run: Run) -> Iterator[Finding]:
    """A budget ends the rollouts before the policy does."""
    for reason in BUDGETS:
        share = _filled_series(run, STOP + reason)
        if len(share) < MIN_WINDOW:
            continue
        holds = share.means >= TRUNCATED
        mean = float(share.last.mean())
        if not holds[-1] or share.values[-MIN_WINDOW:].mean() < TRUNCATED:
            if reason in HARD_BUDGETS:
                found = [*_find_cut_calls(run, reason)]
                yield from found or _find_cut_loops(run, reason, share.window)
            continue
        episodes = training_episodes(run, share.window)
        is_cut = _is_cut(episodes, reason)
        costs, rewards = _reward_of_cut(episodes, is_cut)
        if costs is False or (costs is None and reason not in HARD_BUDGETS):
            continue
        earned = ""
        if rewards:
            earned = (
                f"; their mean reward is {rewards['cut']:.3g}, that of the others"
                f" {rewards['other']:.3g}"
            )
        key = BUDGETS[reason]
        start = share.since(holds)
        yield Finding(
            start,
            f"since step {start} the budget {reason!r} cuts {mean:.0%} of the rollouts{earned}",
            {"share": mean, **rewards},
            **examples(episodes, is_cut, "last"),
            causes=[
                f"{key} ({config_value(run, key)}) is too small for this task",
                "the policy does not learn to stop: long or endless answers, repeated calls",
            ],
            tries=[
                f"raise {key}",
                f"rollout.budget_policy.{reason}=zero or =mask",
                "reward.overlong_buffer",
            ],
            severity="error" if mean >= TRUNCATED_ERROR else "warning",
            subject=reason,
        )


def _is_cut(episodes: pa.Table, reason: str) -> np.ndarray:
    return np.array([r == reason for r in episodes.column("stop_reason").to_pylist()], bool)


def _find_cut_loops(run: Run, reason: str, steps: int) -> Iterator[Finding]:
    """Yield a finding for each agent loop of which a budget cuts many rollouts."""
    episodes = training_episodes(run, steps)
    agents = np.array(episodes.column("agent_name").to_pylist(), object)
    for agent in filter(None, dict.fromkeys(agents.tolist())):
        own = episodes.filter(pa.array(agents == agent))
        is_cut = _is_cut(own, reason)
        costs, rewards = _reward_of_cut(own, is_cut)
        if is_cut.sum() < CUT_ROLLOUTS or is_cut.mean() < CUT_LOOP or not costs:
            continue
        key, played = BUDGETS[reason], column(own, "step")
        yield Finding(
            int(played.min()),
            f"in steps {played.min()} to {played.max()} the budget {reason!r} cuts"
            f" {is_cut.mean():.0%} of the rollouts of {agent}; their mean reward is"
            f" {rewards['cut']:.3g}, that of its other rollouts {rewards['other']:.3g}",
            {"share": float(is_cut.mean()), **rewards},
            **examples(own, is_cut, "last"),
            causes=[f"{key} ({config_value(run, key)}) is too small for rows of {agent}"],
            tries=[f"raise {key}"],
            subject=f"{reason} of {agent}",
        )


def _find_cut_calls(run: Run, reason: str) -> Iterator[Finding]:
    """Yield a finding if a budget cuts all rollouts with n or more tool calls.

    Only if the others earn little: otherwise rollouts with so many calls repeat a call.
    """
    episodes = training_episodes(run, max(MIN_WINDOW, len(read_series(run, REWARD)) // 2))
    low, high = reward_range(run)
    if not episodes.num_rows or high <= low:
        return
    reward, calls = column(episodes, "reward"), column(episodes, "tool_calls")
    is_cut, played = _is_cut(episodes, reason), column(episodes, "step")
    for number in MANY_CALLS:
        many = calls >= number
        if many.sum() < max(CUT_ROLLOUTS, CUT_SHARE * len(calls)):
            return
        share = float(is_cut[many].mean())
        others = float(reward[~many].mean()) if not many.all() else low
        fails = reward[many].mean() <= failure_limit(run)
        if share < CUT_CALLS or not (fails and others <= low + CUT_GOOD * (high - low)):
            continue
        key = BUDGETS[reason]
        yield Finding(
            int(played[many].min()),
            f"in steps {played[many].min()} to {played[many].max()} the budget {reason!r} cuts"
            f" {share:.0%} of the {many.sum()} rollouts with {plural(number, 'tool call')} or more;"
            f" their mean reward is {reward[many].mean():.3g}, that of all rollouts"
            f" {reward.mean():.3g}",
            {"share": share, "calls": float(number), "cut": float(reward[many].mean())},
            **examples(episodes, many & is_cut, "last"),
            causes=[f"{key} ({config_value(run, key)}) is too small for this task"],
            tries=[f"raise {key}"],
            subject=f"{reason} and calls",
        )
        return


def _filled_series(run: Run, name: str) -> Series:
    """Return a metric whose absence in a step means 0, from the run's first training step on."""
    known, reward = read_series(run, name), read_series(run, REWARD)
    if not len(known):
        return known
    values = dict(zip(known.steps.tolist(), known.values.tolist(), strict=True))
    return Series(reward.steps, np.array([values.get(s, 0.0) for s in reward.steps.tolist()]))


def _reward_of_cut(episodes: pa.Table, is_cut: np.ndarray) -> tuple[bool | None, dict[str, float]]:
    """Return whether cut rollouts earn less (None: unknown), and both mean rewards.

    Standard errors are clustered by row. If all rollouts are cut, nothing can be compared.
    """
    if not is_cut.any() or is_cut.all():
        return None, {}
    reward, ids = column(episodes, "reward"), np.array(episodes.column("sample_id").to_pylist())

    def clustered(mask: np.ndarray) -> tuple[float, float]:
        rows = defaultdict(list)
        for key, value in zip(ids[mask], reward[mask], strict=True):
            rows[key].append(float(value))
        return float(reward[mask].mean()), standard_error(list(rows.values()))

    (cut, cut_error), (other, other_error) = clustered(is_cut), clustered(~is_cut)
    error = math.hypot(cut_error, other_error)
    means = {"cut": cut, "other": other}
    return (None if math.isnan(error) else other - cut > 2 * error), means


# --- tools ---------------------------------------------------------------------------------------

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


@diagnosis("settings")
def settings(run: Run) -> Iterator[Finding]:
    """The notes on the run's settings that it printed when it began."""
    try:
        config = Config.model_validate(run.config)
    except ValueError:  # A number refers to an environment variable that is not set here.
        return
    for note in doubtful(config):
        yield Finding(0, note, severity="note", subject=note.partition("=")[0])


@diagnosis("tool_use")
def tool_use(run: Run) -> Iterator[Finding]:
    """The policy stops calling tools, or never calls them."""
    episodes = training_episodes(run)
    with_tools = set(episodes.filter(episodes.column("has_tools")).column("agent_name").to_pylist())
    for name in run.metrics.column_names:
        match = re.fullmatch(r"rollout/(.+)/tool_call_rate", name)
        if not match:
            continue
        agent, rate = match[1], read_series(run, name)
        if len(rate) < MIN_STEPS:
            continue
        means, last = rate.means, float(rate.last.mean())
        best = int(means.argmax())
        before, best_rate = rate.at(best), float(means[best])
        # A fast fall is over before a window is full.
        if (begin := rate.values[:FAST]).mean() > best_rate:
            best, before, best_rate = 0, begin, float(begin.mean())
        own = np.array([a == agent for a in episodes.column("agent_name").to_pylist()], bool)
        shown = examples(episodes, own & (column(episodes, "tool_calls") == 0))
        tries = [
            "rows that cannot be answered without the tool",
            "agentrl play: does the prompt show the tools, and does a call get its result?",
            "a reward for turns or calls: reward.turn_weight, reward.tool_weight",
        ]
        if best_rate >= TOOL_RATE and last <= TOOL_DROP * best_rate:
            is_gone = rate.last.max() <= GONE and (rate.values >= TOOL_RATE).sum() >= FAST
            if z_score(before, rate.last) > -Z and not is_gone:
                continue
            start = rate.since(means <= TOOL_DROP * best_rate)
            reward = read_series(run, f"rollout/{agent}/reward")
            same = len(reward) == len(rate)
            is_better = same and z_score(reward.at(best), reward.last) > 3.0
            earned = (
                f"; its reward went from {reward.at(best).mean():.3g} to {reward.last.mean():.3g}"
                if same
                else ""
            )
            failed = own & (column(episodes, "tool_calls") > 0)
            failed &= column(episodes, "reward") <= failure_limit(run)
            failed &= column(episodes, "step") <= start
            clause, common, reasons, changes = _explain_failures(
                run, episodes.filter(pa.array(failed))
            )
            if clause:
                clause = f"; of its {failed.sum()} failed rollouts with calls before that{clause}"
            # A fast fall is over in the first step; its rewards are not enough.
            end = max(start, int(rate.steps[min(rate.window, len(rate) - 1)]))
            early = episodes.filter(pa.array(own & (column(episodes, "step") <= end)))
            correlation = correlation_within_rows(early, "sampled_tokens")
            penalty = (
                "a penalty for calls, turns or length that is larger than what the tool brings"
            )
            causes = [
                *reasons,
                "an answer without the tool earns as much: the policy learned to guess"
                if is_better
                else "calls were punished by chance: failed or truncated calls earn less than"
                " an answer at once",
            ]
            causes.insert(0 if correlation <= LENGTH_PENALTY else len(causes), penalty)
            if correlation <= LENGTH_PENALTY:
                common["length_correlation"] = correlation
                clause += (
                    f"; within a row, longer rollouts earn less (correlation {correlation:.2f})"
                )
                changes.append(
                    "a smaller penalty for length; score these episodes without it: agentrl"
                    f" rescore {run.folder}"
                )
            yield Finding(
                start,
                f"{agent} stops calling tools: {best_rate:.0%} of its rollouts called one around"
                f" step {rate.steps[best]}, {last:.0%} in the last {rate.window} steps{earned}"
                f"{clause}",
                {"best_rate": best_rate, "last_rate": last, **common},
                **shown,
                causes=causes,
                tries=[*changes, *tries],
                severity="audit" if is_better else "warning",
                subject=agent,
            )
        elif (
            means.max() <= NO_TOOLS
            and agent in with_tools
            and not has_risen(read_series(run, REWARD), 0)
        ):
            yield Finding(
                int(rate.steps[0]),
                f"{agent} never calls the tools of its rows ({rate.values.mean():.1%} of the"
                " rollouts)",
                {"last_rate": last},
                **shown,
                causes=[
                    "the model does not know the format of calls, or the prompt does not ask for"
                    " them",
                    "calls are not parsed: rollout.tool_format is not that of the model",
                ],
                tries=[
                    f"agentrl check-template {config_value(run, 'model.path') or 'MODEL'}",
                    "imitate first: docs/debugging.md",
                    *tries,
                ],
                subject=agent,
            )


REPEATED = 0.25
"""The share of calls that repeat an earlier call of the conversation with the same result. One
repetition after a mistake is normal, so a quarter of all calls is not reached by it."""
MIN_CALLS = 50
"""The fewest calls of the last steps."""


@diagnosis("repeated_calls")
def repeated_calls(run: Run) -> Iterator[Finding]:
    """The policy makes the same call again and gets the same result."""
    episodes = training_episodes(run)
    steps = np.unique(column(episodes, "step"))
    if len(steps) < MIN_WINDOW:
        return
    position = np.searchsorted(steps, column(episodes, "step"))
    calls = np.bincount(position, column(episodes, "tool_calls"), len(steps))
    again = np.bincount(position, column(episodes, "repeated_calls"), len(steps))
    share = Series(steps, again / np.maximum(calls, 1))
    total = calls[-share.window :].sum()
    mean = float(again[-share.window :].sum() / max(total, 1))
    holds = share.means >= REPEATED
    if total < MIN_CALLS or mean < REPEATED or not holds[-1]:
        return
    start = share.since(holds)
    repeats = column(episodes, "repeated_calls")
    reward = column(episodes, "reward")
    recent = position >= len(steps) - share.window
    with_repeats, without = reward[recent & (repeats > 0)], reward[recent & (repeats == 0)]
    evidence = {"share": mean, "rollouts": float((repeats[recent] > 0).mean())}
    compared = ""
    if len(with_repeats) and len(without):
        evidence |= {
            "reward_with": float(with_repeats.mean()),
            "reward_without": float(without.mean()),
        }
        compared = (
            f"; such rollouts earn {with_repeats.mean():.3g}, the others {without.mean():.3g}"
        )
    causes = [
        "the policy does not use the result: it is cut, or in a form that the model cannot read"
        " (tools.max_result_tokens)",
        "calls earn reward by themselves (reward.function, reward.tool_weight, reward.turn_weight)",
        "nothing ends the loop: rollout.max_tool_calls, rollout.max_turns are large",
    ]
    if compared and with_repeats.mean() > without.mean():
        causes[:2] = reversed(causes[:2])
    yield Finding(
        start,
        f"since step {start} {mean:.0%} of the tool calls repeat an earlier call of the"
        f" conversation and get the same result{compared}",
        evidence,
        **examples(episodes, recent & (repeats > 0), "repeated_turn"),
        causes=causes,
        tries=[
            "read the episodes: does the result contain what the call asked for?",
            "rollout.max_tool_calls",
            "a penalty for failed calls: tools.penalties",
        ],
    )


# --- kinds of questions --------------------------------------------------------------------------

COLLAPSE_STEPS = 5
"""The fewest last steps with the kind of rows, all of whose rollouts fail."""
COLLAPSE_ROLLOUTS = 40
"""The fewest rollouts in these steps. If a policy succeeded in only one of 20, all of 40 would fail
by chance in 13 % of the cases; they must give equal answers too."""
COLLAPSE_GROUPS = 5
"""The fewest groups in these steps."""
SAME_ANSWER = 0.9
"""The share of rollouts that give the most frequent answer of their group."""
COMMON_WORD = 0.125
"""A word that at least an eighth of the rows contain belongs to the wording of a kind of rows.
Names and things that vary are rarer."""
MAX_KINDS = 200
"""The largest number of kinds: with more, the wording does not tell kinds apart."""


MAX_COLLAPSED = 2
"""The number of kinds that the text of a finding describes."""


@diagnosis("collapse")
def collapse(run: Run) -> Iterator[Finding]:
    """All rollouts of a kind of rows give the same wrong answer."""
    episodes = training_episodes(run)
    if not episodes.num_rows:
        return
    low, high = reward_range(run)
    if not len(read_series(run, "critic/score/min")):
        low, high = float(column(episodes, "reward").min()), math.nan
    kinds = _find_kinds(episodes)
    step, reward = column(episodes, "step"), column(episodes, "reward")
    answers = np.array([a.strip() for a in episodes.column("answer").to_pylist()], object)
    groups = group_keys(episodes)
    is_wrong = reward <= low + FAILED * ((high - low) if high > low else 0.0)
    collapsed: list[tuple[str, int, list[int]]] = []  # example of the rows, first step, episodes
    texts = []
    for kind, members in kinds.items():
        rows = np.flatnonzero(members)
        good = rows[~is_wrong[rows]]
        start = int(step[good].max()) + 1 if len(good) else int(step[rows].min())
        rows = rows[step[rows] >= start]
        if len(rows) < COLLAPSE_ROLLOUTS or len(np.unique(step[rows])) < COLLAPSE_STEPS:
            continue
        kept, share = _longest_agreement(rows, groups, answers)
        number = len({groups[row] for row in kept})
        steps = np.unique(step[kept])
        if len(kept) < COLLAPSE_ROLLOUTS or number < COLLAPSE_GROUPS or len(steps) < COLLAPSE_STEPS:
            continue
        answer, count = Counter(answers[kept].tolist()).most_common(1)[0]
        is_one = count >= SAME_ANSWER * len(kept)
        same = f"the same wrong answer ({shorten(answer)!r})" if is_one else "the same wrong answer"
        texts.append(
            f"rows like {kind!r}: all {len(kept)} rollouts fail and {share:.0%} give {same}"
            f"{'' if is_one else ' to a row'} since step {steps[0]}"
        )
        collapsed.append((kind, int(steps[0]), kept))
    if not collapsed:
        return
    kept = [row for _, _, rows in collapsed for row in rows]
    start = min(first for _, first, _ in collapsed)
    others = (step >= start) & ~np.logical_or.reduce([kinds[kind] for kind, _, _ in collapsed])
    evidence = {"kinds": float(len(collapsed)), "rollouts": float(len(kept))}
    elsewhere = ""
    if others.any():
        evidence["reward_elsewhere"] = float(reward[others].mean())
        elsewhere = f"; the other rows earn {evidence['reward_elsewhere']:.3g}"
    more = len(texts) - MAX_COLLAPSED
    yield Finding(
        start,
        "; ".join(texts[:MAX_COLLAPSED])
        + (f"; and {plural(more, 'other kind')} of rows" if more > 0 else "")
        + elsewhere,
        evidence,
        [
            str(episodes.column("episode_id")[row].as_py())
            for _, _, rows in collapsed[:EXAMPLES]
            for row in rows[: -(-EXAMPLES // len(collapsed))]
        ],
        causes=[
            "the policy no longer explores: all rewards of such a group are equal, so it gives no"
            " gradient",
            "updates for other rows changed these answers (shared wording, too large steps)",
            "the ground truth or the reward of these rows is wrong",
        ],
        tries=[
            "read one of the episodes, and check its ground truth",
            "more exploration: rollout.temperature, algorithm.entropy_coef, a lower optim.lr",
            "imitate right conversations of these rows first: agentrl sft (docs/debugging.md)",
            "fork from a checkpoint before this step: trainer.resume",
        ],
    )


SAME_TRUTH_ROWS = 8
"""The fewest rows of a kind: with five possible answers, so many are equal by chance once in 80,000
kinds."""
MIN_TRUTHS = 5
"""The fewest different ground truths of rows that are compared: rows of a yes-or-no task agree
often."""
SKEWED_ROWS = 30
"""The fewest rows of an agent loop and data source. Of fewer, half may agree by chance."""
SKEWED_SHARE = 0.5
"""The share of these rows with the same ground truth from which on it is reported."""
SKEW = 3.0
"""How many times this share must be that of the most frequent ground truth of the other rows."""


@diagnosis("ground_truths")
def ground_truths(run: Run) -> Iterator[Finding]:
    """Rows of a kind have the same ground truth, and other rows have different ones."""
    episodes = training_episodes(run)
    truths = np.array(episodes.column("ground_truth").to_pylist(), object)
    samples = np.array(episodes.column("sample_id").to_pylist(), object)
    is_known = np.array([truth is not None for truth in truths], bool)
    if len(set(truths[is_known])) <= MIN_TRUTHS:
        return
    texts, shown = [], np.zeros(len(truths), bool)
    for kind, members in _find_kinds(episodes).items():
        own = members & is_known
        rows, others = len(set(samples[own])), set(truths[is_known & ~members])
        if rows < SAME_TRUTH_ROWS or len(set(truths[own])) > 1 or len(others) < MIN_TRUTHS:
            continue
        truth = truths[int(own.argmax())]
        texts.append(f"all {rows} rows like {kind!r} have it: {shorten(truth)!r}")
        shown |= own
    if not texts:
        yield from _find_skewed_truths(episodes, truths, samples, is_known)
    else:
        more = len(texts) - MAX_COLLAPSED
        yield Finding(
            int(column(episodes, "step").min()),
            f"one ground truth for many questions: {'; '.join(texts[:MAX_COLLAPSED])}"
            + (f"; and {plural(more, 'other kind')} of rows" if more > 0 else ""),
            {"kinds": float(len(texts)), "rows": float(len(set(samples[shown])))},
            **examples(episodes, shown),
            causes=["the column of the ground truth holds a placeholder, or is filled wrongly"],
            tries=["compare the ground truths with the questions: agentrl check --dataset ROWS"],
            severity="audit",
        )


def _find_skewed_truths(
    episodes: pa.Table, truths: np.ndarray, samples: np.ndarray, is_known: np.ndarray
) -> Iterator[Finding]:
    """Yield a finding for each agent loop and data source most of whose rows have one truth."""
    agents, sources = (episodes.column(name).to_pylist() for name in ("agent_name", "data_source"))
    subsets = np.array([f"{a}, {s}" for a, s in zip(agents, sources, strict=True)], object)

    def most_common(chosen: np.ndarray) -> tuple[str, float, int, int]:
        """Return the most frequent truth, its share, and how many rows and truths there are."""
        truth_of = dict(zip(samples[chosen], truths[chosen], strict=True))
        counts = Counter(truth_of.values())
        truth, count = counts.most_common(1)[0]
        return truth, count / len(truth_of), len(truth_of), len(counts)

    for subset in sorted(set(subsets)):
        own, others = is_known & (subsets == subset), is_known & (subsets != subset)
        if not own.any() or not others.any():
            continue
        truth, share, rows, different = most_common(own)
        _, other_share, _, other_truths = most_common(others)
        if rows < SKEWED_ROWS or share < SKEWED_SHARE or share < SKEW * other_share:
            continue
        if min(different, other_truths) < MIN_TRUTHS:
            continue
        of_truth = own & (truths == truth)
        yield Finding(
            int(column(episodes, "step").min()),
            f"{share:.0%} of the {rows} rows of {subset} have the same ground truth,"
            f" {shorten(truth)!r}; in the other rows the most frequent one has {other_share:.0%}",
            {"share": share, "elsewhere": other_share, "rows": float(rows)},
            **examples(episodes, of_truth, "last"),
            causes=["the column of the ground truth is filled wrongly for these rows"],
            tries=["compare the ground truths with the questions: agentrl check --dataset ROWS"],
            severity="audit",
            subject=subset,
        )


def _longest_agreement(
    rows: np.ndarray, groups: Sequence[str], answers: np.ndarray
) -> tuple[list[int], float]:
    """Return the episodes of the longest stretch until now in which the groups agree.

    Returns:
        The episodes, the last ones first; and the share of them that give the most frequent answer
        of their group.
    """
    by_group: dict[str, list[int]] = defaultdict(list)
    for row in map(int, rows):
        by_group[groups[row]].append(row)
    seen: list[int] = []
    agreeing = length = 0
    share = 0.0
    for group in reversed(by_group.values()):
        seen += group
        agreeing += Counter(answers[group].tolist()).most_common(1)[0][1]
        if agreeing >= SAME_ANSWER * len(seen):
            length, share = len(seen), agreeing / len(seen)
    return seen[:length], share


def _find_kinds(episodes: pa.Table) -> dict[str, np.ndarray]:
    """Return masks of the episodes whose rows are worded alike, by an example of such a row.

    Numbers and rare words (names, things) are left out of the wording; see `COMMON_WORD`.
    """
    prompts = dict(
        zip(
            episodes.column("sample_id").to_pylist(),
            episodes.column("prompt").to_pylist(),
            strict=True,
        )
    )
    words = {i: re.findall(r"[^\W\d_]+|\d+", p[-2000:].lower()) for i, p in prompts.items()}
    frequency = Counter(word for w in words.values() for word in set(w))
    common = {w for w, n in frequency.items() if n >= COMMON_WORD * len(words) and not w.isdigit()}
    wording = {i: " ".join(w for w in ws if w in common) for i, ws in words.items()}
    agents = episodes.column("agent_name").to_pylist()
    keys = [
        (agent, wording[i])
        for agent, i in zip(agents, episodes.column("sample_id").to_pylist(), strict=True)
    ]
    if len(set(keys)) > MAX_KINDS:
        keys = [
            (agent, source)
            for agent, source in zip(
                agents, episodes.column("data_source").to_pylist(), strict=True
            )
        ]
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    number = np.array([numbers[key] for key in keys])
    kinds = {}
    all_prompts = episodes.column("prompt")
    for (agent, _), n in numbers.items():
        members = number == n
        example = " ".join(all_prompts[int(members.argmax())].as_py().split())
        text = example if len(example) <= 100 else "..." + example[-97:]
        name = f"{text} ({agent})" if len(set(agents)) > 1 else text
        kinds[name] = members
    return kinds


# --- rewards over time ---------------------------------------------------------------------------

FALL = 0.5
"""The loss that is an error, as a share of the best level above the smallest reward."""
MIN_FALL = 0.05
"""The smallest fall as a share of the range of rewards, so that a run that never rose has none."""
FALL_Z = 5.0
"""The standard errors of a fall. They are more than `Z`, because the best of many windows is high
by chance."""
FALL_WITH_KL = 0.2
"""The loss that is a warning if the KL rose meanwhile, faster than before."""
KL_RISE = 2.0
"""How many times its value at the best rewards the KL must have to be named as the cause."""


@diagnosis("reward_falls")
def reward_falls(run: Run) -> Iterator[Finding]:
    """The reward falls far below its best level, or less far while the KL rises."""
    reward = read_series(run, REWARD)
    if len(reward) < MIN_STEPS:
        return
    low, high = reward_range(run)
    means = reward.means
    best = int(means.argmax())
    top, last = float(means[best]), float(reward.last.mean())
    lost = top - last
    if lost < FALL_WITH_KL * (top - low) or lost < MIN_FALL * (high - low):
        return
    if z_score(reward.at(best), reward.last) > -FALL_Z:
        return
    start = reward.since(means <= top - 0.5 * lost)
    evidence = {"best": top, "last": last}
    rises, has_jumped = [], False
    for name in ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl", "canary/drift"):
        kl = read_series(run, name)
        if len(kl) < MIN_STEPS:
            continue
        around = kl.values[
            (kl.steps >= reward.steps[best]) & (kl.steps < reward.steps[best] + reward.window)
        ]
        before, after = (
            float(np.abs(around).mean()) if len(around) else 0.0,
            float(np.abs(kl.values[kl.steps >= start]).mean()),
        )
        evidence |= {f"{name} before": before, f"{name} after": after}
        if after < KL_RISE * max(before, 1e-9):
            continue
        rises.append(f"{name} rose from {before:.2g} to {after:.2g}")
        # The KL to the reference grows in every run: it must grow faster than until the best step.
        first = float(np.abs(kl.first).mean())
        speed = (after - before) / max(reward.steps[-1] - reward.steps[best], 1)
        speed_before = (before - first) / max(reward.steps[best] - reward.steps[0], 1)
        has_jumped |= speed > KL_RISE * max(speed_before, 0.0)
    is_large = lost >= FALL * (top - low)
    if not (is_large or has_jumped):
        return
    suffix = f", while {rises[0]}" if rises else ""
    episodes = training_episodes(run)
    yield Finding(
        start,
        f"the reward fell from {top:.3g} (steps {reward.steps[best]} to"
        f" {reward.steps[best] + reward.window - 1}) to {last:.3g}; half of this fall happened by"
        f" step {start}{suffix}",
        evidence,
        **examples(episodes, column(episodes, "step") >= start),
        causes=[
            "updates are too large: the policy left the region where its samples teach it"
            if rises
            else "the rows, a tool or the reward changed",
            f"optim.lr ({config_value(run, 'optim.lr')}) is too high, or too many optimizer steps"
            " per batch",
            "the engine does not sample from the trained policy: rollout_corr/logprob_diff_mean",
        ],
        tries=[
            "fork from a checkpoint before this step with a lower optim.lr: trainer.resume",
            "a KL penalty: algorithm.kl_loss_coef",
            "fewer algorithm.ppo_epochs, a larger batch",
        ],
        severity="error" if is_large else "warning",
    )


SUBSET_REWARDS = re.compile(r"(?:val|val_greedy|val-core)/(.+)/reward/mean@\d+")
"""The mean rewards of an agent loop or a data source in a validation, sampled or greedy."""
MIN_VALIDATION_FALL = 0.1
"""The smallest fall as a share of the range of rewards."""


@diagnosis("validation_falls")
def validation_falls(run: Run) -> Iterator[Finding]:
    """The validation reward of an agent loop or data source falls far below an earlier one."""
    episodes = training_episodes(run, MIN_WINDOW)
    low, high = reward_range(run)
    largest: dict[bytes, tuple[float, Finding]] = {}
    for name in run.metrics.column_names:
        match = SUBSET_REWARDS.fullmatch(name)
        fall = _find_validation_fall(run, name) if match else None
        if match is None or fall is None:
            continue
        subset, size = match[1], fall.best - fall.last
        rows = values_by_step(run, name.rpartition("/reward/")[0] + "/rows")
        if min(rows.values(), default=MIN_KIND) < MIN_KIND:
            continue
        if size <= Z * math.sqrt(2) * fall.error or size < MIN_VALIDATION_FALL * (high - low):
            continue
        if size < FALL * (fall.best - low):
            continue
        chosen = np.logical_or(
            *(column(episodes, of) == subset for of in ("agent_name", "data_source"))
        )
        answers = Counter(column(episodes, "answer")[chosen].tolist())
        answer, count = answers.most_common(1)[0] if answers else ("", 0)
        common_answer = ""
        if chosen.any() and count >= SHARED_ANSWER * chosen.sum():
            common_answer = (
                f"; in the last training steps {count / chosen.sum():.0%} of its rollouts answer"
                f" {shorten(answer)!r}"
            )
        finding = Finding(
            fall.step,
            f"the validation reward of {subset} fell from {fall.best:.3g} (step {fall.step}) to"
            f" {fall.last:.3g} (step {fall.last_step}){common_answer}",
            {"best": fall.best, "last": fall.last, "standard_error": fall.error},
            **examples(episodes, chosen, "last"),
            causes=[
                "the training rows of this loop or source reward something else: wrong ground"
                " truths, or a reward that can be exploited",
                "updates for other rows changed these answers",
            ],
            tries=[
                "compare the ground truths of its training rows with those of its validation rows",
                "keep the best checkpoint: trainer.keep_best",
            ],
            subject=subset,
        )
        # The metrics of an agent loop and of a data source, sampled or greedy, may describe the
        # same rows: report the largest fall of them.
        key = chosen.tobytes() if chosen.any() else subset.encode()
        if key not in largest or size > largest[key][0]:
            largest[key] = size, finding
    yield from (finding for _, finding in largest.values())


@dataclass(frozen=True, slots=True)
class _ValidationFall:
    """The best and the last value of a validation metric, and the largest standard error."""

    step: int
    best: float
    last_step: int
    last: float
    error: float


def _find_validation_fall(run: Run, name: str) -> _ValidationFall | None:
    """Return the fall of a metric `.../mean@N`; None without two values and a standard error."""
    values, errors = (
        {step: value for step, value in values_by_step(run, key).items() if math.isfinite(value)}
        for key in (name, name.replace("/mean@", "/se@"))
    )
    if len(values) < 2 or not errors:
        return None
    step, last = max(values, key=values.__getitem__), max(values)
    return _ValidationFall(step, values[step], last, values[last], max(errors.values()))


VAL_REWARDS = re.compile(r"val-core/.*/reward/mean@\d+")
"""The mean rewards of a data source's sampled rollouts in a validation."""
OVERFIT_GAP = 0.15
"""How far the reward of training must be above that of validation, in ranges of rewards. The tiny
model's healthy runs have up to 0.09."""
OVERFIT_STEPS = 5
"""The training steps before a validation with which it is compared."""
MEMORIZED = 0.75
"""The epochs from which on rows can have been memorized."""
MIN_KIND = 8
"""The rollouts of a kind of rows in a validation below which its mean says little."""


@diagnosis("overfitting")
def overfitting(run: Run) -> Iterator[Finding]:
    """The reward of the training rows is far above that of the validation rows, and was not."""
    training = values_by_step(run, REWARD)
    names = [name for name in run.metrics.column_names if VAL_REWARDS.fullmatch(name)]
    validations = [values_by_step(run, name) for name in names]
    if not validations or len(training) < MIN_STEPS:
        return
    steps = sorted(set.intersection(*map(set, validations)))
    means = {step: sum(values[step] for values in validations) / len(names) for step in steps}
    low, high = reward_range(run)
    if high <= low:
        return
    gaps = {}
    for step in steps:
        near = range(step - OVERFIT_STEPS + 1, step + 1) if step else range(1, 3)
        rewards = [training[s] for s in near if s in training]
        if rewards:
            gaps[step] = sum(rewards) / len(rewards) - means[step]
    limit = OVERFIT_GAP * (high - low)
    late = [step for step in gaps if step][-2:]
    # Validation rows that are harder from the start, or another reward, are no overfitting.
    if len(late) < 2 or 0 not in gaps or gaps[0] > limit / 2:
        return
    if any(gaps[step] < limit for step in late):
        return
    start = next(step for step in gaps if step and gaps[step] >= limit)
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
        causes = ["too few training rows, played too often: training/epoch"]
        tries = [
            "more rows; fewer steps: trainer.total_steps, trainer.patience, trainer.keep_best",
            "a KL penalty: algorithm.kl_loss_coef; fewer algorithm.ppo_epochs",
        ]
    else:
        text += (
            f". That is not memorized, because most training rows were not played yet ({epoch:.0%}"
            f" of an epoch): they reward something else{_widest_gap(run, last)}"
        )
        causes = ["ground truths of the training rows are wrong", "the reward can be exploited"]
        tries = [
            "compare ground truths of training rows with validation rows of the same kind",
            f"read episodes with a reward: agentrl show {run.folder} 'reward>0' --step {last}",
        ]
    yield Finding(
        start,
        text,
        rewards | {"epoch": epoch or 0.0},
        causes=[*causes, "the rows of validation are of another kind"],
        tries=tries,
    )


def _widest_gap(run: Run, step: int) -> str:
    """Return a clause about the kind of rows whose training and validation rewards differ most.

    It names the answer that these training rows get most often; it is "" if no kind stands out.
    """
    training = training_episodes(run, OVERFIT_STEPS)
    table = run.behaviour
    at_step = (column(table, "step") == step) & (column(table, "split") == "val")
    validation = table.filter(pa.array(at_step))
    widest, clause = 1.5 * OVERFIT_GAP, ""
    for name in ("agent_name", "data_source"):
        kinds = np.unique(column(validation, name))
        for kind in kinds if len(kinds) > 1 else ():
            rows, others = (
                t.filter(pa.array(column(t, name) == kind)) for t in (training, validation)
            )
            if min(rows.num_rows, others.num_rows) < MIN_KIND:
                continue
            means = [float(np.nanmean(column(t, "reward"))) for t in (rows, others)]
            if means[0] - means[1] > widest:
                widest = means[0] - means[1]
                answer, count = Counter(rows.column("answer").to_pylist()).most_common(1)[0]
                clause = f". Rows with {name}={kind} earn {means[0]:.3g} against {means[1]:.3g}"
                if count >= rows.num_rows / 3:
                    share = count / rows.num_rows
                    clause += f", and {share:.0%} of them are answered with {answer[-60:]!r}"
    return clause


GROWTH = 1.5
"""How many times as long responses must be: half as long again is no noise of lengths."""
MIN_GROWTH = 10
"""The fewest tokens by which they must be longer."""


@diagnosis("length")
def length(run: Run) -> Iterator[Finding]:
    """Responses get longer, of all rollouts or of an agent loop; a warning if they earn no more."""
    episodes = training_episodes(run)
    agents = np.array(episodes.column("agent_name").to_pylist(), object)
    subsets = [("", read_series(run, "response_length/mean"), read_series(run, REWARD))]
    if len(set(agents)) > 1:
        for agent in sorted(set(agents)):
            of_agent = episodes.filter(pa.array(agents == agent))
            subsets.append(
                (
                    agent,
                    _mean_by_step(of_agent, "sampled_tokens"),
                    _mean_by_step(of_agent, "reward"),
                )
            )
    low, high = reward_range(run)
    notes = []
    for agent, size, reward in subsets:
        if len(size) < MIN_STEPS or len(size) != len(reward):
            continue
        # Compare with the first steps, and with the best ones: a run may first learn, then grow.
        for start in dict.fromkeys((int(reward.means.argmax()), 0)):
            before, last = float(size.at(start).mean()), float(size.last.mean())
            if last < max(GROWTH * before, before + MIN_GROWTH):
                continue
            if z_score(size.at(start), size.last) < Z:
                continue
            is_paid = has_risen(reward, start)
            is_paid |= bool(high > low and reward.last.mean() >= low + SOLVED * (high - low))
            finding = _explain_growth(episodes, agent, size, reward, start, is_paid)
            if is_paid:
                notes.append(finding)
            else:
                yield finding
                if not agent:
                    return  # The findings of single agent loops would repeat it.
            break
    yield from notes[:1]


def _mean_by_step(episodes: pa.Table, name: str) -> Series:
    """Return the mean of a column over the episodes of each step."""
    values = column(episodes, name).astype(float)
    known = ~np.isnan(values)
    steps, position = np.unique(column(episodes, "step")[known], return_inverse=True)
    return Series(steps, np.bincount(position, values[known]) / np.bincount(position))


def _explain_growth(
    episodes: pa.Table, agent: str, size: Series, reward: Series, start: int, is_paid: bool
) -> Finding:
    """Describe responses that grew since the window that begins at `start`.

    `is_paid`: whether the reward rose as well, or nearly all rollouts succeed.
    """
    before, last = float(size.at(start).mean()), float(size.last.mean())
    rewards = float(reward.at(start).mean()), float(reward.last.mean())
    is_late = column(episodes, "step") >= size.steps[-size.window]
    if agent:
        is_late &= np.array(episodes.column("agent_name").to_pylist(), object) == agent
    sizes = column(episodes, "sampled_tokens")
    long = is_late & (sizes >= np.quantile(sizes[is_late], 0.9)) if is_late.any() else is_late
    change = f"the reward went from {rewards[0]:.3g} to {rewards[1]:.3g}"
    if not is_paid:
        change = f"the reward did not rise ({rewards[1] - rewards[0]:+.3g})"
    return Finding(
        size.since(size.means >= (1 + (GROWTH - 1) / 2) * before),
        f"responses{' of ' if agent else ''}{agent} grew from {before:.0f} to {last:.0f} tokens"
        f" since step {size.steps[start]}, and {change}",
        {"before": before, "last": last, "reward_gain": rewards[1] - rewards[0]},
        **examples(episodes, long),
        causes=[
            "the reward pays for longer responses"
            if is_paid
            else "nothing in the reward makes the policy stop",
            "the loss favours long responses: algorithm.loss_agg_mode, whose token mean gives long"
            " responses more weight",
        ],
        tries=[
            "a penalty close to the budget: reward.overlong_buffer, reward.overlong_penalty",
            "algorithm.loss_agg_mode",
            "read the longest episodes: do they repeat themselves?",
        ],
        severity="note" if is_paid else "warning",
        subject=agent,
    )


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


@diagnosis("reward_flat")
def reward_flat(run: Run) -> Iterator[Finding]:
    """The reward does not rise; with a KL near 0, because the policy does not move."""
    reward = read_series(run, REWARD)
    low, high = reward_range(run)
    if len(reward) < FLAT_STEPS or high <= low or is_solved(run):
        return
    dead = read_series(run, DEAD_GROUPS)
    if len(dead) and dead.last.mean() >= DEAD_SHARE:  # `dead_groups` says why it does not rise
        return
    gain = float(reward.last.mean() - reward.first.mean())
    error = math.hypot(*(x.std(ddof=1) / math.sqrt(len(x)) for x in (reward.first, reward.last)))
    best_gain = float(reward.means.max() - reward.first.mean())
    drift, kl = read_series(run, "canary/drift"), read_series(run, "actor/ppo_kl")
    norm, rate = read_series(run, "actor/grad_norm"), read_series(run, "actor/lr")
    evidence = {
        "first": float(reward.first.mean()),
        "last": float(reward.last.mean()),
        "error": error,
    }
    for name, s in (("drift", drift), ("kl", kl), ("grad_norm", norm), ("lr", rate)):
        if len(s):
            evidence[name] = float(np.abs(s.last).mean())
    moves = evidence.get("drift", math.inf) >= NO_DRIFT
    if not len(drift):
        moves = evidence.get("kl", math.inf) >= NO_KL
    described = (
        f"the reward is flat: {evidence['first']:.3g} in the first {reward.window} steps,"
        f" {evidence['last']:.3g} in the last ({gain:+.3g} ± {error:.2g})"
    )
    numbers = ", ".join(
        f"{name} {evidence[name]:.2g}"
        for name in ("drift", "kl", "grad_norm", "lr")
        if name in evidence
    )
    if not moves and gain <= max(2 * error, FLAT * (high - low)):
        yield Finding(
            int(reward.steps[0]),
            f"{described}, and the policy hardly moves ({numbers})",
            evidence,
            causes=[
                f"optim.lr ({config_value(run, 'optim.lr')}) is too low",
                "few groups have a learning signal: waste/dead_group_frac",
                "a KL penalty that is too strong: algorithm.kl_loss_coef, algorithm.kl_reward_coef",
            ],
            tries=[
                "optim.lr ten times as high (with LoRA 1e-5 to 1e-4)",
                "optim.lr_warmup_steps, optim.lr_final",
                "a smaller KL penalty",
            ],
            severity="error",
        )
        return
    keys = ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef")
    penalties = [(key, config_value(run, key)) for key in keys]
    strong = [
        f"{key} ({value}) keeps the policy close to the reference"
        for key, value in penalties
        if isinstance(value, float | int) and value >= STRONG_KL
    ]
    largest = FLAT_STRONG_KL if strong else FLAT
    if gain + 2 * error < largest * (high - low) and best_gain < 2 * FLAT * (high - low):
        yield Finding(
            int(reward.steps[0]),
            f"{described}, although the policy moves ({numbers})",
            evidence,
            causes=[
                *strong,
                "the reward does not depend on what the policy does, or is noisy",
                "rows are too hard: the rollouts that succeed do so by chance",
            ],
            tries=[
                f"score some episodes by hand: agentrl show {run.folder}",
                "train on 16 easy rows for 30 steps (docs/debugging.md, narrow it down)",
                "more rollouts of a row: rollout.n",
            ],
        )


# --- audits and notes ----------------------------------------------------------------------------

SHARED_ANSWER = 0.2
"""The share of rewarded rollouts with one and the same answer, over rows with different ones, that
is worth reading."""


FOLLOWS = 0.8
"""The correlation within rows of reward and length, or number of calls, that is worth reading."""
LEVELS = 5
"""The fewest different rewards. With a reward of two values, calling the tool may be the task."""


@diagnosis("audit")
def audit(run: Run) -> Iterator[Finding]:
    """The reward may be exploited: what to read. None of this is proof."""
    reward = read_series(run, REWARD)
    if len(reward) >= MIN_STEPS and z_score(reward.first, reward.last) > 3.0:
        yield from _compare_validation(run, reward)
        accuracy = read_series(run, "grader/acc")
        if len(accuracy) == len(reward) and z_score(accuracy.first, accuracy.last) < -2.0:
            yield Finding(
                int(accuracy.steps[0]),
                f"the reward rose ({reward.first.mean():.3g} to {reward.last.mean():.3g}) and the"
                f" accuracy fell ({accuracy.first.mean():.3g} to {accuracy.last.mean():.3g})",
                {
                    "acc_first": float(accuracy.first.mean()),
                    "acc_last": float(accuracy.last.mean()),
                },
                causes=["parts of the reward pay for something else than a right answer"],
                tries=["look which part rose: reward/outcome, reward/turn or reward/tool"],
                severity="audit",
                subject="accuracy",
            )
    yield from _find_paid_parts(run)
    episodes = training_episodes(run, MIN_WINDOW)
    low, high = reward_range(run)
    if not episodes.num_rows or high <= low:
        return
    yield from _find_what_pays(episodes)
    best = column(episodes, "reward") >= low + SOLVED * (high - low)
    answers = np.array(episodes.column("answer").to_pylist(), object)
    rows = np.array(episodes.column("sample_id").to_pylist(), object)
    if best.sum() < COLLAPSE_ROLLOUTS:
        return
    answer, count = Counter(answers[best].tolist()).most_common(1)[0]
    of_answer = best & (answers == answer)
    shared = len(set(rows[of_answer]))
    if count >= SHARED_ANSWER * best.sum() and shared >= COLLAPSE_GROUPS:
        shown = answer if len(answer) <= 60 else answer[:57] + "..."
        yield Finding(
            int(column(episodes, "step").min()),
            f"{count / best.sum():.0%} of the rollouts with the best rewards end with the same"
            f" message ({shown!r}), over {shared} rows",
            {"share": float(count / best.sum()), "rows": float(shared)},
            **examples(episodes, of_answer, "last"),
            causes=["the reward accepts an answer that does not depend on the row"],
            tries=["read these episodes: is the answer right for each row?"],
            severity="audit",
            subject="answers",
        )


def _find_paid_parts(run: Run) -> Iterator[Finding]:
    """Yield a finding for each part of a reward that rises while the accuracy does not."""
    accuracy = read_series(run, "grader/acc")
    if len(accuracy) < MIN_STEPS or has_risen(accuracy, 0):
        return
    for name in run.metrics.column_names:
        if not name.startswith("grader/") or name == "grader/acc":
            continue
        part = read_series(run, name)
        if len(part) < MIN_STEPS or z_score(part.first, part.last) <= 3.0:
            continue
        first, last = float(part.first.mean()), float(part.last.mean())
        yield Finding(
            int(part.steps[0]),
            f"{name} rose from {first:.3g} to {last:.3g}, and the accuracy did not rise"
            f" ({accuracy.first.mean():.3g} to {accuracy.last.mean():.3g})",
            {"first": first, "last": last, "acc_last": float(accuracy.last.mean())},
            causes=[
                f"the reward pays for {name.removeprefix('grader/')!r} instead of right answers"
            ],
            tries=[
                "a smaller weight of this part, or only if the answer is right: agentrl rescore"
            ],
            severity="audit",
            subject=name,
        )


def without_group_means(episodes: pa.Table, name: str) -> np.ndarray:
    """Return a column minus its mean over the episode's group."""
    values = column(episodes, name).astype(float)
    _, group = np.unique(group_keys(episodes), return_inverse=True)
    means = (np.bincount(group, values) / np.bincount(group))[group]
    return np.where(is_close(values, means), 0.0, values - means)


def correlation_within_rows(episodes: pa.Table, name: str) -> float:
    """Return the correlation of a column and the reward, both without the mean of their group.

    0 if one of them does not vary, or the reward has fewer than `LEVELS` values.
    """
    if len(np.unique(column(episodes, "reward"))) < LEVELS:
        return 0.0
    x, y = without_group_means(episodes, name), without_group_means(episodes, "reward")
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _find_what_pays(episodes: pa.Table) -> Iterator[Finding]:
    """Yield a finding if the reward follows the length or the number of calls within rows."""
    for name, what in (("sampled_tokens", "length"), ("tool_calls", "number of tool calls")):
        correlation = correlation_within_rows(episodes, name)
        if correlation >= FOLLOWS:
            x = without_group_means(episodes, name)
            yield Finding(
                int(column(episodes, "step").min()),
                f"within a row the reward follows the {what} (correlation {correlation:.2f})",
                {"correlation": correlation},
                **examples(episodes, x >= np.quantile(x, 0.9)),
                causes=[f"the reward pays for the {what}, whether or not the answer is right"],
                tries=["read these episodes", "score them without this part: agentrl rescore"],
                severity="audit",
                subject=name,
            )


def _compare_validation(run: Run, reward: Series) -> Iterator[Finding]:
    """Yield a finding if training rewards rose and those of the validation fell."""
    for name in run.metrics.column_names:
        if not re.fullmatch(r"val/reward/mean@\d+", name):
            continue
        fall = _find_validation_fall(run, name)
        if fall and fall.best - fall.last > 3 * math.sqrt(2) * fall.error:
            yield Finding(
                fall.step,
                f"the training reward rose to {reward.last.mean():.3g}, but the validation fell"
                f" from {fall.best:.3g} (step {fall.step}) to {fall.last:.3g}",
                {"best": fall.best, "last": fall.last, "standard_error": fall.error},
                causes=["the policy memorizes the rows, or exploits the reward of training rows"],
                tries=["more rows, fewer epochs", "keep the best checkpoint: trainer.keep_best"],
                severity="audit",
                subject="validation",
            )


PARTS = {
    "timing_s/gen": "generation and tools",
    "timing_s/update_actor": "the update",
    "timing_s/update_weights": "sending the weights",
    "timing_s/canary": "the canary",
    "timing_s/old_log_prob": "logprobs before the update",
    "timing_s/ref": "reference logprobs",
    "timing_s/values": "values",
    "timing_s/store": "storing trajectories",
    "timing_s/metrics": "metrics",
    "timing_s/collate": "making the batch",
    "timing_s/adv": "advantages",
}
"""The parts of a step, which follow each other."""
BETWEEN_STEPS = 0.25
"""The share of the run's time that validations or checkpoints may take."""
LATE = 0.9
"""The share of rollouts after whose end the step waits for the last ones."""


@diagnosis("step_time")
def step_time(run: Run) -> Iterator[Finding]:
    """The share of each part in the time of a step."""
    step = read_series(run, "timing_s/step")
    if not len(step):
        return
    steps = step.steps[-step.window :]
    total = float(step.values[-len(steps) :].mean())
    shares: dict[str, float] = {}
    for name, label in PARTS.items():
        part = read_series(run, name)
        seconds = part.values[np.isin(part.steps, steps)].sum() / len(steps)
        shares[label] = float(seconds / total)
    inside = _time_of_rollouts(run, steps)
    if inside:
        generation = shares.pop("generation and tools")
        waiting = inside.pop("waiting for the last rollouts") * generation
        shares["waiting for the last rollouts"] = waiting
        for label, share in inside.items():
            shares[label] = share * (generation - waiting)
    shares = {k: v for k, v in sorted(shares.items(), key=lambda kv: -kv[1]) if v >= 0.005}
    if not shares:
        return
    largest = next(iter(shares))
    parts = ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
    tries = list(_FASTER.get(largest, ()))
    if config_value(run, "rollout.name") == "local":  # It is always one, in this process.
        tries = [SERVER if text == MORE_ENGINES else text for text in tries]
    passes = read_series(run, "perf/micro_batches")
    if len(passes) and passes.last.max() <= 1:  # A larger limit changes nothing.
        tries = [text for text in tries if text != LARGER_PASSES]
    yield Finding(
        int(steps[0]),
        f"a step takes {total:.3g} s: {parts}",
        {"seconds": total, **shares},
        tries=tries,
        severity="note",
    )
    yield from _find_time_between_steps(run, step)


def _find_time_between_steps(run: Run, step: Series) -> Iterator[Finding]:
    """Yield a finding if validations or checkpoints take much of the time of a run."""
    for name, what, tries in (
        ("timing_s/testing", "validations", ["a larger trainer.test_freq", "a smaller val.n"]),
        ("timing_s/save_checkpoint", "checkpoints", ["a larger trainer.save_freq"]),
    ):
        seconds = values_by_step(run, name).values()
        share = sum(seconds) / (sum(seconds) + float(step.values.sum()))
        if share >= BETWEEN_STEPS:
            yield Finding(
                int(step.steps[0]),
                f"{what} take {share:.0%} of the time of the run: {len(seconds)} of"
                f" {sum(seconds) / len(seconds):.3g} s; a step takes"
                f" {float(step.values.mean()):.3g} s",
                {"share": share, "number": float(len(seconds))},
                tries=tries,
                severity="note",
                subject=what,
            )


MORE_ENGINES = "more engines: rollout.engines"
SERVER = "a server on a GPU: rollout.name=sglang"
LARGER_PASSES = "a larger optim.micro_batch_tokens"
_FASTER: Mapping[str, Sequence[str]] = {
    "generation": [MORE_ENGINES, "a smaller rollout.max_turn_tokens"],
    "generation and tools": [
        MORE_ENGINES,
        "more processes of the tool server: tools.workers",
        "a smaller rollout.timeout_s",
    ],
    "waiting for the engine": [MORE_ENGINES],
    "tools": ["more processes of the tool server: tools.workers", "a smaller rollout.timeout_s"],
    "interactions": ["a faster `respond` of the interaction: it answers every turn"],
    "opening tools": ["less work in the constructors of class tools"],
    "rewards": ["more processes: reward.workers", "a smaller reward.timeout_s"],
    "waiting for the last rollouts": [
        "a smaller rollout.timeout_s or rollout.max_trajectory_tokens: the step waits for a few"
        " long rollouts",
        "a smaller rollout.max_turns",
    ],
    "the update": [LARGER_PASSES, "docs/scaling.md"],
    "sending the weights": ["an adapter instead of all weights: model.lora_rank", "docs/gpu.md"],
}


def _time_of_rollouts(run: Run, steps: np.ndarray) -> dict[str, float]:
    """Return the shares of the time of generation, without and with the wait for the last rollouts.

    A step waits for the last rollouts from the time when `LATE` of them have ended until the last
    one ends. Before that its time is divided as the rollouts' own time is: generation, waiting for
    the engine, tools, interactions, opening tools and rewards.
    """
    episodes = training_episodes(run)
    episodes = episodes.filter(pa.array(np.isin(column(episodes, "step"), steps)))
    if not len(episodes):
        return {}
    started = column(episodes, "started")
    # `seconds` begins when the tools are open.
    ends = started + column(episodes, "open_seconds") + column(episodes, "seconds")
    waits = spans = 0.0
    for number in np.unique(column(episodes, "step")):
        chosen = column(episodes, "step") == number
        last = ends[chosen].max()
        spans += last - started[chosen].min()
        waits += last - np.quantile(ends[chosen], LATE)
    get = partial(column, episodes)
    sums = {
        "generation": get("generate_seconds").sum(),
        "waiting for the engine": get("queue_seconds").sum(),
        "tools": get("tool_seconds").sum(),
        "interactions": get("interaction_seconds").sum(),
        "opening tools": get("open_seconds").sum(),
        "rewards": get("reward_seconds").sum(),
    }
    total = sum(sums.values()) or 1.0
    parts = {name: float(seconds / total) for name, seconds in sums.items()}
    waiting = parts["tools"] + parts["interactions"]
    if config_value(run, "rollout.name") == "local" and spans and waiting:
        # The local engine samples the turns of all rollouts together: while one rollout waits for a
        # tool, all do, and the wait counts as generation in the others.
        more = max(0.0, _seconds_in_tools(episodes) / spans - waiting)
        more = min(more, parts["generation"])
        for name in ("tools", "interactions"):
            parts[name] += more * parts[name] / waiting
        parts["generation"] -= more
    return parts | {"waiting for the last rollouts": float(waits / spans) if spans else 0.0}


def _seconds_in_tools(episodes: pa.Table) -> float:
    """Return the seconds in which at least one rollout waited for a tool or an interaction.

    They are summed over the steps.
    """
    total = 0.0
    for number in np.unique(column(episodes, "step")):
        of_step = episodes.filter(pa.array(column(episodes, "step") == number))
        names = ("started", "tool_times")
        rows = zip(*(of_step.column(name).to_pylist() for name in names), strict=True)
        waits = sorted(
            (started + begin, started + end)
            for started, times in rows
            for begin, end in zip(times[::2], times[1::2], strict=True)
        )
        until = -np.inf
        for begin, end in waits:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
    return total
