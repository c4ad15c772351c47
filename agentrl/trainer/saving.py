"""When a run saves a checkpoint, and what it saves if it has to stop."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from agentrl.callbacks import Notifier
from agentrl.errors import RunStopped, Terminated
from agentrl.trainer.best import Best
from agentrl.trainer.checkpoint import find_checkpoint, find_steps, save_checkpoint
from agentrl.trainer.parts import Parts, RunState

AUTO_SAVE_S = 1800.0
"""The longest time between two checkpoints with `trainer.save_freq=auto`, in seconds, unless a
single step takes longer. The clock is that of the controller, which decides for all ranks."""
LARGE_CHECKPOINT = 10**9
"""The bytes of a checkpoint from which a run announces it: writing and hashing takes seconds."""


class Saver:
    """Saves the checkpoints of a run, and tells its observers."""

    def __init__(
        self, parts: Parts, state: RunState, best: Best, observers: Notifier, spare: ExitStack
    ):
        """Prepare to save.

        Args:
            parts: the parts of the run.
            state: its state, which the run changes.
            best: the checkpoint of the best validation is kept.
            observers: get `on_checkpoint`.
            spare: file descriptors to save a run with that has no more of them.
        """
        self._parts, self._state, self._best = parts, state, best
        self._observers, self._spare = observers, spare
        self._folder, self._trainer = parts.folder, parts.config.trainer
        self._last_save = time.monotonic()
        self._saved_step = parts.start.first_step
        """The step of the last checkpoint."""

    def save_if_due(
        self, *, validated: bool, is_best: bool, is_last: bool, step_seconds: float
    ) -> None:
        """Save a checkpoint after a step if it is due. One that `auto` saves may fail.

        Args:
            validated: whether the step was validated.
            is_best: whether its validation is the best one until now.
            is_last: whether the run ends with this step.
            step_seconds: the time that the step took: the end of the next one may be too late.
        """
        freq = self._trainer.save_freq
        if freq == "never":
            return
        if freq == "auto":
            seconds = time.monotonic() - self._last_save + step_seconds
            due = validated or seconds >= AUTO_SAVE_S
        else:
            due = is_best or is_due(self._state.step, freq)
        if not (due or is_last):
            return
        # A run that resumes does not play these steps again, so it needs their trajectories.
        self._parts.store.wait()
        try:
            checkpoint = self._write()
        except RunStopped as e:
            if is_last or freq != "auto":
                raise
            self._last_save = time.monotonic()
            text = f"warning: {e} The run goes on (trainer.save_freq=auto)."
            self._parts.display.warning(text)
        else:
            self._notify(checkpoint)

    def save_after_error(self, cause: BaseException) -> str:
        """Save a checkpoint of a run that stops, and return what was saved.

        Within an update the state is not consistent (some of the step's optimizer steps may be
        missing), and after a second signal there is no time: then nothing is saved. Trajectories
        that cannot be written do not prevent it, because the step was made. An error here must not
        hide why the run stopped, the `cause`: ranks may have died, the disk may be full, or no file
        descriptor may be left.
        """
        self._spare.close()
        failure = ""
        is_new = self._state.step > self._saved_step and self._trainer.save_freq != "never"
        try:
            if is_new and self._state.is_consistent and not self._parts.interrupt.is_urgent:
                try:
                    self._parts.store.wait()
                except RunStopped as e:
                    failure = f"{e}\n" if e is not cause else ""
                self._notify(self._write())
        except RunStopped as e:
            # The same error may name another number of free bytes.
            is_same = e.__cause__ is not None and repr(e.__cause__) == repr(cause.__cause__)
            failure += "" if is_same or str(e) == str(cause) else f"{e}\n"
        except (KeyboardInterrupt, Terminated, Exception) as e:
            failure += f"the step could not be saved: {type(e).__name__}: {e}\n"
        try:
            saved = find_checkpoint(self._folder, "auto")
        except (KeyboardInterrupt, Terminated, Exception) as e:
            return f"{failure}the checkpoint cannot be read: {type(e).__name__}: {e}"
        if saved is None:
            fork = self._parts.start.fork
            origin = f"the fork of {fork.checkpoint} again" if fork else "from the beginning"
            return f"{failure}nothing was saved; the same command starts {origin}"
        return f"{failure}saved after step {saved.step}; the same command resumes from there"

    def _notify(self, checkpoint: Path) -> None:
        self._observers.notify("on_checkpoint", self._state.step, checkpoint=checkpoint)

    def _write(self) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            RunStopped: it cannot be written.
        """
        parts, state, start = self._parts, self._state, self._parts.start
        with parts.clock.timed("save_checkpoint"), parts.display.phase("checkpoint"):
            checkpoint = save_checkpoint(
                self._folder,
                state.step,
                self._write_files,
                {
                    "config": parts.config.model_dump(mode="json"),
                    "dtype": parts.dtype,
                    "rows": parts.plan.fingerprint,
                    "position": state.position,
                    "order_start": start.order_start,
                    "changes": [asdict(change) for change in start.changes],
                    "kl": state.kl.coef,
                    "unfinished": state.unfinished,
                    "canary": parts.publisher.state,
                },
                keep=self._trainer.keep,
                pinned=self._best.best_of([*find_steps(self._folder), state.step]),
            )
        self._last_save, self._saved_step = time.monotonic(), state.step
        return checkpoint

    def _write_files(self, folder: Path) -> None:
        """Write the files of a checkpoint. A large one is announced before."""
        if (size := self._parts.learner.ranks.saved_bytes()) >= LARGE_CHECKPOINT:
            self._parts.display.note(
                f"checkpoint of step {self._state.step}: writing {size / 1e9:.1f} GB (weights and"
                " optimizer state). Ctrl-C waits for it; a second Ctrl-C stops at once, without it"
            )
        self._parts.learner.ranks.save(folder)
        if self._state.curriculum is not None:
            self._state.curriculum.save(folder)


def is_due(step: int, freq: int) -> bool:
    """Return whether something that is done every `freq` steps (0: never) is done after a step."""
    return freq > 0 and step % freq == 0
