"""Answer requests that are independent of each other, for `agentrl serve`.

Each request is an episode of one turn, with the sampling parameters that its client asks for. All
its assistant messages are encoded from their text, as in an inference server.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace

from agentrl.agent_loops import Episode
from agentrl.agent_loops.attempt import Attempt, Runtime
from agentrl.engine.base import Sampling
from agentrl.gateway.requests import Answer, Refusal, Request
from agentrl.gateway.session import Session
from agentrl.trajectory import Message, Sample

KEPT_REFUSALS = 100
"""The number of last refusals that are kept."""
_OPENING = (Message("user", ""),)


class StatelessSession:
    """Answers the requests of all clients, each independently of the others.

    Args:
        runtime: the engine, its template and the config.
        temperature: the temperature for requests without one.
    """

    def __init__(self, runtime: Runtime, temperature: float):
        self.refusals: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)
        self._runtime = runtime
        self._default = Sampling(temperature=temperature)

    async def answer(self, request: Request) -> Answer:
        """Return the model's next message in the conversation of a request.

        Raises:
            Refusal: the conversation cannot be continued, or the engine failed.
        """
        sampling = replace(self._default, **request.sampling)
        sampler, episode_id = self._runtime.sampler, f"serve-{secrets.token_hex(8)}"
        seed = secrets.randbits(62)
        attempt = Attempt(self._runtime, Sample("serve", _OPENING), episode_id, 0, sampling, seed)
        sampler.begin(episode_id, awaited=False)
        session = Session(Episode(attempt, _OPENING, ()))
        try:
            return await session.answer(request)
        finally:
            await session.close()
            await attempt.end()
            sampler.end(episode_id)

    def set_outcome(self, reward: float) -> None:
        """Refuse a reward, because nothing trains.

        Raises:
            Refusal: always.
        """
        raise Refusal(404, "no_episode", "this server trains nothing, so it takes no rewards")
