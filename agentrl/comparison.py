"""What a validation says: pass@k, maj@k, intervals, paired differences and rows that flip.

`read_validation` reads a validation of a run or of `agentrl eval`. A value (`Value`) is computed
for each row, so differences are paired: the difficulty of a row is in both of its values.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from agentrl.errors import DataError, UserError
from agentrl.metrics import count_calls, mean, standard_error, t_quantile
from agentrl.registry import did_you_mean
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Scored

WITHOUT_TOOLS = "without"
"""The split of the rollouts that were played without tools (`val.without_tools`)."""
LEVEL = 0.975
"""The probability below the upper end of an interval of 95 %."""

Value = Callable[[Group], Sequence[float]]
"""Returns the values of a row: one for each rollout, or one for the whole row."""


# -- values of a row ------------------------------------------------------------------------------


def accuracy(scored: Scored) -> float:
    """Return `acc` of the reward function, or the outcome if it returns no `acc`."""
    return float(scored.metrics.get("acc", scored.rewards.get("outcome", scored.reward)))


def rewards_of(group: Group) -> list[float]:
    """Return the rewards of a row's rollouts."""
    return [s.reward for s in group.scored]


def accuracies_of(group: Group) -> list[float]:
    """Return the accuracies of a row's rollouts."""
    return [accuracy(s) for s in group.scored]


def pass_at_k(group: Group, k: int) -> float:
    """Return the probability that at least one of k rollouts of a sample passes.

    The estimate is 1 - C(n-c, k) / C(n, k) for n rollouts of which c passed (Chen et al.,
    arXiv:2107.03374, section 2.1). It is unbiased for n >= k. If fewer than k rollouts were not
    dropped, k is their number.
    """
    n = len(group.scored)
    c = sum(accuracy(s) >= 1 for s in group.scored)
    k = min(k, n)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def has_answers(groups: Sequence[Group]) -> bool:
    """Return whether the reward returned an `answer` for each rollout, as `maj_at_k` needs."""
    return all(s.answer is not None for g in groups for s in g.scored)


def maj_at_k(group: Group, k: int) -> float:
    """Return the expected accuracy of the most common answer of k rollouts of a sample.

    It is the mean over all C(n, k) subsets of the n rollouts, so it is unbiased for n >= k, and k =
    n is the majority vote of Wang et al. (arXiv:2203.11171). Of answers that are equally common,
    each is chosen with the same probability. If fewer than k rollouts were not dropped, k is their
    number.
    """
    by_answer: dict[str | None, list[float]] = defaultdict(list)
    for scored in group.scored:
        by_answer[scored.answer].append(accuracy(scored))
    parts = sorted(by_answer.values(), key=len)
    chances = _majorities(tuple(map(len, parts)), min(k, len(group.scored)))
    return math.fsum(mean(a) * p for a, p in zip(parts, chances, strict=True))


@cache
def _majorities(counts: tuple[int, ...], k: int) -> list[float]:
    """Return for each answer the probability that it is the most common of k chosen rollouts.

    Args:
        counts: how many rollouts have each answer.
        k: the number of rollouts that are chosen, without replacement.
    """
    chances: dict[int, float] = {}
    for own in set(counts):
        others = [*counts]
        others.remove(own)
        wins = 0.0
        for votes in range(1, min(own, k) + 1):
            # The number of ways to choose from the other answers, by how many rollouts were chosen
            # and how many answers have as many votes.
            ways = Counter({(0, 0): 1})
            for count in others:
                before, ways = ways, Counter()
                for (chosen, ties), number in before.items():
                    for v in range(min(votes, count, k - votes - chosen) + 1):
                        ways[chosen + v, ties + (v == votes)] += number * math.comb(count, v)
            won = sum(w / (ties + 1) for (chosen, ties), w in ways.items() if chosen == k - votes)
            wins += math.comb(own, votes) * won
        chances[own] = wins / math.comb(sum(counts), k)
    return [chances[own] for own in counts]


def powers_of_two(n: int) -> list[int]:
    """Return 2, 4, 8, ... up to n."""
    return [2**i for i in range(1, n.bit_length())]


def values_of(groups: Sequence[Group]) -> dict[str, Value]:
    """Return the values that rows with these groups have, by name: reward, acc, pass@k, maj@k."""
    values: dict[str, Value] = {"reward": rewards_of, "acc": accuracies_of}
    n = min((len(g.scored) for g in groups), default=1)
    k = 2 ** (n.bit_length() - 1)
    if k > 1:
        values[f"pass@{k}"] = lambda group: [pass_at_k(group, k)]
        if has_answers(groups):
            values[f"maj@{k}"] = lambda group: [maj_at_k(group, k)]
    return values


