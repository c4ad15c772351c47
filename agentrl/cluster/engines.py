"""Inference servers of a run in its Ray cluster: on the learner's GPUs, or on other ones."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster.group import (
    Failure,
    WorkerInfo,
    return_failure,
    set_variables,
    users_threads,
)
from agentrl.cluster.pool import ResourcePool
from agentrl.config import RolloutConfig
from agentrl.engine.remote.launch import (
    LOOPBACK,
    START_SECONDS,
    EngineSlot,
    ServerProcess,
    StartServer,
)
from agentrl.engine.remote.senders import check_folder_visible
from agentrl.errors import ConfigError, EngineDead, EngineError
from agentrl.workers.owned_folder import OwnedFolder

HOST_SECONDS = 120.0
"""The time for an actor to start."""
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1
"""The interval in which an actor checks that its server runs."""


def colocated_slots(
    ranks: Sequence[WorkerInfo], config: RolloutConfig, *, cpu: bool
) -> list[EngineSlot]:
    """Return slots on the ranks' machines and GPUs, in the order of ranks.

    Raises:
        ConfigError: there are too few GPUs, or one server's GPUs would be on several machines.
    """
    each = config.tensor_parallel_size
    if cpu:
        # The run sends requests all the time, so the servers are on its machine. CPUs are not
        # reserved.
        node = ray.get_runtime_context().get_node_id()
        return [_slot_on(node, (), config) for _ in range(config.engines)]
    if config.engines * each > len(ranks):
        raise ConfigError(
            f"trainer.placement=colocated: rollout.engines={config.engines} times"
            f" rollout.tensor_parallel_size={each} are {config.engines * each} GPUs, but"
            f" the learner has {len(ranks)}"
        )
    result = []
    for first in range(0, config.engines * each, each):
        share = ranks[first : first + each]
        if len({rank.node for rank in share}) > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={each}: the GPUs of a server must be on one"
                " machine. Make trainer.n_gpus_per_node a multiple of it"
            )
        gpus = [gpu for rank in share for gpu in rank.gpus]
        ranks_of_server = tuple(range(first, first + each))
        result.append(_slot_on(share[0].node, gpus, config, ranks_of_server))
    return result


def separate_slots(config: RolloutConfig) -> tuple[list[EngineSlot], ResourcePool]:
    """Return slots on reserved GPUs, and the pool that holds them.

    Raises:
        ConfigError: there are too few free GPUs.
    """
    each = config.tensor_parallel_size
    pool = ResourcePool(
        config.engines,
        each,
        gpu=True,
        spread=False,
        request=f"trainer.placement=separate, rollout.engines={config.engines},"
        f" rollout.tensor_parallel_size={each}",
    )
    options = [pool.options(bundle) | {"num_gpus": each} for bundle in range(config.engines)]
    return [
        EngineSlot(list(range(each)), run=partial(_start_in_actor, o, (), config)) for o in options
    ], pool


def _slot_on(
    node: str, gpus: Sequence[str], config: RolloutConfig, ranks: tuple[int, ...] = ()
) -> EngineSlot:
    """Return a slot on a machine, with GPUs that Ray has assigned to these ranks."""
    options = {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    run = partial(_start_in_actor, options, tuple(gpus), config)
    return EngineSlot(list(range(len(gpus))), ranks=ranks, run=run)


def _start_in_actor(
    options: dict[str, Any], gpus: Sequence[str], config: RolloutConfig, start: StartServer
) -> tuple[RemoteProcess, bool]:
    """Start a server in its own actor; this is `EngineSlot.run`."""
    actor = ray.remote(EngineHost).options(max_restarts=0, max_concurrency=4, **options)
    host: Any = actor.remote()
    try:
        with OwnedFolder("weights") as probe:
            node = ray.get_runtime_context().get_node_id()
            if config.workers != 1 and sum(bool(n["Alive"]) for n in ray.nodes()) > 1:
                node = ""  # Its clients, the rollout workers, may be on any machine.
            ref = host.start.remote(start, tuple(gpus), node, str(probe), users_threads())
            result = _get(ref, HOST_SECONDS + START_SECONDS)
    except BaseException:
        ray.kill(host)
        raise
    if isinstance(result, Failure):
        ray.kill(host)
        raise result.error or EngineError(f"a server could not be started: {result.message}")
    arguments, on_policy = result
    return RemoteProcess(host, **arguments), on_policy


class RemoteProcess:
    """A server's process that an actor holds, with the interface of a local one."""

    def __init__(self, host: Any, *, url: str, token: str, admin_token: str, pid: int):
        """Use a server that runs.

        Args:
            host: the actor.
            url: the server's URL.
            token: the server's API key.
            admin_token: the key of its management API.
            pid: the process id on its machine.
        """
        self.url, self.token, self.admin_token, self.pid = url, token, admin_token, pid
        self._host = host
        self._end = host.wait.remote()

    @property
    def running(self) -> bool:
        """True if the process and the actor run; does not wait."""
        return not ray.wait([self._end], timeout=0)[0]

    def death_error(self) -> EngineDead:
        """Return why the process ended."""
        try:
            return _get(self._end, STOP_SECONDS)
        except EngineError as e:
            return EngineDead(f"the server at {self.url} ended with its actor: {e}")

    def stop(self) -> None:
        """Stop the process, if its machine still exists."""
        if not ray.is_initialized():  # the processes ended with the cluster
            return
        with contextlib.suppress(EngineError):
            _get(self._host.stop.remote(), STOP_SECONDS)
        ray.kill(self._host)


