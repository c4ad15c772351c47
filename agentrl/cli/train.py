"""`agentrl train`: train a policy."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.check import print_notes
from agentrl.cli.options import (
    ConfigFile,
    Dataset,
    Deterministic,
    Files,
    LogFormat,
    Model,
    Output,
    Overrides,
    ValDataset,
    read_config,
    with_model_folder,
    with_teacher_folders,
)
from agentrl.cli.restarts import exit_code_of_crashes, is_supervised, run_supervised
from agentrl.cli.spelling import command_words

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.observers.console import Console


def train(
    overrides: Overrides = None,
    dataset: Dataset = None,
    val_dataset: ValDataset = None,
    model: Model = None,
    output: Output = None,
    file: Files = None,
    config: ConfigFile = None,
    deterministic: Deterministic = False,
    log_format: LogFormat = "text",
    recorded: Annotated[Path | None, typer.Option("--from", metavar="DIR")] = None,
) -> None:
    """Train a policy on the rows of a dataset.

    The same command resumes a run that was stopped, and prints the result of a finished run.

    Args:
        recorded: Train on the answers that `agentrl serve --record DIR` stored, with the scores of
            their users (data.train=recorded:DIR), from the policy that was served last.

    Examples:
        agentrl train --dataset datasets/arithmetic_train.parquet --model tiny

        agentrl train -c run.yaml rollout.n=16 algorithm.name=ppo

        agentrl train verl.yaml data.train_files=rows.parquet

        agentrl train --dataset rows.jsonl --model Qwen/Qwen2.5-0.5B-Instruct -f my_tools.py

        agentrl train -c run.yaml --log-format json

        agentrl train --from served
    """
    from agentrl.observers import open_console

    restarts = 0
    with open_console(log_format) as console:
        settings = read_config(
            config,
            overrides,
            dataset=dataset,
            val_dataset=val_dataset,
            model=model,
            output=output,
            file=file,
            deterministic=deterministic,
            recorded=recorded,
        )
        if not is_supervised():
            restarts = settings.trainer.max_restarts
        if not restarts:
            with exit_code_of_crashes():
                _train(settings, console)
    if restarts:  # Another process trains, with a console of its own.
        sys.exit(run_supervised(command_words.get(), Path(settings.trainer.output), restarts))


def _train(settings: Config, console: Console) -> None:
    from agentrl.config import TINY
    from agentrl.preflight import check_open_files, check_policy_learns, make_plan

    with console.phase("check the dataset"):
        plan = make_plan(settings)
    check_policy_learns(plan)
    check_open_files(plan)
    with console.phase("find the model"):
        plan = replace(plan, config=with_teacher_folders(with_model_folder(settings)))
    with console.phase("load the libraries"):
        from agentrl.cluster import open_placement
        from agentrl.observers import make_observers
        from agentrl.trainer import Trainer

    if settings.model.path == TINY:
        from agentrl.demo import describe_preset

        if note := describe_preset(settings):
            console.warning(f"note: {note}")
    print_notes(plan, console.warning)
    observers = make_observers(plan.config, console)
    with open_placement(plan.config) if plan.config.trainer.spread else nullcontext() as placement:
        Trainer(plan.config, plan, placement, observers, console).run()
