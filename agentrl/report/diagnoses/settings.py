"""Settings that are likely mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.checks import doubtful
from agentrl.config.sections import Config
from agentrl.report.finding import Finding
from agentrl.report.run import Run


def settings(run: Run) -> Iterator[Finding]:
    """The notes on the run's settings that it printed when it began."""
    try:
        config = Config.model_validate(run.config)
    except ValueError:  # A number refers to an environment variable that is not set here.
        return
    for note in doubtful(config):
        yield Finding(0, note, severity="note", subject=note.partition("=")[0])
