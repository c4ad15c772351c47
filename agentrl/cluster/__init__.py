"""Many processes on one or more machines, with Ray: the only package that imports it.

A run opens a placement in a cluster (`open_placement`). The placement starts the ranks as a group
with the methods of one rank, and has slots for the run's servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.cluster.connect import open_cluster
from agentrl.config import Config
from agentrl.engine.remote.launch import EngineSlot
from agentrl.errors import ConfigError
from agentrl.plural import plural
from agentrl.torch_threads import choose_threads

__all__ = ["RayPlacement", "open_placement"]

if TYPE_CHECKING:
    from agentrl.cluster.group import WorkerGroup
    from agentrl.cluster.pool import ResourcePool
    from agentrl.engine.remote.launch import ServerHandle, StartServer
    from agentrl.rollout_workers.workers import WorkerProcess


@contextmanager
def open_placement(config: Config) -> Iterator[RayPlacement]:
    """Join the run's cluster or start one, and reserve the learner's devices in it.

    All that was reserved or started is released at the end. With trainer.device=auto several ranks
    need GPUs; a single one may run on a CPU.

    Args:
        config: the run's config.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, the cluster is too small, or
            several ranks need GPUs that it does not have.
    """
    t = config.trainer
    with open_cluster(t.ray_address, cpus=t.n_gpus_per_node, gpus=t.device != "cpu"):
        import ray

        from agentrl.cluster.pool import ResourcePool

        request = f"trainer.nnodes={t.nnodes}, trainer.n_gpus_per_node={t.n_gpus_per_node}"
        cpu = t.device == "cpu" or (t.device == "auto" and not ray.cluster_resources().get("GPU"))
        if cpu and t.device == "auto" and t.ranks > 1:
            raise ConfigError(
                f"{request}: the run needs {t.ranks} GPUs, but the cluster has none. With"
                " trainer.device=cpu the keys count CPU processes instead"
            )
        with ExitStack() as stack:
            pool = ResourcePool(t.nnodes, t.n_gpus_per_node, gpu=not cpu, request=request)
            stack.callback(pool.close)
            yield RayPlacement(config, pool, stack)


class RayPlacement:
    """The devices of a run in a Ray cluster; from `open_placement`."""

    def __init__(self, config: Config, pool: ResourcePool, stack: ExitStack):
        """Use reserved devices.

        Args:
            config: the run's config.
            pool: the learner's devices.
            stack: releases what is reserved later.
        """
        self._config, self._pool, self._stack = config, pool, stack
        self._group: WorkerGroup | None = None
        import torch

        # The thread that makes this object computes while the ranks wait.
        torch.set_num_threads(choose_threads(current=torch.get_num_threads()).count)

    def start_ranks(self, cls: type, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Start one object of a class per rank.

        Args:
            cls: a class with methods that are marked by `dispatch`.
            *args: its arguments.
            **kwargs: its arguments.

        Raises:
            AgentRLError: see `WorkerGroup`.
        """
        from agentrl.cluster.group import WorkerGroup
        from agentrl.shipment import Shipment

        config = self._config
        self._group = WorkerGroup(
            cls,
            self._pool,
            *args,
            shipment=Shipment.pack([*config.files, *config.reward.files], [config.model.path]),
            **kwargs,
        )
        self._stack.callback(self._group.close)
        return self._group

    def describe_threads(self) -> str:
        """Return the number of CPU threads of each rank. Call it after `start_ranks`."""
        assert self._group is not None, "start_ranks first"
        counts = Counter(map(str, self._group.threads))
        return ", ".join(f"{plural(n, 'rank')} with {text}" for text, n in counts.items())

    def engine_slots(self) -> list[EngineSlot]:
        """Return where servers are started.

        Slots that share GPUs with ranks can be used after `start_ranks`, other slots before it.

        Raises:
            ConfigError: the servers do not fit.
        """
        from agentrl.cluster.engines import colocated_slots, separate_slots

        r, t = self._config.rollout, self._config.trainer
        if r.name == "local" or r.urls:
            return []
        if not self._pool.gpu:
            return colocated_slots([], r, cpu=True)
        if t.placement == "colocated":
            each = r.tensor_parallel_size
            return [
                EngineSlot(
                    range(each),
                    ranks=tuple(range(i * each, (i + 1) * each)),
                    run=partial(self._run_on_gpus_of_ranks, i),
                )
                for i in range(r.engines)
            ]
        slots, pool = separate_slots(r)
        self._stack.callback(pool.close)
        return slots

    def start_worker(self, number: int) -> WorkerProcess:
        """Start the process of a rollout worker on one of the machines."""
        from agentrl.cluster.workers import RayWorker

        return RayWorker(number)

    def timeline(self, since: float) -> list[dict[str, Any]]:
        """Return the calls of Ray's processes since a time, as `ray timeline` does.

        Args:
            since: in seconds since 1970.
        """
        import ray

        events = ray.timeline() or []  # None only if it writes a file
        return [event for event in events if event["ts"] >= since * 1e6]

    def _run_on_gpus_of_ranks(self, index: int, start: StartServer) -> tuple[ServerHandle, bool]:
        """Start a server on the GPUs of ranks; this is `EngineSlot.run`.

        Raises:
            ConfigError: the servers do not fit.
        """
        from agentrl.cluster.engines import colocated_slots

        assert self._group is not None, "start_ranks first: colocated servers use the GPUs of ranks"
        slots = colocated_slots(self._group.workers, self._config.rollout, cpu=False)
        return slots[index].run(start)
