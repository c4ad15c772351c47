"""The parts of an open run, and the state that its steps change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.data import Curriculum
from agentrl.engine.base import Engine
from agentrl.learner.algorithms import KLController
from agentrl.learner.dispatch import Placement
from agentrl.learner.learner import Learner
from agentrl.learner.mismatch import MismatchGuard
from agentrl.preflight import Plan
from agentrl.rollout import Rollouts
from agentrl.store import TrajectoryWriter
from agentrl.trainer.clock import StepClock
from agentrl.trainer.display import Display
from agentrl.trainer.interrupt import Interrupt
from agentrl.trainer.publisher import Publisher
from agentrl.trainer.recorded import RecordedStream
from agentrl.trainer.resume import Start
from agentrl.trainer.stream import RolloutStream
from agentrl.trainer.teacher import Teacher
from agentrl.trajectory import Scored


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, which `agentrl.trainer.open.open_run` makes and closes."""

    config: Config
    plan: Plan
    """The rows and rewards of the run."""
    start: Start
    """The state that the run starts from."""
    display: Display
    placement: Placement | None
    """Where the ranks and the servers run; None: the learner runs in this process."""
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    """The padding token of batches. No forward pass reads it."""
    stream: RolloutStream | RecordedStream
    """Takes the rows of each step and plays them, or takes recorded answers."""
    rollouts: Rollouts
    """Plays rows; the stream and validations use it."""
    engine: Engine
    dtype: str
    """The precision in which the engine samples; see `EngineStart`."""
    learner: Learner
    teacher: Teacher | None
    """Scores the rows of each step; None without a teacher."""
    publisher: Publisher
    guard: MismatchGuard
    store: TrajectoryWriter
    clock: StepClock
    interrupt: Interrupt

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.trainer.output)


@dataclass(slots=True)
class RunState:
    """The state of a run besides that of its learner. The seeds follow from it.

    The weights change during a step. Step and position change when the step is committed, after its
    update.
    """

    kl: KLController
    """The weight of the KL penalty. The update of a step changes it."""
    step: int = 0
    """The number of steps that are done, which is the version of the policy."""
    position: int = 0
    """The number of rows taken so far. It includes rows whose groups were filtered out."""
    curriculum: Curriculum | None = None
    """The success of the rows, with `data.curriculum`. The commit of a step changes it."""
    unfinished: dict[str, float] | None = None
    """Metrics of a step that was made, but not yet validated and recorded."""
    is_consistent: bool = True
    """True if the learner's state is that of `step` and can be saved. An update makes it False."""

    def commit(self, made: MadeStep) -> None:
        """Advance to a step whose update has finished. From now on it can be saved."""
        if self.curriculum is not None:
            self.curriculum.commit(made.position, made.successes)
            made.metrics.update(self.curriculum.metrics())
        self.step, self.position = self.step + 1, made.position
        self.unfinished, self.is_consistent = made.metrics, True


@dataclass(frozen=True, slots=True)
class MadeStep:
    """The result of a step, besides the new weights."""

    position: int
    """The number of rows that the run has taken, including those of this step."""
    successes: Sequence[tuple[int, float]]
    """The index of each row that was played, and the mean success of its rollouts."""
    metrics: dict[str, float]
    episodes: Sequence[Scored]
    """Episodes that trackers show: those of the first group."""
    learned: Callable[[], pa.Table]
    """Returns the numbers that the update used for each token; see `Learned.table`."""
