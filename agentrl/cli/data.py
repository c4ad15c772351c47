"""`agentrl data`: prepare datasets, and write the rollouts of a run as verl does."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.plural import plural
from agentrl.terminal import echo


class Split(StrEnum):
    """The splits of stored trajectories."""

    TRAIN = "train"
    VAL = "val"
    GREEDY = "greedy"
    EVICTED = "evicted"
    BASELINE = "baseline"


app = typer.Typer(help="Prepare datasets, dump rollouts.", no_args_is_help=True)


@app.command("convert")
def convert(
    source: str,
    output: str,
    rename: Annotated[list[str] | None, typer.Option("--rename", metavar="OLD=NEW")] = None,
    split: str = "",
    name: str = "",
) -> None:
    """Convert rows of another format to a dataset.

    Args:
        source: hf://OWNER/NAME, a folder of save_to_disk, or a .csv, .json, .jsonl or .parquet
            file.
        output: The file to write, .parquet or .jsonl.
        rename: Rename a column, e.g. question=prompt. It may be repeated.
        split: The split of a Hugging Face dataset.
        name: The configuration of a dataset of the hub.

    Examples:
        agentrl data convert hf://openai/gsm8k train.parquet --name main --split train
        --rename question=prompt --rename answer=ground_truth

        agentrl data convert questions.csv questions.jsonl --rename question=prompt
    """
    from agentrl.data import convert_rows

    pairs = [text.partition("=") for text in rename or []]
    for old, _, new in pairs:
        if not old or not new:
            raise UserError(f"--rename {old or '='}: write OLD=NEW, such as question=prompt")
    if len({old for old, _, _ in pairs}) < len(pairs):
        raise UserError("--rename: a column is renamed twice")
    renamed = {old: new for old, _, new in pairs}
    count = convert_rows(source, output, rename=renamed, split=split, name=name)
    echo(f"saved {plural(count, 'row')} to {output}")


@app.command("dump")
def dump(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    output: Annotated[Path, typer.Argument(metavar="FOLDER")],
    split: Split = Split.TRAIN,
) -> None:
    """Write the rollouts of a run as verl's trainer.rollout_data_dir: FOLDER/STEP.jsonl.

    Existing files are replaced.

    Args:
        run: The folder of a run.
        output: The folder to write to.
        split: train; val or greedy: validations; evicted: played but not trained on; baseline:
            ReMax's greedy rollouts.

    Examples:
        agentrl data dump runs/demo rollouts

        agentrl data dump runs/demo validations --split val
    """
    from agentrl.compat.verl.dump import dump_rollouts
    from agentrl.report import load_run

    count = dump_rollouts(load_run(run), output, split.value)
    echo(f"saved {plural(count, 'file')} to {output}")
