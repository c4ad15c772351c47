"""The output of a command that trains or evaluates, as lines of text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from agentrl.callbacks import Event, Observer
from agentrl.observers.curve import TRAINING, validation_series
from agentrl.terminal import printable
from agentrl.trainer.display import Display

if TYPE_CHECKING:
    from agentrl.report.finding import Finding

log = logging.getLogger("agentrl")

Metrics = Mapping[str, float]

COLUMNS = (
    ("reward", TRAINING, "{:.3f}"),
    ("calls", "tool_call_counts/mean", "{:.2f}"),
    ("turns", "num_turns/mean", "{:.1f}"),
    ("length", "response_length/mean", "{:.0f}"),
    ("ppo_kl", "actor/ppo_kl", "{:.4f}"),
    ("teacher_kl", "teacher/reverse_kl", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("s", "timing_s/step", "{:.1f}"),
    ("learner_waits", "async/wait_engines", "{:.1f}"),
    ("engine_waits", "async/wait_learner", "{:.1f}"),
)
"""Header, metric and format. A metric that a run does not have gets no column."""


class Console(Display, Observer, AbstractContextManager):
    """Prints the progress of a run to a stream, as lines. Use it in a `with`."""

    name = "the console"

    def on_step(self, event: Event) -> None:
        cells = [f"{name} {text}" for name, text in format_cells(event.metrics).items()]
        number = f"{event.step:>{len(str(event.total_steps))}}/{event.total_steps}"
        self._print("  ".join([f"step {number}", *cells]))

    def on_validation(self, event: Event) -> None:
        cells = [f"{name} {text}" for name, text in format_scores(event.metrics).items()]
        self._print("  ".join([f"validation at step {event.step}:", *cells]))

    def finding(self, finding: Finding) -> None:
        """Warn about a finding of a diagnosis."""
        from agentrl.report.finding import describe

        log.warning("%s", describe(finding))

    def results(self, text: str) -> None:
        """Print the results of a run that has finished, below its display."""
        self.close()
        self._print(text)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


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
