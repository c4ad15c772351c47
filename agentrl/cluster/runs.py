"""Whole runs as Ray tasks, each with GPUs of its own: those of `agentrl sweep --ray`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.cluster.connect import open_cluster
from agentrl.errors import ConfigError
from agentrl.torch_threads import NUMBER

log = logging.getLogger("agentrl")


def train_runs(
    address: str, runs: Mapping[str, Mapping[str, Any]], train: Callable[[str], int], folder: Path
) -> Iterator[tuple[str, int]]:
    """Train runs at the same time, as many as the cluster has GPUs for.

    Each is a task on one machine, with the working folder and the environment variables of this
    process. With trainer.device=cpu, or in a cluster without GPUs, its ranks use CPUs.

    Args:
        address: `HOST:PORT`, `auto`, or `local` for a new cluster on this machine.
        runs: the values of the config keys of each run, by its name.
        train: trains the run with a name, and returns the exit code.
        folder: for the output of each run, `NAME.log`.

    Yields:
        The name of a run that has ended, and its exit code.

    Raises:
        ConfigError: there is no such cluster, no machine of it has enough GPUs for a run, or a run
            needs several machines.
    """
    with open_cluster("" if address == "local" else address):
        import ray
        from ray.exceptions import RayError

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_gpus = any(node.get("GPU") for node in nodes)
        needs = {name: _devices(values, has_gpus) for name, values in runs.items()}
        for name, (kind, count) in needs.items():
            if address := runs[name]["trainer.ray_address"]:
                problem = "a run is a task on one machine here: leave out the key, or --ray"
                raise ConfigError(f"{name}: trainer.ray_address={address}: {problem}")
            if all(n.get(kind, 0) < count for n in nodes):
                raise ConfigError(f"{name}: no machine of the cluster has {count} {kind}s")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "CUDA_VISIBLE"))}
        tasks = {}
        for name, (kind, count) in needs.items():
            variables = kept if kind == "GPU" else {NUMBER: "1"} | kept  # A core has one run.
            devices: dict[str, Any] = {f"num_{kind.lower()}s": count}
            task = ray.remote(max_calls=1, max_retries=0, **devices)(_train)
            tasks[task.remote(train, name, folder, os.getcwd(), variables)] = name
        while tasks:
            for task in ray.wait([*tasks], timeout=1)[0]:  # in steps, so that Ctrl-C works
                name = tasks.pop(task)
                try:
                    yield name, ray.get(task)
                except RayError as e:
                    log.error("%s: %s", name, e)
                    yield name, 1


def _devices(values: Mapping[str, Any], has_gpus: bool) -> tuple[str, int]:
    """Return the devices that a run needs: "GPU" or "CPU", and how many."""
    device, ranks = values["trainer.device"], values["trainer.n_gpus_per_node"]
    if device == "cpu" or (device == "auto" and not has_gpus):
        return "CPU", ranks
    is_separate = values["trainer.placement"] == "separate" and not values["rollout.urls"]
    engines = values["rollout.engines"] * values["rollout.tensor_parallel_size"]
    return "GPU", ranks + engines * is_separate


def _train(
    train: Callable[[str], int], name: str, folder: Path, here: str, variables: dict[str, str]
) -> int:
    """Train in the process of a task."""
    from agentrl.cluster.group import set_variables

    os.chdir(here)
    set_variables(variables)
    with open(folder / f"{name}.log", "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return train(name)
