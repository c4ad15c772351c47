"""The training run. `Trainer.step` is the algorithm, `Trainer.run` is everything around it.

A step runs from top to bottom:

    rows ─► groups of scored trajectories ─► Batch ─► Targets ─► learner.update ─► publish ─► next

The state of a run is its global step, its position in the rows, the learner's state, the weight of
the KL penalty and the config. The seeds and the policy version follow from the step. So a
checkpoint is small, and a killed run continues exactly where it was.
"""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.utils import logging

from agentrl.agent_loops.attempt import load_template
from agentrl.callbacks import Callbacks
from agentrl.capacity import check_open_files
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import resolve_device
from agentrl.engine.open import EngineStart, describe_engine
from agentrl.engine.remote.admin import in_thread
from agentrl.errors import ConfigError, EngineError, RunStopped, Terminated
from agentrl.evaluate import evaluate
from agentrl.learner.algorithms import KLController
from agentrl.learner.batch import Batch
from agentrl.learner.dispatch import Placement, check_single_controller
from agentrl.learner.learner import Learner
from agentrl.learner.memory import LOCAL_ROWS
from agentrl.learner.mismatch import MismatchGuard, mean_drift
from agentrl.learner.modes import describe_mode
from agentrl.learner.packing import Mode
from agentrl.learner.policy import describe_targets
from agentrl.learner.profile import annotate
from agentrl.learner.rank import start_ranks
from agentrl.open_files import spare_files
from agentrl.plan import (
    CANARY_TOKENS,
    CANARY_TOKENS_OF_FLOAT32,
    Plan,
    check_policy_learns,
    check_rows_fit,
    check_template_fits,
    describe_run,
    encode_prompts,
    make_canary_row,
    make_plan,
)
from agentrl.record import METRICS, read_metrics
from agentrl.report.diagnosis import LiveDiagnosis
from agentrl.rollout import open_rollouts
from agentrl.store import TrajectoryStore, TrajectoryWriter
from agentrl.torch_threads import choose_threads
from agentrl.trainer.checkpoint import (
    INITIAL,
    find_checkpoint,
    find_steps,
    is_disk_full,
    recover,
    remove_later_checkpoints,
    replace_folder,
    run_lock,
    save_checkpoint,
)
from agentrl.trainer.console import (
    CURVE,
    FINAL,
    TOKENIZER,
    TRAJECTORIES,
    Activity,
    Console,
    open_console,
)
from agentrl.trainer.curve import write_curve
from agentrl.trainer.profile import (
    annotate_episodes,
    check_profile_steps,
    profile_folder,
    profile_step,
    remove_later_profiles,
)
from agentrl.trainer.publisher import ROW_TOKENS_PER_SAMPLE, SAMPLED_SECONDS, Publisher
from agentrl.trainer.resume import Start, find_start, write_config, write_fork
from agentrl.trainer.speed import describe_local_speed, measure_sampling
from agentrl.trainer.step import compute_targets, learn, make_batch
from agentrl.trainer.stream import RolloutStream, StepRollouts
from agentrl.trainer.tracking import EARLY_STOP, Best, Tracker, check_loggers
from agentrl.trajectory import Group, Scored

AUTO_SAVE_S = 1800.0
"""The longest time between two checkpoints with `trainer.save_freq=auto`, in seconds, unless a
single step takes longer. The clock is that of the controller, which decides for all ranks."""
LARGE_CHECKPOINT = 10**9
"""The bytes of a checkpoint from which a run announces it: writing and hashing takes seconds."""


