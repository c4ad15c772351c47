"""`agentrl replay` and `agentrl rescore`: repeat a recorded step, score stored episodes again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.errors import UserError

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


def replay(
    run: RunFolder,
    step: Annotated[int, typer.Option(help="The step to replay, from 1.")],
    model: Annotated[
        str,
        typer.Option(help="The model that training started from, if it was moved (model.path)."),
    ] = "",
    device: Annotated[
        Literal["", "auto", "cpu", "cuda"],
        typer.Option(help="Where to compute; default: the run's trainer.device."),
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The relative difference to accept; default: 0 for one process on a CPU, 0.01 for"
            " GPUs and several processes."
        ),
    ] = None,
) -> None:
    """Repeat a recorded step from its stored rollouts, and compare it with the record.

    No engine, tool or reward runs. The command loads the newest checkpoint before the step and
    repeats the updates up to it. It compares metrics, the numbers of each token, and the weights if
    the step has a checkpoint. If a value differs, it is named, and the exit code is 1.

    Examples:
        agentrl replay runs/demo --step 12
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g} must be a relative difference: 0 <= X < 1")
    from agentrl.report.recorded import RecordedRun
    from agentrl.trainer.replay import Replayer
    from agentrl.trainer.replay import replay as run_replay

    replayer = Replayer(RecordedRun(run), model=model, device=device)
    result = run_replay(replayer, step, tolerance, say=typer.echo)
    result.raise_differences()
    equal = f"within {result.tolerance:g}" if result.tolerance else "bit for bit"
    typer.echo(f"step {step} equals the record {equal}: {', '.join(result.compared)}")
