"""What a run has of a cluster: its ranks, and places for its servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.cluster.connect import connected
from agentrl.config import Config
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.cluster.group import WorkerGroup
    from agentrl.engine.server.place import Place


@contextmanager
def open_cluster(config: Config, *, cpu: bool) -> Iterator[Cluster]:
    """Join the run's cluster or start it; what was taken or started is given back at the end.

    Args:
        config: the run's.
        cpu: whether ranks do without a GPU.

    Raises:
        ConfigError: there is no Ray or no such cluster, or it is too small.
    """
    t = config.trainer
    if t.nnodes > 1 and not t.ray_address:
        raise ConfigError(
            f"trainer.nnodes={t.nnodes}: a cluster that is started here is this machine alone."
            " Start one on all machines (ray start) and set trainer.ray_address"
        )
    with (
        connected(t.ray_address, cpus=t.n_gpus_per_node, gpus=not cpu),
        ExitStack() as stack,
    ):
        yield Cluster(config, cpu, stack)


class Cluster:
    """See `open_cluster`."""

    def __init__(self, config: Config, cpu: bool, stack: ExitStack):
        """Within a cluster; what is taken is given back by the stack."""
        from agentrl.cluster.pool import ResourcePool

        t = config.trainer
        self._config, self._cpu, self._stack = config, cpu, stack
        self._group: WorkerGroup | None = None
        self._pool = ResourcePool(
            t.nnodes,
            t.n_gpus_per_node,
            gpu=not cpu,
            why=f"trainer.nnodes={t.nnodes}, trainer.n_gpus_per_node={t.n_gpus_per_node}",
        )
        stack.callback(self._pool.close)

    def ranks(self, cls: type, *args: Any, **kwargs: Any) -> WorkerGroup:
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
            shipment=Shipment.pack(config.files, [config.model.path]),
            watchdog_s=config.trainer.watchdog_s,
            **kwargs,
        )
        self._stack.callback(self._group.close)
        return self._group

    def places(self) -> list[Place]:
        """Where the run's servers stand, for `open_engine`; after `ranks`.

        Raises:
            ConfigError: they do not fit where they should.
        """
        from agentrl.cluster.engines import beside, elsewhere

        r, t = self._config.rollout, self._config.trainer
        if self._cpu or t.placement == "colocated":
            assert self._group is not None, "servers stand beside ranks"
            return beside(self._group.places, r, cpu=self._cpu)
        places, pool = elsewhere(r)
        self._stack.callback(pool.close)
        return places
