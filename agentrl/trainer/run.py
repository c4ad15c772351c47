"""The loop of a run: makes the steps, and publishes, validates, records, shows and saves them.

A step that `train_step` has made is committed, published, validated, recorded, shown to observers
and saved, in this order. Whatever fails after the commit, the step can be saved: a checkpoint has
the metrics of a step that is not recorded yet.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from agentrl.callbacks import Notifier
from agentrl.errors import RunStopped, Terminated
from agentrl.evaluate import evaluate
from agentrl.record import FINAL, METRICS, TOKENIZER, TRAJECTORIES, Record, read_metrics
from agentrl.store import TrajectoryStore
from agentrl.trainer.best import EARLY_STOP, Best
from agentrl.trainer.checkpoint import (
    INITIAL,
    find_steps,
    is_disk_full,
    remove_later_checkpoints,
    replace_folder,
)
from agentrl.trainer.display import Activity
from agentrl.trainer.parts import Parts, RunState
from agentrl.trainer.profile import (
    annotate_episodes,
    profile_folder,
    profile_step,
    remove_later_profiles,
)
from agentrl.trainer.recorded import RecordedStream
from agentrl.trainer.resume import write_config
from agentrl.trainer.saving import Saver, is_due
from agentrl.trainer.step import train_step
from agentrl.trajectory import Scored


def open_record(parts: Parts, state: RunState) -> Record:
    """Open the run's record, and remove what was written after the checkpoint."""
    last_step = -1 if state.step == 0 or parts.start.is_new_fork else state.step
    remove_later_checkpoints(parts.folder, state.step)
    TrajectoryStore(parts.folder / TRAJECTORIES).truncate_after(last_step)
    remove_later_profiles(parts.folder, state.step)
    return Record(parts.folder, last_step if state.unfinished is None else last_step - 1)


def validate(parts: Parts, step: int, best: Best) -> dict[str, float]:
    """Play the validation rows, store the episodes, and return the metrics.

    Raises:
        RunStopped: too many episodes were dropped, or the metric of `best` is missing.
    """
    parts.clock.seconds.pop("testing", None)
    with (
        parts.clock.timed("testing"),
        parts.display.phase("validation", parts.rollouts.progress),
        parts.interrupt.abandonable(),
    ):
        result = evaluate(parts.rollouts, parts.plan.val, parts.config.val)
    annotate_episodes("validation", [g for groups in result.splits.values() for g in groups])
    for split, groups in result.splits.items():
        parts.store.write(step, groups, split=split)
    best.check_metric(result.metrics)
    return dict(result.metrics)


