"""The conversations of one episode, as an agent sends them to an OpenAI-style API.

A chat API has no memory: each request contains the whole conversation. `Session` finds out which
part of it the policy has sampled, so that a sampled token trains once, with its logprob, and is
never encoded again:

    the conversation goes on where a known one ends     the row grows (clean)
    the same, written differently                       the row grows (realigned): arguments in
                                                        another JSON form, no thinking
    it goes on elsewhere in a known one                 a new row begins (branch)
    it is unknown                                       a new conversation begins (spawn)

Two messages are the same if role, visible text and calls are. The ids of tool calls are ours, so
they tell which turn an assistant message was, even if two turns have the same text. An assistant
message that the policy did not write, or that the client has changed, is foreign: it is shown to
the policy and has mask 0.

A request that is sent again because its client lost the connection gets the same answer. Any other
request with the same contents gets a new sample, so that best-of-n works.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import orjson

from agentrl.agent_loops import Episode
from agentrl.errors import EpisodeOver, Infrastructure, TemplateError
from agentrl.gateway.requests import Answer, Call, ChatMessage, Refusal, Request
from agentrl.trajectory import Message, ToolCall, ToolResult, Turn

VOLATILE = re.compile(
    r"^(?:x-anthropic-billing-header:.*"
    r"|(?:(?:the )?current|today's) (?:date|time|date and time)\b.*)$",
    re.IGNORECASE | re.MULTILINE,
)
"""Lines of system and user messages that clients change in every request. The policy keeps seeing
the first version of such a line."""
MAX_ANSWERS = 64
"""The number of answers that a session keeps for requests that are sent again."""
CONTEXT = 60
"""The characters that a report shows before and after a difference."""

Kind = Literal["first", "clean", "realigned", "branch", "spawn", "retry"]


@dataclass(frozen=True, slots=True)
class Event:
    """How a request was matched, for reports.

    Attributes:
        kind: see the top of this file; "first" for the first conversation, "retry" for a request
            that was sent again.
        cause: what made it differ from a clean continuation; "" if nothing did.
        index: the index of the first message that differs; -1 if none does.
        before: that message as the session knows it, around the difference.
        after: the same as the client sends it.
    """

    kind: Kind
    cause: str = ""
    index: int = -1
    before: str = ""
    after: str = ""


class Key(NamedTuple):
    """What makes two messages the same, and how this one is written."""

    role: str
    text: str
    """The visible text, without volatile lines."""
    calls: tuple[tuple[str, str], ...]
    """The name and the canonical arguments of each call."""
    ids: tuple[str, ...]
    """The ids of its calls, or of the call that it answers, as far as this session made them."""
    written: str
    """What may differ between equal messages: volatile lines, JSON forms, thinking."""

    def is_same(self, other: Key) -> bool:
        """Return whether two messages are the same. A message without our ids may be any."""
        return self[:3] == other[:3] and (self.ids == other.ids or not (self.ids and other.ids))


@dataclass(slots=True, eq=False)
class _Sampled:
    """A turn that the policy sampled."""

    message: Message
    turn: int
    """Its index in `Episode.turns`."""
    chain: _Chain
    ids: tuple[str, ...]
    """The ids of its well-formed calls."""
    own_ids: tuple[str, ...]
    """The ids that the model gave these calls, "" without one."""
    answered: float
    """The `time.monotonic()` seconds at which the client got it."""
    key: Key = field(init=False)


@dataclass(slots=True, eq=False)
class _Chain:
    """A conversation: what the client sent last, and the messages of the episode for it."""

    episode: Episode
    keys: list[Key] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: bytes = b""
    is_busy: bool = False
    turns: int = 0


class Session:
    """Answers the requests of one episode.

    Attributes:
        events: how each request was matched.
        counts: how often clients asked for something that the run decides, by the field's name, and
            how often volatile lines changed ("volatile").
        refusals: the errors that requests got as their answers.
        over: set when the episode has ended: each further request is refused.
        is_over_budget: whether a budget has ended the episode.
        has_outcome: whether the agent has reported its reward.
        failure: the infrastructure failure or the bug that ended it, if there is one.
    """

    def __init__(self, episode: Episode):
        """Open a session for an episode without turns."""
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.over = asyncio.Event()
        self.failure: BaseException | None = None
        self.has_outcome = self.is_over_budget = False
        self.refusals: list[Refusal] = []
        self._episode = episode
        self._chains: list[_Chain] = []
        self._sampled: list[_Sampled] = []
        self._by_call: dict[str, _Sampled] = {}
        self._answers: dict[bytes, asyncio.Task[Answer]] = {}
        self._waiting: Counter[bytes] = Counter()
        self._delivered: set[bytes] = set()
        self._openings: Counter[str] = Counter()
        # Requests come from the server's tasks, but their waits belong to the episode's time limit.
        self._context = copy_context()

    async def answer(self, request: Request) -> Answer:
        """Return the policy's next message in the conversation of a request.

        If the caller is cancelled because its client has gone, the message is sampled nevertheless:
        the same request gets it later.

        Raises:
            Refusal: the episode is over, the conversation cannot be continued, or the engine
                failed.
        """
        digest = blake2b(request.body, digest_size=16).digest()
        task = self._answers.get(digest)
        # Nobody got the answer, and nobody waits for it: its client has lost the connection.
        is_lost = not self._waiting[digest] and digest not in self._delivered
        if task is not None and (is_lost or request.is_retry):
            self.events.append(Event("retry"))
        else:
            task = asyncio.create_task(self._sample(request), context=self._context.copy())
            task.add_done_callback(_take_error)
            self._answers[digest] = task
            self._delivered.discard(digest)
            old = [d for d, t in self._answers.items() if t.done()][:-MAX_ANSWERS]
            for d in old:
                del self._answers[d]
        self._waiting[digest] += 1
        try:
            answer = await asyncio.shield(task)
            self._delivered.add(digest)
            return answer
        except Refusal:
            self._answers.pop(digest, None)
            raise
        finally:
            self._waiting[digest] -= 1

    def set_outcome(self, reward: float) -> None:
        """Set the outcome reward of the episode. A second call replaces the first.

        Raises:
            UserCodeError: `reward` is not a finite number.
        """
        self._episode.set_outcome(reward)
        self.has_outcome = True

    async def close(self) -> None:
        """Refuse all further requests, and end those in flight.

        The conversation of the last turn becomes the main one.
        """
        self.over.set()
        tasks = [task for task in self._answers.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for event in self.events:
            self._episode.count(f"gateway/{event.kind}")
        for name, number in self.counts.items():
            self._episode.count(f"gateway/ignored/{name}", number)
        if self._sampled:
            # Sub-agents may have more turns than the conversation that uses their answers, and an
            # agent that summarizes its history goes on in another conversation.
            self._episode.make_main(self._sampled[-1].chain.episode)

    # -- one request ------------------------------------------------------------------------------

    async def _sample(self, request: Request) -> Answer:
        if self.over.is_set():
            raise _episode_over("the episode has ended")
        self.counts.update(request.ignored)
        if request.messages[-1].role == "assistant":
            raise Refusal(
                400,
                "last_message",
                "the last message must not be an assistant message: the policy begins a new turn",
                "messages",
            )
        chain = None
        try:
            chain = self._match(request)
            chain.is_busy = True
            turns = len(self._episode.turns)
            try:
                message = await chain.episode.generate(
                    stop=request.stop, max_tokens=request.max_tokens
                )
            except EpisodeOver:
                # The last turn of a budget is an answer, if it is complete enough to be one.
                turn = next((t for t in self._episode.turns[turns:] if _is_of(t, chain)), None)
                self.is_over_budget = True
                self.over.set()
                if turn is None:
                    raise
                message = chain.episode.messages[-1]
            return self._record(chain, message, request)
        except EpisodeOver as over:
            self.is_over_budget = True
            self.over.set()
            raise _episode_over(f"a budget is used up: {over.reason}") from None
        except TemplateError as e:
            raise Refusal(400, "template", str(e), "messages") from e
        except Infrastructure as e:
            self._fail(e)
            raise Refusal(503, "engine", str(e).partition("\n")[0]) from e
        except Refusal:
            raise
        except Exception as e:
            self._fail(e)
            raise Refusal(500, "bug", f"{type(e).__name__}: {e}") from e
        finally:
            if chain is not None:
                chain.is_busy = False

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.over.set()

    def _match(self, request: Request) -> _Chain:
        """Return the conversation that a request continues, with its messages observed."""
        keys = [self._key(message) for message in request.messages]
        tools = orjson.dumps(request.tools)
        best, shared = None, 0
        for chain in reversed(self._chains):
            n = _shared(chain.keys, keys)
            if n > shared or (n == shared and best is not None and best.is_busy):
                best, shared = chain, n
        if best is None or all(key.role == "system" for key in keys[:shared]):
            # Nothing but instructions is the same. A turn may be, if the client removed the
            # beginning of a conversation.
            known = (self._find(k, set()) for k in reversed(keys) if k.role == "assistant")
            turn = next(filter(None, known), None)
            if turn is None:
                return self._open(request, keys, tools, Event("spawn", "unknown conversation"))
            best, shared = turn.chain, _shared(turn.chain.keys, keys)
        event = self._difference(best, keys, shared, tools)
        if best.is_busy:
            cause = event.cause or "the conversation goes on in another request"
            return self._open(request, keys, tools, replace(event, kind="spawn", cause=cause))
        self._record_results(request)
        messages = self._messages(best, request, keys, shared)
        sampled = {id(s.message) for s in self._sampled}
        if event.kind != "branch" and any(id(m) in sampled for m in messages[shared:]):
            event = Event("branch", "a turn of another conversation was added", shared)
        if event.kind == "branch" or not best.turns:
            best.episode.branch(messages, request.tools)
        else:
            best.episode.observe(*messages[shared:])
        best.keys, best.messages, best.tools = keys, messages, tools
        self.events.append(event)
        return best

    def _open(self, request: Request, keys: list[Key], tools: bytes, event: Event) -> _Chain:
        """Begin a conversation. The first one is the episode's own."""
        if keys[0].role not in ("system", "user"):
            raise Refusal(
                400,
                "first_message",
                f"the first message must be of role system or user, not {keys[0].role!r}",
                "messages",
            )
        messages = self._messages(None, request, keys, 0)
        if not self._chains:
            self._episode.branch(messages, request.tools)
            chain, event = _Chain(self._episode), Event("first")
        else:
            # Independent of the order in which concurrent conversations begin.
            opening = repr([key[:3] for key in keys])
            self._openings[opening] += 1
            text = f"{self._openings[opening]} {opening}".encode()
            seed = int.from_bytes(blake2b(text, digest_size=7).digest(), "big")
            chain = _Chain(self._episode.spawn(messages, request.tools, seed=seed))
        chain.keys, chain.messages, chain.tools = keys, messages, tools
        self._chains.append(chain)
        self.events.append(event)
        return chain

    def _difference(self, chain: _Chain, keys: list[Key], shared: int, tools: bytes) -> Event:
        """Return how a conversation differs from a known one with the same beginning."""
        known = chain.keys
        written = next((i for i in range(shared) if known[i].written != keys[i].written), -1)
        if shared < len(known):
            i = shared
            if i == len(keys):
                cause = "an earlier request was sent again"
                return Event("branch", cause, i - 1)
            before, after = _around(_shown(known[i]), _shown(keys[i]))
            role = known[i].role
            cause = f"{role} message changed" if keys[i].role == role else "messages were removed"
            return Event("branch", cause, i, before, after)
        if tools != chain.tools:
            before, after = _around(chain.tools.decode(), tools.decode())
            return Event("branch", "the tools changed", -1, before, after)
        if written < 0:
            return Event("clean")
        before, after = _around(known[written].written, keys[written].written)
        if known[written].role != "assistant":
            self.counts["volatile"] += 1
            return Event("realigned", "a volatile line changed", written, before, after)
        return Event("realigned", "a turn is written differently", written, before, after)

    # -- messages ---------------------------------------------------------------------------------

    def _key(self, message: ChatMessage) -> Key:
        """Return what makes a message the same as another."""
        text, written = message.text.strip(), ""
        if message.role in ("system", "user") and VOLATILE.search(text):
            text, written = VOLATILE.sub("", text), text
        if message.role != "assistant":
            ids = (message.call_id,) if message.call_id in self._by_call else ()
            return Key(message.role, text, (), ids, written)
        ids = tuple(call.id for call in message.calls if call.id in self._by_call)
        calls = tuple((call.name, _canonical(call.arguments)) for call in message.calls)
        written = "\n".join([message.reasoning, *(call.arguments for call in message.calls)])
        return Key("assistant", text, calls, ids, written)

    def _messages(
        self, chain: _Chain | None, request: Request, keys: list[Key], shared: int
    ) -> list[Message]:
        """Return the episode's messages for those of a request.

        Args:
            chain: a conversation whose first `shared` messages are the same.
            request: the request.
            keys: the keys of its messages.
            shared: see `chain`.
        """
        messages = chain.messages[:shared] if chain else []
        used = set(map(id, messages))
        for message, key in zip(request.messages[shared:], keys[shared:], strict=True):
            if message.role == "assistant":
                sampled = self._find(key, used)
                messages.append(sampled.message if sampled else self._foreign(message))
                used.add(id(messages[-1]))
            else:
                own_id = self._own_id(message.call_id)
                messages.append(Message(message.role, message.text, tool_call_id=own_id))
        self._sort_results(request, messages, shared)
        row = {(m.role, m.content): m for m in self._episode.sample.prompt if m.role != "assistant"}
        return [row.get((m.role, m.content), m) if m.role != "tool" else m for m in messages]

    def _find(self, key: Key, used: set[int]) -> _Sampled | None:
        """Return the sampled turn that an assistant message is, each turn once."""
        candidates = [self._by_call[key.ids[0]]] if key.ids else reversed(self._sampled)
        for sampled in candidates:
            if sampled.key.is_same(key) and id(sampled.message) not in used:
                return sampled
        return None

    def _foreign(self, message: ChatMessage) -> Message:
        """Return an assistant message that the policy did not write."""
        calls = []
        for call in message.calls:
            try:
                arguments = json.loads(call.arguments or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                raise Refusal(
                    400,
                    "arguments",
                    f"the arguments of the tool call {call.id!r} are not a JSON object:"
                    f" {call.arguments[:80]!r}",
                    "messages",
                )
            calls.append(ToolCall(call.name, arguments, id=self._own_id(call.id)))
        return self._episode.foreign(message.text, calls)

    def _own_id(self, id: str) -> str:
        """Return the id that the model gave a call; other ids stay as they are."""
        sampled = self._by_call.get(id)
        return sampled.own_ids[sampled.ids.index(id)] if sampled else id

    def _sort_results(self, request: Request, messages: list[Message], start: int) -> None:
        """Put results that follow each other into the order of their calls."""
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

    def _record_results(self, request: Request) -> None:
        """Record the results of calls that the client ran, in their turns."""
        texts = {m.call_id: m.text for m in request.messages if m.role == "tool"}
        for sampled in {id(s): s for i in texts if (s := self._by_call.get(i))}.values():
            turn = self._episode.turns[sampled.turn]
            if turn.tool_results or not all(i in texts for i in sampled.ids):
                continue
            contents = (texts[i] for i in sampled.ids)
            results = [
                ToolResult(call.error, ok=False, error="bad_call")
                if call.error
                else ToolResult(next(contents))
                for call in turn.tool_calls
            ]
            seconds = time.monotonic() - sampled.answered
            self._episode.record_results(turn, results, seconds)

    def _record(self, chain: _Chain, message: Message, request: Request) -> Answer:
        """Add the policy's turn to a conversation and return it as the client sees it."""
        index = max(i for i, turn in enumerate(self._episode.turns) if _is_of(turn, chain))
        turn, number = self._episode.turns[index], len(self._sampled)
        salt = blake2b(self._episode.episode_id.encode(), digest_size=4).hexdigest()
        reasoning, text = self._episode.split_thinking(turn)
        for stop in request.stop:
            text = text.removesuffix(stop)
        parsed = [call for call in turn.tool_calls if not call.error]
        calls = tuple(
            Call(f"call_{salt}_{number}_{i}", c.name, json.dumps(c.arguments, ensure_ascii=False))
            for i, c in enumerate(parsed)
        )
        is_cut = turn.finish_reason == "length"
        answer = Answer(
            id=f"chatcmpl-{salt}-{number}",
            text=text.strip(),
            reasoning=reasoning,
            calls=calls,
            finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            completion_tokens=turn.end - turn.start,
        )
        ids, own_ids = tuple(c.id for c in calls), tuple(c.id for c in parsed)
        sampled = _Sampled(message, index, chain, ids, own_ids, time.monotonic())
        self._by_call.update(dict.fromkeys(ids, sampled))
        sampled.key = self._key(ChatMessage("assistant", answer.text, calls, reasoning=reasoning))
        self._sampled.append(sampled)
        chain.keys.append(sampled.key)
        chain.messages.append(message)
        chain.turns += 1
        return answer


def _take_error(task: asyncio.Task[Answer]) -> None:
    """Let asyncio not complain about an error for which no client waits any more."""
    if not task.cancelled():
        task.exception()


def _is_of(turn: Turn, chain: _Chain) -> bool:
    return turn.thread == chain.episode.conversation


def _episode_over(why: str) -> Refusal:
    return Refusal(400, "episode_over", f"{why}. End now: no request will be answered")


def _shared(known: Sequence[Key], keys: Sequence[Key]) -> int:
    """Return how many messages two conversations share at their beginning."""
    n = 0
    for a, b in zip(known, keys, strict=False):
        if not a.is_same(b):
            break
        n += 1
    return n


@lru_cache(4096)  # Each request contains the arguments of all earlier calls again.
def _canonical(arguments: str) -> str:
    """Return one form for all texts of the same JSON value."""
    try:
        value: Any = orjson.loads(arguments or "{}")
        return orjson.dumps(_unify(value), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments


def _unify(node: Any) -> Any:
    """Return a JSON value whose whole numbers are integers: JavaScript writes 1.0 as 1."""
    if isinstance(node, float) and node.is_integer() and abs(node) < 2**53:
        return int(node)
    if isinstance(node, dict):
        return {key: _unify(value) for key, value in node.items()}
    return [*map(_unify, node)] if isinstance(node, list) else node


def _shown(key: Key) -> str:
    return "\n".join([key.text, *(f"{name}({arguments})" for name, arguments in key.calls)])


def _around(before: str, after: str) -> tuple[str, str]:
    """Return two texts around their first difference."""
    pairs = zip(before, after, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    start = max(at - CONTEXT, 0)
    return before[start : at + CONTEXT], after[start : at + CONTEXT]
