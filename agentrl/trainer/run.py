"""The loop of a run: makes the steps, and publishes, validates, records, shows and saves them.

A step that `train_step` has made is committed, published, validated, recorded, shown to callbacks
and saved, in this order. Whatever fails after the commit, the step can be saved: a checkpoint has
the metrics of a step that is not recorded yet.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.callbacks import Callbacks
from agentrl.errors import RunStopped, Terminated
from agentrl.evaluate import evaluate
from agentrl.learner.dispatch import Placement
from agentrl.preflight import Plan
from agentrl.record import METRICS, read_metrics
from agentrl.report.live import LiveDiagnosis
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint import (
    INITIAL,
    find_checkpoint,
    find_steps,
    is_disk_full,
    remove_later_checkpoints,
    replace_folder,
    save_checkpoint,
)
from agentrl.trainer.console import CURVE, FINAL, TOKENIZER, TRAJECTORIES, Activity, Console
from agentrl.trainer.curve import write_curve
from agentrl.trainer.parts import Parts, RunState
from agentrl.trainer.profile import (
    annotate_episodes,
    profile_folder,
    profile_step,
    remove_later_profiles,
)
from agentrl.trainer.resume import Start, write_config
from agentrl.trainer.step import train_step
from agentrl.trainer.tracking import EARLY_STOP, Best, Tracker
from agentrl.trajectory import Scored

AUTO_SAVE_S = 1800.0
"""The longest time between two checkpoints with `trainer.save_freq=auto`, in seconds, unless a
single step takes longer. The clock is that of the controller, which decides for all ranks."""
LARGE_CHECKPOINT = 10**9
"""The bytes of a checkpoint from which a run announces it: writing and hashing takes seconds."""


def open_tracker(parts: Parts, state: RunState, start: Start, console: Console) -> Tracker:
    """Open the run's record, and remove what was written after the checkpoint."""
    folder = Path(parts.config.trainer.output)
    last_step = -1 if state.step == 0 or start.is_new_fork else state.step
    remove_later_checkpoints(folder, state.step)
    TrajectoryStore(folder / TRAJECTORIES).truncate_after(last_step)
    remove_later_profiles(folder, state.step)
    if state.unfinished is not None:
        last_step -= 1
    return Tracker(
        folder,
        parts.config.trainer.logger,
        config=parts.config.model_dump(),
        resumed_step=last_step,
        warn=console.warning,
    )


def validate(parts: Parts, plan: Plan, step: int, best: Best, console: Console) -> dict[str, float]:
    """Play the validation rows, store and show the episodes, and return the metrics.

    Raises:
        RunStopped: too many episodes were dropped, or the metric of `best` is missing.
    """
    parts.clock.seconds.pop("testing", None)
    with (
        parts.clock.timed("testing"),
        console.phase("validation", parts.rollouts.progress),
        parts.interrupt.abandonable(),
    ):
        result = evaluate(parts.rollouts, plan.val, parts.config.val)
    annotate_episodes("validation", [*result.groups, *result.greedy_groups])
    parts.store.write(step, result.groups, split="val")
    if result.greedy_groups:
        parts.store.write(step, result.greedy_groups, split="greedy")
    best.check_metric(result.metrics)
    console.validation(step, result.metrics)
    return dict(result.metrics)


