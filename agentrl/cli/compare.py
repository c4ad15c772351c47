"""`agentrl compare`: compare validations of runs and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UserError


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...")],
    step: int | None = None,
    output: Path = Path("compare.svg"),
    other_prompts: Annotated[bool, typer.Option("--other-prompts")] = False,
    fail_if_worse: Annotated[float | None, typer.Option(min=0)] = None,
) -> None:
    """Compare the validations of runs: a table, paired differences to the first run, a picture.

    A difference is paired: it is computed for each row that both runs validated, so the difficulty
    of the rows cancels out. The interval of 95 % is that of the paired t-test over the rows. If it
    does not contain 0, the rows and rollouts alone hardly explain the difference.

    Runs whose configs differ in trainer.seed alone are one line: a row's value is its mean over the
    seeds, and the column "seeds" has the mean reward of each.

    Args:
        runs: Folders of runs, or of `eval --output`.
        step: The step of the validations; default: each run's last.
        output: The picture to write, .svg; the numbers are in .json next to it.
        other_prompts: Pair rows by id and ground truth alone: the runs have prompts of their own.
        fail_if_worse: Exit code 1 if a run's reward may be worse than the first by more than X.

    Examples:
        agentrl compare runs/grpo runs/ppo

        agentrl compare evals/base evals/trained --output base_and_trained.svg

        agentrl compare evals/released evals/candidate --fail-if-worse 0.02
    """
    from agentrl.cli.comparison import print_comparison

    if len(runs) < 2:
        raise UserError(f"compare needs two or more folders, and got only {runs[0]}")
    if output.suffix != ".svg":
        raise UserError(f"--output {output} must end in .svg")
    print_comparison(runs, step, output, same_prompts=not other_prompts, margin=fail_if_worse)
