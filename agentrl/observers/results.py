"""The end of a run: its results, where they are, and the commands to run next."""

from __future__ import annotations

import shlex
from pathlib import Path

from agentrl.callbacks import Event, Observer
from agentrl.config import Config
from agentrl.observers.console import Console, format_scores
from agentrl.observers.curve import CURVE
from agentrl.plural import plural
from agentrl.record import FINAL, METRICS, TRAJECTORIES, read_metrics

OUTPUTS = (
    ("learning curve", CURVE),
    ("metrics", METRICS),
    ("trajectories", TRAJECTORIES),
    ("model", FINAL),
)
"""The results in a run's folder, with the names that the user sees."""


class Results(Observer):
    """Shows the results of a run that has finished."""

    name = "the list of results"

    def __init__(self, config: Config, console: Console):
        """Show the results of the run of `config` on the console."""
        self._config, self._console = config, console

    def on_end(self, event: Event) -> None:
        if event.error is None:
            self._console.results(describe_results(event.folder, self._config))


def describe_results(folder: Path, config: Config) -> str:
    """Return the results in a run's folder, where they are, and the commands to run next."""
    history = read_metrics(folder / METRICS)
    validated = [(step, scores) for step, data in history if (scores := format_scores(data))]
    lines = [f"\ndone: {plural(history[-1][0], 'step')}"]
    if validated:
        (before, first), (after, last) = validated[0], validated[-1]
        lines.append(f"validation, step {before} -> {after}:")
        width = max(map(len, last))
        lines += [f"  {name:{width}}  {first.get(name, '-')} -> {last[name]}" for name in last]
    checkpoints = sorted(f.name for f in folder.glob("global_step_*"))
    items = [*OUTPUTS, *(("checkpoint", name) for name in checkpoints[-1:])]
    lines.append("")
    lines += [f"{label:14}  {folder / name}" for label, name in items if (folder / name).exists()]
    lines.append("\nnext:")
    lines += ["  " + shlex.join(words) for words in next_commands(folder, config)]
    return "\n".join(lines)


def next_commands(folder: Path, config: Config) -> list[list[str]]:
    """Return commands to run next, as lists of words.

    They use the run's config, its trained model and its validation rows.

    Args:
        folder: the run's folder, with its `config.yaml`.
        config: the run's config.
    """
    rows = config.data.val or config.data.train
    dataset = ["--dataset", rows] if isinstance(rows, str) else []  # the config names them too
    run = ["-c", str(folder / "config.yaml"), *dataset, "--model", str(folder / FINAL)]
    # With greedy sampling all rollouts of a row are the same.
    sampling = ["val.n=4"] if config.val.temperature > 0 else []
    reports = [["agentrl", "report", str(folder)], ["agentrl", "view", str(folder)]]
    if config.data.is_recorded and not config.data.val:  # There are no rows to play.
        return [*reports, ["agentrl", "serve", str(folder)]]
    return [
        *reports,
        ["agentrl", "play", *run, "-n", "3"],
        ["agentrl", "eval", *run, *sampling],
        ["agentrl", "generate", *run, "--output", str(folder / "answers.parquet")],
    ]