class Trainer:
    """A training run.

        Trainer(load_config("run.yaml")).run()

    A run has one controller process. If a launcher of several processes (torchrun, `accelerate
    launch`) starts it, the constructor raises. `agentrl.demo.tiny_config` makes a config of the
    `tiny` model.

    Attributes:
        config: the run's config.
        placement: where the ranks and the servers run; None: the learner runs in this process.
        plan: the run's rows and rewards, checked.
        folder: the run's folder.
        total_steps: the number of steps of the whole run.
        global_step: the number of steps that are done.
        position: the number of rows taken so far. It includes rows whose groups were filtered out.
        kl: the coefficient of the KL penalty, which may change during the run.
        clock: measures the parts of the step.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan | None = None,
        placement: Placement | None = None,
        console: Console | None = None,
    ):
        """Check everything that can be checked without loading a model.

        Args:
            config: the run's config.
            plan: the run's plan, if its rows were loaded already.
            placement: where the ranks and the servers run. None: the learner runs in this process.
            console: shows the progress; the caller closes it. None: one for standard output.

        Raises:
            UserError: the config, the files or the rows have mistakes; the message lists all.
        """
        check_single_controller(config, placement)
        check_loggers(config.trainer.logger)
        if config.model.path == "tiny":
            raise ConfigError(
                "model.path=tiny is a preset of the command line. In Python:"
                " `from agentrl.demo import tiny_config; Trainer(tiny_config(overrides=[...]))`"
            )
        self.config, self.placement, self._console = config, placement, console
        self.plan = plan or make_plan(config)
        check_policy_learns(self.plan)
        _check_engine_is_apart(config)
        check_open_files(self.plan)
        if not config.trainer.val_only and len(self.plan.train) == 0:
            raise ConfigError("there are no training rows: name a file with --dataset (data.train)")
        self.folder = Path(config.trainer.output)
        Sampling(temperature=config.rollout.temperature).check_trainable()
        self.total_steps = self.plan.total_steps
        self.global_step = 0
        self.position = 0
        self.kl = KLController(config.algorithm)
        self.clock = StepClock()
        self._is_open = False
        """True once `_open` has created the engine, the learner and the other parts of a run."""
        self._is_consistent = True
        """True if the learner's state is that of `global_step` and can be saved."""
        self._unfinished: dict[str, float] | None = None
        """Metrics of a step that was made, but not yet validated and recorded."""
        self._episodes: Sequence[Scored] = ()
        """Episodes of the step that trackers show."""
        self._last_save = time.monotonic()
        self._saved_step = 0
        """The step of the last checkpoint that this process saved."""
        self._curve_failed = False
        self._profile_failed = False

    # -- the algorithm ----------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Run one step: collect rollouts, compute targets, update the weights.

        `run` calls it. It needs the engine and the learner that `run` opens. Weights, step and
        position advance together, so a step that was made can be saved whatever fails next.

        Returns:
            The metrics of the step.

        Raises:
            RunStopped: too many episodes were dropped.
            RuntimeError: `run` has not opened them.
        """
        if not self._is_open:
            raise RuntimeError(
                "Trainer.step needs the engine and the learner that Trainer.run opens"
            )
        with self.clock.timed("gen"), self.interrupt.abandonable():
            rollouts = self.stream.take(self.position, self.global_step)
        if not self.stream.plays_ahead:
            self.engine.sleep()
        with self.clock.timed("store"):
            self._store(rollouts)
        with self.clock.timed("metrics"):
            metrics = rollouts.metrics()
        with self.clock.timed("collate"):
            batch = self._collate(rollouts.groups)  # (B, T)
        targets, signal = compute_targets(self.learner, batch, self.kl, self.clock.timed)
        self.engine.weights_moving()
        self._is_consistent = False  # until the update has finished
        with self.clock.timed("update_actor"):
            step, check = self.global_step + 1, self._check_mismatch
            self.guard.drift = mean_drift(batch, self.publisher.drifts)
            updated, learned = learn(self.learner, batch, targets, self.kl, step, check)
        metrics |= signal | updated
        self._episodes = rollouts.groups[0].scored if rollouts.groups else ()
        self.position, self.global_step = rollouts.position, step
        self._unfinished, self._is_consistent = metrics, True
        self.store.write_learned(step, partial(learned.table, batch))
        return metrics

    def _check_mismatch(self, compared: Mapping[str, float]) -> None:
        """Stop if the logprobs of engine and trainer are suddenly far apart.

        The learner calls this before it changes any weight.
        """
        self._is_consistent = True
        self.guard.check(compared)
        self._is_consistent = False

    def _collate(self, groups: Sequence[Group]) -> Batch:
        pad_id = self.tokenizer.pad_token_id
        return make_batch(
            groups, self.config, self.tokenizer.eos_token_id if pad_id is None else pad_id
        )

    def _store(self, rollouts: StepRollouts) -> None:
        """Store the rollouts of the step, in the background.

        If a file of the last step could not be written, this raises, and the state is still that
        of the last step.
        """
        step = self.global_step + 1
        played = [*rollouts.groups, *rollouts.evicted, *rollouts.greedy]
        annotate_episodes("episodes", played)
        self.store.write(step, rollouts.groups)
        for split, groups in (("evicted", rollouts.evicted), ("baseline", rollouts.greedy)):
            if groups:
                self.store.write(step, groups, split=split)

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Mapping[str, float]:
        """Train to the end. Resume from a checkpoint if there is one.

        Returns:
            The metrics of the last step, including its validation.

        Raises:
            AgentRLError: the run could not start or continue. The message says what was saved.
        """
        with ExitStack() as stack:
            self.spare = stack.enter_context(spare_files())
            stack.enter_context(run_lock(self.folder))
            self._open(stack)
            self.callbacks = Callbacks(self.folder, self.total_steps)
            stack.push(self._call_on_end)
            if self.config.trainer.val_only:
                metrics = self._validate()
                self.store.wait()
                self.callbacks.validation(self.global_step, metrics)
                return metrics
            self._begin(stack)
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

    def _call_on_end(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.interrupt.is_urgent:
            self.callbacks.end(self.global_step, error)

    def _train(self) -> None:
        trainer = self.config.trainer
        self.console.begin(self.folder, self.global_step, self.total_steps, self._activity)
        if self._unfinished is not None:
            self._complete(self._unfinished)
        elif (
            self.global_step == self.start.first_step and trainer.val_before_train and self.plan.val
        ):
            metrics = self._validate()
            self.tracker.log(self.global_step, metrics)
            self.best.add(self.global_step, metrics)
            self._write_curve()
            self.callbacks.validation(self.global_step, metrics)
        while self.global_step < self.total_steps and not self.best.is_over:
            self.interrupt.check()
            with self._profiled():
                self._complete(self._advance())

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Write a profile of the block, the next step, if `trainer.profile_steps` names it."""
        step = self.global_step + 1
        if step not in self.config.trainer.profile_steps:
            yield
            return
        folder = profile_folder(self.folder, step)
        with profile_step(folder, self.learner.ranks, self.placement) as problems:
            yield
        if not problems:
            self.console.note(f"profile of step {step}: {folder}")
        elif not self._profile_failed:
            self._profile_failed = True
            self.console.warning(f"warning: no profile of step {step}: {'; '.join(problems)}")

    def _activity(self) -> Activity:
        """Return what the run does now. The console calls it in a thread of its own."""
        part, start = self.clock.part
        return Activity(part, time.perf_counter() - start, self.rollouts.progress())

    def _advance(self) -> dict[str, float]:
        """Run one step and publish the new policy. The caller validates and records the step."""
        saving = self.clock.seconds.get("save_checkpoint")
        self.clock = StepClock()
        metrics = self.step()
        if saving is not None:
            # The line of a step is on the disk before its checkpoint, so the next line has it.
            metrics["timing_s/save_checkpoint"] = saving
        metrics["training/global_step"] = self.global_step
        metrics["training/epoch"] = self.position / self.plan.epoch_rows
        metrics |= self.clock.metrics(metrics)
        with self.clock.named("publish"), self.rollouts.paused_time_limits():
            gc.collect()  # `collect_rarely` made it rare.
            metrics |= self.publisher.publish(self.global_step)
        self.stream.advance(self.global_step)
        metrics |= self.engine.metrics()
        metrics |= self.clock.metrics(metrics)
        return metrics

    def _complete(self, metrics: dict[str, float]) -> None:
        """Validate if it is due, record the step, save a checkpoint if it is due."""
        step, last = self.global_step, self.global_step == self.total_steps
        validates = bool(self.plan.val) and _is_due(step, self.config.trainer.test_freq, last)
        if validates:
            metrics |= self._validate()
            metrics["timing_s/testing"] = self.clock.seconds["testing"]
        is_best = self.best.add(step, metrics)
        if self.best.is_over and not last:
            metrics[EARLY_STOP] = 1.0
            self.console.note(self.best.describe_stop())
        self.store.check()
        self.tracker.log(step, metrics)
        self.tracker.trace(step, self._episodes)
        self.diagnosis.add(step, metrics)
        self._unfinished = None
        if validates:
            self._write_curve()
        self.console.step(step, self.total_steps, metrics)
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
        freq = self.config.trainer.save_freq
        if freq == "never":
            return None
        if freq != "auto":
            return self._save() if is_best or _is_due(self.global_step, freq, last) else None
        # The end of the next step may be too late.
        seconds = time.monotonic() - self._last_save + metrics.get("timing_s/step", 0.0)
        if last:
            return self._save()
        if validated or seconds >= AUTO_SAVE_S:
            self._last_save = time.monotonic()
            self.store.wait()
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
            is_new = self.global_step > max(self.start.first_step, self._saved_step)
            is_saved = is_new and self.config.trainer.save_freq != "never"
            if self._is_consistent and is_saved and not self.interrupt.is_urgent:
                try:
                    self.store.wait()
                except RunStopped as e:
                    failure = f"{e}\n" if e is not cause else ""
                checkpoint = self._save(has_all_trajectories=False)
                self.console.checkpoint(self.global_step, checkpoint)
                self.callbacks.checkpoint(self.global_step, checkpoint)
        except RunStopped as e:
            failure += f"{e}\n" if str(e) != str(cause) else ""
        except (KeyboardInterrupt, Terminated, Exception) as e:
            failure += f"the step could not be saved: {type(e).__name__}: {e}\n"
        if not self.interrupt.is_urgent:
            with suppress(KeyboardInterrupt, Terminated):
                self._write_curve()
        try:
            saved = find_checkpoint(self.folder, "auto")
        except (KeyboardInterrupt, Terminated, Exception) as e:
            return f"{failure}the checkpoint cannot be read: {type(e).__name__}: {e}"
        if saved is None:
            fork = self.start.fork
            origin = f"the fork of {fork.checkpoint} again" if fork else "from the beginning"
            return f"{failure}nothing was saved; the same command starts {origin}"
        return f"{failure}saved after step {saved.step}; the same command resumes from there"

    def _validate(self) -> dict[str, float]:
        self.clock.seconds.pop("testing", None)
        with (
            self.clock.timed("testing"),
            self.console.phase("validation", self.rollouts.progress),
            self.interrupt.abandonable(),
        ):
            result = evaluate(self.rollouts, self.plan.val, self.config.val)
        annotate_episodes("validation", [*result.groups, *result.greedy_groups])
        self.store.write(self.global_step, result.groups, split="val")
        if result.greedy_groups:
            self.store.write(self.global_step, result.greedy_groups, split="greedy")
        self.best.check_metric(result.metrics)
        self.console.validation(self.global_step, result.metrics)
        return dict(result.metrics)

    # -- opening and finishing --------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Load the model, find the checkpoint to resume from, start the engine and the tools.

        The engine starts while the model loads and the chat template is checked. The first error
        ends all of this.
        """
        config = self.config
        recover(self.folder)
        self.console = self._console or stack.enter_context(open_console())
        with self.console.phase("look for a checkpoint"):
            self.start = find_start(config, self.plan.fingerprint, self.plan.total_steps)
        self.total_steps = self.start.total_steps
        check_profile_steps(config.trainer.profile_steps, self.total_steps)
        if not config.trainer.val_only:
            write_fork(self.folder, self.start)
        logging.disable_progress_bar()  # one bar per model folder is noise
        self.console.note(describe_run(self.plan))
        template = load_template(config)
        self.tokenizer = template.tokenizer
        if config.rollout.name != "local":
            self.console.note(describe_engine(config))
        slots = self.placement.engine_slots() if self.placement else None
        opening = EngineStart(config, self.tokenizer, slots)
        stack.callback(opening.close)
        start = partial(start_ranks, self.placement, config.model.path, config)
        starting = in_thread(start, "start-ranks") if self.placement else None
        with self.console.phase("load the model"):
            check_template_fits(self.plan, template)
            # A rank in this process belongs to this thread, as all its later work does.
            group = start() if starting is None else opening.wait_for(starting)
            self.learner = Learner(
                config.model.path, config, total_steps=self.total_steps, group=group
            )
            if starting is None:
                stack.callback(self.learner.ranks.close)
        mode, reason = self.learner.ranks.mode()
        if mode is not Mode.PACKED:
            self.console.note(describe_mode(mode, reason, config.rollout.n))
        if config.model.lora_rank and (line := describe_targets(config.model)):
            self.console.note(line)
        with self.console.phase("load the checkpoint"):
            canary = self._load(self.start)
        with self.console.phase("start the engine"):
            self.engine, self._dtype = opening.finish(), opening.dtype
        self.console.note(f"threads: {self._describe_threads()}")
        check_rows_fit(self.plan, template, self.engine.max_length)
        self.rollouts = stack.enter_context(
            open_rollouts(config, self.engine, template, self.plan.scorer)
        )
        self.stream = RolloutStream(
            config, self.plan.train, self.rollouts, self._collate, total_steps=self.total_steps
        )
        stack.callback(self.stream.close)
        self.publisher = Publisher(
            self.learner,
            self.engine,
            make_canary_row(self.plan, template, self._canary_tokens()),
            lambda ids: self.rollouts.run(self.engine.scores(ids)),
            canary,
            sample=lambda ids: self.rollouts.run(
                self.engine.continue_row(
                    ids, -(-len(ids) // ROW_TOKENS_PER_SAMPLE), SAMPLED_SECONDS
                )
            ),
        )
        with self.console.phase("send the weights and compare the engine"):
            self.publisher.publish(self.global_step)
        on_gpu = resolve_device(config.trainer.device) != "cpu"
        if on_gpu and isinstance(self.engine, LocalEngine) and self.plan.train:
            rows = min(LOCAL_ROWS, config.rollouts_of_step)
            samples = islice(self.plan.train, config.data.batch_size)
            prompts = [*encode_prompts(samples, template)]
            with suppress(EngineError):  # A slow engine is no reason to end the run.
                speed = self.rollouts.run(measure_sampling(self.engine, prompts, rows))
                self.console.note(describe_local_speed(speed, config.rollout.python))
        self.guard = MismatchGuard(self.publisher.noise)
        keep = config.trainer.keep_trajectories
        store = TrajectoryStore(self.folder / TRAJECTORIES)
        self.store = TrajectoryWriter(store, keep, self.console.warning)
        stack.callback(self.store.close)
        self.best = Best(config.trainer.keep_best, config.trainer.patience, config.val.n)
        self.interrupt = stack.enter_context(Interrupt())
        self._is_open = True

    def _canary_tokens(self) -> int:
        """Return the length of the canary; the row must be shorter than the engine's longest."""
        is_exact = isinstance(self.engine, LocalEngine) and self.engine.dtype == torch.float32
        tokens = CANARY_TOKENS_OF_FLOAT32 if is_exact else CANARY_TOKENS
        return min(tokens, self.engine.max_length - 1)

    def _describe_threads(self) -> str:
        """Return the CPU threads of the learner and of a local engine, and why."""
        if self.placement:
            return self.placement.describe_threads()
        learner = choose_threads(current=torch.get_num_threads())
        if isinstance(self.engine, LocalEngine):
            return f"the learner uses {learner}, the local engine {self.engine.threads}"
        return f"the learner uses {learner}"

    def _load(self, start: Start) -> Mapping[str, Any] | None:
        """Load the state that the run starts from.

        Returns:
            The state of the canary; None for a new run or a new fork, whose engine or rows may be
            others.
        """
        if start.checkpoint is None:
            return None
        meta = start.checkpoint.meta
        self.learner.ranks.load(start.checkpoint.folder)
        self.global_step, self.position = start.checkpoint.step, start.position
        if "algorithm.kl_reward_coef" not in {change.key for change in start.new_changes}:
            self.kl.load(meta["kl"])
        for line in start.describe():
            self.console.note(line)
        if start.is_new_fork:  # the other run records its last step itself
            return None
        self._unfinished = meta["unfinished"]
        return meta["canary"]

    def _begin(self, stack: ExitStack) -> None:
        """Open the run's record, and remove what was written after the checkpoint."""
        last_step = self.global_step
        if self.global_step == 0 or self.start.is_new_fork:
            last_step = -1
        remove_later_checkpoints(self.folder, self.global_step)
        TrajectoryStore(self.folder / TRAJECTORIES).truncate_after(last_step)
        remove_later_profiles(self.folder, self.global_step)
        if self._unfinished is not None:
            last_step -= 1
        self.tracker = Tracker(
            self.folder,
            self.config.trainer.logger,
            config=self.config.model_dump(),
            resumed_step=last_step,
            warn=self.console.warning,
        )
        stack.callback(self.tracker.close)
        write_config(self.folder, self.config, self.start)
        if self.start.checkpoint is None:
            shutil.rmtree(self.folder / INITIAL, ignore_errors=True)
            if self.config.model.lora_rank:
                replace_folder(self.folder / INITIAL, self.learner.ranks.save)
        self._save_tokenizer()
        tokens = self.config.rollout.max_trajectory_tokens
        size = self.store.describe_size(self.total_steps, self.config.rollouts_of_step, tokens)
        self.console.note(size)
        record = read_metrics(self.folder / METRICS)
        self.diagnosis = LiveDiagnosis(
            self.folder, warn=self.console.warning, found=self.console.finding
        )
        for step, metrics in record:
            self.best.add(step, metrics)
        self._last_save = time.monotonic()

    def _save_tokenizer(self) -> None:
        """Save the tokenizer into the run's folder, so that the folder alone shows texts.

        Training does not need it: if it cannot be written, this is a warning.
        """
        folder = self.folder / TOKENIZER
        try:
            replace_folder(folder, self.tokenizer.save_pretrained)
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
        with self.clock.timed("save_checkpoint"), self.console.phase("checkpoint"):
            if has_all_trajectories:
                self.store.wait()
            trainer = self.config.trainer
            checkpoint = save_checkpoint(
                self.folder,
                self.global_step,
                self._save_state,
                {
                    "config": self.config.model_dump(mode="json"),
                    "dtype": self._dtype,
                    "rows": self.plan.fingerprint,
                    "position": self.position,
                    "order_start": self.start.order_start,
                    "changes": [asdict(change) for change in self.start.changes],
                    "kl": self.kl.coef,
                    "unfinished": self._unfinished,
                    "canary": self.publisher.state,
                },
                keep=trainer.keep,
                pinned=self.best.best_of([*find_steps(self.folder), self.global_step]),
            )
        self._last_save, self._saved_step = time.monotonic(), self.global_step
        return checkpoint

    def _save_state(self, folder: Path) -> None:
        """Let the ranks write their parts of a checkpoint. A large one is announced before."""
        if (size := self.learner.ranks.saved_bytes()) >= LARGE_CHECKPOINT:
            self.console.note(
                f"checkpoint of step {self.global_step}: writing {size / 1e9:.1f} GB (weights and"
                " optimizer state). Ctrl-C waits for it; a second Ctrl-C stops at once, without it"
            )
        self.learner.ranks.save(folder)

    def _finish(self) -> Mapping[str, float]:
        """Write the model and the learning curve, and print where the results are."""
        history = read_metrics(self.folder / METRICS)
        if not history:
            raise RunStopped(f"{self.folder} is the folder of a finished run, but has no {METRICS}")
        try:
            with self.console.phase("export the model"):
                self.learner.ranks.save_pretrained(self.folder / FINAL, self._dtype)
                self.tokenizer.save_pretrained(self.folder / FINAL)
        except Exception as e:
            if not (isinstance(e, OSError) or is_disk_full(self.folder, e)):
                raise
            fix = (
                f"The checkpoint of step {self.global_step} is complete: free disk space and run"
                " the same command again, or write the model elsewhere: agentrl export"
                f" {self.folder} FOLDER"
            )
            if self.config.trainer.save_freq == "never":
                fix = "There is no checkpoint (trainer.save_freq=never): the run is lost"
            raise RunStopped(f"cannot write {self.folder / FINAL}: {e}. {fix}") from e
        self._write_curve()
        self.diagnosis.finish()
        self.console.finish(self.folder, history, self.config)
        best = self.best.best_of(find_steps(self.folder))
        if best is not None:
            metric = self.config.trainer.keep_best
            self.console.note(f"best checkpoint ({metric}): step {best} in {self.folder}")
        return history[-1][1]

    def _write_curve(self) -> None:
        """Write the learning curve. A picture that cannot be written is a warning."""
        try:
            write_curve(self.folder / METRICS, self.folder / CURVE)
        except Exception as e:
            if not self._curve_failed:
                self.console.warning(f"warning: cannot write {self.folder / CURVE}: {e}")
            self._curve_failed = True


