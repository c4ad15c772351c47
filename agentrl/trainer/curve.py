"""The learning curve of a run as an SVG picture, drawn from its `metrics.jsonl`.

No plotting library, no script, no background: a few kilobytes that read on white and on black.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from agentrl.trainer.tracking import read_metrics

TRAINING = "critic/score/mean"
_VALIDATION = re.compile(r"(val|val_greedy)/(?:([^/]+)/)?reward/mean@\d+")

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, BOTTOM = 56, 28, 46
LEGEND_ROW = 20
MAX_LINES = 12
MAX_POINTS = 200
"""A line is drawn through at most so many points: a picture has no more columns to show."""

# Middle tones: at least 3:1 in contrast to white and to black.
INK = "#7d8590"
GREY = "#8b949e"
COLOURS = ("#2f81f7", "#d4702a", "#2da44e", "#a371f7", "#d6498f", "#0e9aa7", "#b58900", "#e5534b")

Points = list[tuple[float, float]]


def validation_series(keys: Iterable[str]) -> dict[str, str]:
    """The validation metrics among `keys`: label to key, the total first, then loops, then greedy.

    Example: `{"validation": "val/reward/mean@1", "react": "val/react/reward/mean@1",
    "greedy": "val_greedy/reward/mean@1"}`.
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
    # One loop alone is the total.
    return total | (loops if len(loops) > 1 or not total else {}) | greedy


def write_curve(
    metrics_path: Path, svg_path: Path, series: Mapping[str, str] | None = None
) -> None:
    """Draw training and validation rewards over steps.

    Args:
        metrics_path: a run's `metrics.jsonl`; a run without steps gives an empty frame.
        svg_path: where the picture goes.
        series: label to metric key; the first 12 that have values are drawn. By default the
            training reward (smoothed, its raw values thin behind it) and what `validation_series`
            finds.
    """
    steps = read_metrics(metrics_path)
    if series is None:
        found = validation_series({key for _, data in steps for key in data})
        series = {"training": TRAINING, **found}
    found_points = {label: _points(steps, key) for label, key in series.items()}
    lines = {label: points for label, points in found_points.items() if points}
    lines = dict(list(lines.items())[:MAX_LINES])
    staging = svg_path.with_name(f".{svg_path.name}.tmp")
    staging.write_text(_draw(lines, {label: series[label] for label in lines}), encoding="utf-8")
    staging.replace(svg_path)


def _points(steps: Sequence[tuple[int, Mapping[str, float]]], key: str) -> Points:
    return [
        (float(step), float(value))
        for step, data in steps
        if isinstance(value := data.get(key), int | float) and abs(value) < 1e15  # nor NaN
    ]


def _draw(lines: Mapping[str, Points], keys: Mapping[str, str]) -> str:
    """The document: frame and ticks, lines, legend."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_ticks = _ticks(min(xs, default=0), max(xs, default=1), 8, whole=True)
    # Rewards of 0 to 1 get that scale, so that pictures of different runs compare.
    y_ticks = _ticks(min([0.0, *ys]), max([1.0, *ys]), 6)
    styles = {label: _style(label, keys[label], i) for i, label in enumerate(lines)}
    shown = {k: _smoothed(v) if keys[k] == TRAINING else v for k, v in lines.items()}
    legend, top = _legend(shown, styles)

    x_low, x_high = min([x_ticks[0], *xs]), max([x_ticks[-1], *xs])
    y_low, y_high = y_ticks[0], y_ticks[-1]
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - top - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + plot_width * (x - x_low) / (x_high - x_low),
            top + plot_height * (y_high - y) / (y_high - y_low),
        )

    floor = HEIGHT - BOTTOM
    body = [f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>']
    for tick in y_ticks:
        y = at(x_low, tick)[1]
        body.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        body.append(_label(LEFT - 8, y + 4, _number(tick), "end"))
    for tick in x_ticks:
        x = at(tick, y_low)[0]
        body.append(f'<path class="axis" d="M{x:.1f} {floor}v5"/>')
        body.append(_label(x, floor + 19, _number(tick), "middle"))
    body.append(_label(LEFT + plot_width / 2, HEIGHT - 8, "step", "middle"))
    body.append(_label(LEFT - 8, top - 14, "reward", "end"))
    if not lines:
        body.append(_label(LEFT + plot_width / 2, top + plot_height / 2, "no steps yet", "middle"))
    for label in sorted(lines, key=lambda name: name == "validation"):  # the total lies on top
        colour, style = styles[label]
        if keys[label] == TRAINING:
            raw = _polyline([at(*p) for p in _thinned(lines[label])])
            body.append(f'<path d="{raw}" stroke="{colour}" stroke-width="1" opacity=".4"/>')
        drawn = [at(*p) for p in _thinned(shown[label])]
        body.append(f'<path d="{_polyline(drawn)}" stroke="{colour}" {style}/>')
        if len(drawn) == 1 or (keys[label] != TRAINING and len(drawn) <= 60):
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in drawn)
            body.append(f'<path d="{dots}" stroke="{colour}" stroke-width="5.5"/>')
    return "\n".join([_HEAD, *body, *legend, "</svg>", ""])


_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" role="img"
 viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">
<title>Learning curve: reward over training steps</title>
<style>
path{{fill:none;stroke-linecap:round;stroke-linejoin:round}}
.grid{{stroke:{INK};stroke-opacity:.25}}
.axis{{stroke:{INK};stroke-opacity:.8}}
text{{fill:{INK};font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
</style>"""


