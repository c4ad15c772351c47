"""`agentrl eval` and `agentrl generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile, Dataset, Files, Model, Overrides, read_config


def eval_(
    overrides: Overrides = None,
    dataset: Dataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder for metrics.json and the trajectories.")
    ] = None,
) -> None:
    """Evaluate a model on fixed rows with fixed seeds: mean@n and pass@k.

    Twice with the same seed gives the same episodes. Sampling is that of the `val` keys.

    Examples:
        agentrl eval --dataset datasets/arithmetic_val.parquet --model tiny val.n=4

        agentrl eval --dataset rows.jsonl --model runs/a/model -f my_tools.py --output evals/a
    """
    import json

    from agentrl.cli.session import open_session
    from agentrl.evaluate import evaluate
    from agentrl.store import TrajectoryStore

    settings = read_config(config, overrides, dataset=dataset, model=model, files=file)
    with open_session(settings) as (plan, rollouts):
        result = evaluate(rollouts, plan.train, settings.val)
    width = max(map(len, result.metrics))
    for name, value in sorted(result.metrics.items()):
        typer.echo(f"{name:{width}}  {value:.4f}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "metrics.json").write_text(json.dumps(result.metrics, indent=2) + "\n")
        store = TrajectoryStore(output / "trajectories")
        store.write(0, result.groups, split="val")
        if result.greedy_groups:
            store.write(0, result.greedy_groups, split="greedy")
        typer.echo(f"written to {output}")


def generate(
    output: Annotated[Path, typer.Option(help="The file to write, .parquet or .jsonl.")],
    overrides: Overrides = None,
    dataset: Dataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", help="Responses a row.", min=1)] = 1,
) -> None:
    """Write the rows back with a column `responses`: the assistant's text of n episodes each.

    Responses are sampled as the `val` keys say; each is what the assistant wrote over all turns.

    Examples:
        agentrl generate --dataset rows.parquet --model tiny --output answers.parquet -n 4
    """
    from agentrl.cli.session import open_session
    from agentrl.data import read_rows, write_rows
    from agentrl.engine.base import Sampling

    settings = read_config(config, overrides, dataset=dataset, model=model, files=file)
    val = settings.val
    sampling = Sampling(temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)
    with open_session(settings) as (plan, rollouts):
        groups = rollouts.collect(plan.train, n=n, sampling=sampling, step=0, tag="val")
    texts = {g.sample.row: [s.trajectory.assistant_text for s in g.scored] for g in groups}
    rows = read_rows(settings.data.train)
    write_rows(output, [{**row, "responses": texts.get(i, [])} for i, row in enumerate(rows)])
    typer.echo(f"{len(groups)} rows with {n} responses each: {output}")
