"""`agentrl sft`: fine-tune a model on conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Files, resolve_model
from agentrl.plural import plural
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.learner.sft import Example

FEW_STEPS = 20
"""With fewer steps, the default learning rates hardly change a model."""


def sft(
    dataset: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
    output: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    column: Annotated[str, typer.Option("--column", "--response-key")] = "messages",
    prompt_key: str = "prompt",
    file: Files = None,
    lora_rank: Annotated[int, typer.Option(min=0)] = 0,
    lr: Annotated[float | None, typer.Option(min=0)] = None,
    steps: Annotated[int, typer.Option(min=0)] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    micro_batch_tokens: Annotated[int, typer.Option(min=1)] = 16384,
    fresh: Annotated[bool, typer.Option("--fresh")] = False,
    seed: int = 0,
) -> None:
    """Fine-tune a model on the assistant messages of conversations.

    If a conversation starts with an assistant message, it continues the row's prompt, as the row's
    agent loop shows it. A text is such a message, but in the column `messages` it is a conversation
    in JSON. Other conversations are complete. The tools of the row are shown too.

    A tool call is text in the assistant's content, in the format of the model (`agentrl check
    template MODEL` prints it), or in `tool_calls` as OpenAI writes it: then the model's template
    writes the text. Assistant messages with `weight` 0 or `train` false are not trained.

    Args:
        dataset: Rows with conversations, .parquet or .jsonl, or of `agentrl show --sft`.
        model: The model to train: a folder or hub name, or `tiny`.
        output: The folder to create, for a model or an adapter.
        overrides: Config keys of the learner, e.g. optim.recompute=true.
        column: The column with the conversations, or with the answers to the prompts.
        prompt_key: The column with the prompts that answers continue.
        lora_rank: Rank of a LoRA adapter; 0: train all weights.
        lr: Peak learning rate; default: 1e-5, or 2e-4 for LoRA.
        steps: Optimizer steps; 0: one epoch.
        batch_size: Conversations per step.
        micro_batch_tokens: Maximum number of tokens per forward pass.
        fresh: Start with random weights of the model's shape.
        seed: Seed of the order of rows and of random weights.

    Examples:
        agentrl sft --dataset chats.jsonl --model models/base --output models/chat

        agentrl sft --dataset rows.parquet --column gold -f my_tools.py --model models/base
        --lora-rank 16 --output models/adapter

        agentrl sft --dataset qa.parquet --prompt-key question --response-key answer
        --model models/base --output models/chat

        agentrl sft --dataset chats.jsonl --model models/base --output models/chat
        trainer.n_gpus_per_node=8 optim.recompute=true

        agentrl sft --dataset best.parquet --model runs/demo/model --output models/best
    """
    from agentrl.errors import UserError
    from agentrl.registry import load_file

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} already exists: choose a new folder")
    for name in file or []:
        load_file(name)
    path = resolve_model(model, say=echo)

    from transformers.utils import logging

    from agentrl.chat import ChatTemplate
    from agentrl.config import without_effect
    from agentrl.engine.local.load import load_model_config, max_row_length
    from agentrl.learner.sft import batches, make_sft_config
    from agentrl.trainer.sft import has_tokens, load_examples, load_token_examples

    logging.disable_progress_bar()
    template = ChatTemplate.load(path)
    max_length = max_row_length(load_model_config(path))
    if has_tokens(dataset):
        examples = load_token_examples(dataset, template, max_length)
    else:
        examples = load_examples(dataset, column, template, max_length, prompt_key)
    steps = steps or -(-len(examples) // batch_size)
    config = make_sft_config(
        path,
        steps=steps,
        lr=lr or 0.0,
        lora_rank=lora_rank,
        micro_batch_tokens=micro_batch_tokens,
        seed=seed,
        files=file or (),
        overrides=overrides or (),
    )
    for note in [*without_effect(config), *_note_few_steps(model, steps, lr, config)]:
        echo(f"note: {note}", err=True)
    _describe(examples, steps, batch_size)
    _train(config, fresh, batches(examples, batch_size, seed), steps, output)
    template.tokenizer.save_pretrained(output)
    echo(f"saved to {output}")


def _train(
    config: Config, fresh: bool, batches: Iterator[Sequence[Example]], steps: int, output: Path
) -> None:
    from agentrl.cluster import open_placement
    from agentrl.learner.sft import SFTLearner
    from agentrl.trainer.sft import ProgressPrinter

    with open_placement(config) if config.trainer.spread else nullcontext() as placement:
        learner = SFTLearner(config, fresh=fresh, placement=placement)
        learner.fit(batches, ProgressPrinter(steps, echo))
        output.mkdir(parents=True, exist_ok=True)
        learner.ranks.save_pretrained(output)


def _note_few_steps(model: str, steps: int, lr: float | None, config: Config) -> Iterator[str]:
    """Yield a note if there are so few steps that the default learning rate changes little."""
    from agentrl.config import TINY

    if steps >= FEW_STEPS or lr is not None:
        return
    advice = "--steps trains on the rows again, --lr sets the peak"
    if model == TINY:
        advice += f"; for {TINY}, --lr 1e-3 is a start"
    yield (
        f"{plural(steps, 'step')} with a peak learning rate of {config.optim.lr:g}: this"
        f" changes the model very little. {advice}"
    )


def _describe(examples: Sequence[Example], steps: int, batch_size: int) -> None:
    trained, tokens = (sum(sum(e.mask) for e in examples), sum(len(e.ids) for e in examples))
    echo(
        f"{plural(len(examples), 'conversation')} with {tokens:,} tokens, {trained:,} of them"
        f" from the assistant; {plural(steps, 'step')} of {batch_size}"
    )
