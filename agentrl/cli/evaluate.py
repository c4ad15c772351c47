"""`agentrl eval` and `agentrl compare`: evaluate models, score stored responses, compare runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import (
    ConfigFile,
    Files,
    LogFormat,
    Model,
    Overrides,
    PlayedDataset,
    describe_sampling,
    read_config,
    read_config_to_play,
)
from agentrl.errors import UserError
from agentrl.plural import plural
from agentrl.terminal import echo, printable

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.evaluate import Validation
    from agentrl.trajectory import Group, Scored


def eval_(
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder for metrics.json and the trajectories.")
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="Rows with stored responses, .parquet or .jsonl: score these, play none."
        ),
    ] = None,
    response_key: Annotated[
        str, typer.Option(help="With --responses: the column of the responses.")
    ] = "responses",
    reward_model_key: Annotated[
        str, typer.Option(help="With --responses: the column with the ground_truth.")
    ] = "reward_model",
    log_format: LogFormat = "text",
) -> None:
    """Evaluate a model on fixed rows with fixed seeds, or score stored responses.

    Prints rewards and accuracy with standard errors, and pass@k. The same seed gives the same
    episodes. The `val` keys set the sampling. With --responses no model is loaded; the graders are
    those of training.

    Examples:
        agentrl eval --dataset datasets/arithmetic_val.parquet --model tiny val.n=4

        agentrl eval -c runs/a/config.yaml --model runs/a --output evals/a

        agentrl eval --responses answers.parquet
    """
    import json

    if responses is not None:
        if log_format == "json":
            raise UserError("--responses prints a table: leave out --log-format json")
        if model or dataset:
            raise UserError("--responses scores stored responses: leave out --model and --dataset")
        settings = read_config(
            config, overrides, needs_model=False, dataset=[str(responses)], file=file
        )
        _score_stored(settings, str(responses), response_key, reward_model_key, output)
        return
    from agentrl.callbacks import Event
    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.evaluate import evaluate
    from agentrl.observers import open_console
    from agentrl.store import TrajectoryStore

    with open_console(log_format) as console:
        settings = read_config_to_play(config, overrides, dataset, model, file)
        val = settings.val
        with open_session(settings, console) as (plan, rollouts):
            sampling = describe_sampling(val.temperature)
            greedy = ", and a greedy pass" if val.greedy and val.temperature else ""
            rows = plural(len(plan.train), "row")
            names = file_names(settings.data.train)
            console.note(f"{names}: {rows} x {val.n} ({sampling}){greedy}")
            with console.phase("validation", rollouts.progress):
                result = evaluate(rollouts, plan.train, val)
        if log_format == "json":
            console.on_validation(Event(0, 0, result.metrics, Path()))
        else:
            console.close()
            agents = sorted({kind.sample.agent_name for kind in plan.kinds})
            console.note("\n".join(table(result.metrics, agents, val.n)))
        if output is not None:
            from agentrl.trainer.checkpoint import make_private_folder, replace_file

            make_private_folder(output)
            replace_file(output / "metrics.json", json.dumps(result.metrics, indent=2) + "\n")
            store = TrajectoryStore(output / "trajectories")
            store.write(0, result.groups, split="val")
            if result.greedy_groups:
                store.write(0, result.greedy_groups, split="greedy")
            console.note(f"saved all metrics and the trajectories to {output}")


def _score_stored(
    settings: Config, path: str, response_key: str, reward_model_key: str, output: Path | None
) -> None:
    """Score stored responses and print a table with a line for each data source."""
    import asyncio
    import json

    from agentrl import sandbox
    from agentrl.data import ColumnNames
    from agentrl.evaluate import read_responses, score_responses
    from agentrl.registry import load_file
    from agentrl.rewards import Scorer, check_graders

    for name in settings.files:
        load_file(name)
    names = ColumnNames(settings.data.prompt_key, settings.data.reward_fn_key)
    rows = read_responses(path, response_key, names, reward_model_key)
    rollout = settings.rollout
    scorer = Scorer(settings.reward, rollout.budget_policy, rollout.max_trajectory_tokens)
    samples = [sample for sample, _ in rows]
    check_graders(samples, scorer, path)
    several = [s for s in samples if s.tools or s.interaction]
    graders = [g for source in {s.data_source for s in several} for g in scorer.graders(source)]
    if names_of_rewards := sorted({g.name for g in graders if not g.is_compute_score}):
        echo(
            f"note: {plural(len(several), 'row')} may have responses of several turns. Each is one"
            " message here, so these rewards see the text of all turns as final_text:"
            f" {', '.join(names_of_rewards)}",
            err=True,
        )
    sandbox.configure(settings.sandbox)

    async def score() -> list[Group]:
        try:
            return await score_responses(rows, scorer)
        finally:
            await scorer.close()
            await sandbox.release()

    try:
        groups = asyncio.run(score())
    finally:
        scorer.stop()
    if not groups:
        raise UserError(f"{path}: no row has a response in {response_key!r}")
    if len(groups) < len(rows):
        missing = plural(len(rows) - len(groups), "row")
        echo(f"note: {missing} without responses: left out", err=True)
    lines, metrics = _score_table(groups)
    echo("\n".join(aligned(lines, 1)))
    if output is not None:
        from agentrl.trainer.checkpoint import make_private_folder, replace_file

        make_private_folder(output)
        replace_file(output / "metrics.json", json.dumps(metrics, indent=2) + "\n")
        echo(f"saved the scores to {output / 'metrics.json'}")


def _score_table(groups: Sequence[Group]) -> tuple[list[list[str]], dict[str, float]]:
    """Return the cells of the table of scores, a line for each data source, and the metrics."""
    from agentrl.evaluate import accuracy
    from agentrl.metrics import grader_metrics, mean, standard_error, t_quantile

    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.sample.data_source or "none", []).append(group)
    parts = [("all", groups)] if len(by_source) > 1 else []
    lines = [["data source", "rows", "responses", "score", "95 % interval", "acc"]]
    metrics: dict[str, float] = {}
    for source, part in [*parts, *sorted(by_source.items())]:
        # As in verl: a row's score is the mean of its responses, and a source's that of its rows.
        scores = [mean([s.reward for s in group.scored]) for group in part]
        accs = [mean([accuracy(s) for s in group.scored]) for group in part]
        count = sum(len(group.scored) for group in part)
        center, error = mean(scores), standard_error([[x] for x in scores])
        interval = "-"
        if len(part) > 1:
            half = t_quantile(0.975, len(part) - 1) * error
            interval = f"[{center - half:.3f}, {center + half:.3f}]"
        score_text = f"{center:.3f} ± {error:.3f}" if len(part) > 1 else f"{center:.3f}"
        cells = [str(len(part)), str(count), score_text, interval, f"{mean(accs):.3f}"]
        lines.append([source, *cells])
        metrics[f"test_score/{source}"] = center
        metrics |= {f"test_score_rows/{source}": len(part)}
        if len(part) > 1:
            metrics[f"test_score_se/{source}"] = error
        scored = [s for group in part for s in group.scored]
        metrics |= {f"test_{name}/{source}": x for name, x in grader_metrics(scored).items()}
    return lines, metrics


def table(metrics: Mapping[str, float], agents: Sequence[str], n: int) -> list[str]:
    """Return a table of rewards, accuracy and tool calls, for all rows and for each loop.

    Behind `±` is the standard error of a mean.

    Args:
        metrics: the metrics of an `Evaluation`.
        agents: the loops of its rows.
        n: rollouts per row of the sampled pass.
    """
    powers = [2**i for i in range(1, n.bit_length())]
    lines = [
        ["", "", "rows", "reward", "acc", *(f"pass@{k}" for k in powers), "calls tools", "turns"]
    ]
    loops = [("all", ""), *((agent, f"/{agent}") for agent in agents)]
    for name, below in loops if len(agents) > 1 else [(*agents, "")]:
        passes = (("sampled", f"val{below}", n), ("greedy", f"val_greedy{below}", 1))
        for label, prefix, count in passes:
            if f"{prefix}/reward/mean@{count}" not in metrics:
                continue
            formats = {
                "rows": ".0f",
                f"reward/mean@{count}": ".3f",
                f"acc/mean@{count}": ".3f",
                **{f"acc/pass@{k}": ".3f" for k in powers},
                "tool_call_rate": ".0%",
                "num_turns": ".1f",
            }
            cells = []
            for key, form in formats.items():
                value = metrics.get(f"{prefix}/{key}")
                error = metrics.get(f"{prefix}/{key.replace('/mean@', '/se@')}")
                has_error = "/mean@" in key and error is not None
                cell = "-" if value is None else format(value, form)
                cells.append(f"{cell} ± {error:.3f}" if has_error else cell)
            lines.append([name, label, *cells])
    return aligned(lines, 2)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Folders of runs, or of `eval --output`."),
    ],
    step: Annotated[
        int | None, typer.Option(help="The step of the validations; default: each run's last.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The picture to write, .svg.")] = Path("compare.svg"),
) -> None:
    """Compare the validations of runs: a table, paired differences to the first run, a picture.

    A difference is paired: it is computed for each row that both runs validated, so the difficulty
    of the rows cancels out. The interval of 95 % is that of the paired t-test over the rows. If it
    does not contain 0, the rows and rollouts alone hardly explain the difference.

    Runs whose configs differ in trainer.seed alone are one line: a row's value is its mean over the
    seeds, and the column "seeds" has the mean reward of each.

    Examples:
        agentrl compare runs/grpo runs/ppo

        agentrl compare evals/base evals/trained --output base_and_trained.svg
    """
    from agentrl.evaluate import accuracy, merge_seeds, read_validation
    from agentrl.metrics import mean, standard_error
    from agentrl.observers.curve import validation_points, write_comparison
    from agentrl.record import METRICS

    if len(runs) < 2:
        raise UserError(f"compare needs two or more folders, and got only {runs[0]}")
    if output.suffix != ".svg":
        raise UserError(f"--output {output} must end in .svg")
    names = [run.resolve().name for run in runs]
    labels = [
        str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise UserError(f"a folder is named twice: {', '.join(map(str, runs))}")
    of_runs = [read_validation(run, step) for run in runs]
    rewards = [mean([s.reward for g in v.groups.values() for s in g.scored]) for v in of_runs]
    families: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        families.setdefault(_config_without_seed(run), []).append(i)
    if len(families) == 1:  # the seeds themselves are compared
        families = {label: [i] for i, label in enumerate(labels)}
    validations = [merge_seeds([of_runs[i] for i in family]) for family in families.values()]
    run_labels, sizes = labels, [len(family) for family in families.values()]
    has_seeds = max(sizes) > 1
    labels = [
        labels[family[0]] + f" ({n} seeds)" * (n > 1)
        for family, n in zip(families.values(), sizes, strict=True)
    ]
    values: dict[str, Callable[[Scored], float]] = {"reward": lambda s: s.reward, "acc": accuracy}
    lines = [["", "step", "rows", *values, *["seeds"] * has_seeds]]
    for label, validation, family in zip(labels, validations, families.values(), strict=True):
        groups = validation.groups.values()
        cells = []
        for value in values.values():
            rows = [[value(s) for s in group.scored] for group in groups]
            center = mean([x for row in rows for x in row])
            has_error = len(rows) > 1
            cells.append(
                f"{center:.3f} ± {standard_error(rows):.3f}" if has_error else f"{center:.3f}"
            )
        if has_seeds:
            cells.append(" ".join(f"{rewards[i]:.3f}" for i in family))
        lines.append([label, str(validation.step), str(len(groups)), *cells])
    echo("\n".join(aligned(lines, 1)))
    _print_differences(labels, validations, values)
    curves = {}
    for label, run, validation, reward in zip(run_labels, runs, of_runs, rewards, strict=True):
        # The folder of `agentrl eval` has no metrics of steps.
        curves[label] = validation_points(run / METRICS) or [(float(validation.step), reward)]
    write_comparison(curves, output)
    echo(f"\nvalidation rewards over steps: {output}")


def _print_differences(
    labels: Sequence[str],
    validations: Sequence[Validation],
    values: Mapping[str, Callable[[Scored], float]],
) -> None:
    """Print the paired difference between each run and the first one.

    Args:
        labels: the names of the runs.
        validations: the validation of each run.
        values: functions of the values to compare, by the names of the values.

    Raises:
        UserError: a run shares no rows with the first one.
    """
    from agentrl.errors import DataError
    from agentrl.evaluate import paired_difference

    differences = [["", "rows", *(f"{name} [95 % interval]" for name in values)]]
    for label, validation in zip(labels[1:], validations[1:], strict=True):
        try:
            paired = [paired_difference(validations[0], validation, v) for v in values.values()]
        except DataError:
            raise UserError(
                f"{labels[0]} and {label} share no rows: no id with the same prompt, loop and"
                " ground truth is in both. Evaluate both on one file: agentrl eval --dataset FILE"
                " --model RUN --output FOLDER"
            ) from None
        cells = [
            f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" if d.rows > 1 else f"{d.mean:+.3f}"
            for d in paired
        ]
        differences.append([f"{label} - {labels[0]}", str(paired[0].rows), *cells])
    echo("\npaired differences on the rows that both have:")
    echo("\n".join(aligned(differences, 1)))
    for label, validation, (_, shared, *_) in zip(
        labels[1:], validations[1:], differences[1:], strict=True
    ):
        sizes = [len(v.groups) for v in (validations[0], validation)]
        if max(sizes) > int(shared):
            echo(
                f"note: {labels[0]} has {plural(sizes[0], 'row')}, {label} has {sizes[1]};"
                f" {shared} are in both",
                err=True,
            )


def _config_without_seed(run: Path) -> str:
    """Return a run's config without its seed and folder, as text; the path if it has no config."""
    from agentrl.report.run import Run

    config = Run(run).config
    trainer = dict(config.get("trainer") or {})
    for key in ("seed", "output"):
        trainer.pop(key, None)
    return repr(config | {"trainer": trainer}) if config else str(run.resolve())


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table; the first `left` columns are aligned to the left.

    Each cell stays on its line, and its characters that are not printable are escaped.
    """
    lines = [[" ".join(printable(cell).split()) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
