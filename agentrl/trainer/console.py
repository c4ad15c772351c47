"""The output of a training run: a live table in a terminal, otherwise one line per step."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.config import Config
from agentrl.plural import plural
from agentrl.record import METRICS
from agentrl.trainer.curve import TRAINING, validation_series

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

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
)
"""Header, metric and format. A metric that a run does not have gets no column."""

MAX_STEPS, MAX_VALIDATIONS = 16, 7
"""The number of last steps, and of last validations after the first one, that the table shows."""

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


class Console:
    """Prints the progress of a run to a stream. Close it, or use it in a `with`."""

    def __init__(self, out: TextIO | None = None, live: bool | None = None):
        """Choose the kind of output.

        Args:
            out: the stream; standard output by default.
            live: True for a table that redraws itself, False for lines. By default True if `out` is
                a terminal that supports such a table.
        """
        self._out = out or sys.stdout
        supports_live = self._out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._wants_live = supports_live if live is None else live
        self._live: Live | None = None
        self._steps: list[tuple[int, Metrics]] = []
        self._validations: list[tuple[int, Metrics]] = []
        self._first = self._last = self._total = 0
        self._start = 0.0
        self._is_closing = False

    def step(self, step: int, total: int, metrics: Metrics) -> None:
        """Show a finished step, one of `total`."""
        if not self._steps:
            self._first = step - 1
            self._start = time.monotonic() - metrics.get("timing_s/step", 0.0)
        # A new list, because the table's thread may be reading the old one.
        self._steps = [*self._steps, (step, metrics)][-MAX_STEPS:]
        self._last, self._total = step, total
        if self._wants_live:
            self._redraw()
        else:
            cells = [f"{name} {text}" for name, text in _format_cells(metrics).items()]
            self._print("  ".join([f"step {step:>{len(str(total))}}/{total}", *cells]))

    def validation(self, step: int, metrics: Metrics) -> None:
        """Show the validation after a step (0: before training)."""
        shown = [*self._validations, (step, metrics)]
        self._validations = shown[:1] + shown[1:][-MAX_VALIDATIONS:]
        if self._wants_live:
            self._redraw()
        else:
            cells = [f"{name} {text}" for name, text in _format_scores(metrics).items()]
            self._print("  ".join([f"validation at step {step}:", *cells]))

    def note(self, text: str) -> None:
        """Print a line that stays visible."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def finish(self, folder: Path, history: Sequence[tuple[int, Metrics]], config: Config) -> None:
        """Print the results, where they are, and the commands to run next.

        Args:
            folder: the run's folder.
            history: all steps with their metrics.
            config: the run's config.
        """
        self.close()
        validated = [(step, _format_scores(metrics)) for step, metrics in history]
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
        """Stop the live table; its last state stays visible. Closing twice does nothing."""
        if self._live is not None:
            self._is_closing = (
                True  # nothing runs any more, so the last state has no remaining time
            )
            self._live.stop()
            self._live = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    # -- the live table ---------------------------------------------------------------------------

    def _redraw(self) -> None:
        """Redraw the table, and start it on first use."""
        if self._live is None:
            import rich.console
            from rich.live import Live

            self._live = Live(
                get_renderable=self._render,
                console=rich.console.Console(file=self._out),
                refresh_per_second=2,
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.refresh()

    def _render(self) -> RenderableType:
        """Return the table. A separate thread calls this twice a second, so it must not wait."""
        from rich.console import Group

        parts: list[Any] = []
        width, height = self._live.console.size if self._live else (80, 24)
        # The first validation stays visible, to compare with.
        validations = (
            self._validations[:1]
            + self._validations[1:][-max(1, min(MAX_VALIDATIONS, height // 4)) :]
        )
        steps = self._steps[-max(3, min(MAX_STEPS, height - len(validations) - 12)) :]
        if steps:
            rows = [(step, _format_cells(metrics)) for step, metrics in steps]
            parts.append(_table("step", rows, width))
        if validations:
            rows = [(step, _format_scores(metrics)) for step, metrics in validations]
            parts.append(_table("validation", rows, width))
        if self._total:
            parts.append(self._progress())
        return Group(*parts)

    def _progress(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        finished, elapsed = self._last - self._first, time.monotonic() - self._start
        remaining = elapsed / finished * (self._total - self._last)
        text = f"{self._last}/{self._total}  elapsed {_format_duration(elapsed)}"
        if not self._is_closing:
            text += f", about {_format_duration(remaining)} left"
        line = Table.grid(padding=(0, 1))
        line.add_row(
            ProgressBar(total=self._total, completed=self._last, width=32),
            text,
        )
        return line


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
        ["agentrl", "play", *run, "-n", "3"],
        ["agentrl", "eval", *run, *sampling],
        ["agentrl", "generate", *run, "--output", str(folder / "answers.parquet")],
    ]


def _table(first: str, rows: Sequence[tuple[int, Mapping[str, str]]], width: int) -> RenderableType:
    """Return a table of at most `width` characters: the last columns that do not fit are dropped.

    The first two columns always remain.
    """
    from rich import box
    from rich.table import Table

    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    used, fitting = max(len(first), *(len(str(step)) for step, _ in rows)), 0
    for name in names:
        used += 3 + max(len(name), *(len(cells.get(name, "-")) for _, cells in rows))
        fitting += used < width  # one character of padding is at the right
    names = names[: max(1, fitting)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(first, justify="right", style="cyan", no_wrap=True)
    for name in names:
        strong = name in ("reward", "all")
        table.add_column(name, justify="right", style="bold green" if strong else "", no_wrap=True)
    for step, cells in rows:
        table.add_row(str(step), *(cells.get(name, "-") for name in names))
    return table


def _format_cells(metrics: Metrics) -> dict[str, str]:
    return {name: form.format(metrics[key]) for name, key, form in COLUMNS if key in metrics}


def _format_scores(metrics: Metrics) -> dict[str, str]:
    """Return validation rewards as text, by label; for loops with tools also the rate of calls."""
    scores = {}
    for label, key in validation_series(metrics).items():
        score = f"{metrics[key]:.3f}"
        rate = metrics.get(key.rpartition("/reward/")[0] + "/tool_call_rate", 0.0)
        loop = label not in ("validation", "greedy")
        scores["all" if label == "validation" else label] = (
            f"{score} ({rate:.0%} call)" if loop and rate > 0 else score
        )
    return scores


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
