"""The learning curve of a run as an SVG picture, drawn by matplotlib from its `metrics.jsonl`.

The picture has no background and no script. Its colours are readable on white and on black, and its
text is stored as text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.callbacks import Event, Observer
from agentrl.record import METRICS, read_metrics
from agentrl.regular_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = "curve.svg"
TRAINING = "critic/score/mean"
_VALIDATION = re.compile(r"(val|val_greedy)/(?:([^/]+)/)?reward/mean@\d+")

MAX_LINES = 12
MAX_POINTS = 100
"""The largest number of points of a line: more points would not be visible and would make a large
file."""

# The contrast to white and to black is at least 3:1.
INK = "#7d8590"
GREY = "#8b949e"
COLOURS = ("#2f81f7", "#d4702a", "#2da44e", "#a371f7", "#d6498f", "#0e9aa7", "#b58900", "#e5534b")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "agentrl",  # the same numbers make the same file
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib includes it, so no search is needed
    "font.size": 9,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color", "xtick.color"), INK
    ),
    "ytick.color": INK,
    "ytick.left": False,
}
"""matplotlib's parameters for a curve."""
METADATA = {
    "Title": "Reward over training steps",
    **dict.fromkeys(("Creator", "Date", "Format", "Type")),
}

Points = list[tuple[float, float]]


class Curve(Observer):
    """Writes the learning curve into the run's folder, after validations and at the end."""

    name = f"the picture {CURVE}"

    def on_validation(self, event: Event) -> None:
        write_curve(event.folder / METRICS, event.folder / CURVE)

    on_end = on_validation


def validation_series(keys: Iterable[str]) -> dict[str, str]:
    """Return the validation metrics among `keys` by label: the total, then loops, then greedy.

    Example: `{"validation": "val/reward/mean@1", "react": "val/react/reward/mean@1", "greedy":
    "val_greedy/reward/mean@1"}`.
    """
    total, loops, greedy = {}, {}, {}
    for key in sorted(keys):
        if not (match := _VALIDATION.fullmatch(key)):
            continue
        kind, agent_name = match.groups()
        if kind == "val" and agent_name is None:
            total["validation"] = key
        elif kind == "val":
            loops[agent_name] = key
        elif agent_name is None:
            greedy["greedy"] = key
    # With a single loop its metric is the total.
    return total | (loops if len(loops) > 1 or not total else {}) | greedy


@cache
def _is_drawn(key: str) -> bool:
    return key == TRAINING or _VALIDATION.fullmatch(key) is not None


def write_curve(metrics_path: Path, svg_path: Path) -> None:
    """Draw training and validation rewards over steps. The title is the name of the run's folder.

    The training reward is smoothed, with its raw values as a thin line behind it; the legend says
    over how many steps. The first of the series of `validation_series` are drawn, up to `MAX_LINES`
    lines in total.

    Args:
        metrics_path: a run's `metrics.jsonl`; a run without steps gives empty axes.
        svg_path: the file to write.
    """
    steps = read_metrics(metrics_path, _is_drawn)
    keys = {"training": TRAINING, **validation_series({key for _, data in steps for key in data})}
    series = {label: _points(steps, key) for label, key in keys.items()}
    lines = dict([(label, points) for label, points in series.items() if points][:MAX_LINES])
    _save(lines, svg_path, metrics_path.resolve().parent.name, "training")


def validation_points(metrics_path: Path) -> Points:
    """Return the validations of a run as pairs of step and mean reward; [] if it has none."""
    steps = read_metrics(metrics_path, _is_drawn)
    keys = validation_series({key for _, data in steps for key in data})
    return _points(steps, keys.get("validation", ""))


def write_comparison(lines: Mapping[str, Points], svg_path: Path) -> None:
    """Draw the validation rewards of several runs over steps.

    Args:
        lines: by the name of a run, its `validation_points`; the first `MAX_LINES` are drawn.
        svg_path: the file to write.
    """
    _save(dict(list(lines.items())[:MAX_LINES]), svg_path, "validation", "")


