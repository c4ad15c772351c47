"""The output of a command that trains or evaluates, as lines of text.

`open_console` chooses between these lines, a display that redraws itself (`trainer/live.py`) and
lines of JSON (`trainer/json_log.py`).
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from agentrl.config import Config
from agentrl.plural import plural
from agentrl.record import METRICS
from agentrl.terminal import echo, printable
from agentrl.trainer.curve import TRAINING, validation_series

if TYPE_CHECKING:
    from agentrl.report.finding import Finding
    from agentrl.rollout import Progress

log = logging.getLogger("agentrl")

Metrics = Mapping[str, float]

COLUMNS = (
    ("reward", TRAINING, "{:.3f}"),
    ("calls", "tool_call_counts/mean", "{:.2f}"),
    ("turns", "num_turns/mean", "{:.1f}"),
    ("length", "response_length/mean", "{:.0f}"),
    ("ppo_kl", "actor/ppo_kl", "{:.4f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("s", "timing_s/step", "{:.1f}"),
    ("learner_waits", "async/wait_engines", "{:.1f}"),
    ("engine_waits", "async/wait_learner", "{:.1f}"),
)
"""Header, metric and format. A metric that a run does not have gets no column."""

PHASE_SECONDS = 2.0
"""A phase that takes longer is shown."""

TOKENIZER = "tokenizer"
TRAJECTORIES = "trajectories"
CURVE = "curve.svg"
FINAL = "model"
"""Results in a run's folder, apart from `metrics.jsonl`, `config.yaml` and the checkpoints."""

OUTPUTS = (
    ("learning curve", CURVE),
    ("metrics", METRICS),
    ("trajectories", TRAJECTORIES),
    ("model", FINAL),
)
"""The results in a run's folder, with the names that the user sees."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The part of a step that runs now.

    Attributes:
        part: its name, as in `timing_s/*`; "" between two parts.
        seconds: the time since the part began.
        progress: the progress of the episodes; None if none is being played.
    """

    part: str
    seconds: float
    progress: Progress | None


class Console:
    """Prints the progress of a run to a stream, as lines. Use it in a `with`."""

    def __init__(self, out: TextIO | None = None):
        """Create a console.

        Args:
            out: the stream; standard output by default.
        """
        self._out = out or sys.stdout

    def begin(self, folder: Path, step: int, total: int, activity: Callable[[], Activity]) -> None:
        """Show that training begins.

        Args:
            folder: the run's folder.
            step: the number of steps that the run has made.
            total: the number of steps of the whole run.
            activity: returns what the run does now. Another thread calls it.
        """

    def step(self, step: int, total: int, metrics: Metrics) -> None:
        """Show a finished step, one of `total`."""
        cells = [f"{name} {text}" for name, text in format_cells(metrics).items()]
        self._print("  ".join([f"step {step:>{len(str(total))}}/{total}", *cells]))

    def validation(self, step: int, metrics: Metrics) -> None:
        """Show the validation after a step (0: before training)."""
        cells = [f"{name} {text}" for name, text in format_scores(metrics).items()]
        self._print("  ".join([f"validation at step {step}:", *cells]))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Show that a checkpoint is complete. The text shows nothing: saving it is a phase."""

    def finding(self, finding: Finding) -> None:
        """Warn about a finding of a diagnosis."""
        from agentrl.report.finding import describe

        log.warning("%s", describe(finding))

    def note(self, text: str) -> None:
        """Print a line that stays visible."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print a line that stays visible, to standard error."""
        echo(text, err=True)

    @contextmanager
    def phase(
        self, name: str, progress: Callable[[], Progress | None] | None = None
    ) -> Iterator[None]:
        """Show that the block runs, if it takes longer than `PHASE_SECONDS`.

        Args:
            name: what the block does, such as "load the model".
            progress: returns the progress of the episodes that the block plays. Another thread
                calls it.
        """
        start = time.monotonic()
        timer = threading.Timer(PHASE_SECONDS, self._print, [f"{name}: started"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if (seconds := time.monotonic() - start) >= PHASE_SECONDS:
            self._print(f"{name}: {seconds:.1f} s")

    def finish(self, folder: Path, history: Sequence[tuple[int, Metrics]], config: Config) -> None:
        """Print the results, where they are, and the commands to run next.

        Args:
            folder: the run's folder.
            history: all steps with their metrics.
            config: the run's config.
        """
        self.close()
        validated = [(step, format_scores(metrics)) for step, metrics in history]
        validated = [(step, scores) for step, scores in validated if scores]
        lines = [f"\ndone: {plural(history[-1][0], 'step')}"]
        if validated:
            (before, first), (after, last) = validated[0], validated[-1]
            lines.append(f"validation, step {before} -> {after}:")
            width = max(map(len, last))
            lines += [f"  {name:{width}}  {first.get(name, '-')} -> {last[name]}" for name in last]
        checkpoints = sorted(f.name for f in folder.glob("global_step_*"))
        items = [*OUTPUTS, *(("checkpoint", name) for name in checkpoints[-1:])]
        lines.append("")
        lines += [
            f"{label:14}  {folder / name}" for label, name in items if (folder / name).exists()
        ]
        lines.append("\nnext:")
        lines += ["  " + shlex.join(words) for words in next_commands(folder, config)]
        self._print("\n".join(lines))

    def close(self) -> None:
        """End a display that redraws itself. Later lines are printed below it. Idempotent."""

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        line = f"{printable(text)}\n"
        self._out.write(line)  # one call, because the timer of a phase prints, too
        self._out.flush()


def open_console(log_format: Literal["text", "json"] = "text") -> Console:
    """Return a console for standard output.

    Args:
        log_format: "text" for a display in a terminal and for lines elsewhere; "json" for lines of
            JSON.
    """
    if log_format == "json":
        from agentrl.trainer.json_log import JsonConsole

        return JsonConsole()
    if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from agentrl.trainer.live import LiveConsole

        return LiveConsole()
    return Console()


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
    return [
        ["agentrl", "report", str(folder)],
        ["agentrl", "view", str(folder)],
        ["agentrl", "play", *run, "-n", "3"],
        ["agentrl", "eval", *run, *sampling],
        ["agentrl", "generate", *run, "--output", str(folder / "answers.parquet")],
    ]


def format_cells(metrics: Metrics) -> dict[str, str]:
    """Return the numbers of a step as text, by header."""
    return {name: form.format(metrics[key]) for name, key, form in COLUMNS if key in metrics}


def format_scores(metrics: Metrics) -> dict[str, str]:
    """Return validation rewards as text, by label; for loops with tools also the rate of calls."""
    scores = {}
    for label, key in validation_series(metrics).items():
        score = f"{metrics[key]:.3f}"
        rate = metrics.get(key.rpartition("/reward/")[0] + "/tool_call_rate", 0.0)
        loop = label not in ("validation", "greedy")
        scores["all" if label == "validation" else printable(label)] = (
            f"{score} ({rate:.0%} call)" if loop and rate > 0 else score
        )
    return scores