def _check_engine_is_apart(config: Config) -> None:
    """Raise `ConfigError` if rollouts would go on while the learner uses the same GPU."""
    staleness, device = config.trainer.max_staleness, config.trainer.device
    if staleness and config.rollout.name == "local" and resolve_device(device) != "cpu":
        raise ConfigError(
            f"trainer.max_staleness={staleness}: rollouts go on while the learner computes, but"
            f" with rollout.name=local and trainer.device={device} both use one GPU. Set"
            " trainer.device=cpu, or trainer.max_staleness=0"
        )


def _is_due(step: int, freq: int, last: bool) -> bool:
    return last or (freq > 0 and step % freq == 0)


# --- clock and signals ---------------------------------------------------------------------------


class StepClock:
    """Measures the time of one step and of its parts. The step begins when the clock is created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds by part; a part that ran several times has the sum."""
        self.part = "", self._start
        """The part that runs now, and the `time.perf_counter()` of its start."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of the block, even if it raises."""
        start = time.perf_counter()
        try:
            with self.named(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Let `part` name the block."""
        self.part = name, time.perf_counter()
        try:
            with annotate(name):
                yield
        finally:
            self.part = "", time.perf_counter()

    def metrics(self, step: Mapping[str, float]) -> dict[str, float]:
        """Return `timing_s/*` until now, and `perf/throughput` in sampled tokens per second."""
        seconds = self.seconds | {"step": time.perf_counter() - self._start}
        sampled = step.get("rollout/sampled_tokens", 0.0)
        times = {f"timing_s/{name}": s for name, s in seconds.items()}
        return times | {"perf/throughput": sampled / seconds["step"]}


class Interrupt:
    """Handles SIGINT and SIGTERM: the first signal is a request, the second one stops at once.

    Rollouts can be abandoned at any moment, an optimizer step cannot. So the trainer calls `check`
    where its state is consistent.
    """

    def __init__(self) -> None:
        self.is_urgent = False
        """True after a second signal."""
        self._request: KeyboardInterrupt | Terminated | None = None
        self._abandonable = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Stop here if a signal has arrived.

        Raises:
            KeyboardInterrupt: SIGINT has arrived.
            Terminated: SIGTERM has arrived.
        """
        if self._request is not None:
            raise self._request

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Let a signal stop the block at once. The block must not change state that is saved."""
        self.check()
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_urgent = self._request is not None
        self._request = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self.is_urgent or self._abandonable:
            raise self._request
        print("\nstopping; press Ctrl-C again to stop at once", flush=True)