def _save(lines: Mapping[str, Points], svg_path: Path, title: str, smoothed: str) -> None:
    """Write a picture; `smoothed` is the label of the line to smooth, or ""."""
    import matplotlib

    with atomic_file(svg_path) as staging, matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the viewer's fonts draw the text
        figure = _draw(lines, _replace_unprintable(title[:80]), smoothed)
        figure.savefig(staging, format="svg", transparent=True, metadata=METADATA)


def _points(steps: Sequence[tuple[int, Mapping[str, float]]], key: str) -> Points:
    return [
        (float(step), float(value))
        for step, data in steps
        if isinstance(value := data.get(key), int | float) and abs(value) < 1e15  # false for NaN
    ]


def _draw(lines: Mapping[str, Points], title: str, smoothed: str) -> Figure:
    """Return the figure with title, axes, lines and legend."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    xs = [x for points in lines.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in lines.values() for _, y in points]
    figure = Figure(figsize=(7.6, 4.2), dpi=72, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="reward")
    axes.set_xlim(min(xs), max(*xs, min(xs) + 1))
    axes.set_title(title, loc="left", fontsize=10)
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if high - low < 1e-6 * max(1.0, abs(low), abs(high)):  # one value: put it in the middle
        low, high = low - 0.5 * max(1.0, abs(low)), high + 0.5 * max(1.0, abs(high))
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.set_yticks(ticks)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    labels = []
    for i, (label, points) in enumerate(lines.items()):
        style = _style(label, i) if smoothed else {"color": COLOURS[i % len(COLOURS)], "lw": 1.8}
        if len(points) == 1 or (label != smoothed and len(points) <= 20):
            style["marker"] = "."
        name = label[:40]
        if label == smoothed and len(points) > 1:
            axes.plot(*zip(*_thin(points), strict=True), color=GREY, lw=0.8, alpha=0.35)
            name += f" (thick: mean of {min(2 * _half_window(points) + 1, len(points))} steps)"
            points = _smooth(points)
        axes.plot(*zip(*_thin(points), strict=True), clip_on=False, **style)
        labels.append(_replace_unprintable(f"{name} {points[-1][1]:.2f}"))
    if lines:
        columns = max(1, 90 // (8 + max(map(len, labels))))
        handles = [line for line in axes.lines if line.get_alpha() is None]
        legend = figure.legend(
            handles, ["-"] * len(labels), loc="outside upper left", ncols=columns
        )
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set_text(label)  # matplotlib leaves out labels that begin with an underscore
    else:
        axes.text(0.5, 0.5, "no steps yet", transform=axes.transAxes, ha="center")
    return figure


def _style(label: str, index: int) -> dict[str, Any]:
    """Return colour and stroke of a line: training grey, the total thick, greedy dashed."""
    if label == "training":
        return {"color": GREY, "lw": 2}
    colour = COLOURS[(index - 1) % len(COLOURS)]
    if label == "greedy":
        return {"color": colour, "lw": 1.6, "ls": "--"}
    if label == "validation":
        return {"color": colour, "lw": 3, "zorder": 3}  # on top of the others
    return {"color": colour, "lw": 1.8}


def _half_window(points: Points) -> int:
    """Return how many points on each side a smoothed point is the mean of."""
    return len(points) // 40 + 1


def _smooth(points: Points) -> Points:
    """Return a centred moving mean over about a twentieth of the run.

    The windows are shorter at the ends.
    """
    half, n = _half_window(points), len(points)
    sums = [0.0, *accumulate(y for _, y in points)]
    windows = [(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    means = [(sums[high] - sums[low]) / (high - low) for low, high in windows]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def _thin(points: Points) -> Points:
    """Return at most `MAX_POINTS` points: the first, means of neighbours, the last."""
    if len(points) <= MAX_POINTS:
        return points
    import numpy as np

    parts = np.array_split(points[1:-1], MAX_POINTS - 2)
    return [points[0], *(tuple(part.mean(axis=0)) for part in parts), points[-1]]


def _replace_unprintable(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
