"""The training run: checks the config, opens the parts of the run, and runs it.

`train_step` (`agentrl.trainer.step`) is the algorithm, and `Run` (`agentrl.trainer.run`) is the
loop around it. The state of a run is its global step, its position in the rows, the success of the
rows with a curriculum, the learner's state, the weight of the KL penalty and the config. The seeds
and the policy version follow from the step. So a checkpoint is small, and a killed run continues
exactly where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from agentrl.callbacks import Notifier, Observer
from agentrl.config import Config
from agentrl.engine.local.load import resolve_device
from agentrl.errors import ConfigError
from agentrl.learner.algorithms import KLController
from agentrl.learner.dispatch import Placement, check_single_controller
from agentrl.open_files import spare_files
from agentrl.preflight import Plan, check_open_files, check_policy_learns, make_plan
from agentrl.trainer import default_observers
from agentrl.trainer.best import Best
from agentrl.trainer.checkpoint import recover, run_lock
from agentrl.trainer.display import Display
from agentrl.trainer.open import open_run
from agentrl.trainer.parts import RunState
from agentrl.trainer.profile import check_profile_steps
from agentrl.trainer.resume import find_start, write_fork
from agentrl.trainer.run import Run, open_record, validate
from agentrl.trainer.saving import Saver


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
        state: the number of steps and rows until now, and the weight of the KL penalty.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan | None = None,
        placement: Placement | None = None,
        observers: Sequence[Observer] | None = None,
        display: Display | None = None,
    ):
        """Check everything that can be checked without loading a model.

        Args:
            config: the run's config.
            plan: the run's plan, if its rows were loaded already.
            placement: where the ranks and the servers run. None: the learner runs in this process.
            observers: follow the run, in this order. None: those of `agentrl train`, which are the
                console, trackers, learning curve, diagnoses and the user's callbacks.
            display: shows what takes long; the caller closes it. None: lines on standard output.

        Raises:
            UserError: the config, the files or the rows have mistakes; the message lists all.
        """
        check_single_controller(config, placement)
        if config.model.path == "tiny":
            raise ConfigError(
                "model.path=tiny is a preset of the command line. In Python:"
                " `from agentrl.demo import tiny_config; Trainer(tiny_config(overrides=[...]))`"
            )
        self.config, self.placement = config, placement
        self._display, self._observers = display, observers
        self.plan = plan or make_plan(config)
        check_policy_learns(self.plan)
        _check_engine_is_apart(config)
        check_open_files(self.plan)
        if not config.trainer.val_only and len(self.plan.train) == 0:
            raise ConfigError("there are no training rows: name a file with --dataset (data.train)")
        self.folder = Path(config.trainer.output)
        self.total_steps = self.plan.total_steps
        self.state = RunState(KLController(config.algorithm))

    def run(self) -> Mapping[str, float]:
        """Train to the end. Resume from a checkpoint if there is one.

        Returns:
            The metrics of the last step, including its validation.

        Raises:
            AgentRLError: the run could not start or continue. The message says what was saved.
        """
        config, state = self.config, self.state
        with ExitStack() as stack:
            spare = stack.enter_context(spare_files())
            stack.enter_context(run_lock(self.folder))
            recover(self.folder)
            display, observers = self._display or Display(), self._observers
            if observers is None:
                display, observers = stack.enter_context(default_observers[0](config))
            with display.phase("look for a checkpoint"):
                start = find_start(config, self.plan.fingerprint, self.plan.total_steps)
            self.total_steps = start.total_steps
            check_profile_steps(config.trainer.profile_steps, self.total_steps)
            if not config.trainer.val_only:
                write_fork(self.folder, start)
            parts = stack.enter_context(
                open_run(config, self.plan, start, state, display, self.placement)
            )
            best = Best(config.trainer.keep_best, config.trainer.patience, config.val.n)
            notifier = Notifier(observers, self.folder, self.total_steps)

            def notify_end(_: object, error: BaseException | None, __: object) -> None:
                if not parts.interrupt.is_urgent:
                    notifier.notify("on_end", state.step, error=error)

            stack.push(notify_end)
            if config.trainer.val_only:
                metrics = validate(parts, state.step, best)
                parts.store.wait()
                notifier.notify("on_validation", state.step, metrics)
                return metrics
            record = stack.enter_context(closing(open_record(parts, state)))
            saver = Saver(parts, state, best, notifier, spare)
            return Run(parts, state, record, best, notifier, saver).run()


def _check_engine_is_apart(config: Config) -> None:
    """Raise `ConfigError` if rollouts would go on while the learner uses the same GPU."""
    staleness, device = config.trainer.max_staleness, config.trainer.device
    if config.plays_ahead and config.rollout.name == "local" and resolve_device(device) != "cpu":
        raise ConfigError(
            f"trainer.max_staleness={staleness}: rollouts go on while the learner computes, but"
            f" with rollout.name=local and trainer.device={device} both use one GPU. Set"
            " trainer.device=cpu, or trainer.max_staleness=0"
        )
