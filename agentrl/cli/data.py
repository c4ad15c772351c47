"""`agentrl data`: prepare datasets."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.plural import plural

app = typer.Typer(help="Prepare datasets.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Keep `convert` a subcommand while it is the only one."""


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="hf://OWNER/NAME, a folder of save_to_disk, or a .csv, .json, .jsonl or .parquet"
            " file."
        ),
    ],
    output: Annotated[str, typer.Argument(help="The file to write, .parquet or .jsonl.")],
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="Rename a column, e.g. question=prompt."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of a Hugging Face dataset.")] = "",
    name: Annotated[str, typer.Option(help="The configuration of a dataset of the hub.")] = "",
) -> None:
    """Convert rows of another format to a dataset.

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
    typer.echo(f"saved {plural(count, 'row')} to {output}")
