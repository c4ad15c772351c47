"""The table of `agentrl compare`, its JSON file and its picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.comparison import (
    WITHOUT_TOOLS,
    MeanInterval,
    Validation,
    Value,
    flipped_rows,
    least_probability,
    merge_seeds,
    paired_difference,
    read_validation,
    rewards_of,
    shared_rows,
    values_of,
)
from agentrl.errors import UserError
from agentrl.metrics import mean, standard_error
from agentrl.observers.curve import Points, validation_points, write_comparison
from agentrl.plural import plural
from agentrl.record import METRICS
from agentrl.report.run import Run
from agentrl.terminal import aligned, echo

SHOWN_ROWS = 8
"""The number of flipped rows that are printed; the JSON file has all."""


def print_comparison(
    runs: Sequence[Path],
    step: int | None,
    output: Path,
    *,
    same_prompts: bool = True,
    margin: float | None = None,
) -> None:
    """Print the table of `agentrl compare`, and write the picture and the numbers.

    Args:
        runs: two or more folders.
        step: the step of the validations; None: the last one of each.
        output: the picture.
        same_prompts: as in `agentrl.comparison.shared_rows`.
        margin: how much worse than the first a run may be; None: anything.

    Raises:
        UserError: the folders have no such validations or share no rows, or a run is not shown to
            be at most `margin` worse.
    """
    entries, curves = _read(runs, step)
    values = values_of([g for e in entries for v in (e.validation, e.bare) if v for g in v])
    measured = [_measure(e.label, e.validation, values, e.seeds) for e in entries]
    bare = [(f"{e.label} without tools", e.bare) for e in entries if e.bare]
    measured += [_measure(name, validation, values) for name, validation in bare]
    pairs = [_pair(entries[0], other) for other in entries[1:]]
    compared = [_compare(*pair, values, same_prompts) for pair in pairs]
    for other, (cells, difference) in zip(entries[1:], compared, strict=True):
        if len(shared := [s for s in entries[0].seeds if s in other.seeds]) > 1:
            by_seed = MeanInterval.of([other.seeds[s] - entries[0].seeds[s] for s in shared])
            cells.append(f"{by_seed:+.3f}")
            difference["reward_by_seed"] = by_seed.as_dict()
    for e in entries:
        if e.bare:
            compared.append(_compare(f"{e.label}: tool_dependence", e.bare, e.validation, values))
    seeds = ["seeds", "mean [95 % interval]"] if any(entry.seeds for entry in entries) else []
    _print_table(["", "step", "rows", *values, *seeds], [cells for cells, _ in measured])
    echo("\npaired differences on the rows that both have:")
    header = ["", "rows", *(f"{name} [95 % interval]" for name in values), "gained", "lost"]
    by_seed = ["reward by seed [95 %]"] if any("reward_by_seed" in n for _, n in compared) else []
    _print_table([*header, *by_seed], [cells for cells, _ in compared])
    differences = [numbers for _, numbers in compared]
    for d, flips in product(differences, ("gained", "lost")):
        if d[flips]:
            more = f", ... ({len(d[flips])} in all)" if len(d[flips]) > SHOWN_ROWS else ""
            echo(f"rows {flips} by {d['name']}: {', '.join(d[flips][:SHOWN_ROWS])}{more}")
    for other, difference in zip(entries[1:], differences, strict=False):
        sizes = [len(entry.validation.groups) for entry in (entries[0], other)]
        if max(sizes) > difference["rows"]:
            echo(
                f"note: {entries[0].label} has {plural(sizes[0], 'row')}, {other.label} has"
                f" {sizes[1]}; {difference['rows']} are in both",
                err=True,
            )
    numbers = {"validations": [n for _, n in measured], "differences": differences}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n")
    write_comparison(curves, output)
    echo(f"\nvalidation rewards over steps: {output}")
    for difference in differences[: len(pairs)] if margin is not None else ():
        _check_margin(difference["name"], difference["rows"], difference["reward"], margin or 0.0)


def _print_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print lines of cells under a header; a line may have fewer cells."""
    padded = [[*line, *[""] * len(header)][: len(header)] for line in lines]
    echo("\n".join(aligned([[*header], *padded], 1)))


def _check_margin(name: str, rows: int, reward: Mapping[str, Any], margin: float) -> None:
    """Raise `UserError` unless the interval of a difference begins at or above `-margin`."""
    low, high = reward["low"], reward["high"]
    if low is None:
        raise UserError(f"{name}: one row has no interval, so --fail-if-worse cannot be tested")
    if low == high:  # No row differs. A row is assumed to lose 1 at most.
        low -= 1 - least_probability(rows)
    if low < -margin:
        verb = "is" if high < -margin else "may be"
        ends = f"{reward['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
        raise UserError(f"{name}: {verb} worse by more than {margin:g}: reward {ends}")


class _Entry(NamedTuple):
    """A run, or runs that differ in their seeds alone."""

    label: str
    validation: Validation
    bare: Validation | None
    """The rollouts without tools; None if there are none."""
    seeds: Mapping[int, float]
    """The mean reward of each seed; empty for one run."""


