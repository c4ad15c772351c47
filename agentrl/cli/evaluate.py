"""`agentrl eval` and `agentrl generate`: evaluate a model, and sample responses to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import (
    ConfigFile,
    Files,
    Model,
    Overrides,
    PlayedDataset,
    describe_sampling,
    read_config_to_play,
)
from agentrl.plural import plural


def eval_(
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder for metrics.json and the trajectories.")
    ] = None,
) -> None:
    """Evaluate a model on fixed rows with fixed seeds: mean@n and pass@k.

    The same seed gives the same episodes. The `val` keys set the sampling.

    Examples:
        agentrl eval --dataset datasets/arithmetic_val.parquet --model tiny val.n=4

        agentrl eval -c runs/a/config.yaml --model runs/a/model --output evals/a
    """
    import json

    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.evaluate import evaluate
    from agentrl.store import TrajectoryStore

    settings = read_config_to_play(config, overrides, dataset, model, file)
    val = settings.val
    with open_session(settings) as (plan, rollouts):
        sampling = describe_sampling(val.temperature)
        greedy = ", and a greedy pass" if val.greedy and val.temperature else ""
        rows = plural(len(plan.train), "row")
        typer.echo(f"{file_names(settings.data.train)}: {rows} x {val.n} ({sampling}){greedy}")
        result = evaluate(rollouts, plan.train, val)
    typer.echo(
        "\n".join(table(result.metrics, sorted({k.sample.agent_name for k in plan.kinds}), val.n))
    )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "metrics.json").write_text(json.dumps(result.metrics, indent=2) + "\n")
        store = TrajectoryStore(output / "trajectories")
        store.write(0, result.groups, split="val")
        if result.greedy_groups:
            store.write(0, result.greedy_groups, split="greedy")
        typer.echo(f"saved all metrics and the trajectories to {output}")


def table(metrics: Mapping[str, float], agents: Sequence[str], n: int) -> list[str]:
    """Return a table of rewards, accuracy and tool calls, for all rows and for each loop.

    Args:
        metrics: the metrics of an `Evaluation`.
        agents: the loops of its rows.
        n: rollouts per row of the sampled pass.
    """
    powers = [2**i for i in range(1, n.bit_length())]
    lines = [["", "", "reward", "acc", *(f"pass@{k}" for k in powers), "calls tools", "turns"]]
    loops = [("all", ""), *((agent, f"/{agent}") for agent in agents)]
    for name, below in loops if len(agents) > 1 else [(*agents, "")]:
        passes = (("sampled", f"val{below}", n), ("greedy", f"val_greedy{below}", 1))
        for label, prefix, count in passes:
            if f"{prefix}/reward/mean@{count}" not in metrics:
                continue
            formats = {
                f"reward/mean@{count}": ".3f",
                f"acc/mean@{count}": ".3f",
                **{f"acc/pass@{k}": ".3f" for k in powers},
                "tool_call_rate": ".0%",
                "num_turns": ".1f",
            }
            values = [(metrics.get(f"{prefix}/{key}"), form) for key, form in formats.items()]
            lines.append([name, label, *("-" if v is None else format(v, f) for v, f in values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def generate(
    output: Annotated[Path, typer.Option(help="The file to write, .parquet or .jsonl.")],
    overrides: Overrides = None,
    dataset: PlayedDataset = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    n: Annotated[int, typer.Option("-n", help="Responses per row.", min=1)] = 1,
) -> None:
    """Write the rows with an added column `responses`: the assistant's text of n episodes.

    The `val` keys set the sampling. A response contains the text of all assistant turns.

    Examples:
        agentrl generate --dataset rows.parquet --model tiny --output answers.parquet -n 4
    """
    from agentrl.errors import UserError

    if output.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--output {output} must end in .parquet or .jsonl")
    if output.exists():
        raise UserError(f"--output {output} already exists: choose a new file")

    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.data import Rows, write_rows
    from agentrl.engine.base import Sampling

    settings = read_config_to_play(config, overrides, dataset, model, file)
    val = settings.val
    sampling = Sampling(temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)
    with open_session(settings) as (plan, rollouts):
        sampling_text = describe_sampling(val.temperature)
        rows = plural(len(plan.train), "row")
        typer.echo(f"{file_names(settings.data.train)}: {rows} x {n} ({sampling_text})")
        groups = rollouts.collect(plan.train, n=n, sampling=sampling, step=0, tag="val")
    texts = {g.sample.row: [s.trajectory.assistant_text for s in g.scored] for g in groups}
    assert isinstance(plan.train, Rows)  # `make_plan` reads them from files
    rows = enumerate(plan.train.raw())
    write_rows(output, [{**row, "responses": texts.get(i, [])} for i, row in rows])
    typer.echo(f"saved {plural(len(groups), 'row')} with {plural(n, 'response')} each to {output}")