# -- validations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Validation:
    """The rollouts of one validation, read from the folder of a run or of `agentrl eval`."""

    step: int
    groups: Mapping[str, Sequence[Group]]
    """The sampled rollouts of each row, by the row's id: a group for each seed of the run."""

    def __iter__(self) -> Iterator[Group]:
        return chain.from_iterable(self.groups.values())

    def values(self, value: Value, key: str) -> list[float]:
        """Return the values of a row: those of each seed."""
        return [x for group in self.groups[key] for x in value(group)]

    @property
    def has_tools(self) -> bool:
        """True if rows have tools."""
        return any(group.sample.tools for group in self)


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """The mean of numbers, such as the differences of rows, with its interval of 95 %."""

    n: int
    mean: float
    low: float
    """The lower end of the interval; NaN for one number."""
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanInterval:
        """Return mean ± t(0.975, n - 1) * s / sqrt(n)."""
        center, half = mean(values), math.nan
        if len(values) > 1:
            half = t_quantile(LEVEL, len(values) - 1) * standard_error([[x] for x in values])
        return cls(len(values), center, center - half, center + half)

    def __format__(self, spec: str) -> str:
        ends = f" [{self.low:{spec}}, {self.high:{spec}}]" if self.n > 1 else ""
        return f"{self.mean:{spec}}{ends}"

    def as_dict(self) -> dict[str, float | None]:
        """Return mean, low and high, as JSON has them: None for NaN."""
        ends = {"mean": self.mean, "low": self.low, "high": self.high}
        return {name: x if math.isfinite(x) else None for name, x in ends.items()}


def read_validation(folder: Path, step: int | None = None, split: str = "val") -> Validation:
    """Read a validation of a run, or the result of `agentrl eval --output`.

    Args:
        folder: the folder with `trajectories/`.
        step: the step of the validation; None: the last one.
        split: "val", or `WITHOUT_TOOLS`, of which a validation may have no rollouts.

    Raises:
        DataError: there is no such validation, or its file is damaged.
    """
    store = TrajectoryStore(folder / "trajectories")
    steps = store.steps("val")
    if not steps:
        raise DataError(
            f"{folder} has no validation: there is no val-*.parquet in {store.folder}. Name the"
            " folder of a run with data.val, or of `agentrl eval --output`"
        )
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise DataError(f"{folder} was not validated at step {step}. Its validations: {listed}")
    step = steps[-1] if step is None else step
    scored: dict[str, list[Scored]] = defaultdict(list)
    for rollout in store.read(step, split):
        scored[rollout.scored.trajectory.sample.id].append(rollout.scored)
    groups = {key: [Group(s[0].trajectory.sample, tuple(s))] for key, s in scored.items()}
    return Validation(step, groups)


def merge_seeds(validations: Sequence[Validation]) -> Validation:
    """Return one validation with the rollouts of runs that differ in their seeds alone.

    Its rows are those that all runs validated. A row's value is then the mean over the seeds: its
    pass@k is that of one policy, not that of k policies.
    """
    first, *others = validations
    keys = [key for key in first.groups if all(key in other.groups for other in others)]
    groups = {key: [g for v in validations for g in v.groups[key]] for key in keys}
    return Validation(max(v.step for v in validations), groups)


def shared_rows(first: Validation, second: Validation, same_prompts: bool = True) -> list[str]:
    """Return the ids of the rows that both validations played, with the same prompt and truth.

    Rows of different files may have the same id, because an id may be the row's number.

    Args:
        first: a validation.
        second: another one.
        same_prompts: False if rows with other prompts and loops are the same rows, too: for a run
            that was trained without tools, under a prompt of its own.
    """

    def content(group: Group) -> tuple[object, ...]:
        prompt = (group.sample.prompt, group.sample.agent_name) if same_prompts else ()
        return *prompt, group.sample.ground_truth

    return [
        key
        for key, groups in first.groups.items()
        if key in second.groups and content(second.groups[key][0]) == content(groups[0])
    ]


def paired_difference(
    first: Validation, second: Validation, value: Value, rows: Sequence[str] | None = None
) -> MeanInterval:
    """Return the mean of `second - first` over their shared rows, with an interval of 95 %.

    A row's value is the mean over its rollouts. The interval is that of the paired t-test: with the
    difference d of each of R rows, mean(d) ± t(0.975, R - 1) * s(d) / sqrt(R). The difficulty of
    a row is in both values, so the interval is narrower than for independent rows (Miller,
    arXiv:2411.00640, section 4.2).

    Args:
        first: a validation.
        second: another one.
        value: the value to compare.
        rows: the ids of the rows; None: `shared_rows`.

    Raises:
        DataError: there is no shared row.
    """
    differences = [
        mean(second.values(value, key)) - mean(first.values(value, key))
        for key in (shared_rows(first, second) if rows is None else rows)
    ]
    if not differences:
        raise DataError("they share no rows")
    return MeanInterval.of(differences)