@dataclass(slots=True)
class Run:
    """A training run whose parts are open."""

    parts: Parts
    state: RunState
    record: Record
    best: Best
    observers: Notifier
    saver: Saver
    _profile_failed: bool = False

    def run(self) -> Mapping[str, float]:
        """Make all steps, and write the model.

        Returns:
            The metrics of the last step, including its validation.

        Raises:
            AgentRLError: the run could not continue. The message says what was saved.
        """
        self._begin()
        try:
            self._train()
        except RunStopped as e:
            raise RunStopped(f"{e}\n{self.saver.save_after_error(e)}") from e
        except (KeyboardInterrupt, Terminated, Exception) as e:
            saved = self.saver.save_after_error(e)
            with suppress(OSError):  # the terminal is gone, or the disk of a log is full
                self.parts.display.close()
                self.parts.display.note(saved)
            raise
        return self._finish()

    def _train(self) -> None:
        config, state = self.parts.config, self.state
        if state.unfinished is not None:
            self._complete(state.unfinished)
        elif (
            state.step == self.parts.start.first_step
            and config.trainer.val_before_train
            and self.parts.plan.val
        ):
            metrics = validate(self.parts, state.step, self.best)
            self.record.write(state.step, metrics)
            self.best.add(state.step, metrics)
            self.observers.notify("on_validation", state.step, metrics)
        while not self._is_last() and not self.best.is_over:
            self.parts.interrupt.check()
            with self._profiled():
                self._step()
        if isinstance(stream := self.parts.stream, RecordedStream):
            self.parts.display.note(stream.summary(state.position, state.step))

    def _is_last(self) -> bool:
        """Return whether the last step that can be made is made."""
        state, stream = self.state, self.parts.stream
        if isinstance(stream, RecordedStream) and stream.is_used_up(state.position, state.step):
            return True
        return state.step >= self.parts.start.total_steps

    def _step(self) -> None:
        """Make the next step and commit it. From then on it can be saved, whatever fails next."""
        saving = self.parts.clock.seconds.get("save_checkpoint")
        self.parts.clock.restart()
        made = train_step(self.parts, self.state)
        self.state.commit(made)
        self.parts.store.write_learned(self.state.step, made.learned)
        if saving is not None:
            # The line of a step is on the disk before its checkpoint, so the next line has it.
            made.metrics["timing_s/save_checkpoint"] = saving
        self._publish(made.metrics)
        self._complete(made.metrics, made.episodes)

    def _publish(self, metrics: dict[str, float]) -> None:
        """Send the new policy to the engine, and add what is measured to the metrics."""
        parts, step = self.parts, self.state.step
        metrics["training/global_step"] = step
        metrics["training/epoch"] = self.state.position / parts.plan.epoch_rows
        metrics |= parts.clock.metrics(metrics)
        with parts.clock.named("publish"), parts.rollouts.paused_time_limits():
            gc.collect()  # `collect_rarely` made it rare.
            metrics |= parts.publisher.publish(step)
        parts.stream.advance(step)
        metrics |= parts.engine.metrics() | parts.rollouts.metrics()
        metrics |= parts.clock.metrics(metrics)

    def _complete(self, metrics: dict[str, float], episodes: Sequence[Scored] = ()) -> None:
        """Validate if it is due, record the step, notify, save a checkpoint if it is due."""
        parts, step = self.parts, self.state.step
        is_last = self._is_last()
        validates = bool(parts.plan.val) and (
            is_last or is_due(step, parts.config.trainer.test_freq)
        )
        if validates:
            metrics |= validate(parts, step, self.best)
            metrics["timing_s/testing"] = parts.clock.seconds["testing"]
        is_best = self.best.add(step, metrics)
        if self.best.is_over and not is_last:
            metrics[EARLY_STOP] = 1.0
            parts.display.note(self.best.describe_stop())
        parts.store.check()
        self.record.write(step, metrics)
        self.state.unfinished = None
        self.observers.notify("on_step", step, metrics, episodes=episodes)
        if validates:
            self.observers.notify("on_validation", step)
        self.saver.save_if_due(
            validated=validates,
            is_best=is_best,
            is_last=is_last or self.best.is_over,
            step_seconds=metrics.get("timing_s/step", 0.0),
        )

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Write a profile of the block, the next step, if `trainer.profile_steps` names it."""
        step, display = self.state.step + 1, self.parts.display
        if step not in self.parts.config.trainer.profile_steps:
            yield
            return
        folder = profile_folder(self.parts.folder, step)
        with profile_step(folder, self.parts.learner.ranks, self.parts.placement) as problems:
            yield
        if not problems:
            display.note(f"profile of step {step}: {folder}")
        elif not self._profile_failed:
            self._profile_failed = True
            display.warning(f"warning: no profile of step {step}: {'; '.join(problems)}")

    def _activity(self) -> Activity:
        """Return what the run does now. The display calls it in a thread of its own."""
        part, start = self.parts.clock.part
        return Activity(part, time.perf_counter() - start, self.parts.rollouts.progress())

    def _begin(self) -> None:
        """Write what the run's folder has from its start, and read the steps that are recorded."""
        config, parts, start = self.parts.config, self.parts, self.parts.start
        write_config(parts.folder, config, start)
        if start.checkpoint is None:
            shutil.rmtree(parts.folder / INITIAL, ignore_errors=True)
            if config.model.lora_rank:
                replace_folder(parts.folder / INITIAL, parts.learner.ranks.save)
        try:
            # With it, the folder alone shows texts.
            replace_folder(parts.folder / TOKENIZER, parts.tokenizer.save_pretrained)
        except Exception as e:  # Training does not need it.
            reason = e or type(e).__name__
            parts.display.warning(f"warning: cannot write {parts.folder / TOKENIZER}: {reason}")
        tokens, top_k = config.rollout.max_trajectory_tokens, config.rollout.top_k
        parts.display.note(
            parts.store.describe_size(start.total_steps, config.rollouts_of_step, tokens, top_k)
        )
        for step, metrics in read_metrics(parts.folder / METRICS):
            self.best.add(step, metrics)
        parts.display.follow(self._activity)
        recorded, is_rewound = self.record.last_step, self.record.is_rewound
        self.observers.notify("on_begin", self.state.step, recorded=recorded, is_rewound=is_rewound)

    def _finish(self) -> Mapping[str, float]:
        """Write the model, and return the metrics of the last step."""
        parts, trainer = self.parts, self.parts.config.trainer
        history = read_metrics(parts.folder / METRICS)
        if not history:
            raise RunStopped(
                f"{parts.folder} is the folder of a finished run, but has no {METRICS}"
            )
        model = parts.folder / FINAL
        try:
            with parts.display.phase("export the model"):
                parts.learner.ranks.save_pretrained(model, parts.dtype)
                parts.tokenizer.save_pretrained(model)
        except Exception as e:
            if not (isinstance(e, OSError) or is_disk_full(parts.folder, e)):
                raise
            fix = (
                f"The checkpoint of step {self.state.step} is complete: free disk space and run"
                f" the same command again, or write the model elsewhere: agentrl export"
                f" {parts.folder} FOLDER"
            )
            if trainer.save_freq == "never":
                fix = "There is no checkpoint (trainer.save_freq=never): the run is lost"
            raise RunStopped(f"cannot write {model}: {e}. {fix}") from e
        best = self.best.best_of(find_steps(parts.folder))
        if best is not None:
            text = f"best checkpoint ({trainer.keep_best}): step {best} in {parts.folder}"
            parts.display.note(text)
        return history[-1][1]
