"""`agentrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, or a run's folder: its newest checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Put a LoRA adapter into the weights of its base.")
    ] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Of a model's weights; auto: as the base was published."),
    ] = "auto",
    model: Annotated[
        str, typer.Option(help="Where the model is now that training began with (model.path).")
    ] = "",
) -> None:
    """Make a folder that transformers, PEFT and SGLang load, of a checkpoint's policy.

    Of a full training it is a model's; of LoRA an adapter's, or with --merge a model's. Tokenizer
    and chat template are in it.

    Examples:
        agentrl export runs/demo models/mine

        agentrl export runs/demo/global_step_00000010 models/mine --merge --dtype bfloat16
    """
    from transformers.utils import logging

    from agentrl.trainer.export import export as make

    logging.disable_progress_bar()
    made = make(checkpoint, out, merge=merge, dtype=dtype, model=model)
    for line in made.checkpoint.skipped:
        typer.echo(f"skipped: {line}")
    if merge and not made.lora:
        typer.echo("note: --merge does nothing: all weights were trained, no adapter", err=True)
    if made.adapter and dtype != "auto":
        typer.echo(
            f"note: --dtype {dtype} does nothing without --merge: an adapter is written as it"
            " was saved",
            err=True,
        )
    what = f"an adapter for {made.base}" if made.adapter else "a model"
    typer.echo(f"{out}: {what}, as trained to step {made.checkpoint.step}")
