"""The table of `agentrl compare`, its JSON file and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
    lines = [_measure(e.label, e.validation, values, e.seeds) for e in entries]
    lines += [_measure(f"{e.label} without tools", e.bare, values) for e in entries if e.bare]
    differences = _differences(entries, values, same_prompts)
    _print_table(
        lines, ["step", "rows"], values, ["seeds"] if any(e.seeds for e in entries) else []
    )
    echo("\npaired differences on the rows that both have:")
    _print_table(differences, ["rows"], values, ["gained", "lost"])
    for flips, d in product(("gained", "lost"), differences):
        if d[flips]:
            more = f", ... ({len(d[flips])} in all)" if len(d[flips]) > SHOWN_ROWS else ""
            echo(f"{d['name']}, {flips} rows: {', '.join(d[flips][:SHOWN_ROWS])}{more}")
    _note_other_rows(entries, differences)
    numbers = {"validations": lines, "differences": differences}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n")
    write_comparison(curves, output)
    echo(f"\nvalidation rewards over steps: {output}")
    if margin is not None:
        for difference in differences[: len(entries) - 1]:
            _check_margin(difference["name"], difference["reward"], margin)


def _check_margin(name: str, reward: Mapping[str, Any], margin: float) -> None:
    """Raise `UserError` unless an interval of a difference begins above `-margin`."""
    low, high = reward["low"], reward["high"]
    if low is None:
        raise UserError(f"{name}: one row has no interval, so --fail-if-worse cannot be tested")
    if low < -margin:
        verb = "is" if high < -margin else "may be"
        raise UserError(
            f"{name}: {verb} worse by more than {margin:g}: reward {reward['mean']:+.3f}"
            f" [{low:+.3f}, {high:+.3f}]"
        )


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
) -> dict[str, Any]:
    """Return the means of a validation, with their standard errors."""
    line = {"name": name, "step": validation.step, "rows": len(validation.groups)}
    for key, value in values.items():
        rows = [value(group) for group in validation]
        error = standard_error(rows)
        center = mean([x for row in rows for x in row])
        line[key] = {"mean": center, "se": error if math.isfinite(error) else None}
    return line | {"seeds": [*seeds]}


def _differences(
    entries: Sequence[_Entry], values: Mapping[str, Value], same_prompts: bool
) -> list[dict[str, Any]]:
    """Return the differences to the first entry, then those of entries to themselves without tools.

    Raises:
        UserError: a run shares no rows with the first one.
    """
    first, *others = entries
    pairs = [
        (
            f"{other.label} - {first.label}"
            + " (tool_value)" * (other.validation.has_tools and not first.validation.has_tools),
            first.validation,
            other.validation,
            same_prompts,
        )
        for other in others
    ]
    pairs += [
        (f"{e.label}: tool_dependence", e.bare, e.validation, True) for e in entries if e.bare
    ]
    differences = []
    for name, before, after, same in pairs:
        rows = shared_rows(before, after, same)
        if not rows:
            raise UserError(
                f"{name}: they share no rows: no id with the same prompt, loop and ground truth is"
                " in both. Evaluate both on one file: agentrl eval --dataset FILE --model RUN"
                " --output FOLDER. If the runs have prompts of their own: --other-prompts"
            )
        paired = {n: paired_difference(before, after, v, rows) for n, v in values.items()}
        gained, lost = flipped_rows(before, after, rows)
        differences.append(
            {
                "name": name,
                "rows": len(rows),
                **{n: difference.as_dict() for n, difference in paired.items()},
                "gained": gained,
                "lost": lost,
            }
        )
    return differences


def _print_table(
    lines: Sequence[Mapping[str, Any]],
    before: Sequence[str],
    values: Iterable[str],
    after: Sequence[str],
) -> None:
    """Print lines with the columns `before`, the values and the columns `after`."""

    def cell(number: Any) -> str:
        if isinstance(number, list):
            is_seeds = number and isinstance(number[0], float)
            return " ".join(f"{x:.3f}" for x in number) if is_seeds else str(len(number))
        if not isinstance(number, dict):
            return str(number)
        center, others = number["mean"], [*number.values()][1:]
        if "low" not in number:
            return f"{center:.3f}" + (f" ± {others[0]:.3f}" if others[0] is not None else "")
        ends = f" [{others[0]:+.3f}, {others[1]:+.3f}]" if others[0] is not None else ""
        return f"{center:+.3f}{ends}"

    unit = " [95 % interval]" if "low" in next(iter(lines))["reward"] else ""
    header = ["", *before, *(f"{name}{unit}" for name in values), *after]
    names = ["name", *before, *values, *after]
    echo("\n".join(aligned([header, *([cell(line[n]) for n in names] for line in lines)], 1)))


def _note_other_rows(entries: Sequence[_Entry], differences: Sequence[Mapping[str, Any]]) -> None:
    """Print which runs have rows that are not in both."""
    first, *others = entries
    for other, difference in zip(others, differences, strict=False):
        sizes = [len(entry.validation.groups) for entry in (first, other)]
        if max(sizes) > difference["rows"]:
            echo(
                f"note: {first.label} has {plural(sizes[0], 'row')}, {other.label} has {sizes[1]};"
                f" {difference['rows']} are in both",
                err=True,
            )


def _config_without_seed(run: Path) -> str:
    """Return a run's config without its seed and folder, as text; the path if it has no config."""
    config = Run(run).config
    trainer = dict(config.get("trainer") or {})
    for key in ("seed", "output"):
        trainer.pop(key, None)
    return repr(config | {"trainer": trainer}) if config else str(run.resolve())
