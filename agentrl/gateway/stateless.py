"""Answer requests that are independent of each other, for `agentrl serve`.

Each request is an episode of one turn, with the sampling parameters that its client asks for. If it
contains answers of this server, the policy sees their tokens as it sampled them, as in training.
Other assistant messages are encoded from their text.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from secrets import compare_digest
from typing import NamedTuple

from agentrl.agent_loops import Episode
from agentrl.agent_loops.attempt import Attempt, Runtime
from agentrl.config import Config
from agentrl.data.recorded import RecordedAnswer, Recorder
from agentrl.engine.base import Sampling
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest, Refusal
from agentrl.gateway.session import Session, parts_of
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
    """The message without images."""
    ids: array[int]
    answer: str = ""
    """The id of the answer; "" for a message that states an output format."""


def without_budgets(config: Config) -> Config:
    """Return the config of a server for the config of a run."""
    return config.with_values("rollout", **UNLIMITED)


class StatelessSession:
    """Answers the requests of all clients, each independently of the others.

    Args:
        runtime: the engine, its template, and a config `without_budgets`.
        temperature: the temperature for requests without one.
        recorder: records the answers; None: nothing is recorded.
        user: a hash of the key of the clients.
    """

    def __init__(
        self,
        runtime: Runtime,
        temperature: float,
        recorder: Recorder | None = None,
        user: str = "",
    ):
        self.refusals: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)
        self.memory = AnswerMemory(SERVED_BYTES)
        self._runtime = runtime
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._default = Sampling(temperature=temperature)
        self._recorder, self._user = recorder, user

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the model's next message in the conversation of a request.

        Raises:
            Refusal: the conversation cannot be continued, or the engine failed.
        """
        if self._recorder and any(m.images for m in request.messages):
            why = "this server records what it answers (--record), and it records no images"
            raise Refusal(400, "image", why, "messages")
        attempt, episode, session = self._open(request)
        sampler, episode_id = self._runtime.sampler, attempt.episode_id
        sampler.begin(episode_id, awaited=False)
        try:
            answer = await session.answer(request)
            prompt, message = episode.messages[-2:]
            if self._recorder:
                self._record(self._recorder, request, answer, attempt, message)
            turn = _Turn(message, attempt.turn_ids[id(message)], answer.id)
            self._keep(request, answer, turn, prompt)
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
            self._turns[before] = _Turn(replace(prompt, images=()), token_array())
        while len(self._turns) > KEPT_TURNS:
            self._turns.popitem(last=False)

    def _record(
        self,
        recorder: Recorder,
        request: ChatRequest,
        answer: Answer,
        attempt: Attempt,
        message: Message,
    ) -> None:
        """Record an answer, with the answer of this server that its conversation continues."""
        parent, start = "", 0
        for i, digest in enumerate(_digests(request.messages)):
            if digest in self._turns and (id := self._turns[digest].answer):
                parent, start = id, i + 1
        row, [turn] = attempt.rows[-1].segment(), attempt.turns
        sampled = {"stop": request.stop, "max_tokens": request.max_tokens}
        recorder.add(
            RecordedAnswer(
                id=answer.id,
                parent=parent,
                user=self._user,
                step=recorder.step,
                prompt=row.prompt_ids,
                sampled=row.response_ids,
                logprobs=row.logprobs,
                sampling=attempt.sampling.as_dict() | sampled,
                messages=[Message(m.role, m.text) for m in request.messages[start:]],
                text=message.content,
                finish_reason=turn.finish_reason,
                time=time.time(),
            )
        )

    async def give_feedback(self, id: str, score: float) -> None:
        """Record the score of an answer.

        Raises:
            Refusal: nothing is recorded, the key of these clients got no such answer, it has a
                score already, or the score cannot be written.
        """
        if self._recorder is None:
            raise Refusal(404, "no_record", "this server records nothing (agentrl serve --record)")
        try:
            scored = await asyncio.wrap_future(self._recorder.score(id, self._user, score))
        except OSError as e:
            raise Refusal(503, "not_recorded", f"the score cannot be recorded: {e}") from e
        if scored is None:
            raise Refusal(404, "unknown_id", "this key got no answer with this id", "id")
        first, is_new = scored
        if not is_new:
            why = f"this answer has the score {first:g} already, and the first one counts"
            raise Refusal(409, "already_scored", why, "id")

    def set_outcome(self, reward: float) -> None:
        """Refuse a reward, because nothing trains.

        Raises:
            Refusal: always.
        """
        raise Refusal(404, "no_episode", "this server trains nothing, so it takes no rewards")


def sessions_of_keys(
    keys: str, runtime: Runtime, temperature: float, recorder: Recorder | None = None
) -> Callable[[str], StatelessSession | None]:
    """Return a function from the key of a request to the session of this key, or None.

    Args:
        keys: the keys, separated by commas; "": any key is accepted, and all share a session.
        runtime: see `StatelessSession`.
        temperature: see `StatelessSession`.
        recorder: see `StatelessSession`.
    """
    names = [key.strip() for key in keys.split(",") if key.strip()]
    users = {key: blake2b(key.encode(), digest_size=16).hexdigest() for key in names or [""]}
    sessions = {
        key: StatelessSession(runtime, temperature, recorder, user) for key, user in users.items()
    }

    def session_of(key: str) -> StatelessSession | None:
        sent = key.encode() if names else b""
        known = [s for name, s in sessions.items() if compare_digest(name.encode(), sent)]
        return known[0] if known else None

    return session_of


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
        turn = self._known[id(message)]
        self._control.recall(turn.message, turn.ids)
        return turn.message

    def _received(self, message: ChatMessage) -> Message:
        known = self._known.get(id(message))
        received = super()._received(message)
        return replace(known.message, images=received.images) if known else received


def _digests(messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """Yield a digest of each message and those before it. Ids and thinking do not matter."""
    digest = b""
    for m in messages:
        text = repr((m.role, m.text.strip(), parts_of(m)))
        digest = blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        yield digest
