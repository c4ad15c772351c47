"""The rollout workers of a run: starts processes, hands out samples, replaces those that end.

    RolloutWorkers   what `Rollouts` sees, with the methods of a `Player`
      _Worker        one process: its channel, the samples that it plays

All rollouts of a sample are played and scored by one worker, so that a reward of the group sees all
of them. A sample goes to the worker with the fewest rollouts. Results return to whoever asked for
them, so neither the batch nor the seeds depend on the number of workers.

If a worker ends, its samples are played again by others, with new episode ids. That is no failure
of the samples and has a counter of its own (`workers/replayed`). A sample whose worker has ended
twice is played alone in a process of its own. If that ends too, the sample is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from socket import socket
from typing import Any, Protocol

from agentrl.agent_loops.attempt import CLEANUP_SECONDS
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling, ServerUsage
from agentrl.errors import Infrastructure, RunStopped
from agentrl.player import Dropped, OnEnd, Play, Wait
from agentrl.plural import plural
from agentrl.rollout_workers.channel import Channel, ChannelClosed
from agentrl.rollout_workers.process import STATUS_SECONDS, RunSampler, Settings, Status
from agentrl.shipment import Shipment
from agentrl.torch_threads import count_cores
from agentrl.trajectory import Scored
from agentrl.workers.child_process import ChildProcess, python_command

log = logging.getLogger("agentrl")

START_SECONDS = 300.0
"""The time for a worker to start: it imports packages, loads files and starts a tool server."""
STOP_SECONDS = 20.0
"""The time for a worker to end after its tools and rewards were closed."""
SILENT_SECONDS = 600.0
"""A worker that reports nothing for so long is killed. It was stopped, or code of the user blocks
its event loop. Without a limit, the run would wait for it forever."""
RESTARTS = 10
RESTARTS_WITHIN_SECONDS = 60.0
"""With more ends of workers within this time, the run stops: nothing would ever be finished."""
EPISODES_PER_WORKER = 256
"""With more episodes of short turns, one process needs longer than the turns take (`load.py`)."""
MAX_DEATHS = 3
"""A sample whose worker has ended so often is dropped. The last time, it was alone."""


class WorkerProcess(Protocol):
    """The process of a worker, on this machine or on another one."""

    async def connect(self) -> socket:
        """Return a connection to the process, which sends its settings."""
        ...

    def describe_end(self) -> str:
        """Return how the process ended, with its last lines of output."""
        ...

    def stop(self, seconds: float) -> None:
        """End the process, after at most so many seconds. Blocks; idempotent."""
        ...


StartProcess = Callable[[int], WorkerProcess]
"""Starts the process of the worker with a number."""


class LocalProcess:
    """A worker as a child of this process."""

    def __init__(self, number: int):
        self._child = ChildProcess(
            python_command("from agentrl.rollout_workers.process import main; main()", "-u"),
            on_line=lambda line: log.info("worker %d: %s", number, line),
        )

    async def connect(self) -> socket:
        """Return the child's standard input."""
        return self._child.take_channel()

    def describe_end(self) -> str:
        """Return the exit code and the last lines."""
        self._child.wait(1.0)
        lines = "".join(f"\n  {line}" for line in [*self._child.tail][-8:])
        return f"code {self._child.exit_code}" + (f"; its last lines:{lines}" if lines else "")

    def stop(self, seconds: float) -> None:
        """End the child: it ends by itself if its channel is closed."""
        self._child.stop(seconds)


@dataclass(eq=False, slots=True)
class _Worker:
    """A process that plays, and what it plays."""

    number: int
    process: WorkerProcess
    channel: Channel
    pid: int = 0
    """The id of the process; 0 until it can play."""
    load: int = 0
    """The number of rollouts that it plays."""
    begun: set[str] = field(default_factory=set)
    """The episodes that the engine of this process expects tokens of."""
    status: Status = field(default_factory=Status)
    status_at: float = 0.0
    """When the status arrived, in `time.monotonic()` seconds."""
    silent: float = 0.0
    """The time without a report, in seconds in which this process ran."""


