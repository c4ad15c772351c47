"""Places for processes: so many on each of so many machines, all or none."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.errors import ConfigError

RESERVE_SECONDS = 60.0
"""How long others may take to free what they hold."""


class ResourcePool:
    """GPUs of a cluster, or CPUs, that are ours until `close`."""

    def __init__(
        self,
        nodes: int,
        each: int,
        *,
        gpu: bool,
        request: str,
        spread: bool = True,
        seconds: float = RESERVE_SECONDS,
    ):
        """Reserve them.

        Args:
            nodes: how many bundles.
            each: GPUs (CPUs) of a bundle, all on one machine.
            gpu: which of the two.
            why: what asked for so many, for messages.
            spread: whether each bundle is on a machine of its own.
            seconds: how long to wait where others hold them now.

        Raises:
            ConfigError: there are not so many, at once; or they are in use for too long.
        """
        self.nodes, self.each, self.gpu = nodes, each, gpu
        self._kind = "GPU" if gpu else "CPU"
        self._check_capacity(request, spread)
        strategy = "STRICT_SPREAD" if spread and nodes > 1 else "PACK"
        self._group = placement_group([{self._kind: each}] * nodes, strategy=strategy)
        if not self._wait(seconds):
            free = ray.available_resources().get(self._kind, 0)
            self.close()
            raise ConfigError(
                f"{request}: {self._describe_request(spread)}, but after {seconds:g} s others still hold them:"
                f" {free:g} {self._kind}s of the cluster are free"
            )
        self._order = self._local_first()

    def options(self, bundle: int) -> dict[str, Any]:
        """What Ray is told of an actor that takes one GPU (CPU) of a bundle.

        Those on this machine come first, so that rank 0 reads and writes the run's own files.
        """
        return {
            "num_gpus": int(self.gpu),
            "num_cpus": int(not self.gpu),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._order[bundle]
            ),
        }

    def close(self) -> None:
        """Give them back; actors there end. Idempotent."""
        if ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)

    def _wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:  # in pieces, so that Ctrl-C is heard
                if self._group.wait(1):
                    return True
        except BaseException:
            self.close()
            raise
        return False

    def _local_first(self) -> list[int]:
        """The bundles in our order."""
        here = ray.get_runtime_context().get_node_id()
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(range(self.nodes), key=lambda bundle: node_of[bundle] != here)

    def _describe_request(self, spread: bool) -> str:
        machines = f" on each of {self.nodes} nodes" if spread else f", {self.nodes} times"
        return f"{self.each} {self._kind}s{machines} are needed"

    def _check_capacity(self, request: str, spread: bool) -> None:
        counts = {
            node["NodeManagerAddress"] + f" ({node['NodeID'][:6]})": int(
                node["Resources"].get(self._kind, 0)
            )
            for node in ray.nodes()
            if node["Alive"]
        }
        bundles = [has // self.each for has in counts.values()]
        if sum(map(bool, bundles) if spread else bundles) < self.nodes:
            listed = ", ".join(f"{name}: {has}" for name, has in sorted(counts.items()))
            raise ConfigError(
                f"{request}: {self._describe_request(spread)}, but the {self._kind}s of the cluster are {listed}"
            )
