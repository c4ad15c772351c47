"""The report of a run as one HTML page without scripts, or as Markdown.

Texts of models, tools and datasets are shown as text: they are escaped, and characters that are not
printable (control characters, changes of the writing direction) are escaped. The page loads
nothing and forbids scripts (Content-Security-Policy).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from agentrl.data import POOLS
from agentrl.plural import plural
from agentrl.report.finding import ALARMS, SEVERITIES, Finding
from agentrl.report.run import Run, config_value
from agentrl.report.series import REWARD, Series, read_series, values_by_step
from agentrl.terminal import printable

CURVES = (
    REWARD,
    "response_length/mean",
    "num_turns/mean",
    "tool_call_counts/mean",
    "waste/dead_group_frac",
    *(f"curriculum/{pool}" for pool in POOLS),
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_loss",
    "teacher/reverse_kl",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "rollout_corr/logprob_diff_mean",
    "timing_s/step",
)
"""The metrics that the page draws, if the run has them."""
HEADINGS = {
    "error": "Errors: the run cannot succeed like this",
    "warning": "Warnings",
    "audit": "To audit: the reward may be exploited; read these episodes",
    "note": "Notes",
}
MAX_TEXT = 400
"""The characters of a text of an episode that the page shows."""
MAX_EPISODES = 2
"""The number of episodes of a finding whose texts are shown."""

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a report. All texts are plain; `to_html` and `to_markdown` escape them."""

    title: str
    summary: Sequence[tuple[str, str]]
    """Label and text of the lines about the run."""
    findings: Sequence[Finding]
    episodes: dict[str, dict[str, Any]]
    """The row of `Run.behaviour` of each episode whose texts are shown, by its id."""
    time: Sequence[Row]
    """Part of the step, seconds, share."""
    validation: Sequence[Row]
    """Data source, rows, first and last reward; with a header."""
    curves: Sequence[tuple[str, Series]]

    def by_severity(self) -> Iterator[tuple[str, list[Finding]]]:
        """Yield the findings of each severity, with a heading."""
        for severity, heading in HEADINGS.items():
            if chosen := [f for f in self.findings if f.severity == severity]:
                yield heading, chosen

    def episode_texts(self, finding: Finding) -> Iterator[str]:
        """Yield prompt, answer and reward of the first episodes of a finding."""
        for name in finding.episodes[:MAX_EPISODES]:
            if row := self.episodes.get(name):
                truth = row["ground_truth"]
                yield (
                    f"{name}: step {row['step']}, row {row['sample_id']}, reward"
                    f" {row['reward']:.3g}, {plural(row['turns'], 'turn')},"
                    f" {plural(row['tool_calls'], 'call')}, stopped by {row['stop_reason']}\n"
                    f"prompt: {_cut(row['prompt'])}\nanswer: {_cut(row['answer'])}"
                    + (f"\nground truth: {_cut(truth)}" if truth else "")
                )


def make_report(run: Run, findings: Sequence[Finding]) -> Report:
    """Collect the content of a report.

    Args:
        run: the run; it may still be training.
        findings: the findings of `diagnose`.
    """
    curves = [(name, series) for name in CURVES if len(series := read_series(run, name)) > 1]
    return Report(
        run.folder.resolve().name,
        list(_summarize(run, findings)),
        findings,
        _find_episodes(run, findings),
        list(_time_of_a_step(run)),
        list(_validations(run)),
        curves,
    )


def _summarize(run: Run, findings: Sequence[Finding]) -> Iterable[tuple[str, str]]:
    """Yield five lines about the run, and one about its findings."""
    value = partial(config_value, run)
    if run.config:
        lora = f", LoRA of rank {value('model.lora_rank')}" if value("model.lora_rank") else ""
        yield (
            "config",
            f"{value('model.path')}{lora}, {value('algorithm.name')},"
            f" {value('data.batch_size')} rows x {value('rollout.n')} rollouts a step, lr"
            f" {value('optim.lr')}, engine {value('rollout.name')}",
        )
        validated = f", validated on {_names(value('data.val'))}" if value("data.val") else ""
        yield "rows", f"{_names(value('data.train'))}{validated}"
    pools = {pool: read_series(run, f"curriculum/{pool}") for pool in POOLS}
    if all(map(len, pools.values())):
        sizes = [f"{s.values[-1]:.0f} {pool.replace('_', ' ')}" for pool, s in pools.items()]
        yield "curriculum", f"{', '.join(sizes)} (rows, after step {pools[POOLS[0]].steps[-1]})"
    reward = read_series(run, REWARD)
    if not len(reward):
        yield "steps", "no training step is recorded yet"
    else:
        total = value("trainer.total_steps")
        of = f" of {total}" if isinstance(total, int) and total else ""
        yield "steps", f"{reward.steps[-1]}{of}"
        window = reward.window
        if len(reward) < 2 * window:
            text = f"{reward.values[0]:.3g} -> {reward.values[-1]:.3g}"
        else:
            text = (
                f"{_mean(reward.first)} in the first {window} steps -> {_mean(reward.last)} in the"
                f" last {window} (± one standard error between steps)"
            )
        yield "reward", text
    seconds = read_series(run, "timing_s/step")
    if len(seconds):
        tested = read_series(run, "timing_s/testing").values.sum()
        yield (
            "time",
            f"{_duration(seconds.values.sum())} of training, {seconds.last.mean():.3g} s a step;"
            f" {_duration(float(tested))} of validation",
        )
    counts = {g: sum(f.severity == g for f in findings) for g in SEVERITIES}
    alarms = [plural(n, g) for g, n in counts.items() if n and g in ALARMS]
    yield "findings", ", ".join(alarms) or "no errors or warnings"


