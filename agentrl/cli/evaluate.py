"""`agentrl eval`: evaluate models, and score stored responses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from agentrl.cli.options import (
    ConfigFile,
    Files,
    LogFormat,
    Overrides,
    PlayedDataset,
    describe_sampling,
    read_config,
    read_config_to_play,
)
from agentrl.errors import UserError
from agentrl.plural import plural
from agentrl.terminal import aligned, echo

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.observers.console import Console
    from agentrl.trajectory import Group


def eval_(
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: list[str] | None = None,
    file: Files = None,
    config: ConfigFile = None,
    output: Path | None = None,
    without: Literal["tools"] | None = None,
    expect: list[str] | None = None,
    token_env: str = "",
    responses: Path | None = None,
    response_key: str = "responses",
    reward_model_key: str = "reward_model",
    log_format: LogFormat = "text",
) -> None:
    """Evaluate models on fixed rows with fixed seeds, or score stored responses.

    Prints rewards and accuracy with standard errors, pass@k and maj@k. The same seed gives the same
    episodes. The `val` keys set the sampling. Several models end with the table of `agentrl
    compare`. With --responses no model is loaded; the graders are those of training.

    Args:
        model: A model, run or checkpoint, as for `agentrl train`; or URL#NAME, a model of an
            OpenAI-compatible server. It may be repeated: each plays the same rows.
        output: A folder for metrics.json and the trajectories; of several models, a folder for
            each. The same command continues there.
        without: Also play each row without its tools (val.without_tools).
        expect: METRIC>=NUMBER or METRIC<=NUMBER: exit code 1 if the end of its interval of 95 % is
            not. It may be repeated.
        token_env: The environment variable with the key of the URLs of --model.
        responses: Rows with stored responses, .parquet or .jsonl: score these, play none.
        response_key: With --responses: the column of the responses.
        reward_model_key: With --responses: the column with the ground_truth.

    Examples:
        agentrl eval --dataset datasets/arithmetic_val.parquet --model tiny val.n=4

        agentrl eval -c runs/a/config.yaml --model runs/a --model runs/b --output evals/both

        agentrl eval -c runs/a/config.yaml --model runs/a --expect 'val/reward/mean@1>=0.9'

        agentrl eval --responses answers.parquet
    """
    from agentrl.callbacks import Event
    from agentrl.comparison import Expectation
    from agentrl.observers import open_console

    if responses is not None:
        if log_format == "json":
            raise UserError("--responses prints a table: leave out --log-format json")
        if model or dataset or expect or without:
            raise UserError(
                "--responses scores stored responses: leave out --model and --dataset, --expect and"
                " --without"
            )
        settings = read_config(
            config, overrides, needs_model=False, dataset=[str(responses)], file=file
        )
        _score_stored(settings, str(responses), response_key, reward_model_key, output)
        return
    expectations = [Expectation.parse(text) for text in expect or ()]
    models: Sequence[str | None] = model or [None]
    if len(set(models)) < len(models):
        raise UserError(f"--model names a model twice: {', '.join(map(str, models))}")
    folders = [output]
    if len(models) > 1:
        if output is None:
            raise UserError("several models need --output FOLDER: each gets a folder in it")
        folders = [output / name for name in _folder_names(models)]
    overrides = [*(overrides or ()), *["val.without_tools=true"] * bool(without)]
    failed = False
    with open_console(log_format) as console:
        settings = [read_config_to_play(config, overrides, dataset, name, file) for name in models]
        for name, of_model, folder in zip(models, settings, folders, strict=True):
            if len(models) > 1:
                console.note(f"{name}:")
            metrics, lines = _evaluate(of_model, folder, console, token_env)
            if log_format == "json":
                console.on_validation(Event(0, 0, metrics, folder or Path()))
            else:
                console.note("\n".join(lines))
            for expectation in expectations:
                is_kept, line = expectation.check(metrics)
                echo(("" if is_kept else "error: ") + line, err=True)
                failed |= not is_kept
        if output is not None and len(models) > 1:
            from agentrl.cli.comparison import print_comparison

            console.close()
            print_comparison([f for f in folders if f], 0, output / "compare.svg")
    if failed:
        raise typer.Exit(1)


def _folder_names(models: Sequence[str | None]) -> list[str]:
    """Return names for the folders of models: the last parts of their paths, if these differ."""
    for pattern in (r".*[/#]", ""):
        names = [re.sub(pattern, "", str(m).rstrip("/")) for m in models]
        names = [re.sub(r"[^\w.=-]+", "-", name).lstrip(".-") for name in names]
        if len(set(names)) == len(names) and all(names):
            return names
    return [f"{i}-{name}" for i, name in enumerate(names)]


def _evaluate(
    settings: Config, folder: Path | None, console: Console, token_env: str
) -> tuple[Mapping[str, float], list[str]]:
    """Play the rows, or what is not in the folder yet, and store the result.

    Returns:
        The metrics, and the lines of their table.
    """
    from agentrl.cli.eval_record import open_record
    from agentrl.cli.session import check_rows, open_session
    from agentrl.config import file_names
    from agentrl.evaluate import evaluate

    val = settings.val
    with contextlib.ExitStack() as stack:
        plan = check_rows(settings, console)
        if val.without_tools and not any(k.sample.tools for k in plan.kinds):
            raise UserError("val.without_tools (--without tools): no row has tools")
        record = stack.enter_context(open_record(folder, plan)) if folder else None
        sampling = describe_sampling(val)
        greedy = ", and a greedy pass" if val.greedy and val.temperature else ""
        bare = ", and without tools" if val.without_tools else ""
        rows = plural(len(plan.train), "row")
        names = file_names(settings.data.train)
        console.note(f"{names}: {rows} x {val.n} ({sampling}){greedy}{bare}")
        if record and record.metrics:
            metrics = record.metrics
            console.note(f"{folder} has all of it: nothing is played")
        else:
            session = open_session(settings, console, plan, token_env)
            _, rollouts = stack.enter_context(session)
            keep = {"record": record.of} if record else {}
            with console.phase("validation", rollouts.progress):
                result = evaluate(rollouts, plan.train, val, **keep)
            metrics = result.metrics
            if record:
                record.finish(result)
                console.note(f"saved all metrics and the trajectories to {folder}")
    return metrics, table(metrics, sorted({k.sample.agent_name for k in plan.kinds}), val.n)


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
    from agentrl.comparison import MeanInterval, accuracy
    from agentrl.metrics import grader_metrics, mean, standard_error

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
        over, error = MeanInterval.of(scores), standard_error([[x] for x in scores])
        metrics |= {f"test_score/{source}": over.mean, f"test_score_rows/{source}": len(part)}
        score, interval = f"{over.mean:.3f}", "-"
        if len(part) > 1:
            score, interval = f"{score} ± {error:.3f}", f"[{over.low:.3f}, {over.high:.3f}]"
            metrics[f"test_score_se/{source}"] = error
        lines.append([source, str(len(part)), str(count), score, interval, f"{mean(accs):.3f}"])
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
    from agentrl.comparison import powers_of_two

    powers = powers_of_two(n)
    kinds = ["pass", *["maj"] * any("/maj@" in key for key in metrics)]
    votes = [f"{kind}@{k}" for kind in kinds for k in powers]
    lines = [["", "", "rows", "reward", "acc", *votes, "calls tools", "turns"]]
    loops = [("all", ""), *((agent, f"/{agent}") for agent in agents)]
    for name, below in loops if len(agents) > 1 else [(*agents, "")]:
        passes = (
            ("sampled", f"val{below}", n),
            ("greedy", f"val_greedy{below}", 1),
            ("without tools", f"val_without_tools{below}", n),
        )
        for label, prefix, count in passes:
            if f"{prefix}/reward/mean@{count}" not in metrics:
                continue
            formats = {
                "rows": ".0f",
                f"reward/mean@{count}": ".3f",
                f"acc/mean@{count}": ".3f",
                **{f"acc/{vote}": ".3f" for vote in votes},
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
