"""Fake engines for a pool, in this process. Each token that they sample equals their weights."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import replace

import torch
from support.updates import update_from

from agentrl.engine.base import Sampling, Update
from agentrl.engine.remote.pool import EnginePool
from agentrl.engine.remote.senders import FROM_FILES, NORM, Route, Sent
from agentrl.engine.remote.supervisor import RecoveryPolicy
from agentrl.errors import EngineDead, EngineError
from agentrl.trajectory import Generation, float_array, token_array

QUICK = RecoveryPolicy(
    health_interval=0.05, health_timeout=0.1, first_backoff=0.02, max_backoff=0.1, outage=60.0
)
PROMPT = array("i", [5, 6, 7])


class FakeLearner:
    """A learner whose weights are one number. `misread`: they were read while they changed."""

    def __init__(self):
        self.weights, self.learning, self.misread = 0, False, False

    def update(self, version: int, weights: int | None = None) -> Update:
        """Return an update whose weights are ten times the version, or those of the last one."""
        is_changed = weights is None
        self.weights, self.learning = 10 * version if weights is None else weights, False

        def read():
            self.misread |= self.learning
            yield NORM, torch.tensor([float(self.weights)])

        update = update_from(read, version)
        # The engines read the weights from the norms that are kept for checks.
        send = lambda route: update.send(replace(route, targets=()))  # noqa: E731
        return replace(update, send=send, is_changed=is_changed)


class FakeEngine:
    """A server and its client in one object. Tests change its behavior by its attributes."""

    max_length = 100
    delivery, dtype, reprefilled = FROM_FILES, None, 0
    has_received, target, kept_folders = True, None, 0

    def __init__(self, opener: FakeOpener):
        self.opener, self.url = opener, f"http://fake:{opener.index}"
        self.restartable = opener.ours
        self.version, self.weights = 0, 0
        self.dead = self.hung = self.full = self.closed = self.asleep = False
        self.forgets = False
        """True if it releases its weights while it sleeps."""
        self.failing: list[Exception] = []
        """Exceptions that the next requests raise."""
        self.seconds = 0.0
        self.claims: int | None = None
        """The version in answers, if it is not `version`."""
        self.requests: list[tuple[str, list[int]]] = []
        self.published: list[int] = []
        self.refuses: list[Exception] = []
        """Exceptions that the next updates raise."""
        self.live: set[str] = set()
        self.probes = 0

    async def ready(self) -> None: ...

    def has_ended(self) -> bool:
        return self.dead or self.closed

    def begin(self, episode_id: str) -> None:
        self.live.add(episode_id)

    def end(self, episode_id: str) -> None:
        self.live.discard(episode_id)

    def check_alive(self) -> None:
        if self.dead or self.closed:
            error = f"{self.url} ended:\n  | last words"
            raise EngineDead(error) if self.restartable else EngineError(f"{self.url} refuses")

    async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline, images=()):
        self.requests.append((episode_id, list(prompt_ids)))
        self.check_alive()
        if self.failing:
            raise self.failing.pop(0)
        weights, version = self.weights, self.version if self.claims is None else self.claims
        end = time.monotonic() + self.seconds
        while self.hung or time.monotonic() < end:
            await asyncio.sleep(0.005)
            self.check_alive()
            if time.monotonic() >= deadline:
                raise EngineError("no response before the deadline")
        return Generation(
            token_array([weights]), float_array([0.0]), token_array([version]), "stop", 3
        )

    async def score(self, token_ids, images=()):
        self.check_alive()
        if self.failing:
            raise self.failing.pop(0)
        return float_array([0.0] * len(token_ids))

    async def check_health(self, deadline: float) -> None:
        while self.hung:
            await asyncio.sleep(0.005)
            self.check_alive()
            if time.monotonic() >= deadline:
                raise EngineError(f"{self.url}: no health")
        self.check_alive()

    def is_healthy(self, seconds: float) -> bool:
        return not (self.hung or self.dead or self.closed)

    def probe(self) -> None:
        self.probes += 1
        self.check_alive()
        if self.hung:
            raise EngineError(f"{self.url}: no probe")
        if self.claims not in (None, self.version):
            raise EngineError(f"{self.url}: version {self.claims}, not {self.version}")

    def sleep(self) -> None:
        self.check_alive()
        self.asleep = True

    def begin_update(self) -> None:
        self.check_alive()
        if self.refuses:
            raise self.refuses.pop(0)

    def finish_update(self, route: Route, sent: Sent) -> None:
        self.check_alive()
        self.weights = int(sent.norms[NORM])
        self.version, self.claims, self.asleep = route.version, None, False
        self.published.append(route.version)

    @property
    def has_weights(self) -> bool:
        return not (self.asleep and self.forgets)

    def set_version(self, version: int) -> None:
        self.version, self.asleep = version, False
        self.probe()

    def fail_update(self, error: EngineError) -> None: ...

    def close(self) -> None:
        self.closed = self.dead = True


class FakeOpener:
    """Opens an engine, and another one after that engine's end."""

    def __init__(self, index: int, ours: bool):
        self.index, self.ours = index, ours
        self.opened: list[FakeEngine] = []
        self.failing: list[Exception] = []
        """Exceptions that the next attempts to open an engine raise."""
        self.seconds = 0.0

    def __call__(self) -> FakeEngine:
        time.sleep(self.seconds)
        if self.failing:
            raise self.failing.pop(0)
        self.opened.append(FakeEngine(self))
        return self.opened[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.opened[-1]


class PoolHarness:
    """A pool of engines, and the learner whose policy they sample."""

    def __init__(self, n: int = 2, *, ours: bool = True, recovery: RecoveryPolicy = QUICK):
        self.learner = FakeLearner()
        self.openers = [FakeOpener(i, ours) for i in range(n)]
        self.pool = EnginePool(self.openers, recovery=recovery)
        self.asking = 0
        """The number of turns in flight, with those that wait for an engine with free capacity."""
        self.published = 0

    @property
    def engines(self) -> list[FakeEngine]:
        return [opener.engine for opener in self.openers]

    async def publish(self, version: int, weights: int | None = None) -> int:
        sent = await asyncio.to_thread(self.pool.publish, self.learner.update(version, weights))
        self.published = version
        return sent

    async def move_weights(self) -> None:
        """From now until the next `publish` the weights change, while turns are sampled."""
        await asyncio.to_thread(self.pool.weights_moving)
        self.learner.learning = True

    async def sleep(self) -> None:
        """Put the engines to sleep. From now until the next `publish` the weights change."""
        await asyncio.to_thread(self.pool.sleep)
        self.learner.learning = True

    async def ask(self, episode: str, prompt: array[int] = PROMPT, seconds: float = 5.0) -> int:
        """Sample a turn of one token, and check that the published policy sampled it."""
        self.asking += 1
        try:
            generation = await self.pool.generate(
                prompt,
                Sampling(),
                episode_id=episode,
                seed=1,
                deadline=time.monotonic() + seconds,
            )
        finally:
            self.asking -= 1
        token, [version] = generation.token_ids[0], generation.versions
        assert (version, token) == (self.published, 10 * self.published)
        return token

    def request_counts(self) -> list[int]:
        """Return the number of requests to all engines of each opener."""
        return [sum(len(e.requests) for e in opener.opened) for opener in self.openers]

    def usable_count(self) -> int:
        return int(self.pool.metrics()["engine/usable"])

    async def until(self, condition, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "not in time"
            await asyncio.sleep(0.005)
