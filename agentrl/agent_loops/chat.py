"""The run's own engine, asked for text: a user who is played by the policy itself."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.agent_loops.attempt import Attempt
from agentrl.engine.base import Sampling
from agentrl.errors import EpisodeOver, Infrastructure
from agentrl.trajectory import Message

OTHERS = -1
"""Keys the random numbers of what is asked here, apart from those of the episode's own turns."""


class EngineChat:
    """A `Chat` (see `agentrl.http.chat`) with the engine and the chat template of the run.

    Who answers is the policy as it is now, its adapter included. What it says here stands in no
    row of the episode, and is never trained on.

    It asks under the episode's own id, one request at a time, as a spawned conversation does: an
    engine that decodes episodes in step with each other would wait for one that waits for another.
    """

    def __init__(self, attempt: Attempt):
        self._attempt = attempt
        self._asked = 0

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        deadline: float,
        max_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> str:
        """See `Chat`; what the model thinks before it answers is left out.

        Raises:
            EpisodeOver: the time is over, or the engine takes no conversation as long as this.
            Infrastructure: the engine failed, or the model has thought for all of `max_tokens`.
        """
        attempt, template = self._attempt, self._attempt.world.template
        ids = template.prompt(messages, given=lambda message: False, exact=False)
        room = attempt.world.sampler.max_length - len(ids)
        if room < 1:
            raise EpisodeOver("trajectory_tokens")
        sampling = Sampling(
            temperature=temperature,
            max_tokens=min(max_tokens, room),
            stop=tuple(stop),
            stop_ids=template.stop_ids,
        )
        self._asked += 1
        async with attempt.engine:
            _, text = await attempt.ask(ids, sampling, (self._asked - 1, OTHERS), deadline)
        for end in sampling.stop:
            text = text.removesuffix(end)
        thinking = template.thinking
        _, ended, answer = (thinking.opened(ids) + text).rpartition(thinking.end)
        if ended:
            return answer.strip()
        if answer.lstrip().startswith(thinking.begin.strip()):
            raise Infrastructure(
                f"the policy, asked for a message, thought for all of max_tokens={max_tokens}"
            )
        return text.strip()
