"""`agentrl replay` and `agentrl rescore`: repeat a recorded step, score stored episodes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.options import Files
from agentrl.cli.session import silence_training_warnings
from agentrl.errors import UserError
from agentrl.metrics import mean
from agentrl.plural import plural
from agentrl.terminal import aligned, echo

if TYPE_CHECKING:
    from agentrl.replay.replay import Replayer

MAX_LISTED = 10
"""The number of episodes that a command lists."""

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


Keys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Config keys, e.g. algorithm.adv_estimator=rloo."
    ),
]


def replay(
    run: RunFolder,
    step: Annotated[int, typer.Option()],
    overrides: Keys = None,
    reward: str = "",
    gradient: Annotated[bool, typer.Option("--gradient")] = False,
    file: Files = None,
    model: str = "",
    device: Literal["", "auto", "cpu", "cuda"] = "",
    tolerance: float | None = None,
) -> None:
    """Repeat a recorded step from its stored rollouts, or ask what another reward would have done.

    No engine and no tool runs. Without keys, --reward and --gradient: load the newest checkpoint
    before the step, repeat the updates up to it, and compare metrics, the numbers of each token,
    and the weights if the step has a checkpoint. A value that differs is named, and the exit code
    is 1.

    With them: show how advantages and gradients would have differed. The recorded rollouts stay.

    Args:
        step: The step to replay, from 1.
        reward: Another reward function: path.py:function, or a registered name. It replaces the
            outcome.
        gradient: Compare gradients, and their variance by how credit is given.
        model: The model that training started from, if it was moved (model.path).
        device: Where to compute; default: the run's trainer.device.
        tolerance: The relative difference to accept; default: 0 for one process on a CPU, 0.001 for
            several, 0.01 for GPUs.

    Examples:
        agentrl replay runs/demo --step 12

        agentrl replay runs/demo --step 12 algorithm.adv_estimator=rloo --reward my.py:strict

        agentrl replay runs/demo --step 12 algorithm.policy_loss=gspo --gradient
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g} must be a relative difference: 0 <= X < 1")
    asks = bool(overrides or reward or gradient)
    if asks and tolerance is not None:
        raise UserError("--tolerance is for a replay without keys, --reward and --gradient")
    from agentrl.registry import load_file
    from agentrl.replay.replay import Replayer
    from agentrl.replay.replay import replay as run_replay
    from agentrl.report.run import load_run

    for name in file or []:
        load_file(name)
    replayer = Replayer(load_run(run), model=model, device=device)
    if asks:
        _ask(replayer, step, overrides or [], reward, gradient)
        return
    result = run_replay(replayer, step, tolerance, say=echo)
    result.raise_differences()
    equal = f"within {result.tolerance:g}" if result.tolerance else "bit for bit"
    echo(f"step {step} equals the record {equal}: {', '.join(result.compared)}")


