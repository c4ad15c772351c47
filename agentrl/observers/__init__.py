"""What follows a run: console, trackers, learning curve, diagnoses, functions of the user.

`agentrl train` and `Trainer` pass these observers to the run, which notifies them. They are above
the trainer, which imports none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from agentrl.callbacks import Observer, user_callbacks
from agentrl.config import Config
from agentrl.observers.console import Console


def open_console(log_format: Literal["text", "json"] = "text") -> Console:
    """Return a console for standard output.

    Args:
        log_format: "text" for a display in a terminal and for lines elsewhere; "json" for lines of
            JSON.
    """
    if log_format == "json":
        from agentrl.observers.json_log import JsonConsole

        return JsonConsole()
    if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from agentrl.observers.live import LiveConsole

        return LiveConsole()
    return Console()


def make_observers(config: Config, console: Console) -> list[Observer]:
    """Return the observers of a run, in the order in which they are notified.

    Args:
        config: the run's config. The user's files are loaded, so that their callbacks are known.
        console: shows the progress.

    Raises:
        ConfigError: a tracker is not installed; the message has the command that installs it.
    """
    if config.trainer.val_only:
        return [console, *user_callbacks()]
    from agentrl.observers.curve import Curve
    from agentrl.observers.results import Results
    from agentrl.observers.tracking import Tracker
    from agentrl.report.live import LiveDiagnosis

    return [
        *(Tracker(name, config) for name in config.trainer.logger),
        LiveDiagnosis(console.finding),
        Curve(),
        console,
        Results(config, console),
        *user_callbacks(),
    ]


@contextmanager
def open_observers(config: Config) -> Iterator[tuple[Console, list[Observer]]]:
    """Open a console for standard output; yield it and the observers of a run."""
    with open_console() as console:
        yield console, make_observers(config, console)
