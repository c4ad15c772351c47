"""Rollout workers as Ray actors, on all machines of a cluster. They connect to the run.

Apart from that they are the processes of `agentrl.rollout_workers`: the same messages on the same
kind of connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from hmac import compare_digest
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster.group import set_variables, users_threads
from agentrl.engine.remote.launch import LOOPBACK
from agentrl.errors import Infrastructure

CONNECT_SECONDS = 300.0
"""The time for an actor to start and to connect; Ray may start a machine for it."""
END_SECONDS = 2.0
TOKEN_BYTES = 32


class RayWorker:
    """The process of a rollout worker, in an actor."""

    def __init__(self, number: int):
        """Start the actor, on each machine in turn."""
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        address = LOOPBACK if len(nodes) == 1 else ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        self._token = secrets.token_bytes(TOKEN_BYTES)
        # It reserves no CPU, because the ranks may have reserved all of them. Ray's own strategy
        # "SPREAD" puts actors that reserve nothing on one machine.
        node = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": node}
        self._actor: Any = ray.remote(RolloutHost).options(max_restarts=0, **options).remote(number)
        port = self._listener.getsockname()[1]
        self._end = self._actor.run.remote(address, port, self._token, users_threads())

    async def connect(self) -> socket.socket:
        """Return the connection that the actor opened.

        Raises:
            Infrastructure: the actor failed, or opened none in time.
        """
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        with self._listener:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    while True:
                        connection, _ = await loop.sock_accept(self._listener)
                        connection.setblocking(False)
                        if compare_digest(await _receive(connection, TOKEN_BYTES), self._token):
                            return connection
                        connection.close()
            except TimeoutError:
                raise Infrastructure(
                    f"a rollout worker did not connect within {CONNECT_SECONDS:g} s:"
                    f" {self.describe_end()}"
                ) from None

    def describe_end(self) -> str:
        """Return why the actor ended."""
        try:
            ray.get(self._end, timeout=END_SECONDS)
        except GetTimeoutError:
            return "its actor still runs"
        except RayError as e:
            return " ".join(str(e).split())[:300]
        return "its connection was closed"

    def stop(self, seconds: float) -> None:
        """End the actor."""
        if not ray.is_initialized():  # It ended with the cluster.
            return
        with contextlib.suppress(RayError):
            ray.wait([self._end], timeout=seconds)
            ray.kill(self._actor)


class RolloutHost:
    """An actor that plays rollouts."""

    def __init__(self, number: int):
        self._number = number

    def __repr__(self) -> str:
        return f"rollout worker {self._number}"

    def run(self, address: str, port: int, token: bytes, environment: dict[str, str]) -> None:
        """Connect to the run, and play until it closes the connection."""
        from agentrl.rollout_workers.process import work

        set_variables(environment)
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        work(connection)


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes, or less if the connection ends."""
    loop, content = asyncio.get_running_loop(), b""
    while len(content) < size and (piece := await loop.sock_recv(connection, size - len(content))):
        content += piece
    return content
