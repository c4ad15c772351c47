"""The run: `Trainer.step` is the algorithm, `Trainer.run` is everything around it.

A step is synchronous and has no way back:

    rows ─► groups of scored trajectories ─► Batch ─► Targets ─► learner.update ─► publish ─► next

What a run is at any moment is its global step, its position in the rows, the learner's state, the
weight of the KL and the config; the seeds and the policy version follow from the step. So a
checkpoint is small, and a killed run goes on as if nothing had happened.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from torch import Tensor
from transformers.utils import logging

from agentrl.agent_loops.attempt import load_template
from agentrl.capacity import check_open_files
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.open import open_engine, opening
from agentrl.errors import ConfigError, RunStopped
from agentrl.evaluate import evaluate
from agentrl.open_files import spare_files
from agentrl.plan import Plan, check_model_fits, check_policy_learns, fixed_row, make_plan, wiring
from agentrl.rollout import open_rollouts
from agentrl.store import TrajectoryStore
from agentrl.trainer.algorithms import KLController, has_learning_signal, make_targets, rollout_kl
from agentrl.trainer.batch import Batch, collate
from agentrl.trainer.checkpoint import (
    check_resumable,
    find_checkpoint,
    hash_file,
    recover,
    remove_later_checkpoints,
    run_lock,
    save_checkpoint,
)
from agentrl.trainer.collect import DEAD_STEP, Collector, DeadSteps, StepRollouts
from agentrl.trainer.console import CURVE, FINAL, TRAJECTORIES, Console
from agentrl.trainer.curve import write_curve
from agentrl.trainer.dispatch import Placement, check_single_controller
from agentrl.trainer.learner import Learner
from agentrl.trainer.mismatch import MismatchGuard
from agentrl.trainer.publisher import Publisher
from agentrl.trainer.rank import start_ranks
from agentrl.trainer.tracking import METRICS, Tracker, check_loggers, read_metrics
from agentrl.trajectory import Group


class Trainer:
    """A training run.

        Trainer(config).run()

    Started by a launcher of many processes (torchrun, `accelerate launch`) it refuses: a run is one
    controller.
    """

    def __init__(
        self, config: Config, plan: Plan | None = None, placement: Placement | None = None
    ):
        """Check everything that can be checked without a model.

        Args:
            config: the run's.
            plan: the run's, where its rows were loaded already.
            site: where ranks and servers are; None: the learner is this process.

        Raises:
            UserError: all that is wrong with config, files and rows.
        """
        check_single_controller(config, placement)
        check_loggers(config.trainer.logger)
        if config.model.path == "tiny":
            raise ConfigError(
                "model.path=tiny is a preset of the command line. In Python:"
                " `from agentrl.demo import tiny_config; Trainer(tiny_config(overrides=[...]))`"
            )
        self.config, self.placement = config, placement
        self.plan = plan or make_plan(config)
        check_policy_learns(self.plan)
        check_open_files(self.plan)
        if not config.trainer.val_only and len(self.plan.train) == 0:
            raise ConfigError("no training rows: give --dataset FILE (data.train)")
        self.folder = Path(config.trainer.output)
        Sampling(temperature=config.rollout.temperature).check_trainable()
        self.total_steps = self.plan.total_steps
        self.global_step = 0
        self.position = 0
        """How many rows were taken: more than the steps' batches where groups are set aside."""
        self.kl = KLController(config.algorithm)
        self.clock = StepClock()
        self._is_consistent = True
        """Whether the learner's state is that of `global_step`, and may be saved."""
        self._unfinished: dict[str, float] | None = None
        """Metrics of the step that was made, but neither validated nor recorded."""

    # -- the algorithm ----------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """One step: play, judge, learn.

        Returns:
            The step's metrics.
        """
        with self.clock.timed("gen"), self.interrupt.abandonable():
            step_rollouts = self.collector.collect(self.position, self.global_step)
        self.engine.sleep()
        self._store(step_rollouts)
        batch = self._collate(step_rollouts.groups)  # (B, T)
        with self.clock.timed("ref"):
            reference = self.learner.reference_logprobs(batch)  # (B, T) or None
        with self.clock.timed("values"):
            values = self.learner.values(batch)  # (B, T) or None
        with self.clock.timed("old_log_prob"):
            old = self.learner.old_logprobs(batch)  # (B, T) or None
        targets = make_targets(batch, self.config, old, values, reference, kl_coef=self.kl.coef)
        self._is_consistent = False  # until the update is made
        with self.clock.timed("update_actor"):
            metrics = self.learner.update(
                batch,
                targets,
                self.global_step + 1,
                self._check_mismatch,
                learn_policy=self._policy_learns,
            )
        metrics[DEAD_STEP] = float(not has_learning_signal(batch, self.config.algorithm, targets))
        self.position = step_rollouts.position
        return metrics | self._update_kl_coef(batch, old, reference) | step_rollouts.metrics

    @property
    def _policy_learns(self) -> bool:
        return self.global_step >= self.config.algorithm.critic_only_steps

    def _check_mismatch(self, compared: Mapping[str, float]) -> None:
        """Stop where engine and trainer are suddenly far apart, before a weight moves."""
        self._is_consistent = True
        self.guard.check(compared)
        self._is_consistent = False

    def _collate(self, groups: Sequence[Group]) -> Batch:
        reward, pad_id = self.config.reward, self.tokenizer.pad_token_id
        return collate(
            groups,
            self.tokenizer.eos_token_id if pad_id is None else pad_id,
            turn_weight=reward.turn_weight,
            tool_weight=reward.tool_weight,
        )

    def _update_kl_coef(
        self, batch: Batch, old: Tensor | None, reference: Tensor | None
    ) -> dict[str, float]:
        """Steer the weight of the KL in the reward for the next step, where there is one."""
        if not self.kl.coef or not self._policy_learns or old is None or reference is None:
            return {}
        kl, coef = rollout_kl(batch, old, reference, self.config.algorithm.kl_type), self.kl.coef
        self.kl.update(kl, int(batch.train.sum()))
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}

    def _store(self, step_rollouts: StepRollouts) -> None:
        """Store the step's rollouts.

        This comes before the update: if it fails, the weights are still those of the last step, and
        a checkpoint can be saved.
        """
        step = self.global_step + 1
        self.store.write(step, step_rollouts.groups)
        for split, groups in (
            ("evicted", step_rollouts.evicted),
            ("baseline", step_rollouts.greedy),
        ):
            if groups:
                self.store.write(step, groups, split=split)

    # -- the run ----------------------------------------------------------------------------------

    def run(self) -> Mapping[str, float]:
        """Train to the end, resuming what was begun.

        Returns:
            The last step's metrics, its validation included.

        Raises:
            AgentRLError: the run could not begin or go on; what was saved is named.
        """
        with ExitStack() as stack:
            self.spare = stack.enter_context(spare_files())
            stack.enter_context(run_lock(self.folder))
            self._open(stack)
            if self.config.trainer.val_only:
                return self._validate()
            self._begin(stack)
            try:
                self._train()
            except RunStopped as e:
                raise RunStopped(f"{e}\n{self._save_after_error()}") from e
            except (KeyboardInterrupt, Exception):
                self.console.note(self._save_after_error())
                raise
            return self._finish()

    def _train(self) -> None:
        trainer = self.config.trainer
        if self._unfinished is not None:
            self._complete(self._unfinished)
        elif self.global_step == 0 and trainer.val_before_train and self.plan.val:
            self.tracker.log(0, self._validate())
        while self.global_step < self.total_steps:
            self.interrupt.check()
            self._complete(self._advance())

    def _advance(self) -> dict[str, float]:
        """One step, published; its validation and its line in the record are still to come."""
        self.clock = StepClock()
        metrics = self.step()
        self.global_step += 1
        metrics["training/global_step"] = self.global_step
        metrics["training/epoch"] = self.position / len(self.plan.train)
        metrics |= self.clock.metrics(metrics)
        # What was learned is not lost with an engine that does not take it.
        self._unfinished, self._is_consistent = metrics, True
        metrics |= self.publisher.publish(self.global_step)
        metrics |= self.engine.metrics()
        metrics |= self.clock.metrics(metrics)
        return metrics

    def _complete(self, metrics: dict[str, float]) -> None:
        """Validate where it is due, record the step, save where it is due."""
        trainer, last = self.config.trainer, self.global_step == self.total_steps
        if self.plan.val and _is_due(self.global_step, trainer.test_freq, last):
            metrics |= self._validate()
            metrics["timing_s/testing"] = self.clock.seconds["testing"]
        self.tracker.log(self.global_step, metrics)
        self.dead_steps.add(self.global_step, metrics)
        self._unfinished = None
        self.console.step(self.global_step, self.total_steps, metrics)
        if _is_due(self.global_step, trainer.save_freq, last):
            self._save()

    def _save_after_error(self) -> str:
        """Save what a stopped run has, if that is whole, and say so.

        Within an update it is not: half of its optimizer steps may be made. And a second signal
        means at once. No failure here may hide why the run stopped: ranks may be gone, a disk full,
        or no descriptor left.
        """
        self.spare.close()
        failure = ""
        try:
            if self._is_consistent and self.global_step > 0 and not self.interrupt.is_urgent:
                self._save()
        except RunStopped as e:
            failure = f"{e}\n"
        except Exception as e:
            failure = f"the step could not be saved: {type(e).__name__}: {e}\n"
        try:
            saved = find_checkpoint(self.folder, "auto")
        except Exception as e:
            return f"{failure}the checkpoint cannot be read: {type(e).__name__}: {e}"
        if saved is None:
            return f"{failure}nothing was saved; the same command starts from the beginning"
        return f"{failure}saved after step {saved.step}; the same command goes on from there"

    def _validate(self) -> dict[str, float]:
        self.clock.seconds.pop("testing", None)
        with self.clock.timed("testing"), self.interrupt.abandonable():
            result = evaluate(self.rollouts, self.plan.val, self.config.val)
        self.store.write(self.global_step, result.groups, split="val")
        if result.greedy_groups:
            self.store.write(self.global_step, result.greedy_groups, split="greedy")
        self.console.validation(self.global_step, result.metrics)
        return dict(result.metrics)

    # -- beginning and end ------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> None:
        """Load the model, find where to go on, start the engine and the tools."""
        config = self.config
        recover(self.folder)
        checkpoint = find_checkpoint(self.folder, config.trainer.resume)
        self._rows = hash_file(config.data.train)
        if checkpoint is not None:
            check_resumable(checkpoint, config, self._rows)
        logging.disable_progress_bar()  # a bar per model folder says nothing here
        self.folder.mkdir(parents=True, exist_ok=True)
        if not config.trainer.val_only:
            (self.folder / "config.yaml").write_text(config.resolved_yaml())
        self.console = stack.enter_context(Console())
        self.console.note(wiring(self.plan))
        template = load_template(config)
        self.tokenizer = template.tokenizer
        group = start_ranks(self.placement, config.model.path, config)
        self.learner = Learner(config.model.path, config, total_steps=self.total_steps, group=group)
        if checkpoint is not None:
            self.learner.ranks.load(checkpoint.folder)
            self.global_step = checkpoint.step
            # Older ones have neither: every step took a batch, and no weight was steered.
            before = self.global_step * config.data.batch_size
            self.position = checkpoint.meta.get("position", before)
            self.kl.load(checkpoint.meta.get("kl", self.kl.coef))
            self._unfinished = checkpoint.meta["unfinished"]
            for line in checkpoint.skipped:
                self.console.note(f"skipped: {line}")
            self.console.note(f"going on from step {self.global_step} ({checkpoint.folder})")
        if config.rollout.name != "local":
            self.console.note(opening(config))
        slots = self.placement.engine_slots() if self.placement else None
        self.engine = open_engine(config, self.tokenizer, slots)
        stack.callback(self.engine.close)
        check_model_fits(self.plan, template, self.engine.max_length)
        self.rollouts = stack.enter_context(
            open_rollouts(config, self.engine, template, self.plan.scorer)
        )
        self.collector = Collector(config, self.plan.train, self.rollouts, self._collate)
        self.publisher = Publisher(
            self.learner,
            self.engine,
            fixed_row(self.plan, template, self.engine.max_length),
            lambda ids: self.rollouts.run(self.engine.scores(ids)),
            noise=checkpoint.meta.get("noise") if checkpoint else None,
            canary=checkpoint.meta.get("canary") if checkpoint else None,
        )
        self.publisher.publish(self.global_step)
        self.guard = MismatchGuard(self.publisher.noise)
        self.store = TrajectoryStore(self.folder / TRAJECTORIES)
        self.interrupt = stack.enter_context(Interrupt())

    def _begin(self, stack: ExitStack) -> None:
        """Cut the record where the run goes on: what lies after is an abandoned future."""
        kept = self.global_step if self.global_step > 0 else -1
        remove_later_checkpoints(self.folder, self.global_step)
        self.store.truncate_after(kept)
        if self._unfinished is not None:
            kept -= 1
        self.tracker = Tracker(
            self.folder,
            self.config.trainer.logger,
            config=self.config.model_dump(),
            resumed_step=kept,
            warn=self.console.note,
        )
        stack.callback(self.tracker.close)
        self.dead_steps = DeadSteps(read_metrics(self.folder / METRICS))

    def _save(self) -> None:
        with self.clock.timed("save_checkpoint"):
            save_checkpoint(
                self.folder,
                self.global_step,
                self.learner.ranks.save,
                {
                    "config": self.config.model_dump(mode="json"),
                    "rows": self._rows,
                    "position": self.position,
                    "kl": self.kl.coef,
                    "unfinished": self._unfinished,
                    "noise": self.publisher.noise,
                    "canary": self.publisher.canary,
                },
            )

    def _finish(self) -> Mapping[str, float]:
        """Leave the model and the curve, and say where everything lies."""
        history = read_metrics(self.folder / METRICS)
        if not history:
            raise RunStopped(f"{self.folder} holds a finished run, but no {METRICS}")
        self.learner.ranks.save_pretrained(self.folder / FINAL)
        self.tokenizer.save_pretrained(self.folder / FINAL)
        write_curve(self.folder / METRICS, self.folder / CURVE)
        self.console.finish(self.folder, history, self.config)
        self.dead_steps.finish()
        return history[-1][1]


def _is_due(step: int, freq: int, last: bool) -> bool:
    return last or (freq > 0 and step % freq == 0)


# --- around a step -----------------------------------------------------------------------------


class StepClock:
    """The times of one step's parts; it runs from its making."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """By part, summed where one came several times."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block, also of one that fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, step: Mapping[str, float]) -> dict[str, float]:
        """`timing_s/*` until now, and `perf/throughput` in sampled tokens a second."""
        seconds = self.seconds | {"step": time.perf_counter() - self._start}
        sampled = step.get("rollout/sampled_tokens", 0.0)
        times = {f"timing_s/{name}": s for name, s in seconds.items()}
        return times | {"perf/throughput": sampled / seconds["step"]}


class Interrupt:
    """Turns the first signal into a request that `check` answers, the second into the end.

    Rollouts may be abandoned at any moment, an optimizer step may not: the trainer calls `check`
    where its state is whole.
    """

    def __init__(self) -> None:
        self.is_urgent = False
        """Whether there was a second signal."""
        self._is_requested = False
        self._abandonable = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        # Signals belong to the main thread; elsewhere (a notebook's worker) they are the host's.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """End here if a signal came.

        Raises:
            KeyboardInterrupt: it did.
        """
        if self._is_requested:
            raise KeyboardInterrupt

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """What runs in this block changes no state that is saved: a signal ends it at once."""
        self.check()
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_urgent, self._is_requested = self._is_requested, True
        if self.is_urgent or self._abandonable:
            raise KeyboardInterrupt
        print("\nstopping; once more to stop at once", flush=True)