@dataclass(slots=True)
class Run:
    """A training run whose parts are open."""

    plan: Plan
    parts: Parts
    state: RunState
    start: Start
    """The state that the run started from."""
    console: Console
    tracker: Tracker
    diagnosis: LiveDiagnosis
    callbacks: Callbacks
    best: Best
    placement: Placement | None
    spare: ExitStack
    """File descriptors to save a run with that has no more of them."""
    _episodes: Sequence[Scored] = ()
    """Episodes of the step that trackers show."""
    _last_save: float = field(default_factory=time.monotonic)
    _saved_step: int = 0
    """The step of the last checkpoint that this process saved."""
    _curve_failed: bool = False
    _profile_failed: bool = False

    @property
    def _folder(self) -> Path:
        return Path(self.parts.config.trainer.output)

    @property
    def _total_steps(self) -> int:
        return self.start.total_steps

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
            raise RunStopped(f"{e}\n{self._save_after_error(e)}") from e
        except (KeyboardInterrupt, Terminated, Exception) as e:
            saved = self._save_after_error(e)
            with suppress(OSError):  # the terminal is gone, or the disk of a log is full
                self.console.close()
                self.console.note(saved)
            raise
        return self._finish()

    def _train(self) -> None:
        trainer = self.parts.config.trainer
        self.console.begin(self._folder, self.state.step, self._total_steps, self._activity)
        if self.state.unfinished is not None:
            self._complete(self.state.unfinished)
        elif (
            self.state.step == self.start.first_step and trainer.val_before_train and self.plan.val
        ):
            metrics = self._validate()
            self.tracker.log(self.state.step, metrics)
            self.best.add(self.state.step, metrics)
            self._write_curve()
            self.callbacks.validation(self.state.step, metrics)
        while self.state.step < self._total_steps and not self.best.is_over:
            self.parts.interrupt.check()
            with self._profiled():
                self._complete(self._advance())

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Write a profile of the block, the next step, if `trainer.profile_steps` names it."""
        step = self.state.step + 1
        if step not in self.parts.config.trainer.profile_steps:
            yield
            return
        folder = profile_folder(self._folder, step)
        with profile_step(folder, self.parts.learner.ranks, self.placement) as problems:
            yield
        if not problems:
            self.console.note(f"profile of step {step}: {folder}")
        elif not self._profile_failed:
            self._profile_failed = True
            self.console.warning(f"warning: no profile of step {step}: {'; '.join(problems)}")

    def _activity(self) -> Activity:
        """Return what the run does now. The console calls it in a thread of its own."""
        part, start = self.parts.clock.part
        return Activity(part, time.perf_counter() - start, self.parts.rollouts.progress())

    def _advance(self) -> dict[str, float]:
        """Run one step and publish the new policy. The caller validates and records the step."""
        saving = self.parts.clock.seconds.get("save_checkpoint")
        self.parts.clock.restart()
        metrics = self._make_step()
        if saving is not None:
            # The line of a step is on the disk before its checkpoint, so the next line has it.
            metrics["timing_s/save_checkpoint"] = saving
        metrics["training/global_step"] = self.state.step
        metrics["training/epoch"] = self.state.position / self.plan.epoch_rows
        metrics |= self.parts.clock.metrics(metrics)
        with self.parts.clock.named("publish"), self.parts.rollouts.paused_time_limits():
            gc.collect()  # `collect_rarely` made it rare.
            metrics |= self.parts.publisher.publish(self.state.step)
        self.parts.stream.advance(self.state.step)
        metrics |= self.parts.engine.metrics()
        metrics |= self.parts.clock.metrics(metrics)
        return metrics

    def _make_step(self) -> dict[str, float]:
        """Make the next step and commit it. From then on it can be saved, whatever fails next."""
        made = train_step(self.parts, self.state)
        self.state.commit(made)
        self.parts.store.write_learned(self.state.step, made.learned)
        self._episodes = made.episodes
        return made.metrics

    def _complete(self, metrics: dict[str, float]) -> None:
        """Validate if it is due, record the step, save a checkpoint if it is due."""
        step, last = self.state.step, self.state.step == self._total_steps
        validates = bool(self.plan.val) and _is_due(step, self.parts.config.trainer.test_freq, last)
        if validates:
            metrics |= self._validate()
            metrics["timing_s/testing"] = self.parts.clock.seconds["testing"]
        is_best = self.best.add(step, metrics)
        if self.best.is_over and not last:
            metrics[EARLY_STOP] = 1.0
            self.console.note(self.best.describe_stop())
        self.parts.store.check()
        self.tracker.log(step, metrics)
        self.tracker.trace(step, self._episodes)
        self.diagnosis.add(step, metrics)
        self.state.unfinished = None
        if validates:
            self._write_curve()
        self.console.step(step, self._total_steps, metrics)
        self.callbacks.step(step, metrics)
        if validates:
            self.callbacks.validation(step, metrics)
        if saved := self._save_if_due(validates, is_best, last or self.best.is_over, metrics):
            self.console.checkpoint(step, saved)
            self.callbacks.checkpoint(step, saved)

    def _save_if_due(
        self, validated: bool, is_best: bool, last: bool, metrics: Mapping[str, float]
    ) -> Path | None:
        """Save a checkpoint if it is due, and return its folder. One that `auto` saves may fail."""
        freq = self.parts.config.trainer.save_freq
        if freq == "never":
            return None
        if freq != "auto":
            return self._save() if is_best or _is_due(self.state.step, freq, last) else None
        # The end of the next step may be too late.
        seconds = time.monotonic() - self._last_save + metrics.get("timing_s/step", 0.0)
        if last:
            return self._save()
        if validated or seconds >= AUTO_SAVE_S:
            self._last_save = time.monotonic()
            self.parts.store.wait()
            try:
                return self._save()
            except RunStopped as e:
                self.console.warning(f"warning: {e} The run goes on (trainer.save_freq=auto).")
        return None

    def _save_after_error(self, cause: BaseException) -> str:
        """Save a checkpoint of a run that stops, and return what was saved.

        Within an update the state is not consistent (some of the step's optimizer steps may be
        missing), and after a second signal there is no time: then nothing is saved. Trajectories
        that cannot be written do not prevent it, because the step was made. An error here must not
        hide why the run stopped, the `cause`: ranks may have died, the disk may be full, or no file
        descriptor may be left.
        """
        self.spare.close()
        failure = ""
        try:
            is_new = self.state.step > max(self.start.first_step, self._saved_step)
            is_saved = is_new and self.parts.config.trainer.save_freq != "never"
            if self.state.is_consistent and is_saved and not self.parts.interrupt.is_urgent:
                try:
                    self.parts.store.wait()
                except RunStopped as e:
                    failure = f"{e}\n" if e is not cause else ""
                checkpoint = self._save(has_all_trajectories=False)
                self.console.checkpoint(self.state.step, checkpoint)
                self.callbacks.checkpoint(self.state.step, checkpoint)
        except RunStopped as e:
            failure += f"{e}\n" if str(e) != str(cause) else ""
        except (KeyboardInterrupt, Terminated, Exception) as e:
            failure += f"the step could not be saved: {type(e).__name__}: {e}\n"
        if not self.parts.interrupt.is_urgent:
            with suppress(KeyboardInterrupt, Terminated):
                self._write_curve()
        try:
            saved = find_checkpoint(self._folder, "auto")
        except (KeyboardInterrupt, Terminated, Exception) as e:
            return f"{failure}the checkpoint cannot be read: {type(e).__name__}: {e}"
        if saved is None:
            fork = self.start.fork
            origin = f"the fork of {fork.checkpoint} again" if fork else "from the beginning"
            return f"{failure}nothing was saved; the same command starts {origin}"
        return f"{failure}saved after step {saved.step}; the same command resumes from there"

    def _validate(self) -> dict[str, float]:
        return validate(self.parts, self.plan, self.state.step, self.best, self.console)

    def _begin(self) -> None:
        """Write what the run's folder has from its start, and read the steps that are recorded."""
        config, folder = self.parts.config, self._folder
        write_config(folder, config, self.start)
        if self.start.checkpoint is None:
            shutil.rmtree(folder / INITIAL, ignore_errors=True)
            if config.model.lora_rank:
                replace_folder(folder / INITIAL, self.parts.learner.ranks.save)
        self._save_tokenizer()
        self.console.note(
            self.parts.store.describe_size(
                self._total_steps, config.rollouts_of_step, config.rollout.max_trajectory_tokens
            )
        )
        for step, metrics in read_metrics(folder / METRICS):
            self.best.add(step, metrics)
        self._last_save = time.monotonic()

    def _save_tokenizer(self) -> None:
        """Save the tokenizer into the run's folder, so that the folder alone shows texts.

        Training does not need it: if it cannot be written, this is a warning.
        """
        folder = self._folder / TOKENIZER
        try:
            replace_folder(folder, self.parts.tokenizer.save_pretrained)
        except Exception as e:
            self.console.warning(f"warning: cannot write {folder}: {e or type(e).__name__}")

    def _save(self, has_all_trajectories: bool = True) -> Path:
        """Save a checkpoint, and return its folder.

        Args:
            has_all_trajectories: wait until all trajectories until now are on the disk, because a
                run that resumes does not play these steps again. False: save without them.

        Raises:
            RunStopped: the trajectories or the checkpoint cannot be written.
        """
        with self.parts.clock.timed("save_checkpoint"), self.console.phase("checkpoint"):
            if has_all_trajectories:
                self.parts.store.wait()
            trainer = self.parts.config.trainer
            checkpoint = save_checkpoint(
                self._folder,
                self.state.step,
                self._save_state,
                {
                    "config": self.parts.config.model_dump(mode="json"),
                    "dtype": self.parts.dtype,
                    "rows": self.plan.fingerprint,
                    "position": self.state.position,
                    "order_start": self.start.order_start,
                    "changes": [asdict(change) for change in self.start.changes],
                    "kl": self.state.kl.coef,
                    "unfinished": self.state.unfinished,
                    "canary": self.parts.publisher.state,
                },
                keep=trainer.keep,
                pinned=self.best.best_of([*find_steps(self._folder), self.state.step]),
            )
        self._last_save, self._saved_step = time.monotonic(), self.state.step
        return checkpoint

    def _save_state(self, folder: Path) -> None:
        """Let the ranks write their parts of a checkpoint. A large one is announced before."""
        if (size := self.parts.learner.ranks.saved_bytes()) >= LARGE_CHECKPOINT:
            self.console.note(
                f"checkpoint of step {self.state.step}: writing {size / 1e9:.1f} GB (weights and"
                " optimizer state). Ctrl-C waits for it; a second Ctrl-C stops at once, without it"
            )
        self.parts.learner.ranks.save(folder)

    def _finish(self) -> Mapping[str, float]:
        """Write the model and the learning curve, and print where the results are."""
        history = read_metrics(self._folder / METRICS)
        if not history:
            raise RunStopped(
                f"{self._folder} is the folder of a finished run, but has no {METRICS}"
            )
        try:
            with self.console.phase("export the model"):
                self.parts.learner.ranks.save_pretrained(self._folder / FINAL, self.parts.dtype)
                self.parts.tokenizer.save_pretrained(self._folder / FINAL)
        except Exception as e:
            if not (isinstance(e, OSError) or is_disk_full(self._folder, e)):
                raise
            fix = (
                f"The checkpoint of step {self.state.step} is complete: free disk space and run"
                " the same command again, or write the model elsewhere: agentrl export"
                f" {self._folder} FOLDER"
            )
            if self.parts.config.trainer.save_freq == "never":
                fix = "There is no checkpoint (trainer.save_freq=never): the run is lost"
            raise RunStopped(f"cannot write {self._folder / FINAL}: {e}. {fix}") from e
        self._write_curve()
        self.diagnosis.finish()
        self.console.finish(self._folder, history, self.parts.config)
        best = self.best.best_of(find_steps(self._folder))
        if best is not None:
            metric = self.parts.config.trainer.keep_best
            self.console.note(f"best checkpoint ({metric}): step {best} in {self._folder}")
        return history[-1][1]

    def _write_curve(self) -> None:
        """Write the learning curve. A picture that cannot be written is a warning."""
        try:
            write_curve(self._folder / METRICS, self._folder / CURVE)
        except Exception as e:
            if not self._curve_failed:
                self.console.warning(f"warning: cannot write {self._folder / CURVE}: {e}")
            self._curve_failed = True


def _is_due(step: int, freq: int, last: bool) -> bool:
    return last or (freq > 0 and step % freq == 0)