class RolloutWorkers:
    """Plays rollouts in several processes. All methods but `close` belong to one event loop."""

    def __init__(
        self,
        sampler: Sampler,
        settings: Settings,
        *,
        start: StartProcess = LocalProcess,
    ):
        """Start nothing yet: `open` does.

        Args:
            sampler: the engine in this process. Workers ask it for tokens, if they do not ask
                servers themselves.
            settings: what each worker gets.
            start: starts the process of a worker.
        """
        self._sampler, self._settings, self._start_process = sampler, settings, start
        self._shared = sampler.share(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_changed = False
        """True if the state of the servers has changed since workers got it."""
        self._started: list[_Worker] = []
        """All workers that were started and have not ended."""
        self._workers: list[_Worker] = []
        """Those that take samples."""
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._on_end: dict[int, OnEnd] = {}
        self._available = asyncio.Condition()
        self._ends: deque[float] = deque(maxlen=RESTARTS)
        self._failure: BaseException | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: dict[str, int] = {}
        """The number of the worker that first logged a warning. Others may not repeat it."""
        self._reprefilled = self._failovers = self._reported = 0
        """The sums over workers that have ended, and how many failovers were reported."""
        self._counts = {"workers/restarts": 0.0, "workers/replayed": 0.0}

    async def open(self) -> None:
        """Start all workers, at the same time.

        Raises:
            AgentRLError: a worker could not load the user's files, or open its tools or rewards.
            Infrastructure: a worker ended.
        """
        self._loop = asyncio.get_running_loop()
        count = self._settings.workers
        self._workers = list(await asyncio.gather(*(self._start() for _ in range(count))))
        self._tasks.add(asyncio.create_task(self._watch()))

    # -- what `Rollouts` calls ---------------------------------------------------------------------

    def begin(self, play: Play) -> None:
        """Announce a rollout to the engine of this process."""
        play.announce(self._sampler)

    async def play(self, plays: Sequence[Play], on_end: OnEnd) -> list[Scored | Dropped]:
        """Play the rollouts of a sample in a worker; if it ends, in another one.

        Raises:
            UserCodeError: a reward function raised.
            RunStopped: workers end again and again.
        """
        for deaths in range(MAX_DEATHS):
            is_alone = deaths == MAX_DEATHS - 1
            ended = _Counter(on_end)
            try:
                worker = await (self._start() if is_alone else self._take())
                try:
                    return await self._play_in(worker, plays, ended)
                finally:
                    if is_alone:
                        await self._stop(worker)
            except ChannelClosed:
                if self._closing:
                    raise
                ended.undo()
                self._counts["workers/replayed"] += len(plays)
                plays = [again(play, deaths + 1) for play in plays]
                if not is_alone:
                    for play in plays:
                        self.begin(play)
        on_end(len(plays))
        row = plays[0].sample.id
        log.error("row %s is dropped: it ended the process of each worker that played it", row)
        cause = f"row {row}: each worker that played it ended, {MAX_DEATHS} in total"
        return [Dropped(cause)] * len(plays)

    def armed(self) -> AbstractContextManager[None]:
        """Return nothing to do: each worker has a watchdog."""
        return nullcontext()

    def longest_wait(self) -> Wait | None:
        """Return the longest of the waits that the workers reported last."""
        waits = [
            replace(w.status.wait, since=w.status_at + w.status.wait.since)
            for w in self._running
            if w.load and w.status.wait
        ]
        return min(waits, key=lambda wait: wait.since, default=None)

    async def pause(self) -> None:
        """Stop the time limits in all workers."""
        await self._call_all("pause")

    async def resume(self) -> None:
        """Let the time limits go on in all workers."""
        await self._call_all("resume")

    def reprefill_tokens(self) -> int:
        """Return the sum of the workers, and of this process."""
        own = self._sampler.reprefill_tokens() + self._reprefilled
        return own + sum(worker.status.reprefilled for worker in self._started)

    def metrics(self) -> dict[str, float]:
        """Return how many workers were restarted, and how many rollouts played again for it."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        if not self._shared:
            return counts
        total = sum(worker.status.failovers for worker in self._started) + self._failovers
        new, self._reported = total - self._reported, total
        return counts | {"engine/failovers": float(new)}

    async def drain(self) -> None:
        """Close tools and rewards of all workers, and end them."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * CLEANUP_SECONDS):
                await self._call_all("drain")
        await asyncio.gather(*(self._stop(worker) for worker in [*self._started]))

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._closing = True
        for worker in [*self._started]:
            worker.process.stop(0.0)

    # -- the state of servers, for workers that send requests themselves ---------------------------

    def changed(self) -> None:
        """Send the state of the servers to all workers soon. Any thread may call it."""
        if self._loop and not self._has_changed and not self._closing:
            self._has_changed = True
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._send_state)

    def usage(self, server: int) -> ServerUsage:
        """Ask all workers how they use a server. Blocks; not for the thread of the event loop."""
        if not self._loop or self._closing:
            return ServerUsage()
        return asyncio.run_coroutine_threadsafe(self._ask_usage(server), self._loop).result()

    def _send_state(self) -> None:
        if self._has_changed and self._shared:
            self._has_changed = False
            state = self._shared.state()
            for worker in self._started:
                worker.channel.note("follow", state)

    async def _ask_usage(self, server: int) -> ServerUsage:
        self._send_state()  # They handle it before they answer.
        calls = [w.channel.call("usage", server) for w in self._playing]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        used = [answer for answer in answers if isinstance(answer, ServerUsage)]
        adapters = frozenset[str]().union(*(u.adapters for u in used))
        return ServerUsage(sum(u.turns for u in used), adapters)

    @property
    def _playing(self) -> list[_Worker]:
        """The workers that may have rollouts."""
        return [w for w in self._started if w.pid and not w.channel.is_closed]

    # -- workers -----------------------------------------------------------------------------------

    async def _take(self) -> _Worker:
        """Wait until a worker runs, and return the one with the fewest rollouts.

        Raises:
            RunStopped: none will start again.
        """
        async with self._available:
            await self._available.wait_for(lambda: self._running or self._failure)
        if self._failure:
            raise RunStopped(f"rollout workers cannot be started: {self._failure}")
        return min(self._running, key=lambda w: (w.load, w.number))

    @property
    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.channel.is_closed]

    async def _play_in(
        self, worker: _Worker, plays: Sequence[Play], on_end: OnEnd
    ) -> list[Scored | Dropped]:
        number = next(self._calls)
        self._on_end[number] = on_end
        worker.load += len(plays)
        ids = {play.episode_id for play in plays}
        worker.begun |= ids
        try:
            results = await worker.channel.call("play", number, plays)
            worker.begun -= ids
            return results
        finally:
            worker.load -= len(plays)
            del self._on_end[number]

    async def _start(self) -> _Worker:
        """Start a worker, and return when it can play.

        Raises:
            AgentRLError: it could not load or open something.
            Infrastructure: it ended.
        """
        number = next(self._numbers)
        process = await asyncio.to_thread(self._start_process, number)
        try:
            streams = await asyncio.open_connection(sock=await process.connect())
            worker = _Worker(number, process, Channel(*streams))
            worker.channel.functions |= self._functions_for(worker)
            self._started.append(worker)
            worker.channel.reading.add_done_callback(lambda _: self._on_worker_end(worker))
            settings = replace(self._settings, number=number)
            if self._shared:
                settings = replace(settings, sampler_of=self._shared.make())
            async with asyncio.timeout(START_SECONDS):
                worker.pid = await worker.channel.call("open", settings)
        except BaseException as e:
            has_ended = isinstance(e, ChannelClosed | TimeoutError)
            how = await asyncio.to_thread(process.describe_end) if has_ended else ""
            await asyncio.to_thread(process.stop, 0.0)
            if has_ended:
                raise Infrastructure(f"rollout worker {number} did not start: {how}") from None
            raise
        return worker

    def _functions_for(self, worker: _Worker) -> dict[str, Callable[..., Any]]:
        """Return the functions of this process that a worker may call."""
        number = worker.number

        async def generate(
            ids: Any, sampling: Sampling, episode_id: str, seed: int, seconds: float, images: Any
        ) -> Any:
            deadline = time.monotonic() + seconds
            return await self._sampler.generate(
                ids,
                sampling,
                episode_id=episode_id,
                seed=seed,
                deadline=deadline,
                **({"images": images} if images else {}),
            )

        def begin(episode_id: str, awaited: bool) -> None:
            worker.begun.add(episode_id)
            self._sampler.begin(episode_id, **({} if awaited else {"awaited": False}))

        def end(episode_id: str) -> None:
            worker.begun.discard(episode_id)
            self._sampler.end(episode_id)

        def report(status: Status) -> None:
            worker.status, worker.status_at, worker.silent = status, time.monotonic(), 0.0

        def log_record(name: str, level: int, text: str) -> None:
            if level == logging.WARNING and self._warned.setdefault(text, number) != number:
                return
            logging.getLogger(name).log(level, "%s", text)

        shared = self._shared.functions if self._shared else {}
        return {
            **shared,
            "generate": generate,
            "begin": begin,
            "end": end,
            "status": report,
            "ended": lambda call, n: self._on_end.get(call, _ignore)(n),
            "log": log_record,
        }

    def _on_worker_end(self, worker: _Worker) -> None:
        """Tell the engine about a worker's end, and start another one."""
        self._started.remove(worker)
        self._reprefilled += worker.status.reprefilled
        self._failovers += worker.status.failovers
        for episode_id in worker.begun:
            self._sampler.end(episode_id)
        worker.begun.clear()
        if self._closing or worker not in self._workers:
            return
        self._workers.remove(worker)
        task = asyncio.create_task(self._replace(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, worker: _Worker) -> None:
        """Start a worker in place of one that ended, unless they end too often."""
        how = await asyncio.to_thread(worker.process.describe_end)
        await asyncio.to_thread(worker.process.stop, 0.0)
        now = time.monotonic()
        self._ends.append(now)
        is_often = len(self._ends) == RESTARTS and self._ends[0] > now - RESTARTS_WITHIN_SECONDS
        end = "was killed" if worker.silent >= SILENT_SECONDS else "ended by itself"
        what = f"rollout worker {worker.number} (process {worker.pid}) {end}, {how}"
        log.error("%s. Its episodes are played again", what)
        try:
            if is_often:
                raise Infrastructure(f"{plural(RESTARTS, 'worker')} ended within a minute; {what}")
            try:
                started = await self._start()
            except Infrastructure as e:  # What killed the worker may have killed this one.
                log.error("%s", e)
                started = await self._start()
            self._counts["workers/restarts"] += 1
            self._workers.append(started)
        except Exception as e:
            if not self._workers or is_often:
                self._failure = e
            log.error("%s", e)
        async with self._available:
            self._available.notify_all()

    async def _watch(self) -> None:
        """Kill workers that report nothing for a long time."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            for worker in self._playing:
                worker.silent += STATUS_SECONDS  # No clock: this process may have been stopped.
                if worker.silent >= SILENT_SECONDS:
                    log.error(
                        "rollout worker %d (process %d) has reported nothing for %g s and is"
                        " killed: it was stopped, or an agent loop blocks its event loop (call"
                        " blocking code with asyncio.to_thread)",
                        *(worker.number, worker.pid, SILENT_SECONDS),
                    )
                    await asyncio.to_thread(worker.process.stop, 0.0)
                    worker.channel.close()

    async def _stop(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        worker.channel.close()
        await asyncio.to_thread(worker.process.stop, STOP_SECONDS)

    async def _call_all(self, name: str) -> None:
        """Call a function of all workers. One that ends meanwhile does not matter."""
        calls: list[Awaitable[Any]] = [w.channel.call(name) for w in self._playing]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ChannelClosed):
                raise result


def count_workers(config: Config) -> int:
    """Return the number of processes that play the episodes of a run; 1: the run's own process.

    `auto` leaves one core to the run, and gives a process `EPISODES_PER_WORKER` episodes or more.
    """
    workers = config.rollout.workers
    if workers != "auto":
        return workers
    episodes = config.rollouts_of_step * (1 + config.trainer.max_staleness)
    if config.rollout.max_in_flight:
        episodes = min(episodes, config.rollout.max_in_flight)
    return max(1, min(count_cores() - 1, -(-episodes // EPISODES_PER_WORKER)))


def make_settings(
    config: Config, sampler: Sampler, template: ChatTemplate, workers: int
) -> Settings:
    """Return what each worker of a run gets.

    Raises:
        UserError: a file of the config is missing.
    """
    return Settings(
        config=config,
        shipment=Shipment.pack(
            [*config.all_files, *config.reward.files], [config.model.path], plays=True
        ),
        template=template,
        sampler_of=partial(
            RunSampler, max_length=sampler.max_length, is_concurrent=sampler.is_concurrent
        ),
        number=0,
        workers=workers,
        log_level=log.getEffectiveLevel(),
    )


class _Counter:
    """Counts the rollouts of a sample that have ended, so that it can be undone."""

    def __init__(self, on_end: OnEnd):
        self._on_end, self._count = on_end, 0

    def __call__(self, rollouts: int) -> None:
        self._count += rollouts
        self._on_end(rollouts)

    def undo(self) -> None:
        """Count none of them."""
        self._on_end(-self._count)


def again(play: Play, attempt: int) -> Play:
    """Return a rollout to be played again, with an id of its own."""
    return replace(play, episode_id=f"{play.episode_id.partition('~')[0]}~{attempt}")


def _ignore(rollouts: int) -> None:
    """Ignore the report of a sample that nobody waits for."""
