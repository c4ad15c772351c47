"""A process that plays rollouts of a run: a rollout worker.

The run calls its functions (`RolloutWorker`) by a `Channel`. The worker loads the user's
files, opens tools and rewards of its own, and plays rollouts with `agentrl.player`, as the run's
process does without workers. It samples from the engines' servers itself. The local engine is in
the process of the run, which samples for the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl import sandbox
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import AgentRLError
from agentrl.http.pool import share_servers
from agentrl.images import RowImage
from agentrl.open_files import raise_limit
from agentrl.player import Dropped, Play, Player, Wait, collect_rarely
from agentrl.rewards import Scorer
from agentrl.rollout_workers.channel import ANSWER, Channel, pack, pack_error, unpack
from agentrl.shipment import Shipment
from agentrl.tools import Toolbox, open_toolbox
from agentrl.trajectory import Generation, Scored
from agentrl.workers import new_loop

log = logging.getLogger("agentrl")

STATUS_SECONDS = 1.0
"""The interval in which a worker reports its state."""


SamplerOf = Callable[[Channel, int], Sampler]
"""Makes the sampler of a worker from its channel and its number. It can be pickled."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker needs to play rollouts: its first message."""

    config: Config
    shipment: Shipment
    template: ChatTemplate
    sampler_of: SamplerOf
    number: int
    """The number of this worker, from 0."""
    workers: int
    """The number of all workers, which share the limits of servers."""
    log_level: int


class RunSampler(Sampler):
    """Asks the process of the run for tokens, where the engine is."""

    def __init__(self, channel: Channel, number: int = 0, *, max_length: int, is_concurrent: bool):
        self._channel = channel
        self.max_length, self.is_concurrent = max_length, is_concurrent

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        self._channel.note("begin", episode_id, awaited)

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        seconds = deadline - time.monotonic()  # Another machine has another clock.
        return await self._channel.call(
            "generate", prompt_ids, sampling, episode_id, seed, seconds, tuple(images)
        )

    def end(self, episode_id: str) -> None:
        self._channel.note("end", episode_id)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a worker.

    Attributes:
        wait: the longest wait, which began `-since` seconds before this status; None if no episode
            is in flight.
        reprefilled: `Sampler.reprefill_tokens` of the worker.
    """

    wait: Wait | None = None
    reprefilled: int = 0
    failovers: int = 0
    """How many turns went to another server because one failed."""


class RolloutWorker:
    """Plays rollouts for the run at the other end of a channel."""

    def __init__(self, player: Player, channel: Channel, sampler: Sampler):
        """Take calls from now on."""
        self._player, self._channel = player, channel
        self._reporting = asyncio.create_task(self._report())
        self._own_tasks = [asyncio.current_task(), self._reporting, channel.reading]
        functions = (self.play, self.drain, self.pause, player.resume)
        channel.functions |= {function.__name__: function for function in functions}
        channel.functions |= getattr(sampler, "functions", {})

    async def play(self, number: int, plays: Sequence[Play]) -> list[Scored | Dropped]:
        """Play and score rollouts of a sample; report how many have ended under a number."""
        with self._player.armed():
            results = await self._player.play(
                plays, lambda ended: self._channel.note("ended", number, ended)
            )
        self._channel.note("status", self.status())
        return results

    def status(self) -> Status:
        """Return the state of this worker."""
        wait, sampler = self._player.longest_wait(), self._player.runtime.sampler
        if wait is not None:  # Another machine has another clock.
            wait = replace(wait, since=wait.since - time.monotonic())
        return Status(wait, sampler.reprefill_tokens(), sampler.failovers)

    async def pause(self) -> None:
        """Stop the time limits, and collect garbage, which `collect_rarely` made rare."""
        gc.collect()
        await self._player.pause()

    async def drain(self) -> None:
        """Let cancelled episodes clean up, and close tools and rewards."""
        await self._player.drain(others=[*self._own_tasks, *self._channel.tasks])

    async def _report(self) -> None:
        """Report the longest wait regularly. The run kills a worker that reports nothing."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self._channel.note("status", self.status())


class LogToRun(logging.Handler):
    """Sends log records to the run, which logs them. Any thread may log."""

    def __init__(self, channel: Channel):
        super().__init__()
        self._channel, self._loop = channel, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        arguments = "log", record.name, record.levelno, record.getMessage()
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._channel.note, *arguments)


def main() -> None:
    """Play rollouts for the run at the other end of standard input, until it closes the channel."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    work(connection)


def work(connection: socket.socket) -> None:
    """Play rollouts for the run at the other end of a connection, until it is closed."""
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    first = connection.recv(size, socket.MSG_WAITALL)
    if not size or len(first) < size:
        return  # The run has ended.
    _, number, (_, (settings,)) = unpack(first)  # type: ignore[misc]
    try:
        raise_limit()
        share_servers(settings.workers)
        settings.shipment.unpack()
        config: Config = settings.config
        sandbox.configure(config.sandbox)
        rollout = config.rollout
        scorer = Scorer(config.reward, rollout.budget_policy, rollout.max_trajectory_tokens)
        with (
            open_toolbox(config.tools, config.all_files, config.sandbox) as toolbox,
            asyncio.Runner(loop_factory=new_loop) as runner,
        ):
            runner.run(_serve(connection, number, settings, toolbox, scorer))
    except AgentRLError as e:
        e.args = (f"in rollout worker {settings.number}: {e}",)
        with contextlib.suppress(OSError):
            connection.sendall(pack_error(number, e))


async def _serve(
    connection: socket.socket, number: int, settings: Settings, toolbox: Toolbox, scorer: Scorer
) -> None:
    """Answer the first message, number `number`, and all others."""
    channel = Channel(*await asyncio.open_connection(sock=connection))
    log.handlers, log.propagate = [LogToRun(channel)], False
    log.setLevel(settings.log_level)
    sampler = settings.sampler_of(channel, settings.number)
    player = Player(Runtime(sampler, settings.template, toolbox, settings.config), scorer)
    try:
        RolloutWorker(player, channel, sampler)
        collect_rarely()
        channel.reply(pack(ANSWER, number, True, os.getpid()))
        await channel.reading
    finally:
        player.close()