def flipped_rows(
    first: Validation, second: Validation, rows: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the rows that only `second` passes, and those that only `first` passes.

    A validation passes a row if more than half of its rollouts pass (an accuracy of at least 1).
    """

    def passes(validation: Validation, key: str) -> bool:
        accuracies = validation.values(accuracies_of, key)
        return 2 * sum(accuracy >= 1 for accuracy in accuracies) > len(accuracies)

    gained = [k for k in rows if passes(second, k) and not passes(first, k)]
    return gained, [k for k in rows if passes(first, k) and not passes(second, k)]


def tool_metrics(played: Sequence[Group], without: Sequence[Group]) -> dict[str, float]:
    """Return `val/tool_dependence`: how much more reward the rows earn with their tools.

    It is the paired difference between rollouts with and without tools of one policy, with `/low`
    and `/high`, the ends of its interval of 95 % (`paired_difference`), and `/calls`, the share of
    the rollouts with tools that call one.

    Args:
        played: the groups of a validation.
        without: the groups of the same rows that were played without tools.
    """
    bare = Validation(0, {g.sample.id: [g] for g in without})
    tooled = Validation(0, {g.sample.id: [g] for g in played if g.sample.id in bare.groups})
    if not tooled.groups:
        return {}
    difference = paired_difference(bare, tooled, rewards_of, [*tooled.groups])
    name = "val/tool_dependence"
    calls = [count_calls(s.trajectory) > 0 for g in tooled for s in g.scored]
    metrics = {name: difference.mean, f"{name}/calls": mean(calls)}
    if difference.n > 1:
        metrics |= {f"{name}/low": difference.low, f"{name}/high": difference.high}
    return metrics


# -- expectations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expectation:
    """A bound that a metric must keep: `val/reward/mean@1>=0.9`."""

    metric: str
    operator: str
    """`>=`: the lower end of the metric's interval must be at least the bound; `<=`: the upper end
    at most."""
    bound: float

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Read an expectation.

        Raises:
            UserError: it is not of the form METRIC>=NUMBER or METRIC<=NUMBER.
        """
        number = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
        match = re.fullmatch(rf"\s*([^\s<>=!]+)\s*(>=|<=)\s*({number})\s*", text)
        if not match:
            raise UserError(
                f"--expect {text!r} must be METRIC>=NUMBER or METRIC<=NUMBER, such as"
                " 'val/reward/mean@1>=0.9'"
            )
        return cls(match[1], match[2], float(match[3]))

    def check(self, metrics: Mapping[str, float]) -> tuple[bool, str]:
        """Return whether metrics keep the bound, and a line that says why.

        Raises:
            UserError: there is no such metric, or it has no interval.
        """
        low, high = interval_of(metrics, self.metric)
        is_kept = low >= self.bound if self.operator == ">=" else high <= self.bound
        text = (
            f"{self.metric} = {metrics[self.metric]:.4g}, interval of 95 % [{low:.4g}, {high:.4g}]"
        )
        return is_kept, f"{text}: {'' if is_kept else 'not '}{self.operator} {self.bound:g}"


def least_probability(successes: int) -> float:
    """Return the end of the interval of 95 % of a probability after successes without a failure.

    It is that of Clopper and Pearson (1934) for R of R successes, 0.025^(1/R): with a smaller
    probability, R of them would be unlikely.
    """
    return (1 - LEVEL) ** (1 / successes)


def interval_of(metrics: Mapping[str, float], name: str) -> tuple[float, float]:
    """Return the interval of 95 % of a metric of an evaluation.

    For a mean it is mean ± t(0.975, R - 1) * SE, with the standard error SE clustered by the R rows
    (`agentrl.metrics.standard_error`). If all rows have the value 1 (or 0), SE is 0 and says
    nothing. Then the end is `least_probability` of R of R successes.

    Raises:
        UserError: there is no such metric, or it has no interval.
    """
    if name not in metrics:
        hint = did_you_mean(name, list(metrics))
        if "/maj@" in name:
            hint = " maj@k needs a reward that returns an `answer` of each rollout, and val.n >= k."
        raise UserError(f"--expect: no metric {name!r}.{hint} There are: {', '.join(metrics)}")
    value = metrics[name]
    if f"{name}/low" in metrics:
        return metrics[f"{name}/low"], metrics[f"{name}/high"]
    error = metrics.get(error_of(name))
    if error is None:
        known = [key for key in metrics if f"{key}/low" in metrics or error_of(key) in metrics]
        raise UserError(
            f"--expect: {name} = {value:.4g} has no interval. Means of two or more rows have one:"
            f" {', '.join(known) or 'here is none'}"
        )
    rows = int(metrics[f"{name.rsplit('/', 2)[0]}/rows"])
    if error == 0 and value in (0.0, 1.0):
        end = least_probability(rows)
        return (end, 1.0) if value else (0.0, 1 - end)
    half = t_quantile(LEVEL, rows - 1) * error
    return value - half, value + half


def error_of(name: str) -> str:
    """Return the name of the standard error of a metric: of `acc/mean@4`, `acc/se@4`."""
    return name.replace("/mean@", "/se@") if "/mean@" in name else f"{name}/se"
