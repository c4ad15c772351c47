"""The output of a run in a terminal: a display at the bottom that redraws itself.

    tables of the last steps and validations
    reward       a sparkline
    time         the shares of each part
    now          what the run does, and the episode that waits longest
    12/120       the time that has passed, and the estimated time that is left

A thread draws it twice a second. The thread of the step only stores numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Self, TextIO

from rich.cells import cell_len
from rich.console import Console as Terminal
from rich.console import ConsoleRenderable, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.callbacks import Event
from agentrl.observers.console import Console, Metrics, format_cells, format_scores
from agentrl.observers.curve import TRAINING
from agentrl.plural import plural
from agentrl.terminal import printable
from agentrl.trainer.display import PHASE_SECONDS, Activity

if TYPE_CHECKING:
    from agentrl.rollout import Progress

MAX_STEPS, MAX_VALIDATIONS = 16, 7
"""The number of last steps, and of last validations after the first one, that are shown."""
MAX_WIDTH = 100
"""The largest number of columns of the display."""
MIN_LINES = 8
"""The number of lines that the display may have even if they are more than half the terminal."""
SPACIOUS = 16
"""If the tables may have this many lines, a blank line follows each table."""
MAX_REWARDS = 60
"""The largest number of steps in the sparkline."""
WAIT_SECONDS = 2.0
"""An episode that waits longer than this is named."""
BARS = "▁▂▃▄▅▆▇█"

PARTS = {
    "update": ("update_actor",),
    "logprobs": ("old_log_prob", "ref", "values"),
    "publish": ("update_weights", "canary"),
    "validation": ("testing",),
    "checkpoint": ("save_checkpoint",),
}
"""The parts of the time apart from `timing_s/gen`: name, and the metrics `timing_s/*` to add."""
OUTSIDE = ("testing", "save_checkpoint")
"""The metrics `timing_s/*` that `timing_s/step` does not contain."""
DOING = {
    "gen": "episodes",
    "store": "waiting for the disk",
    "metrics": "metrics",
    "collate": "making the batch",
    "adv": "advantages",
    "ref": "logprobs of the reference",
    "teacher": "logprobs of the teacher",
    "values": "values",
    "old_log_prob": "logprobs",
    "update_actor": "update",
    "publish": "sending the weights",
}
"""The names that the line `now` shows for the parts of a step."""
STYLES = ("green", "yellow", "blue", "magenta", "cyan", "red", "bright_black")


class LiveConsole(Console):
    """A display that redraws itself; lines that stay visible are printed above it."""

    def __init__(self, out: TextIO | None = None):
        """Create a console; its display starts with its `with`.

        Args:
            out: the terminal; standard output by default. A stream that is no terminal gets the
                last state of the display.
        """
        super().__init__(out)
        self._terminal = Terminal(file=self._out)
        self._steps: list[tuple[int, Metrics, float]] = []
        """The last steps: number, metrics and the `time.monotonic()` of the end."""
        self._validations: list[tuple[int, Metrics]] = []
        self._rewards: list[float] = []
        self._last = self._total = 0
        self._start = time.monotonic()
        self._activity: Callable[[], Activity] | None = None
        self._phases: list[tuple[str, float, Callable[[], Progress | None] | None]] = []
        """The phases that run: name, `time.monotonic()` of the start, and progress."""
        self._live = Live(
            get_renderable=self.render,
            console=self._terminal,
            refresh_per_second=2,
            redirect_stderr=sys.stderr.isatty(),  # not if standard error is a file
        )

    # -- the thread of the run --------------------------------------------------------------------

    # Each list is replaced, not changed, because the thread of the display may read the old one.

    def follow(self, activity: Callable[[], Activity]) -> None:
        self._start, self._activity = time.monotonic(), activity

    def on_begin(self, event: Event) -> None:
        self._last, self._total = event.step, event.total_steps

    def on_step(self, event: Event) -> None:
        self._steps = [*self._steps, (event.step, event.metrics, time.monotonic())][-MAX_STEPS:]
        if TRAINING in event.metrics:
            self._rewards = [*self._rewards, event.metrics[TRAINING]][-MAX_REWARDS:]
        self._last, self._total = event.step, event.total_steps

    def on_validation(self, event: Event) -> None:
        shown = [*self._validations, (event.step, event.metrics)]
        self._validations = shown[:1] + shown[1:][-MAX_VALIDATIONS:]

    def note(self, text: str) -> None:
        self._terminal.print(printable(text), markup=False, highlight=False)

    @contextmanager
    def phase(
        self, name: str, progress: Callable[[], Progress | None] | None = None
    ) -> Iterator[None]:
        phase = name, time.monotonic(), progress
        self._phases = [*self._phases, phase]
        try:
            yield
        finally:
            self._phases = [other for other in self._phases if other is not phase]

    def close(self) -> None:
        # Nothing runs any more, so the last state shows no activity and no remaining time.
        self._activity, self._phases = None, []
        self._live.stop()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    # -- the thread of the display ----------------------------------------------------------------

    def render(self) -> Group:
        """Return the display: at most `MAX_WIDTH` columns and half the lines of the terminal."""
        width, height = self._terminal.size
        width, height = min(width, MAX_WIDTH), max(height // 2, min(height - 1, MIN_LINES))
        summary = self._summary(width, time.monotonic())
        lines = [*self._tables(width, height - 1 - len(summary)), *summary]
        return Group(*["", *lines][: height * bool(lines)])

    def _tables(self, width: int, height: int) -> list[Text]:
        """Return the lines of the tables, at most `height`."""
        steps = [(step, format_cells(metrics)) for step, metrics, _ in self._steps]
        validations = [(step, format_scores(metrics)) for step, metrics in self._validations]
        gap = [Text()] * (height >= SPACIOUS)  # a blank line behind each table
        header = 1 + len(gap)
        rows = height - header * bool(steps)
        number = max(0, min(len(validations), max(1, rows // 3), rows - header - 1))
        lines: list[Text] = []
        if number:
            rows -= header + number
        if steps and rows > 0:
            lines += [*_table("step", steps[-rows:], width), *gap]
        if number:
            # The first validation stays visible, to compare with.
            shown = validations[-number:]
            if number > 1:
                shown[0] = validations[0]
            lines += [*_table("validation", shown, width), *gap]
        return lines

    def _summary(self, width: int, now: float) -> list[ConsoleRenderable]:
        """Return the lines below the tables."""
        lines: list[ConsoleRenderable] = []
        if len(self._rewards) > 1:
            lines.append(_line("reward", [self._sparkline(width)], width))
        if self._steps:
            lines.append(_line("time", _shares([metrics for _, metrics, _ in self._steps]), width))
        phases = [phase for phase in self._phases if now - phase[1] >= PHASE_SECONDS]
        for name, start, progress in phases:
            lines += _doing(name, now - start, progress and progress(), width)
        if not phases and self._activity is not None:
            activity = self._activity()
            part = DOING.get(activity.part, activity.part)
            name = f"step {self._last + 1}{', ' * bool(part)}{part}"
            lines += _doing(name, activity.seconds, activity.progress, width)
        if self._total:
            lines.append(self._bar(width, now))
        return lines

    def _sparkline(self, width: int) -> Text:
        values = self._rewards[-max(8, width - 40) :]
        low, high = min(values), max(values)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        bars = "".join(BARS[round((value - low) * scale)] for value in values)
        text = Text(bars, "green") if self._terminal.encoding.startswith("utf") else Text()
        text.append(f"  {values[0]:.3f} to {values[-1]:.3f} in {plural(len(values), 'step')}", "")
        return text

    def _bar(self, width: int, now: float) -> ConsoleRenderable:
        elapsed = f"elapsed {format_duration(now - self._start)}"
        if self._steps and self._activity is not None:
            first, last = self._steps[0], self._steps[-1]
            spent = last[2] - first[2] + first[1].get("timing_s/step", 0.0)
            left = spent / len(self._steps) * (self._total - self._last) - (now - last[2])
            elapsed += f", about {format_duration(max(0.0, left))} left"
        text = f"{self._last}/{self._total}  {elapsed}"
        columns = min(40, width - len(text) - 2)
        if columns < 5:
            return Text(text[:width])
        bar = ProgressBar(self._total, self._last, columns, complete_style="green")
        bar.finished_style = "green"
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, text)
        return line


def _table(first: str, rows: Sequence[tuple[int, Mapping[str, str]]], width: int) -> list[Text]:
    """Return the lines of a table of at most `width` columns.

    The last columns that do not fit are dropped, but never the first two. (A `rich.table.Table`
    would cut their digits, and take 10 ms for each step.)
    """
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    table = [[first, *names]]
    table += [[str(step), *(cells.get(name, "-") for name in names)] for step, cells in rows]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    fitting = sum(end <= width for end in accumulate(widths, lambda end, w: end + 3 + w))
    lines = []
    for i, row in enumerate(table):
        line = Text(style="" if i else "bold", no_wrap=True, overflow="crop")
        for name, text, w in list(zip(table[0], row, widths, strict=True))[: max(2, fitting)]:
            style = {first: "cyan", "reward": "bold green", "all": "bold green"}.get(name, "")
            line.append("   " * bool(line))
            line.append(" " * (w - cell_len(text)) + text, style * bool(i))
        lines.append(line)
    return lines


def _shares(steps: Sequence[Metrics]) -> list[Text]:
    """Return the shares of the time of steps, validations and checkpoints, the largest first."""

    def total(*parts: str) -> float:
        return sum(metrics.get(f"timing_s/{part}", 0.0) for metrics in steps for part in parts)

    playing = total("gen")
    of_episodes = {
        "generate": total("agent_loop/generate_sequences/mean"),
        "tools": total("agent_loop/tool_calls/mean", "agent_loop/open/mean"),
        "interaction": total("agent_loop/interaction/mean"),
        "reward": total("agent_loop/reward/mean"),
    }
    # An episode's time is divided as its spans are; without spans it counts as generation.
    whole = sum(of_episodes.values()) or 1.0
    seconds = {name: playing * part / whole for name, part in of_episodes.items()}
    if not any(of_episodes.values()):
        seconds["generate"] = playing
    seconds |= {name: total(*parts) for name, parts in PARTS.items()}
    every = total("step", *OUTSIDE)
    seconds["other"] = max(0.0, every - sum(seconds.values()))
    if not every:
        return []
    styles = dict(zip(seconds, [*STYLES, *STYLES], strict=False))
    largest = sorted(seconds, key=lambda name: -seconds[name])
    shown = [name for name in largest if seconds[name] >= 0.005 * every]
    return [
        Text.assemble(("■ ", styles[name]), f"{name} {seconds[name] / every:.0%}") for name in shown
    ]


def _doing(name: str, seconds: float, progress: Progress | None, width: int) -> list[Text]:
    """Return the lines about what the run does now."""
    parts = [Text(name, "bold")]
    if progress is not None:
        parts.append(Text(f"{progress.ended}/{progress.total} ended"))
        parts.append(Text(f"{progress.total - progress.ended} in flight"))
    parts.append(Text(format_duration(seconds)))
    lines = [_line("now", parts, width)]
    wait = progress and progress.wait
    if wait and (waited := time.monotonic() - wait.since) >= WAIT_SECONDS:
        row = printable(wait.sample_id).replace("\n", " ")[:24]
        text = Text.assemble(
            f"row {row}, rollout {wait.rollout}: ",
            (f"{waited:.0f} s, {printable(wait.state)}", "yellow"),
        )
        lines.append(_line("slowest", [text], width))
    return lines


def _line(label: str, parts: Sequence[Text], width: int) -> Text:
    """Return a line with a label; the last parts that do not fit are dropped."""
    line = Text(no_wrap=True, overflow="ellipsis").append(f"{label:9}", "bright_black")
    for i, part in enumerate(parts):
        if i and line.cell_len + 2 + part.cell_len > width:
            break
        line.append(Text("  ") if i else Text())
        line.append_text(part)
    return line


def format_duration(seconds: float) -> str:
    """Return seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
