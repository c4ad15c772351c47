"""Many processes on any number of machines, by Ray: the only room that knows it.

A run opens a site in a cluster (`open_placement`), gets its ranks there as a group with the methods of
one, and places for its servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.cluster.connect import open_cluster
from agentrl.config import Config
from agentrl.errors import ConfigError

__all__ = ["RayPlacement", "open_placement", "open_site"]

if TYPE_CHECKING:
    from agentrl.cluster.group import WorkerGroup
    from agentrl.cluster.pool import ResourcePool
    from agentrl.engine.remote.launch import EngineSlot


@contextmanager
def open_placement(config: Config) -> Iterator[RayPlacement]:
    """Join the run's cluster or start it, and take the learner's places there.

    What was taken or started is given back at the end. With trainer.device=auto, several ranks are
    on GPUs; one alone may be on a CPU.

    Args:
        config: the run's.

    Raises:
        ConfigError: there is no Ray or no such cluster, or it is too small, or several
            ranks are to have GPUs that it has not.
    """
    t = config.trainer
    with open_cluster(t.ray_address, cpus=t.n_gpus_per_node, gpus=t.device != "cpu"):
        import ray

        from agentrl.cluster.pool import ResourcePool

        asked = f"trainer.nnodes={t.nnodes}, trainer.n_gpus_per_node={t.n_gpus_per_node}"
        count = t.nnodes * t.n_gpus_per_node
        cpu = t.device == "cpu" or (t.device == "auto" and not ray.cluster_resources().get("GPU"))
        if cpu and t.device == "auto" and count > 1:
            raise ConfigError(
                f"{asked}: {count} GPUs are asked for, and none is here. With trainer.device=cpu"
                " processes are counted instead"
            )
        with ExitStack() as stack:
            pool = ResourcePool(
                t.nnodes,
                t.n_gpus_per_node,
                gpu=not cpu,
                request=asked,
            )
            stack.callback(pool.close)
            yield RayPlacement(config, pool, stack)


class RayPlacement:
    """See `open_placement`; a trainer's `Placement`."""

    def __init__(self, config: Config, pool: ResourcePool, stack: ExitStack):
        """Use what was taken.

        Args:
            config: the run's.
            pool: the learner's places.
            stack: gives back what is taken later.
        """
        self._config, self._pool, self._stack = config, pool, stack
        self._group: WorkerGroup | None = None

    def start_ranks(self, cls: type, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Start one object of a class a rank.

        Args:
            cls: with methods that are marked by `dispatch`.
            *args: for it.
            **kwargs: for it.

        Raises:
            AgentRLError: see `WorkerGroup`.
        """
        from agentrl.cluster.group import WorkerGroup
        from agentrl.cluster.ship import Shipment

        config = self._config
        self._group = WorkerGroup(
            cls,
            self._pool,
            *args,
            shipment=Shipment.pack([*config.files, *config.reward.files], [config.model.path]),
            watchdog_s=config.trainer.watchdog_s,
            **kwargs,
        )
        self._stack.callback(self._group.close)
        return self._group

    def engine_slots(self) -> list[EngineSlot]:
        """Where the servers that the run starts stand, for `open_engine`; after `ranks`.

        Raises:
            ConfigError: they do not fit where they should.
        """
        from agentrl.cluster.engines import colocated_slots, separate_slots

        r, t = self._config.rollout, self._config.trainer
        if r.name == "local" or r.urls:
            return []
        if t.placement == "colocated" or not self._pool.gpu:
            assert self._group is not None, "servers stand beside ranks"
            return colocated_slots(self._group.workers, r, cpu=not self._pool.gpu)
        slots, pool = separate_slots(r)
        self._stack.callback(pool.close)
        return slots


open_site = open_placement
"""The former name, until 0.2."""
