"""Observers of a run: objects that see each step, validation, checkpoint and the end.

The console, the trackers and the learning curve are observers, and so is each function of the user
that `callback` registers. An observer changes nothing: it gets one read-only `Event`, and its
return value is not used. An error in it is a warning, because a notification that fails must not
end a run of days.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from agentrl.errors import RegistryError, RunStopped, Terminated, UserCodeError
from agentrl.registry import callbacks, did_you_mean
from agentrl.trajectory import Scored

log = logging.getLogger("agentrl")

C = TypeVar("C", bound=Callable[..., object])

EVENTS = ("on_step", "on_validation", "on_checkpoint", "on_end")
"""The names that a callback can have."""


@dataclass(frozen=True, slots=True)
class Event:
    """The argument of callbacks and of the methods of observers.

    Attributes:
        step: the number of steps that the run has made; 0 for the validation before training.
        total_steps: the number of steps of the whole run.
        metrics: the numbers of the step, as in `metrics.jsonl`; those of `on_validation` alone are
            `val...`. It cannot be changed. `on_checkpoint` and `on_end` get the last ones.
        folder: the run's folder.
        checkpoint: the folder of the checkpoint; None except in `on_checkpoint`.
        error: in `on_end` the exception that ends the run, which is a KeyboardInterrupt after
            Ctrl-C; None if the run has finished.
        episodes: in `on_step` the episodes of the step's first group.
        recorded: in `on_begin` the last step that `metrics.jsonl` has; -1 if it has none.
        is_rewound: in `on_begin` whether it had later steps, which the run makes again.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    folder: Path
    checkpoint: Path | None = None
    error: BaseException | None = None
    episodes: Sequence[Scored] = ()
    recorded: int = -1
    is_rewound: bool = False


class Observer:
    """Follows a run. A class overrides the methods that it needs; here they do nothing."""

    name = "an observer"
    """Names the observer in messages."""
    is_dropped = False
    """True: after an error the observer is not called again."""
    after_error = "The run goes on; later errors of it are not printed"
    """The end of the warning about an error."""

    def on_begin(self, event: Event) -> None:
        """Called before the first step; with `trainer.val_only` not at all."""

    def on_step(self, event: Event) -> None:
        """Called when a step is recorded."""

    def on_validation(self, event: Event) -> None:
        """Called when a validation is recorded, after `on_step` of its step."""

    def on_checkpoint(self, event: Event) -> None:
        """Called when a checkpoint is complete."""

    def on_end(self, event: Event) -> None:
        """Called once when the run ends, also after an error."""


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
        RegistryError: no event has the name, or the function cannot take one argument.
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


def user_callbacks() -> list[Observer]:
    """Return an observer for each function that `callback` has registered, in their order."""
    observers = []
    for key, function in callbacks.items():
        observer = Observer()
        observer.name = f"the callback {key}"
        setattr(observer, key.rpartition(".")[2], function)
        observers.append(observer)
    return observers


class Notifier:
    """Calls the observers of a run, in their order."""

    def __init__(self, observers: Sequence[Observer], folder: Path, total_steps: int):
        """Prepare to call the observers of the run in `folder`."""
        self._observers, self._folder, self._total_steps = [*observers], folder, total_steps
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._failed: list[Observer] = []
        """The observers whose first error was printed."""

    def notify(
        self,
        name: Literal["on_begin", "on_step", "on_validation", "on_checkpoint", "on_end"],
        step: int,
        metrics: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> None:
        """Call a method of all observers. An error is a warning, once for each observer.

        Args:
            name: the method.
            step: the number of steps that the run has made.
            metrics: the numbers of the step; None: the last ones.
            **fields: other attributes of the `Event`.

        Raises:
            RunStopped: an observer stops the run. In `on_end` that is a warning, too.
        """
        if metrics is not None:
            self._metrics = MappingProxyType(dict(metrics))
        event = Event(step, self._total_steps, self._metrics, self._folder, **fields)
        for observer in [*self._observers]:
            try:
                getattr(observer, name)(event)
            except (KeyboardInterrupt, Terminated):
                raise
            except BaseException as e:  # a SystemExit too
                if isinstance(e, RunStopped) and name != "on_end":
                    raise RunStopped(f"{observer.name} stops the run: {e}") from e
                if observer not in self._failed:
                    self._failed.append(observer)
                    error = UserCodeError.of(observer.name, e)
                    log.warning("%s. %s", error, observer.after_error)
                if observer.is_dropped:
                    self._observers.remove(observer)