class EngineHost:
    """An actor that holds a server's process. The process ends with the actor."""

    def __init__(self) -> None:
        """Create the actor; nothing is started yet."""
        self._process: ServerProcess | None = None

    def __repr__(self) -> str:
        return "engine host"

    @return_failure
    def start(
        self,
        start: StartServer,
        gpus: Sequence[str],
        node: str,
        probe: str,
        environment: dict[str, str],
    ) -> tuple[dict[str, Any], bool]:
        """Start a server.

        Args:
            start: the function that starts it.
            gpus: the GPUs that the server sees, as in CUDA_VISIBLE_DEVICES; empty: those that Ray
                assigned.
            node: the machine of the server's clients; "" if they are on several. The server
                listens on the network only if they are on another machine than its own.
            probe: a folder of the clients, which the server must be able to read.
            environment: see `set_variables`.

        Returns:
            The arguments of `RemoteProcess`, and the second result of `start`.

        Raises:
            ConfigError: this machine cannot read the folder.
            AgentRLError: see `start`.
        """
        is_local = ray.get_runtime_context().get_node_id() == node
        if not is_local:
            check_folder_visible(Path(probe), ray.util.get_node_ip_address())
        set_variables(environment)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        process, on_policy = start(LOOPBACK if is_local else ray.util.get_node_ip_address())
        self._process = process
        names = ("url", "token", "admin_token", "pid")
        return {name: getattr(process, name) for name in names}, on_policy

    def wait(self) -> EngineDead:
        """Wait for the end of the server, and return why it ended."""
        assert self._process is not None
        while self._process.running:
            time.sleep(POLL_SECONDS)
        return self._process.death_error()

    def stop(self) -> None:
        """Stop the server."""
        if self._process is not None:
            self._process.stop()


def _get(ref: Any, seconds: float) -> Any:
    """Return an actor's result.

    Raises:
        EngineError: the actor failed, or there was no result in time.
    """
    end = time.monotonic() + seconds
    while True:  # in steps of a second, so that Ctrl-C works
        try:
            return ray.get(ref, timeout=max(0.0, min(1.0, end - time.monotonic())))
        except GetTimeoutError:
            if time.monotonic() >= end:
                raise EngineError(
                    f"the actor of a server did not answer within {seconds:g} s"
                ) from None
        except RayError as e:
            raise EngineError(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from None
