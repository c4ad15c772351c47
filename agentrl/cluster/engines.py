"""Servers of the run as part of its cluster: on the learner's GPUs, or on some of their own."""

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

from agentrl.cluster import group
from agentrl.cluster.group import Failed, return_failure
from agentrl.cluster.pool import ResourcePool
from agentrl.config import RolloutConfig
from agentrl.engine.remote.files import check_folder_visible, transfer_folder
from agentrl.engine.remote.launch import LOOPBACK, START_SECONDS, EngineSlot, ServerProcess, Start
from agentrl.errors import ConfigError, EngineDead, EngineError

HOST_SECONDS = 120.0
"""For an actor to be there."""
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.1


def colocated_slots(
    ranks: Sequence[group.WorkerInfo], config: RolloutConfig, *, cpu: bool
) -> list[EngineSlot]:
    """On the ranks' machines and GPUs, in their order.

    Raises:
        ConfigError: there are fewer, or a server's would be on several machines.
    """
    each = config.tensor_parallel_size
    if cpu:
        # Where the run is: it talks to them all the time, and on a CPU there is nothing to share.
        node = ray.get_runtime_context().get_node_id()
        return [_slot_on(node, ()) for _ in range(config.engines)]
    if config.engines * each > len(ranks):
        raise ConfigError(
            f"trainer.placement=colocated: rollout.engines={config.engines} times"
            f" rollout.tensor_parallel_size={each} are {config.engines * each} GPUs, but"
            f" {len(ranks)} learn"
        )
    result = []
    for first in range(0, config.engines * each, each):
        share = ranks[first : first + each]
        if len({rank.node for rank in share}) > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={each}: a server's GPUs must be on one machine,"
                " which trainer.n_gpus_per_node must be a multiple of"
            )
        gpus = [gpu for rank in share for gpu in rank.gpus]
        result.append(_slot_on(share[0].node, gpus, shared=True))
    return result


def separate_slots(config: RolloutConfig) -> tuple[list[EngineSlot], ResourcePool]:
    """On GPUs that nobody else has, and the pool that holds them.

    Raises:
        ConfigError: there are fewer.
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
        EngineSlot(list(range(each)), near=False, run=partial(_start_in_actor, o, ())) for o in options
    ], pool


def _slot_on(node: str, gpus: Sequence[str], *, shared: bool = False) -> EngineSlot:
    """On a machine, with GPUs that Ray counts as the ranks'."""
    options = {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    run = partial(_start_in_actor, options, tuple(gpus))
    return EngineSlot(list(range(len(gpus))), shared=shared, near=False, run=run)


def _start_in_actor(
    options: dict[str, Any], gpus: Sequence[str], start: Start
) -> tuple[RemoteProcess, bool]:
    """Start a server in an actor of its own; see `EngineSlot.run`."""
    host: Any = (
        ray.remote(EngineHost).options(max_restarts=0, max_concurrency=4, **options).remote()
    )
    try:
        with transfer_folder() as probe:
            node = ray.get_runtime_context().get_node_id()
            ref = host.start.remote(start, tuple(gpus), node, probe)
            result = _get(ref, HOST_SECONDS + START_SECONDS)
    except BaseException:
        ray.kill(host)
        raise
    if isinstance(result, Failed):
        ray.kill(host)
        raise result.error or EngineError(f"a server was not started: {result.message}")
    facts, word = result
    return RemoteProcess(host, **facts), word


class RemoteProcess:
    """A server's process that an actor holds; to an engine as good as one of our own."""

    def __init__(self, host: Any, *, url: str, token: str, admin_token: str, pid: int):
        """It runs.

        Args:
            host: the actor.
            url: the server's.
            token: its key.
            admin_token: for what manages it.
            pid: on its machine.
        """
        self.url, self.token, self.admin_token, self.pid = url, token, admin_token, pid
        self._host = host
        self._end = host.ended.remote()

    @property
    def running(self) -> bool:
        """Whether it is there, and the actor as well; does not wait."""
        return not ray.wait([self._end], timeout=0)[0]

    def death(self) -> EngineDead:
        """See `Serving`."""
        try:
            return _get(self._end, STOP_SECONDS)
        except EngineError as e:
            return EngineDead(f"the server at {self.url} ended with its host: {e}")

    def stop(self) -> None:
        """See `Serving`. Its machine may be gone already."""
        if not ray.is_initialized():  # and with the cluster all that ran there
            return
        with contextlib.suppress(EngineError):
            _get(self._host.stop.remote(), STOP_SECONDS)
        ray.kill(self._host)


class EngineHost:
    """An actor: holds a server's process, which ends with it."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._process: ServerProcess | None = None

    def __repr__(self) -> str:
        return "engine host"

    @return_failure
    def start(
        self, start: Start, gpus: Sequence[str], node: str, probe: str
    ) -> tuple[dict[str, Any], bool]:
        """Start a server.

        Args:
            start: how.
            gpus: those it sees, as CUDA_VISIBLE_DEVICES has them; none: those that Ray gave us.
            node: where those are who talk to it: only on another is it open to a network.
            probe: a folder such as they write for servers to read.

        Returns:
            What `RemoteProcess` is made of, and the word of `start`.

        Raises:
            ConfigError: this machine does not see it.
            AgentRLError: see `start`.
        """
        near = ray.get_runtime_context().get_node_id() == node
        if not near:
            check_folder_visible(Path(probe), ray.util.get_node_ip_address())
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        process, word = start(LOOPBACK if near else ray.util.get_node_ip_address())
        self._process = process
        names = ("url", "token", "admin_token", "pid")
        return {name: getattr(process, name) for name in names}, word

    def ended(self) -> EngineDead:
        """Wait for its end."""
        assert self._process is not None
        while self._process.running:
            time.sleep(LOOK_SECONDS)
        return self._process.death()

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.stop()


def _get(ref: Any, seconds: float) -> Any:
    """What an actor answers.

    Raises:
        EngineError: nothing, in time.
    """
    end = time.monotonic() + seconds
    while True:  # in pieces, so that Ctrl-C is heard
        try:
            return ray.get(ref, timeout=max(0.0, min(1.0, end - time.monotonic())))
        except GetTimeoutError:
            if time.monotonic() >= end:
                raise EngineError(f"no answer from a server's host in {seconds:g} s") from None
        except RayError as e:
            raise EngineError(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from None
