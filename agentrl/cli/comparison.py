"""The table of `agentrl compare`, its JSON file and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.comparison import (
    WITHOUT_TOOLS,
    Validation,
    Value,
    flipped_rows,
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
    for e in entries:
        if e.bare:
            compared.append(_compare(f"{e.label}: tool_dependence", e.bare, e.validation, values))
    seeds = ["seeds"] if any(entry.seeds for entry in entries) else []
    header = ["", "step", "rows", *values, *seeds]
    echo("\n".join(aligned([header, *(cells[: len(header)] for cells, _ in measured)], 1)))
    header = ["", "rows", *(f"{name} [95 % interval]" for name in values), "gained", "lost"]
    echo("\npaired differences on the rows that both have:")
    echo("\n".join(aligned([header, *(cells for cells, _ in compared)], 1)))
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
        _check_margin(difference["name"], difference["reward"], margin or 0.0)


def _check_margin(name: str, reward: Mapping[str, Any], margin: float) -> None:
    """Raise `UserError` unless the interval of a difference begins at or above `-margin`."""
    low, high = reward["low"], reward["high"]
    if low is None:
        raise UserError(f"{name}: one row has no interval, so --fail-if-worse cannot be tested")
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
    seeds: Sequence[float]
    """The mean reward of each seed; empty for one run."""


def _read(runs: Sequence[Path], step: int | None) -> tuple[list[_Entry], dict[str, Points]]:
    """Return the entries of the folders, and the validation rewards of each folder over steps.

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
    for i, run in enumerate(runs):
        families.setdefault(_config_without_seed(run), []).append(i)
    if len(families) == 1:  # the seeds themselves are compared
        families = {label: [i] for i, label in enumerate(labels)}
    entries, curves = [], {}
    for family in families.values():
        n = len(family)
        without = [bare[i] for i in family if bare[i].groups]
        entries.append(
            _Entry(
                labels[family[0]] + f" ({n} seeds)" * (n > 1),
                merge_seeds([read[i] for i in family]),
                merge_seeds(without) if len(without) == n else None,
                [rewards[i] for i in family] if len(families) < len(runs) else [],
            )
        )
    for label, run, validation, reward in zip(labels, runs, read, rewards, strict=True):
        # The folder of `agentrl eval` has no metrics of steps.
        curves[label] = validation_points(run / METRICS) or [(float(validation.step), reward)]
    return entries, curves


def _measure(
    name: str, validation: Validation, values: Mapping[str, Value], seeds: Sequence[float] = ()
) -> tuple[list[str], dict[str, Any]]:
    """Return the means of a validation with their standard errors, as cells and as numbers."""
    numbers: dict[str, Any] = {"step": validation.step, "rows": len(validation.groups)}
    cells = [name, *map(str, numbers.values())]
    for key, value in values.items():
        rows = [value(group) for group in validation]
        center, error = mean([x for row in rows for x in row]), standard_error(rows)
        has_error = math.isfinite(error)
        cells.append(f"{center:.3f}" + f" ± {error:.3f}" * has_error)
        numbers[key] = {"mean": center, "se": error if has_error else None}
    text = " ".join(f"{x:.3f}" for x in seeds)
    return [*cells, text], {"name": name, **numbers, "seeds": [*seeds]}


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
    cells = [
        f"{d.mean:+.3f}" + f" [{d.low:+.3f}, {d.high:+.3f}]" * (d.rows > 1) for d in paired.values()
    ]
    numbers = {key: difference.as_dict() for key, difference in paired.items()}
    return (
        [name, str(len(rows)), *cells, *(str(len(ids)) for ids in flips.values())],
        {"name": name, "rows": len(rows), **numbers, **flips},
    )


def _config_without_seed(run: Path) -> str:
    """Return a run's config without its seed and folder, as text; the path if it has no config."""
    config = Run(run).config
    trainer = dict(config.get("trainer") or {})
    for key in ("seed", "output"):
        trainer.pop(key, None)
    return repr(config | {"trainer": trainer}) if config else str(run.resolve())
