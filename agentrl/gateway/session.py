"""The conversations of one episode, as an agent sends them to an OpenAI-style API.

A chat API has no memory: each request contains the whole conversation. `Session` compares it with
the conversations that it knows and finds the turns that the policy has sampled. So each sampled
token trains once, with its logprob, and is never encoded again:

    request                                             effect
    it continues a known conversation at its end        the row grows (clean)
    it does, but writes earlier messages differently    the row grows (realigned): arguments in
                                                        another JSON form, no thinking
    it changes or removes earlier messages or tools     a new row begins (branch)
    its conversation is unknown                         a new conversation begins (spawn)

Two messages are the same if their roles, visible texts, images and tool calls are the same. The
session makes the ids of tool calls. So an id identifies the turn of an assistant message, even if
two turns have the same text. An assistant message that the policy did not write, or that the client
has changed, is foreign: it is shown to the policy and has mask 0.

A request that is sent again because its client lost the connection gets the same answer. Any other
request with the same contents gets a new sample, so that best-of-n works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from calendar import day_abbr, day_name, month_abbr, month_name
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import orjson

from agentrl.agent_loops import Episode
from agentrl.agent_loops.control import EpisodeControl
from agentrl.chat.images import NO_IMAGES
from agentrl.errors import EpisodeOver, Infrastructure, TemplateError
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.output_format import STATEMENT
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, ChatRequest, Refusal
from agentrl.images import PLACE, Image, ImageError
from agentrl.tools.validation import with_whole_numbers
from agentrl.trajectory import Message, Role, ToolCall, ToolResult

_WEEKDAY = f"(?:{'|'.join([*day_name, *day_abbr])})"
_MONTH = rf"(?:{'|'.join([*month_name[1:], *month_abbr[1:]])})\.?"
_DAY = r"\d\d?(?:st|nd|rd|th)?"
_DATE = rf"(?:\d{{1,4}}[-/.]\d\d?[-/.]\d{{1,4}}|{_MONTH} +{_DAY}|{_DAY}(?: of)? +{_MONTH})"
_ZONE = (
    r"(?-i:(?:Z|UTC|GMT)?[+-]\d{1,2}(?::?\d\d)?|Z|UTC|GMT|[ECMP][SD]T|[CE]ES?T|[BIJK]ST"
    r"|(?:Africa|America|Asia|Atlantic|Australia|Europe|Indian|Pacific)/\w+)"
)
_TIME = rf"(?:\d\d?(?::\d\d){{1,2}}(?:[.,]\d+)?{_ZONE}?|\d\d?(?::\d\d){{0,2}} ?[ap]\.?m\b\.?)"
VOLATILE = re.compile(
    r"^(?:x-anthropic-billing-header:.*"
    r"|(?:(?:the )?current|today['\u2019]s) (?:date|time|date and time|datetime)(?: is)?:? +"
    rf"(?:{_WEEKDAY},? +)?(?:{_DATE}|{_TIME})"
    rf"(?:(?:,? +(?:at |on )?|T| \()(?:{_DATE}|{_TIME}|{_ZONE}|{_WEEKDAY}|[12]\d{{3}})\)?)*"
    r"\.?[ \r]*)$",
    re.IGNORECASE | re.MULTILINE,
)
"""The lines of system and user messages that clients change in every request: a header for billing,
or a date or time and nothing else. In a row of tokens, the policy keeps seeing the first version of
such a line."""
REPLACED = "a date, a time or a billing header changed, and the policy keeps seeing the first one"
MAX_ANSWERS = 64
"""The number of answers that a session keeps for requests that are sent again."""
CONTEXT = 60
"""The number of characters that a report shows before and after a difference."""

Kind = Literal["first", "clean", "realigned", "branch", "spawn", "retry"]


@dataclass(frozen=True, slots=True)
class RequestMatch:
    """The way in which a request was matched, for reports.

    Attributes:
        kind: the top of this file explains them; "first" for the first conversation, "retry" for a
            request that was sent again.
        cause: the difference from a clean continuation; "" if there is none.
        index: the index of the first message that differs; -1 if none does.
        before: that message as the session knows it, around the difference.
        after: that message as the client sends it now.
    """

    kind: Kind
    cause: str = ""
    index: int = -1
    before: str = ""
    after: str = ""


class Key(NamedTuple):
    """The parts of a message that are compared with other messages."""

    role: Role
    text: str
    """The visible text, without volatile lines."""
    parts: tuple[tuple[str, str], ...]
    """Its calls and images, as `parts_of` returns them."""
    ids: tuple[str, ...]
    """The ids of its calls, or of the call that it answers; only those that this session made."""
    written: str
    """The parts that may differ between equal messages: volatile lines, JSON forms, thinking."""

    def is_same(self, other: Key) -> bool:
        """Return whether two messages are the same. Ids are compared only if both have some."""
        return self[:3] == other[:3] and (self.ids == other.ids or not (self.ids and other.ids))


@dataclass(slots=True, eq=False)
class _SampledTurn:
    """A turn that the policy sampled."""

    message: Message
    turn: int
    """Its index in `Episode.turns`."""
    conversation: _Conversation
    ids: tuple[str, ...]
    """The ids of its well-formed calls."""
    own_ids: tuple[str, ...]
    """The ids that the model gave these calls; "" for a call without one."""
    answered: float
    """The `time.monotonic()` seconds at which the client got it."""
    key: Key = field(init=False)


@dataclass(slots=True, eq=False)
class _Conversation:
    """A conversation of the episode, as the client sent it last."""

    episode: Episode
    keys: list[Key] = field(default_factory=list)
    """The keys of the client's messages, and of the turn that was sampled last."""
    messages: list[Message] = field(default_factory=list)
    """The messages of the episode, one for each of `keys`."""
    tools: bytes = b""
    """The schemas of the tools as JSON."""
    is_busy: bool = False
    """True while the policy samples a turn of it."""
    turns: int = 0
    """The number of turns that the policy sampled in it."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that was sent, perhaps several times."""

    body: int
    """The hash of its body."""
    task: asyncio.Task[Answer]
    """Samples the answer."""
    waiting: int = 0
    """The number of clients that wait for the answer."""
    is_delivered: bool = False
    """Whether a client got the answer."""

    @property
    def is_lost(self) -> bool:
        """True if no client got the answer and none waits for it: it lost the connection."""
        return not self.waiting and not self.is_delivered


