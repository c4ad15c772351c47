"""Reserved devices: a number of GPUs or CPUs on each of a number of machines, all or none."""

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
"""The time for other jobs to release the devices."""


class ResourcePool:
    """GPUs or CPUs of a cluster, reserved until `close`."""

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
        """Reserve devices.

        Args:
            nodes: the number of bundles.
            each: the GPUs (CPUs) of a bundle, all on one machine.
            gpu: True for GPUs, False for CPUs.
            request: the config keys that ask for the devices, for messages.
            spread: True if each bundle must be on another machine.
            seconds: how long to wait while other jobs use the devices.

        Raises:
            ConfigError: the cluster has too few devices, or other jobs use them for too long.
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
                f"{request}: {self._describe_request(spread)}, but other jobs still use"
                f" them after {seconds:g} s: {free:g} {self._kind}s of the cluster are free"
            )
        self._order = self._local_first()

    def options(self, bundle: int) -> dict[str, Any]:
        """Return Ray's options of an actor that uses one GPU (CPU) of a bundle.

        Bundles on this machine come first, so that rank 0 reads and writes the run's own files.
        """
        return {
            "num_gpus": int(self.gpu),
            "num_cpus": int(not self.gpu),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._order[bundle]
            ),
        }

    def close(self) -> None:
        """Release the devices, and end the actors on them. Idempotent."""
        if ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)

    def _wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:  # in steps of a second, so that Ctrl-C works
                if self._group.wait(1):
                    return True
        except BaseException:
            self.close()
            raise
        return False

    def _local_first(self) -> list[int]:
        """Return the numbers of the bundles, those on this machine first."""
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
        bundles = [count // self.each for count in counts.values()]
        if sum(map(bool, bundles) if spread else bundles) < self.nodes:
            listed = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
            raise ConfigError(
                f"{request}: {self._describe_request(spread)}, but the {self._kind}s of the cluster"
                f" are {listed}"
            )
