"""Functions of the user that a run calls: after steps, validations and checkpoints, at the end.

A callback observes: it gets one read-only `Event`, and its return value is not used. An error in it
is a warning, because a notification that fails must not end a run of days.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from agentrl.errors import RegistryError, RunStopped, Terminated, UserCodeError
from agentrl.registry import callbacks, did_you_mean

log = logging.getLogger("agentrl")

C = TypeVar("C", bound=Callable[..., object])

EVENTS = ("on_step", "on_validation", "on_checkpoint", "on_end")
"""The names that a callback can have."""


@dataclass(frozen=True, slots=True)
class Event:
    """The argument of a callback.

    Attributes:
        step: the number of steps that the run has made; 0 for the validation before training.
        total_steps: the number of steps of the whole run.
        metrics: the numbers of the step, as in `metrics.jsonl`; those of `on_validation` alone are
            `val...`. It cannot be changed. `on_checkpoint` and `on_end` get the last ones.
        folder: the run's folder.
        checkpoint: the folder of the checkpoint; None except in `on_checkpoint`.
        error: in `on_end` the exception that ends the run, which is a KeyboardInterrupt after
            Ctrl-C; None if the run has finished.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    folder: Path
    checkpoint: Path | None = None
    error: BaseException | None = None


def callback(function: C) -> C:
    """Register a function that training calls. Its name says when.

        @callback
        def on_validation(event):
            if event.metrics["val/reward/mean@1"] > 0.9:
                print("solved at step", event.step)

    `on_step(event)` is called when a step is recorded, `on_validation(event)` after a validation,
    `on_checkpoint(event)` when a checkpoint is complete, and `on_end(event)` once when a run ends,
    also after an error. `agentrl.callbacks.Event` describes the argument. Several files may define
    the same name. Training waits for a callback. If it raises, the first error is a warning, the
    run continues, and later events call it again. To stop the run, raise
    `agentrl.errors.RunStopped` with a reason: the run saves a checkpoint and ends, and the same
    command resumes it. In `on_end` that is a warning too.

    Args:
        function: a function, not `async`, of one argument.

    Raises:
        RegistryError: the name is not that of an event, or the function cannot take one argument.
    """
    name = getattr(function, "__name__", repr(function))
    if name not in EVENTS:
        raise RegistryError(
            f"no event named {name!r}.{did_you_mean(name, EVENTS)} The name of a callback is one"
            f" of {', '.join(EVENTS)}"
        )
    if inspect.iscoroutinefunction(function):
        raise RegistryError(f"the callback {name} is async: write `def {name}(event)`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as e:
        raise RegistryError(
            f"the callback {name} must take one argument, `def {name}(event)`: {e}"
        ) from None
    file = Path(inspect.getfile(function)).stem
    callbacks.add(f"{file}.{name}", function)
    return function


class Callbacks:
    """Calls the registered callbacks of a run, in the order of their registration."""

    def __init__(self, folder: Path, total_steps: int):
        """Prepare the callbacks of the run in `folder`."""
        self._folder, self._total_steps = folder, total_steps
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._failed: set[str] = set()
        """The callbacks whose error was printed."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_step`.

        Raises:
            RunStopped: a callback stops the run.
        """
        self._call("on_step", self._event(step, metrics))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_validation`.

        Raises:
            RunStopped: a callback stops the run.
        """
        self._call("on_validation", self._event(step, metrics))

    def checkpoint(self, step: int, checkpoint: Path) -> None:
        """Call `on_checkpoint`.

        Raises:
            RunStopped: a callback stops the run.
        """
        self._call("on_checkpoint", self._event(step, checkpoint=checkpoint))

    def end(self, step: int, error: BaseException | None) -> None:
        """Call `on_end`. It cannot stop the run, which ends anyway."""
        event = self._event(step, error=error)
        self._call("on_end", event)

    def _event(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        checkpoint: Path | None = None,
        error: BaseException | None = None,
    ) -> Event:
        if metrics is not None:
            self._metrics = MappingProxyType(dict(metrics))
        return Event(step, self._total_steps, self._metrics, self._folder, checkpoint, error)

    def _call(self, name: str, event: Event) -> None:
        for key, function in callbacks.items():
            if not key.endswith(f".{name}"):
                continue
            try:
                function(event)
            except (KeyboardInterrupt, Terminated):
                raise
            except BaseException as e:  # a SystemExit too
                if isinstance(e, RunStopped) and name != "on_end":
                    raise RunStopped(f"the callback {key} stops the run: {e}") from e
                if key not in self._failed:
                    self._failed.add(key)
                    error = UserCodeError.of(f"the callback {key}", e)
                    log.warning("%s. The run goes on; later errors of it are not printed", error)
