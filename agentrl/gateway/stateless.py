"""Answer requests that are independent of each other, for `agentrl serve`.

Each request is an episode of one turn, with the sampling parameters that its client asks for. If it
contains answers of this server, the policy sees their tokens as it sampled them, as in training.
Other assistant messages are encoded from their text.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from agentrl.agent_loops import Episode
from agentrl.agent_loops.attempt import Attempt, Runtime
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest, Refusal
from agentrl.gateway.session import Session, canonical
from agentrl.trajectory import Message, Sample, token_array

KEPT_REFUSALS = 100
"""The number of last refusals that are kept."""
KEPT_TURNS = 4096
"""The number of last answers whose tokens are kept."""
SERVED_BYTES = 2**28
"""The size of the messages that are kept for requests that name an answer by its id."""
UNLIMITED = {"max_turn_tokens": 2**20, "max_trajectory_tokens": 2**24, "timeout_s": 3600.0}
"""The budgets of an answer: only the model's context and the request's `max_tokens` limit it."""
_OPENING = (Message("user", ""),)


class _Turn(NamedTuple):
    """A message that the policy sampled, and its tokens; or one that states an output format."""

    message: Message
    ids: array[int]


def without_budgets(config: Config) -> Config:
    """Return the config of a server for the config of a run."""
    return config.with_values("rollout", **UNLIMITED)


class StatelessSession:
    """Answers the requests of all clients, each independently of the others.

    Args:
        runtime: the engine, its template, and a config `without_budgets`.
        temperature: the temperature for requests without one.
    """

    def __init__(self, runtime: Runtime, temperature: float):
        self.refusals: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)
        self.memory = AnswerMemory(SERVED_BYTES)
        self._runtime = runtime
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._default = Sampling(temperature=temperature)

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the model's next message in the conversation of a request.

        Raises:
            Refusal: the conversation cannot be continued, or the engine failed.
        """
        attempt, episode, session = self._open(request)
        sampler, episode_id = self._runtime.sampler, attempt.episode_id
        sampler.begin(episode_id, awaited=False)
        try:
            answer = await session.answer(request)
            prompt, message = episode.messages[-2:]
            self._keep(request, answer, _Turn(message, attempt.turn_ids[id(message)]), prompt)
            return answer
        finally:
            await session.close()
            await attempt.end()
            sampler.end(episode_id)

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt that a request would have.

        Raises:
            Refusal: the conversation cannot be continued.
        """
        _, _, session = self._open(request)
        return session.count_tokens(request)

    def _open(self, request: ChatRequest) -> tuple[Attempt, Episode, Session]:
        """Return an episode of one turn, and its session."""
        sampling = replace(self._default, **request.sampling)
        episode_id, seed = f"serve-{secrets.token_hex(8)}", secrets.randbits(62)
        attempt = Attempt(self._runtime, Sample("serve", _OPENING), episode_id, 0, sampling, seed)
        episode = Episode(attempt, _OPENING, ())
        known = self._known_turns(request.messages[:-1])
        return attempt, episode, _RecallingSession(episode, known)

    def _known_turns(self, messages: Sequence[ChatMessage]) -> dict[int, _Turn]:
        """Return answers of this server, and prompts with an output format, by `id(message)`."""
        known = {}
        for message, digest in zip(messages, _digests(messages), strict=True):
            if digest in self._turns:
                self._turns.move_to_end(digest)
                known[id(message)] = self._turns[digest]
        return known

    def _keep(self, request: ChatRequest, answer: Answer, turn: _Turn, prompt: Message) -> None:
        """Keep an answer for requests that contain it, and what its prompt ends with."""
        self.memory.keep(request, answer)
        answered = ChatMessage("assistant", answer.text, answer.calls)
        *_, before, digest = _digests([*request.messages, answered])
        self._turns[digest] = turn
        if request.output_format:
            self._turns[before] = _Turn(prompt, token_array())
        while len(self._turns) > KEPT_TURNS:
            self._turns.popitem(last=False)

    def set_outcome(self, reward: float) -> None:
        """Refuse a reward, because nothing trains.

        Raises:
            Refusal: always.
        """
        raise Refusal(404, "no_episode", "this server trains nothing, so it takes no rewards")


class _RecallingSession(Session):
    """A session that knows turns of other episodes.

    Args:
        episode: the episode.
        known: these turns, by the `id` of the message of the request that repeats them.
    """

    def __init__(self, episode: Episode, known: Mapping[int, _Turn]):
        super().__init__(episode)
        self._known = known

    def _foreign(self, message: ChatMessage) -> Message:
        if id(message) not in self._known:
            return super()._foreign(message)
        sampled, ids = self._known[id(message)]
        self._control.recall(sampled, ids)
        return sampled

    def _received(self, message: ChatMessage) -> Message:
        known = self._known.get(id(message))
        return known.message if known else super()._received(message)


def _digests(messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """Yield a digest of each message and those before it. Ids and thinking do not matter."""
    digest = b""
    for m in messages:
        calls = [(call.name, canonical(call.arguments)) for call in m.calls]
        text = repr((m.role, m.text.strip(), calls))
        digest = blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        yield digest