def _names(value: Any) -> str:
    """Return the file names of `data.train` or `data.val`."""
    if isinstance(value, str):
        return value
    files = [v.get("path", v) if isinstance(v, dict) else v for v in value or ()]
    return ", ".join(map(str, files))


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():.3g} ± {values.std(ddof=1) / math.sqrt(len(values)):.2g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _find_episodes(run: Run, findings: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """Return the rows of the first episodes of each finding."""
    wanted = {i for finding in findings for i in finding.episodes[:MAX_EPISODES]}
    if not wanted:
        return {}
    ids = run.behaviour.column("episode_id").to_pylist()
    chosen = [i for i, name in enumerate(ids) if name in wanted]
    return {row["episode_id"]: row for row in run.behaviour.take(chosen).to_pylist()}


def _time_of_a_step(run: Run) -> Iterable[Row]:
    """Yield the parts of the last steps with their seconds, the longest first."""
    step = read_series(run, "timing_s/step")
    if not len(step):
        return
    total, number = step.last.mean(), len(step.last)
    parts = []
    for name in run.metrics.column_names:
        is_part = name.startswith("timing_s/") and not name.startswith("timing_s/agent_loop/")
        series = read_series(run, name) if is_part else step
        if series is not step and name not in ("timing_s/step", "timing_s/testing") and len(series):
            of_last = series.values[series.steps >= step.steps[-number]].sum()
            parts.append((name.removeprefix("timing_s/"), of_last / number))
    yield "part", "seconds", "share"
    yield f"step (mean of the last {number})", f"{total:.3g}", "100%"
    for name, seconds in sorted(parts, key=lambda part: -part[1]):
        if seconds >= 0.005 * total:
            yield name, f"{seconds:.3g}", f"{seconds / total:.0%}"


def _validations(run: Run) -> Iterable[Row]:
    """Yield the first and the last validation of all rows, and of each data source."""
    header = False
    for name in run.metrics.column_names:
        match = re.fullmatch(r"(val|val_greedy|val-core/(.+))/reward/mean@(\d+)", name)
        if not match:
            continue
        values = values_by_step(run, name)
        if not values:
            continue
        errors = values_by_step(run, f"{match[1]}/reward/se@{match[3]}")
        if not header:
            yield "validation", "first", "last"
            header = True
        label = {"val": "all rows", "val_greedy": "all rows, greedy"}.get(match[1], match[2])
        ends = [
            f"{values[step]:.3g}"
            + (f" ± {errors[step]:.2g}" if step in errors else "")
            + f" (step {step})"
            for step in (min(values), max(values))
        ]
        yield f"{label}, {plural(int(match[3]), 'rollout')} a row", *ends


# --- rendering -----------------------------------------------------------------------------------


def to_html(report: Report, curve: str = "") -> str:
    """Return the report as one page of HTML.

    Args:
        report: the content.
        curve: the learning curve as SVG, which `agentrl.observers.curve` draws.
    """
    return _render("page.html.j2", report, printable, autoescape=True, curve=curve)


def to_markdown(report: Report) -> str:
    """Return the report as Markdown, without curves."""
    return _render("page.md.j2", report, _markdown)


def _render(
    template: str,
    report: Report,
    plain: Callable[[str], str],
    autoescape: bool = False,
    **values: Any,
) -> str:
    """Return a report in the form of a template; all its texts pass through `plain`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        finalize=lambda value: value if isinstance(value, Markup) else plain(str(value)),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    functions = (cite, format_evidence, points_of, printable)
    values |= {function.__name__: function for function in functions}
    return environment.get_template(template).render(report=report, **values)


def format_evidence(finding: Finding) -> str:
    """Return the numbers of a finding on one line."""
    return ", ".join(f"{name} = {value:.4g}" for name, value in finding.evidence.items())


def cite(finding: Finding) -> list[str]:
    """Return the ids of a finding's episodes, each with the turn that shows it if there is one."""
    turns = finding.turns or [None] * len(finding.episodes)
    return [
        name if turn is None else f"{name}, turn {turn}"
        for name, turn in zip(finding.episodes, turns, strict=True)
    ]


def points_of(series: Series) -> str:
    """Return the points of a metric's line in a picture of 280 x 80."""
    x, y = series.steps.astype(float), series.values
    if len(x) > 200:  # more points are not visible
        parts = np.array_split(np.arange(len(x)), 200)
        x, y = (np.array([a[p].mean() for p in parts]) for a in (x, y))
    low, high = float(y.min()), float(y.max())
    px = 5 + 270 * (x - x.min()) / max(x.max() - x.min(), 1.0)
    py = 75 - 70 * ((y - low) / (high - low) if high > low else np.full(len(y), 0.5))
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(px, py, strict=True))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else "..." + text[-MAX_TEXT:]


def _markdown(text: str) -> str:
    """Return a text as one line in which Markdown and HTML have no meaning."""
    line = " ".join(printable(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#!&~])", r"\\\1", line)