def _read(runs: Sequence[Path], step: int | None) -> tuple[list[_Entry], dict[str, Points]]:
    """Return the entries of the folders, and the validation rewards of each entry over steps.

    Raises:
        UserError: a folder is named twice, or has no such validation.
    """
    names = [run.resolve().name for run in runs]
    labels = [
        str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise UserError(f"a folder is named twice: {', '.join(map(str, runs))}")
    read = [read_validation(run, step) for run in runs]
    bare = [read_validation(r, v.step, WITHOUT_TOOLS) for r, v in zip(runs, read, strict=True)]
    rewards = [mean([x for group in v for x in rewards_of(group)]) for v in read]
    families: dict[str, list[int]] = {}
    configs = [_split_config(run) for run in runs]
    for i, (config, _) in enumerate(configs):
        families.setdefault(config, []).append(i)
    if len(families) == 1:  # the seeds themselves are compared
        families = {label: [i] for i, label in enumerate(labels)}
    # The folder of `agentrl eval` has no metrics of steps.
    points = [
        validation_points(run / METRICS) or [(float(v.step), reward)]
        for run, v, reward in zip(runs, read, rewards, strict=True)
    ]
    entries, curves = [], {}
    for family in families.values():
        n = len(family)
        label = labels[family[0]]
        if n > 1:  # A sweep writes the seed into the name.
            label = f"{re.sub(r'-?seed=-?[0-9]+', '', label) or label} ({n} seeds)"
        without = [bare[i] for i in family if bare[i].groups]
        entries.append(
            _Entry(
                label,
                merge_seeds([read[i] for i in family]),
                merge_seeds(without) if len(without) == n else None,
                {configs[i][1]: rewards[i] for i in family} if len(families) < len(runs) else {},
            )
        )
        curves[label] = _mean_points([points[i] for i in family])
    return entries, curves


def _mean_points(curves: Sequence[Points]) -> Points:
    """Return the mean of curves at the steps that all have."""
    by_step = [dict(points) for points in curves]
    steps = [step for step in by_step[0] if all(step in curve for curve in by_step)]
    return [(step, mean([curve[step] for curve in by_step])) for step in steps]


def _measure(
    name: str,
    validation: Validation,
    values: Mapping[str, Value],
    seeds: Mapping[int, float] | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Return the means of a validation with their standard errors, as cells and as numbers."""
    numbers: dict[str, Any] = {"step": validation.step, "rows": len(validation.groups)}
    cells = [name, *map(str, numbers.values())]
    for key, value in values.items():
        rows = [validation.values(value, row) for row in validation.groups]
        center, error = mean([x for row in rows for x in row]), standard_error(rows)
        has_error = math.isfinite(error)
        cells.append(f"{center:.3f}" + f" ± {error:.3f}" * has_error)
        numbers[key] = {"mean": center, "se": error if has_error else None}
    of_seeds = [*(seeds or {}).values()]
    cells.append(" ".join(f"{x:.3f}" for x in of_seeds))
    if len(of_seeds) > 1:
        over = MeanInterval.of(of_seeds)
        cells.append(f"{over:.3f}")
        numbers["over_seeds"] = over.as_dict()
    return cells, {"name": name, **numbers, "seeds": of_seeds}


def _pair(first: _Entry, other: _Entry) -> tuple[str, Validation, Validation]:
    """Return the name of a difference, and what it is the difference of."""
    is_value = other.validation.has_tools and not first.validation.has_tools
    name = f"{other.label} - {first.label}" + " (tool_value)" * is_value
    return name, first.validation, other.validation


def _compare(
    name: str,
    first: Validation,
    second: Validation,
    values: Mapping[str, Value],
    same_prompts: bool = True,
) -> tuple[list[str], dict[str, Any]]:
    """Return the differences `second - first` with their intervals, as cells and as numbers.

    Raises:
        UserError: they share no rows.
    """
    if not (rows := shared_rows(first, second, same_prompts)):
        raise UserError(
            f"{name}: they share no rows: no id with the same prompt, loop and ground truth is in"
            " both. Evaluate both on one file: agentrl eval --dataset FILE --model RUN --output"
            " FOLDER. If they have prompts of their own: --other-prompts"
        )
    paired = {key: paired_difference(first, second, v, rows) for key, v in values.items()}
    flips = dict(zip(("gained", "lost"), flipped_rows(first, second, rows), strict=True))
    cells = [f"{difference:+.3f}" for difference in paired.values()]
    numbers = {key: difference.as_dict() for key, difference in paired.items()}
    return (
        [name, str(len(rows)), *cells, *(str(len(ids)) for ids in flips.values())],
        {"name": name, "rows": len(rows), **numbers, **flips},
    )


def _split_config(run: Path) -> tuple[str, int]:
    """Return a run's config without its seed and folder, as text, and the seed.

    The text of a folder without a config is its path.
    """
    config = Run(run).config
    trainer = dict(config.get("trainer") or {})
    seed = trainer.pop("seed", 0)
    trainer.pop("output", None)
    return repr(config | {"trainer": trainer}) if config else str(run.resolve()), seed
