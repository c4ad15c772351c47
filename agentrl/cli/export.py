"""`agentrl export`: export the policy of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.plural import plural
from agentrl.terminal import echo


def export(
    checkpoint: Path,
    out: Path,
    merge: Annotated[bool, typer.Option("--merge")] = False,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    model: str = "",
) -> None:
    """Export the policy of a checkpoint to a folder that transformers, PEFT and SGLang can load.

    The folder contains a model; after LoRA training it contains an adapter, or with --merge a
    model. It also contains tokenizer and chat template.

    Args:
        checkpoint: A checkpoint, a run's folder (its newest checkpoint), or RUN/best (the best by
            trainer.keep_best).
        out: The folder to create.
        merge: Merge a LoRA adapter into the base model.
        dtype: Precision of the weights; auto: that in which the run sampled.
        model: The base model of the training, if it was moved (model.path).

    Examples:
        agentrl export runs/demo models/mine

        agentrl export runs/demo/global_step_00000010 models/mine --merge --dtype bfloat16
    """
    from transformers.utils import logging

    from agentrl.trainer.export import export as make

    logging.disable_progress_bar()
    result = make(checkpoint, out, merge=merge, dtype=dtype, model=model)
    for line in result.checkpoint.skipped:
        echo(f"skipped: {line}")
    if result.rounding_note:
        echo(f"note: {result.rounding_note}", err=True)
    if merge and not result.lora:
        echo("note: --merge has no effect: there is no adapter", err=True)
    if result.adapter and dtype != "auto":
        echo(
            f"note: --dtype {dtype} has no effect without --merge: an adapter keeps its precision",
            err=True,
        )
    kind = f"an adapter for {result.base}" if result.adapter else "a model"
    echo(f"{out}: {kind}, trained for {plural(result.checkpoint.step, 'step')}")
