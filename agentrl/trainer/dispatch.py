"""How a method is called on all ranks: what each is given, and what comes back.

    class Rank:
        @dispatch(SPLIT)
        def look(self, share, who): ...    # group.look([share_0, share_1], who) -> [.., ..]

        @dispatch(BROADCAST)
        def descend(self, step): ...       # group.descend(step) -> what rank 0 returned

A group has the methods of its ranks, whether they are one object of this process (`rank.LocalRankGroup`) or
many processes: whoever calls it does not see which. A run that is spread over a cluster gets its
group from a site.
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
    """How arguments are split and results collected."""

    SPLIT = "split"
    """The first argument is a list with an entry for each rank; so is the result. Further arguments
    are the same for all."""
    BROADCAST = "broadcast"
    """All ranks get the same arguments; the result is rank 0's."""


SPLIT, BROADCAST = Dispatch.SPLIT, Dispatch.BROADCAST


def dispatch(how: Dispatch) -> Callable[[F], F]:
    """Declare how a method of a rank is called on all of them."""

    def mark(method: F) -> F:
        method.dispatch = how  # type: ignore[attr-defined]
        return method

    return mark


def dispatched_methods(cls: type) -> dict[str, Dispatch]:
    """The methods of a class that are called on all ranks, by name."""
    return {
        name: method.dispatch
        for name in dir(cls)
        if hasattr(method := getattr(cls, name), "dispatch")
    }


class RankGroup(Protocol):
    """Ranks, with the methods of theirs that were marked by `dispatch`."""

    size: int
    """How many ranks."""

    def __getattr__(self, name: str) -> Any: ...

    def close(self) -> None:
        """End them."""
        ...


class Placement(Protocol):
    """A part of a cluster that a run has for itself (`agentrl.cluster.open_placement`)."""

    def start_ranks(self, cls: type, *args: Any, **kwargs: Any) -> RankGroup:
        """Make an object of a class on each of the learner's places."""
        ...

    def engine_slots(self) -> Sequence[EngineSlot]:
        """Where servers are started; after `ranks`."""
        ...


def check_single_controller(config: Config, placement: Placement | None) -> None:
    """A run has one controller, and ranks only where it has a site for them.

    Raises:
        ConfigError: this process is one of many that a launcher started; or several ranks are asked
            for, and there is no site.
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
            f" trainer.ray_address={t.ray_address!r} need a cluster. The command line opens it; in"
            " Python: `from agentrl.cluster import open_placement`, then `with open_placement(config) as"
            " placement: Trainer(config, placement=placement).run()`"
        )
