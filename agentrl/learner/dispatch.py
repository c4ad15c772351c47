"""How a method is called on all ranks: how its arguments are split and its results collected.

    class Rank:
        @dispatch(SPLIT)
        def forward(self, share, model): ...

        @dispatch(BROADCAST)
        def optimizer_step(self, name, lr): ...

    group.forward([share_0, share_1], model)    # a list: the result of each rank
    group.optimizer_step(name, lr)              # the result of rank 0

A group has the methods of its ranks. The ranks are one object in this process
(`rank.LocalRankGroup`) or many processes (`agentrl.cluster.group.WorkerGroup`). Callers use both in
the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from agentrl.config import Config
from agentrl.engine.remote.launch import EngineSlot
from agentrl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """A way to split the arguments of a call over ranks and to collect the results."""

    SPLIT = "split"
    """The first argument and the result are lists with one entry per rank. Further arguments are
    the same for all ranks."""
    BROADCAST = "broadcast"
    """All ranks get the same arguments. The result is that of rank 0."""


SPLIT, BROADCAST = Dispatch.SPLIT, Dispatch.BROADCAST


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Declare how a method of a rank is called on all ranks."""

    def mark(method: F) -> F:
        method.dispatch = mode  # type: ignore[attr-defined]
        return method

    return mark


def dispatched_methods(cls: type) -> dict[str, Dispatch]:
    """Return the methods of a class that are called on all ranks, by name."""
    return {
        name: method.dispatch
        for name in dir(cls)
        if hasattr(method := getattr(cls, name), "dispatch")
    }


class RankGroup(Protocol):
    """A group of ranks. It has the methods that the ranks' class marks by `dispatch`.

    `agentrl.learner.rank.LearnerRanks` declares those of a learner.
    """

    size: int
    """The number of ranks."""

    def close(self) -> None:
        """End the ranks."""
        ...


class Placement(Protocol):
    """The part of a cluster that a run uses (`agentrl.cluster.open_placement`)."""

    def start_ranks(self, cls: type, *args: Any, **kwargs: Any) -> RankGroup:
        """Make an object of a class on each of the learner's devices."""
        ...

    def describe_threads(self) -> str:
        """Return the number of CPU threads of each rank. Call it after `start_ranks`."""
        ...

    def engine_slots(self) -> Sequence[EngineSlot]:
        """Return the slots in which servers are started.

        Slots that share GPUs with ranks can be used after `start_ranks`, other slots before it.
        """
        ...

    def start_worker(self, number: int) -> Any:
        """Start the process of a rollout worker, a `rollout_workers.workers.WorkerProcess`."""
        ...

    def timeline(self, since: float) -> list[dict[str, Any]]:
        """Return the calls that the cluster has recorded, as events of Chrome's trace format.

        Args:
            since: leave out earlier events; in seconds since 1970. Events have microseconds.
        """
        ...


def check_single_controller(config: Config, placement: Placement | None) -> None:
    """Check that this process is the only controller, and that several ranks have a placement.

    Raises:
        ConfigError: a launcher started this process as one of many, or the config wants several
            ranks and there is no placement.
    """
    t = config.trainer
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "agentrl starts its processes itself: run plain `agentrl train"
            " trainer.n_gpus_per_node=N`, not torchrun or `accelerate launch`"
        )
    if placement is None and t.spread:
        raise ConfigError(
            f"trainer.nnodes={t.nnodes}, trainer.n_gpus_per_node={t.n_gpus_per_node},"
            f" trainer.ray_address={t.ray_address!r} need a cluster. The command line opens it. In"
            " Python: `from agentrl.cluster import open_placement`, then `with"
            " open_placement(config) as placement: Trainer(config, placement=placement).run()`"
        )