def _ask(replayer: Replayer, step: int, overrides: list[str], reward: str, gradient: bool) -> None:
    """Print what another config would have done in a step."""
    from contextlib import nullcontext

    from agentrl.replay.what_if import ADVANTAGE_KEYS, CLIP_KEYS, LOSS_KEYS, what_if
    from agentrl.report.rescore import change_config, changes_outcome, open_rescoring

    recorded = replayer.config_at(step)
    reasons: dict[str, str] = dict.fromkeys(
        CLIP_KEYS, "no ratio is clipped in the first pass of a step"
    )
    if not gradient:
        no_effect = "it changes the gradient and no advantage: add --gradient"
        reasons |= dict.fromkeys(LOSS_KEYS, no_effect)
    allowed = (*ADVANTAGE_KEYS, *(LOSS_KEYS if gradient else ()))
    by_name = (*CLIP_KEYS, *LOSS_KEYS)
    config = change_config(recorded, overrides, reward, allowed, by_name, reasons)
    changed = config.diff(recorded)
    if not changed and not gradient:
        raise UserError(f"{' '.join(overrides)}: step {step} was made with these values")
    scores = (
        open_rescoring(replayer.run, config, [step])
        if changes_outcome(recorded, config)
        else nullcontext()
    )
    with silence_training_warnings(), scores as score:
        result = what_if(replayer, step, config, score, gradient=gradient)
    echo(f"step {step} of {replayer.run.folder}, recorded -> {' '.join(changed) or 'same'}")
    episodes = result.episodes
    lines = [["", "recorded", "what-if"]]
    means = [mean([e.reward for e in episodes]), mean([e.new_reward for e in episodes])]
    lines.append([f"mean reward of {plural(len(episodes), 'episode')}", *_numbers(means)])
    lines.append([f"dead groups, of {result.groups}", str(result.dead), f"{result.new_dead}"])
    if norms := result.gradients:
        lines.append(["norm of the gradient", *_numbers([norms.norm, norms.new_norm])])
    echo("\n".join(aligned(lines, 1)))
    echo(f"groups that become dead: {result.died}; that become alive: {result.revived}")
    echo(
        f"the advantage changes its sign in {len(result.flipped)} of {len(episodes)} episodes"
        f" ({result.flipped_tokens} of {result.tokens} sampled tokens)"
    )
    moved = [e for e in episodes if e.change or e.reward != e.new_reward][:MAX_LISTED]
    if moved:
        lines = [["episode", "group", "rollout", "reward", "new", "advantage", "new"]]
        for e in moved:
            numbers = _numbers([e.reward, e.new_reward, e.advantage, e.new_advantage])
            lines.append([e.episode_id, str(e.group), str(e.rollout), *numbers])
        echo("\nthe episodes that change most:")
        echo("\n".join(aligned(lines, 1)))
    if norms is None:
        return
    if changed:
        cosine = "none: a gradient is 0" if math.isnan(norms.cosine) else f"{norms.cosine:.4f}"
        echo(f"\ncosine between the two gradients: {cosine}")
    lines = [["credit", "norm of the gradient", "its deviation", "norm / deviation"]]
    for name, noise in norms.credits.items():
        share = noise.norm / noise.deviation if noise.deviation > 0 else math.nan
        lines.append([name, *_numbers([noise.norm, noise.deviation, share])])
    echo("\nvariation of the gradient, by what a reward is credited to:")
    echo("\n".join(aligned(lines, 1)))
    if "token" not in norms.credits:
        echo("(credit for tokens needs a critic, and the run has none)")


def _numbers(values: Sequence[float]) -> list[str]:
    return ["-" if math.isnan(value) else f"{value:.4g}" for value in values]


def rescore(
    run: RunFolder,
    reward: Annotated[str, typer.Option()],
    overrides: Keys = None,
    file: Files = None,
    out: Path | None = None,
) -> None:
    """Score all stored episodes of a run with another reward function.

    The reward replaces the outcome; the rewards of turns and tools stay as they were recorded. The
    run does not change.

    Args:
        reward: The reward function: path.py:function, or a registered name.
        out: A .parquet file for the scores of all episodes.

    Examples:
        agentrl rescore runs/demo --reward my.py:strict

        agentrl rescore runs/demo --reward my.py:strict reward.kwargs.limit=3 --out scores.parquet
    """
    from agentrl.registry import load_file
    from agentrl.report.rescore import REWARD_KEYS, change_config, write_rescored
    from agentrl.report.rescore import rescore as score_again
    from agentrl.report.run import load_run

    if out is not None and out.suffix != ".parquet":
        raise UserError(f"--out {out} must end in .parquet")
    for name in file or []:
        load_file(name)
    recorded = load_run(run)
    config = change_config(recorded.config_at(), overrides or [], reward, REWARD_KEYS)
    with silence_training_warnings():
        rows = list(score_again(recorded, config))
    if not rows:
        raise UserError(f"{run} has no stored episodes")
    lines = [["split", "episodes", "outcome", "new outcome", "changed", "reward", "new reward"]]
    for split in dict.fromkeys(row["split"] for row in rows):
        part = [row for row in rows if row["split"] == split]
        changed = sum(row["outcome"] != row["new_outcome"] for row in part)
        means = [
            f"{mean([row[name] for row in part]):.3f}"
            for name in ("outcome", "new_outcome", "reward", "new_reward")
        ]
        lines.append([split, str(len(part)), *means[:2], str(changed), *means[2:]])
    echo("\n".join(aligned(lines, 1)))
    changed_rows = [row for row in rows if row["outcome"] != row["new_outcome"]]
    changed_rows.sort(key=lambda row: -abs(row["new_outcome"] - row["outcome"]))
    if changed_rows:
        lines = [["episode", "step", "split", "row", "outcome", "new outcome"]]
        for row in changed_rows[:MAX_LISTED]:
            cells = [str(row["step"]), row["split"], row["sample_id"]]
            cells += [f"{row[name]:.3f}" for name in ("outcome", "new_outcome")]
            lines.append([row["episode_id"], *cells])
        echo("\nthe largest changes:")
        echo("\n".join(aligned(lines, 1)))
    if out is not None:
        write_rescored(rows, out)
        echo(f"\nwrote {plural(len(rows), 'episode')} to {out}")
