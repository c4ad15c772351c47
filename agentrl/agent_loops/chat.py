"""`EngineChat`: the run's own engine as a chat model, for users that the policy itself plays."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.agent_loops.attempt import Attempt
from agentrl.engine.base import Sampling
from agentrl.errors import Infrastructure, PromptTooLong
from agentrl.trajectory import Message

CHAT_SEED = -1
"""Part of the seed of each reply, so that it differs from the seeds of the episode's own turns."""


class EngineChat:
    """A `Chat` (see `agentrl.http.chat`) with the engine and the chat template of the run.

    The model that replies is the current policy, with its adapter. Its replies are in no row of the
    episode and are never trained on.

    Requests use the id of the episode, one at a time, as those of a spawned conversation do. With
    an id of its own, an engine that decodes episodes in lockstep would deadlock, because one
    episode would wait for another.
    """

    def __init__(self, attempt: Attempt):
        self._attempt = attempt
        self._requests = 0

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        deadline: float,
        max_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the model's reply, without its thinking.

        Raises:
            EpisodeOver: the time is over.
            PromptTooLong: the conversation is too long for the engine. This is no budget of the
                policy's: `rollout.budget_policy` must not penalize it.
            Infrastructure: the engine failed, or the model used all of `max_tokens` for thinking.
        """
        attempt, template = self._attempt, self._attempt.runtime.template
        ids = template.prompt(messages, is_from_row=lambda message: False, exact=False)
        remaining = attempt.runtime.sampler.max_length - len(ids)
        if remaining < 1:
            raise PromptTooLong(
                f"the conversation of the model that plays the user has {len(ids)} tokens, but the"
                f" engine's context length is {attempt.runtime.sampler.max_length}"
            )
        sampling = Sampling(
            temperature=temperature,
            max_tokens=min(max_tokens, remaining),
            stop=tuple(stop),
            stop_ids=template.stop_ids,
        )
        seed = self._requests, CHAT_SEED
        self._requests += 1
        async with attempt.engine_lock:
            _, text = await attempt.sample_turn(ids, sampling, seed, deadline)
        for end in sampling.stop:
            text = text.removesuffix(end)
        thinking = template.thinking
        _, has_ended, reply = (thinking.opening(ids) + text).rpartition(thinking.end)
        if has_ended:
            return reply.strip()
        if reply.lstrip().startswith(thinking.begin.strip()):
            raise Infrastructure(
                f"the policy used all of max_tokens={max_tokens} for thinking and wrote no message"
            )
        return text.strip()