class Session:
    """Answers the requests of one episode.

    Attributes:
        events: how each request was matched.
        counts: how often clients asked for something that the run decides, by the field's name, and
            how often volatile lines changed ("volatile").
        refusals: the errors that requests got as their answers.
        over: an event that is set when the episode has ended. Further requests are refused.
        is_over_budget: whether a budget has ended the episode.
        has_outcome: whether the agent has reported its reward.
        memory: the answers that later requests may name by their ids.
        failure: the infrastructure error or the bug that ended the episode; None without one.
    """

    def __init__(self, episode: Episode):
        """Open a session for an episode without turns."""
        self.events: list[RequestMatch] = []
        self.counts: Counter[str] = Counter()
        self.over = asyncio.Event()
        self.failure: BaseException | None = None
        self.has_outcome = self.is_over_budget = False
        self.refusals: list[Refusal] = []
        self.memory = AnswerMemory()
        self._episode = episode
        self._control = EpisodeControl(episode)
        self._attempt = self._control.attempt
        self._conversations: list[_Conversation] = []
        self._sampled: list[_SampledTurn] = []
        self._by_call: dict[str, _SampledTurn] = {}
        self._by_text: dict[Any, list[_SampledTurn]] = {}
        self._sent: list[_Sent] = []
        self._stated: dict[int, tuple[Message, Message]] = {}
        self._images: dict[str, Image] = {}
        self._openings: Counter[str] = Counter()
        self._refused_before_answer = -1
        # A request runs in a task of the server. It needs the context of the episode's task, so
        # that its waits pause the time limit of the episode.
        self._context = copy_context()

    @property
    def has_requests(self) -> bool:
        """True if the agent has sent a request with the session's key."""
        return bool(self._sent or self.events or self.refusals)

    @property
    def is_answered(self) -> bool:
        """True if the agent got an answer to its last request: an error of it is its own."""
        return self._refused_before_answer == self._count_refused()

    def _count_refused(self) -> int:
        return sum(refusal.code != "reward" for refusal in self.refusals)

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the policy's next message in the conversation of a request.

        If the caller is cancelled because its client disconnected, the message is sampled
        nevertheless. The client gets it if it sends the same request again.

        Raises:
            Refusal: the episode is over, the conversation cannot be continued, or the engine
                failed.
        """
        self._refused_before_answer = -1
        sent = self._find_retried(request)
        if sent is not None:
            self.events.append(RequestMatch("retry"))
        else:
            task = asyncio.create_task(self._sample(request), context=self._context.copy())
            task.add_done_callback(_retrieve_error)
            sent = _Sent(hash(request.body), task)
            self._sent.append(sent)
            for old in [s for s in self._sent if s.task.done()][:-MAX_ANSWERS]:
                self._sent.remove(old)
        sent.waiting += 1
        try:
            answer = await asyncio.shield(sent.task)
            sent.is_delivered = True
            self._refused_before_answer = self._count_refused()
            self.memory.keep(request, answer)
            return answer
        except Refusal:
            if sent in self._sent:
                self._sent.remove(sent)
            raise
        except asyncio.CancelledError:
            if not sent.task.cancelled():
                raise
            raise _episode_over("the episode has ended") from None  # by `close`
        finally:
            sent.waiting -= 1

    def _find_retried(self, request: ChatRequest) -> _Sent | None:
        """Return the earlier request that a request repeats; None if it is a request of its own."""
        body = hash(request.body)
        same = [sent for sent in self._sent if sent.body == body]
        lost = [sent for sent in same if sent.is_lost]
        return next(iter(lost or (same[-1:] if request.is_retry else [])), None)

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt that a request would have. Nothing changes.

        Raises:
            Refusal: the conversation cannot be continued.
        """
        with self._refuse_errors():
            self._check(request)
            keys = [self._key(message) for message in request.messages]
            known, shared = self._find_conversation(keys, orjson.dumps(request.tools))
            messages = self._messages(known, request, keys, shared)
            self._state_format(request, messages)
            self._stated.pop(id(messages[-1]), None)  # The message is not kept.
            control = EpisodeControl(known.episode if known else self._episode)
            return control.count_tokens(messages, request.tools)

    def set_outcome(self, reward: float) -> None:
        """Set the outcome reward of the episode. A second call replaces the first.

        Raises:
            Refusal: the agent does not report its reward: a model that has a shell could send one.
            UserCodeError: `reward` is not a finite number.
        """
        if self._attempt.runtime.config.agent.reward != "post":
            raise Refusal(403, "reward", "the reward is not the agent's: agent.reward is not post")
        self._control.set_outcome(reward)
        self.has_outcome = True

    async def close(self) -> None:
        """Refuse all further requests, and end those in flight.

        The conversation of the last turn becomes the main one.
        """
        self.over.set()
        tasks = [sent.task for sent in self._sent if not sent.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for event in self.events:
            self._attempt.counts[f"gateway/{event.kind}"] += 1
        for name, number in self.counts.items():
            self._attempt.counts[f"gateway/ignored/{name}"] += number
        if self._sampled:
            # Sub-agents may have more turns than the conversation that uses their answers, and an
            # agent that summarizes its history goes on in another conversation.
            self._control.make_main(self._sampled[-1].conversation.episode)

    # -- one request ------------------------------------------------------------------------------

    async def _sample(self, request: ChatRequest) -> Answer:
        if self.over.is_set():
            raise _episode_over("the episode has ended")
        self.counts.update(request.ignored)
        self._check(request)
        conversation = None
        try:
            with self._refuse_errors():
                images = (image for message in request.messages for image in message.images)
                await self._attempt.prepare(images)
                conversation = self._match(request)
                conversation.is_busy = True
                message = await self._generate(conversation, request)
                return self._record(conversation, message, request)
        finally:
            if conversation is not None:
                conversation.is_busy = False

    async def _generate(self, conversation: _Conversation, request: ChatRequest) -> Message:
        """Return the next turn of a conversation, even if a budget ends the episode right after."""
        turns = len(self._attempt.turns)
        try:
            return await conversation.episode.generate(
                stop=request.stop, max_tokens=request.max_tokens
            )
        except EpisodeOver:
            # If the turn was sampled before the budget ended the episode, it is answered.
            if not self._control.turns_of(conversation.episode, turns):
                raise
            self.is_over_budget = True
            self.over.set()
            return conversation.episode.messages[-1]

    @contextlib.contextmanager
    def _refuse_errors(self) -> Iterator[None]:
        """Raise errors as refusals, and end the episode if it cannot go on."""
        try:
            yield
        except EpisodeOver as over:
            self.is_over_budget = True
            self.over.set()
            raise _episode_over(f"a budget is used up: {over.reason}") from None
        except TemplateError as e:
            raise Refusal(400, "template", str(e), "messages") from e
        except ImageError as e:
            raise Refusal(400, "image", str(e), "messages") from e
        except Infrastructure as e:
            self._fail(e)
            raise Refusal(503, "engine", str(e).partition("\n")[0]) from e
        except Refusal:
            raise
        except Exception as e:
            self._fail(e)
            raise Refusal(500, "bug", f"{type(e).__name__}: {e}") from e

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.over.set()

    def _match(self, request: ChatRequest) -> _Conversation:
        """Return the conversation that a request continues, after adding the new messages to it."""
        keys = [self._key(message) for message in request.messages]
        tools = orjson.dumps(request.tools)
        best, shared = self._find_conversation(keys, tools)
        if best is None or _differs_before_turns(best, keys, shared):
            # If the client changed the beginning of a conversation, a later assistant message may
            # still be a turn of it.
            known = (self._find(k) for k in reversed(keys) if k.role == "assistant")
            turn = next(filter(None, known), None)
            if turn is None:
                return self._open(
                    request, keys, tools, RequestMatch("spawn", "unknown conversation")
                )
            best, shared = turn.conversation, _count_shared(turn.conversation.keys, keys)
        event = self._difference(best, keys, shared, tools)
        if best.is_busy:
            cause = event.cause or "the conversation goes on in another request"
            return self._open(request, keys, tools, replace(event, kind="spawn", cause=cause))
        self._record_results(request)
        messages = self._messages(best, request, keys, shared)
        if event.kind == "branch":  # The new row contains volatile lines as they are now.
            for i in range(shared):
                if keys[i].role != "assistant" and keys[i].written != best.keys[i].written:
                    messages[i] = self._received(request.messages[i])
        self._state_format(request, messages)
        sampled = {id(s.message) for s in self._sampled}
        if event.kind != "branch" and any(id(m) in sampled for m in messages[shared:]):
            event = RequestMatch("branch", "a turn of another conversation was added", shared)
        if event.kind == "branch" or not best.turns:
            best.episode.branch(messages, request.tools)
        else:
            best.episode.observe(*messages[shared:])
        best.keys, best.messages, best.tools = keys, messages, tools
        self.events.append(event)
        return best

    def _find_conversation(self, keys: list[Key], tools: bytes) -> tuple[_Conversation | None, int]:
        """Return the conversation that a request continues, and the number of shared messages.

        A conversation that grows cleanly is preferred to one that shares more messages: sub-agents
        that begin in the same way may have got the same answer.
        """
        best, shared, best_rank = None, 0, (False, 0, False)
        for conversation in reversed(self._conversations):
            n, is_free = _count_shared(conversation.keys, keys), not conversation.is_busy
            grows = (
                n == len(conversation.keys)
                and is_free
                and conversation.turns > 0
                and conversation.tools == tools
                and all(key.role != "assistant" for key in keys[n:])
            )
            rank = (grows, n, is_free)
            if n and rank > best_rank:
                best, shared, best_rank = conversation, n, rank
        return best, shared

    def _open(
        self, request: ChatRequest, keys: list[Key], tools: bytes, event: RequestMatch
    ) -> _Conversation:
        """Begin a conversation. The first one is conversation 0 of the episode."""
        if keys[0].role not in ("system", "user"):
            why = f"the first message must be of role system or user, not {keys[0].role!r}"
            raise Refusal(400, "first_message", why, "messages")
        messages = self._messages(None, request, keys, 0)
        self._state_format(request, messages)
        if not self._conversations:
            self._episode.branch(messages, request.tools)
            conversation, event = _Conversation(self._episode), RequestMatch("first")
        else:
            # The seed does not depend on the order in which concurrent conversations begin.
            opening = repr([key[:3] for key in keys])
            self._openings[opening] += 1
            text = f"{self._openings[opening]} {opening}".encode()
            seed = int.from_bytes(blake2b(text, digest_size=7).digest(), "big")
            conversation = _Conversation(self._episode.spawn(messages, request.tools, seed=seed))
        conversation.keys, conversation.messages, conversation.tools = keys, messages, tools
        self._conversations.append(conversation)
        self.events.append(event)
        return conversation

    def _difference(
        self, conversation: _Conversation, keys: list[Key], shared: int, tools: bytes
    ) -> RequestMatch:
        """Compare a request with a known conversation that has the same beginning.

        Args:
            conversation: the known conversation.
            keys: the keys of the request's messages.
            shared: the number of messages that are the same at the beginning.
            tools: the schemas of the request's tools as JSON.
        """
        known = conversation.keys
        changed = [i for i in range(shared) if known[i].written != keys[i].written]
        if shared < len(known):
            i = shared
            if i == len(keys):
                cause = "an earlier request was sent again"
                return RequestMatch("branch", cause, i - 1)
            role = known[i].role
            is_answer = keys[i].role == role == "assistant" and self._find(keys[i])
            if is_answer and not any(key.is_same(keys[i]) for key in known[i:]):
                cause = "the conversation goes on from another answer than its last"
                return RequestMatch("branch", cause, i)
            before, after = cut_around_difference(_text_of(known[i]), _text_of(keys[i]))
            cause = f"{role} message changed" if keys[i].role == role else "messages were removed"
            return RequestMatch("branch", cause, i, before, after)
        if tools != conversation.tools:
            before, after = cut_around_difference(conversation.tools.decode(), tools.decode())
            return RequestMatch("branch", "the tools changed", -1, before, after)
        if not changed:
            return RequestMatch("clean")
        # What the policy does not see is shown before what makes no difference.
        i = min(changed, key=lambda i: known[i].role == "assistant")
        before, after = known[i].written, keys[i].written
        if known[i].role != "assistant":
            self.counts["volatile"] += 1
            old, new = VOLATILE.findall(before), VOLATILE.findall(after)
            before = "\n".join(line for line in old if line not in new)
            after = "\n".join(line for line in new if line not in old)
            return RequestMatch("realigned", REPLACED, i, before, after)
        before, after = cut_around_difference(before, after)
        return RequestMatch("realigned", "a turn is written differently", i, before, after)

    # -- messages ---------------------------------------------------------------------------------

    def _check(self, request: ChatRequest) -> None:
        """Raise `Refusal` for messages that no conversation has."""
        if request.messages[-1].role == "assistant":
            why = "the last message must not be an assistant message: the policy begins a new turn"
            raise Refusal(400, "last_message", why, "messages")
        if not self._attempt.runtime.template.images and any(m.images for m in request.messages):
            raise Refusal(400, "image", NO_IMAGES, "messages")

    def _key(self, message: ChatMessage) -> Key:
        """Return the parts of a message that are compared."""
        text, written = message.text.strip(), ""
        if message.role in ("system", "user"):
            # An image ends a line.
            lines = text.replace(PLACE, f"\n{PLACE}\n") if message.images else text
            if VOLATILE.search(lines):
                text, written = VOLATILE.sub("", lines), lines
        if message.role != "assistant":
            ids = (message.call_id,) if message.call_id in self._by_call else ()
        else:
            ids = tuple(call.id for call in message.calls if call.id in self._by_call)
            written = "\n".join([message.reasoning, *(call.arguments for call in message.calls)])
        return Key(message.role, text, parts_of(message), ids, written)

    def _messages(
        self, conversation: _Conversation | None, request: ChatRequest, keys: list[Key], shared: int
    ) -> list[Message]:
        """Return the episode's messages for those of a request.

        Args:
            conversation: the known conversation that the request continues; None for a new one.
            request: the request.
            keys: the keys of its messages.
            shared: the number of messages that are the same at the beginning of both.
        """
        messages = conversation.messages[:shared] if conversation else []
        used, unused = set(map(id, messages)), {}
        for message, key in zip(request.messages[shared:], keys[shared:], strict=True):
            if message.role == "assistant":
                sampled = self._find(key, used, unused)
                messages.append(sampled.message if sampled else self._foreign(message))
                used.add(id(messages[-1]))
            else:
                messages.append(self._received(message))
        self._sort_results(request, messages, shared)
        row = {(m.role, m.content, m.images): m for m in self._episode.sample.prompt}
        for i in range(shared, len(messages)):
            m = messages[i]
            if m.role in ("system", "user"):
                messages[i] = row.get((m.role, m.content, m.images), m)
        return messages

    def _received(self, message: ChatMessage) -> Message:
        """Return a message that is not an assistant's."""
        # Each request has a copy of all images, and a message that is sent again keeps it.
        images = tuple([self._images.setdefault(i.key, i) for i in message.images])
        id = self._own_id(message.call_id)
        return Message(message.role, message.text, tool_call_id=id, images=images)

    def _state_format(self, request: ChatRequest, messages: list[Message]) -> None:
        """State the form of the answer in the last message, if the conversation does not do so.

        The client does not send this text, so `Key` does not contain it. Earlier messages keep it:
        the row of tokens grows.
        """
        *earlier, last = messages
        _, last = self._stated.get(id(last), (last, last))
        if request.output_format:
            statement = request.output_format.statement
            told = (m.content for m in reversed(earlier) if m.role != "assistant")
            stated = next((text for text in told if STATEMENT in text), "")
            if not stated.endswith(statement):
                changed = replace(last, content=last.content + statement)
                self._stated[id(changed)] = changed, last
                last = changed
        messages[-1] = last

    def _find(
        self,
        key: Key,
        used: Container[int] = (),
        unused: dict[Any, list[_SampledTurn]] | None = None,
    ) -> _SampledTurn | None:
        """Return the sampled turn that an assistant message repeats; None if it is foreign.

        Args:
            key: the key of the message.
            used: the `id` of each message that belongs to an earlier message of the request.
            unused: the turns that the request may still repeat, by their texts. Each turn is
                looked at once per request. Filled and changed here.
        """
        if key.ids:
            candidates = [self._by_call[key.ids[0]]]
        elif unused is None:
            candidates = self._by_text.get(key[:3], [])[-1:]
        else:
            candidates = unused.setdefault(key[:3], self._by_text.get(key[:3], [])[:])
        while candidates:
            sampled = candidates.pop()
            if sampled.key.is_same(key) and id(sampled.message) not in used:
                return sampled
        return None

    def _foreign(self, message: ChatMessage) -> Message:
        """Return an assistant message that the policy did not write."""
        calls = []
        for call in message.calls:
            try:
                # The stricter parser refuses NaN, lone surrogates and deep nesting. The other one
                # reads large integers exactly.
                orjson.dumps(orjson.loads(call.arguments or "{}"))
                arguments = json.loads(call.arguments or "{}")
            except (ValueError, TypeError):
                arguments = None
            if not isinstance(arguments, dict):
                why = (
                    f"the arguments of the tool call {call.id!r} are not a JSON object:"
                    f" {call.arguments[:80]!r}"
                )
                raise Refusal(400, "arguments", why, "messages")
            calls.append(ToolCall(call.name, arguments, id=self._own_id(call.id)))
        return self._episode.foreign(message.text, calls)

    def _own_id(self, id: str) -> str:
        """Return the id that the model gave a call. An id that is not of this session is kept."""
        sampled = self._by_call.get(id)
        return sampled.own_ids[sampled.ids.index(id)] if sampled else id

    def _sort_results(self, request: ChatRequest, messages: list[Message], start: int) -> None:
        """Sort adjacent tool results by the order of their calls."""
        ids = [m.call_id for m in request.messages]
        order = {id: i for s in self._sampled for i, id in enumerate(s.ids)}
        while start < len(messages):
            end = start
            while end < len(messages) and messages[end].role == "tool" and ids[end] in order:
                end += 1
            if end - start > 1:
                group = sorted(zip(ids[start:end], messages[start:end], strict=True),
                               key=lambda pair: order[pair[0]])  # fmt: skip
                messages[start:end] = [message for _, message in group]
            start = max(end, start + 1)

    def _record_results(self, request: ChatRequest) -> None:
        """Record the results of the calls that the client ran, each in the turn that called it."""
        sent = {m.call_id: m for m in request.messages if m.role == "tool"}
        for sampled in {id(s): s for i in sent if (s := self._by_call.get(i))}.values():
            turn = self._attempt.turns[sampled.turn]
            if turn.tool_results or not all(i in sent for i in sampled.ids):
                continue
            messages = (sent[i] for i in sampled.ids)
            results = [
                ToolResult(call.error, ok=False, error="bad_call")
                if call.error
                else ToolResult((message := next(messages)).text, images=message.images)
                for call in turn.tool_calls
            ]
            seconds = time.monotonic() - sampled.answered
            self._control.record_results(turn, results, seconds)

    def _record(
        self, conversation: _Conversation, message: Message, request: ChatRequest
    ) -> Answer:
        """Add the policy's turn to a conversation and return it as the client sees it."""
        index = self._control.turns_of(conversation.episode)[-1]
        turn, number = self._attempt.turns[index], len(self._sampled)
        salt = blake2b(self._attempt.episode_id.encode(), digest_size=8).hexdigest()
        reasoning, text = self._control.split_thinking(turn)
        stop = next((s for s in request.stop if message.content.endswith(s)), "")
        parsed = [call for call in turn.tool_calls if not call.error]
        calls = tuple(
            ChatCall(
                f"call_{salt}_{number}_{i}", c.name, json.dumps(c.arguments, ensure_ascii=False)
            )
            for i, c in enumerate(parsed)
        )
        is_cut = turn.finish_reason == "length"
        answer = Answer(
            id=f"chatcmpl-{salt}-{number}",
            text=text.removesuffix(stop).strip(),
            reasoning=reasoning,
            calls=calls,
            finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
            stop=stop,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            completion_tokens=turn.end - turn.start,
        )
        ids, own_ids = tuple(c.id for c in calls), tuple(c.id for c in parsed)
        sampled = _SampledTurn(message, index, conversation, ids, own_ids, time.monotonic())
        self._by_call.update(dict.fromkeys(ids, sampled))
        sampled.key = self._key(ChatMessage("assistant", answer.text, calls, reasoning=reasoning))
        self._sampled.append(sampled)
        self._by_text.setdefault(sampled.key[:3], []).append(sampled)
        form = request.output_format
        if form and not calls and not form.accepts(answer.text):
            self._attempt.counts["gateway/invalid_output"] += 1
        conversation.keys.append(sampled.key)
        conversation.messages.append(message)
        conversation.turns += 1
        return answer


def _retrieve_error(task: asyncio.Task[Answer]) -> None:
    """Retrieve the error of a task, because asyncio logs errors that nobody retrieves."""
    if not task.cancelled():
        task.exception()


def _episode_over(why: str) -> Refusal:
    return Refusal(400, "episode_over", f"{why}. End now: no request will be answered")


def _count_shared(known: Sequence[Key], keys: Sequence[Key]) -> int:
    """Return how many messages two conversations share at their beginning."""
    n = 0
    for a, b in zip(known, keys, strict=False):
        if not a.is_same(b):
            break
        n += 1
    return n


def _differs_before_turns(known: _Conversation, keys: Sequence[Key], shared: int) -> bool:
    """Return whether a request may be of another conversation than a known one.

    They share system messages at most, or their users' messages differ before the first answer:
    sub-agents of Codex begin with a message of the main agent.

    Args:
        known: a known conversation.
        keys: the keys of the request's messages.
        shared: the number of messages that are the same at the beginning.
    """
    roles = {key.role for key in keys[:shared]}
    if roles <= {"system"}:
        return True
    different = [messages[shared].role for messages in (known.keys, keys) if shared < len(messages)]
    return known.turns > 0 and "assistant" not in roles and different == ["user", "user"]


@lru_cache(4096)  # Each request contains the arguments of all earlier calls again.
def canonical(arguments: str) -> str:
    """Return a canonical text of the arguments of a call, or the text if it is not JSON."""
    try:
        value: Any = orjson.loads(arguments or "{}")
        return orjson.dumps(with_whole_numbers(value), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return arguments


def parts_of(message: ChatMessage) -> tuple[tuple[str, str], ...]:
    """Return the name and the canonical arguments of each call, and the hash of each image."""
    if not message.calls and not message.images:
        return ()
    calls = [(call.name, canonical(call.arguments)) for call in message.calls]
    return (*calls, *[("image", image.key) for image in message.images])


def _text_of(key: Key) -> str:
    return "\n".join([key.text, *(f"{name}({value})" for name, value in key.parts)])


def cut_around_difference(before: str, after: str) -> tuple[str, str]:
    """Return two texts around their first difference."""
    pairs = zip(before, after, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    start = max(at - CONTEXT, 0)
    return before[start : at + CONTEXT], after[start : at + CONTEXT]