def _style(label: str, key: str, index: int) -> tuple[str, str]:
    """Colour and stroke of a line: training grey, the total strong, greedy dashed."""
    if key == TRAINING:
        return GREY, 'stroke-width="2"'
    colour = COLOURS[(index - 1) % len(COLOURS)]
    if label == "greedy":
        return colour, 'stroke-width="1.6" stroke-dasharray="5 4"'
    return colour, f'stroke-width="{3 if label == "validation" else 1.8}"'


def _legend(
    lines: Mapping[str, Points], styles: Mapping[str, tuple[str, str]]
) -> tuple[list[str], int]:
    """Swatches with label and last value, in rows; and the height at which the plot begins."""
    body: list[str] = []
    x, y = float(LEFT), 20
    for label, points in lines.items():
        text = f"{label[:40]} {points[-1][1]:.2f}"
        width = 42 + 6.6 * len(text)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + LEGEND_ROW
        colour, style = styles[label]
        body.append(f'<path d="M{x:.0f} {y - 4}h18" stroke="{colour}" {style}/>')
        body.append(_label(x + 24, y, text, "start"))
        x += width
    return body, y + 38


def _smoothed(points: Points) -> Points:
    """The mean over a window of about a twentieth of the run, centred, shorter at the ends."""
    half = len(points) // 40 + 1
    ys = [y for _, y in points]
    sums = [0.0]
    for y in ys:
        sums.append(sums[-1] + y)
    smooth: Points = []
    for i, (x, _) in enumerate(points):
        low, high = max(0, i - half), min(len(points), i + half + 1)
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


def _thinned(points: Points) -> Points:
    """At most `MAX_POINTS`: means of neighbours, but the first and the last point as they are."""
    if len(points) <= MAX_POINTS:
        return points
    inner, n = points[1:-1], MAX_POINTS - 2
    cuts = [len(inner) * i // n for i in range(n + 1)]
    means = [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
        for part in (inner[a:b] for a, b in pairwise(cuts))
    ]
    return [points[0], *means, points[-1]]


def _polyline(points: Points) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers 1, 2 or 5 times a power of ten apart, that span [low, high]."""
    if high <= low:
        high = low + 1
    size = 10 ** math.floor(math.log10((high - low) / most))
    gap = next(size * m for m in (1, 2, 5, 10, 20) if (high - low) / (size * m) <= most)
    if whole:
        # Steps: the axis ends with the run, not at the next round number.
        gap = max(1, round(gap))
        first, last = math.ceil(low / gap), math.floor(high / gap)
    else:
        first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [i * gap for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{round(value, 10):,.10g}"


def _label(x: float, y: float, text: str, anchor: str) -> str:
    """A text element; without the characters that no XML may hold."""
    shown = escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'
