"""One attempt at a sample: the budgets, turns, rows and time that its conversations share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from inspect import isawaitable
from typing import Any

from agentrl.agent_loops.context import TokenRow
from agentrl.chat import (
    ChatTemplate,
    ForeignParser,
    Reader,
    load_tokenizer,
    open_reader,
    truncate,
)
from agentrl.chat.encoding import common_prefix_length
from agentrl.chat.images import require_rule
from agentrl.chat.render import check_variables
from agentrl.chat.tokenizer import end_of_turn_ids, template_source
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import EngineError, EpisodeOver, UserError
from agentrl.http.pool import TimeLimit
from agentrl.images import PLACE, Image, ImageRule, RowImage
from agentrl.tools import Toolbox
from agentrl.trajectory import (
    Generation,
    Message,
    Sample,
    Scores,
    Span,
    ToolCall,
    ToolResult,
    Turn,
)
from agentrl.workers import IterationLimit, PerLoop

log = logging.getLogger("agentrl")

CLEANUP_SECONDS = 10.0
"""The longest wait for each part of an episode's end, in seconds: for methods of the episode that
still run and are cancelled, and for the interaction's `close`. A run that stops waits as long for
its cancelled episodes. The toolbox has its own limits for closing tools."""
RESUMED_PER_ITERATION = 16
"""How many episodes begin, or continue after a turn, in one iteration of the event loop. Each
computes for about 0.25 ms, so timers and sockets wait for about 4 ms."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts that all episodes of a run share: engine, chat template, tools and config."""

    sampler: Sampler
    template: ChatTemplate
    toolbox: Toolbox
    config: Config
    resumed: PerLoop[IterationLimit] = field(
        init=False, default_factory=lambda: PerLoop(lambda: IterationLimit(RESUMED_PER_ITERATION))
    )
    """Limits how many episodes begin, or continue after a turn, in one iteration of the loop."""
    parser: Reader = field(init=False)
    """Parses the tool calls in a turn's text, as `rollout.tool_format` says."""

    def __post_init__(self):
        rollout = self.config.rollout
        parser = open_reader(rollout.tool_format, self.template, rollout.python)
        object.__setattr__(self, "parser", parser)

    async def parse_calls(self, text: str, schemas: Sequence[Any]) -> list[ToolCall]:
        """Return the tool calls in a turn's text."""
        calls = self.parser(text, schemas)
        return await calls if isawaitable(calls) else calls

    def truncate(self, result: ToolResult) -> ToolResult:
        """Return a tool result of at most `tools.max_result_tokens`, with a note if it was cut."""
        tools, template = self.config.tools, self.template
        limit, side = tools.max_result_tokens, tools.truncate
        content = truncate(result.content, limit, side, template.encode, template.decode_plain)
        if content is result.content:
            return result
        kept = common_prefix_length(content, result.content)
        first = content[:kept].count(PLACE)
        last = len(result.images) - content.count(PLACE) + first
        images = result.images and (*result.images[:first], *result.images[last:])
        return replace(result, content=content, images=images)

    def close(self) -> None:
        """End the process of a foreign parser, if there is one."""
        if isinstance(self.parser, ForeignParser):
            self.parser.close()


def load_template(config: Config) -> ChatTemplate:
    """Load the policy's tokenizer and return its chat template, with the run's variables.

    Raises:
        UserError: there is no tokenizer, or its template cannot render turns, or the template does
            not read one of the variables.
    """
    path = config.model.path
    images = ImageRule.load(path)
    return make_template(load_tokenizer(path), config, end_of_turn_ids(path), images)


def make_template(
    tokenizer: Any, config: Config, end_ids: Sequence[int] = (), images: ImageRule | None = None
) -> ChatTemplate:
    """Return a tokenizer's chat template, with the run's variables.

    Args:
        tokenizer: the policy's tokenizer.
        config: the config of the run.
        end_ids: further tokens that end turns.
        images: how the model turns images into tokens; None: it reads none.

    Raises:
        UserError: see `load_template`.
    """
    variables = config.model.template_kwargs
    check_variables(template_source(tokenizer), variables)
    return ChatTemplate(
        tokenizer, end_ids, variables=variables, untrusted=config.data.untrusted, images=images
    )


@dataclass(slots=True)
class Attempt:
    """One attempt at playing a sample: the state that an episode shares with those it spawns.

    If the infrastructure fails, the sample is played again: that is another attempt, with another
    `episode_id`.
    """

    runtime: Runtime
    sample: Sample
    episode_id: str
    """Unique per attempt."""
    rollout: int
    """The index of this rollout among the sample's n rollouts."""
    sampling: Sampling
    """The sampling parameters. `max_tokens` and the stop tokens are filled in."""
    seed: int
    """The seed of the run. With the rollout and the turn, it is the only source of randomness."""
    messages: list[Message] = field(default_factory=list)
    """All messages of all conversations, in the order in which they were added."""
    turns: list[Turn] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    turn_ids: dict[int, array[int]] = field(default_factory=dict)
    """The token ids of each assistant message that was sampled or is foreign, by `id(message)`.
    `messages` and `foreign` hold references to the messages, so that no id is reused."""
    images: dict[str, RowImage] = field(default_factory=dict)
    """The images of all conversations, as the model reads them, by their keys."""
    foreign: dict[int, Message] = field(default_factory=dict)
    """The assistant messages that the policy did not sample (`Episode.foreign`), by `id`."""
    parses_calls: bool = True
    """False if the environment of the row offers no tools: turns are texts, whatever is in them."""
    main: int = 0
    """The conversation that becomes number 0 in the trajectory."""
    scores: Scores | None = None
    """The scores that the environment or the agent itself reports; None: a reward function computes
    them."""
    counts: Counter[str] = field(default_factory=Counter)
    """What the loop counted, by the names of metrics."""
    error: str = ""
    """Why the user's agent failed; "" if it did not."""
    turns_in_flight: int = 0
    """The turns that the engine is sampling: several, if it takes concurrent requests."""
    turn_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the next of these turns has ended, and replaced by a new event then."""
    reserved_tokens: int = 0
    """The tokens that these turns may add to their rows, at most."""
    tool_calls: int = 0
    spawned: int = 0
    control_token_attempts: int = 0
    """The number of control tokens whose texts prompts, tools and interactions contained."""
    spans: list[Span] = field(default_factory=list)
    """The times that the attempt has spent so far; see `Trajectory.spans`."""
    created: float = field(default_factory=time.monotonic)
    """The `time.monotonic()` seconds at which the spans begin."""
    phase: str = "opening"
    """The stage of the attempt: "opening", "loop", "reward" and so on."""
    waits: list[str] = field(default_factory=list)
    """The things that the conversations wait for within the loop, one for each wait."""
    since: float = field(default_factory=time.monotonic)
    """The `time.monotonic()` seconds at which `state` changed last."""
    started: float = field(default_factory=time.monotonic)
    limit: TimeLimit = field(init=False)
    """`rollout.timeout_s` from `start_clock` on. Waits for a free connection do not count."""
    end_reason: str = ""
    """The exhausted budget, or "agent_error"; "done" if the attempt ended without one; "" while it
    runs."""
    engine_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a request, because an engine accepts one request of an episode at a time."""
    active_tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """The tasks in which a method of an episode (`generate`, `call_tools`, ...) is running."""

    def __post_init__(self):
        self.start_clock()
        self.sampling = replace(
            self.sampling,
            max_tokens=self.runtime.config.rollout.max_turn_tokens,
            stop_ids=self.runtime.template.stop_ids,
        )

    def start_clock(self) -> None:
        """Start or restart the time limit. It is restarted after the tools are opened."""
        self.started = time.monotonic()
        self.limit = TimeLimit(self.runtime.config.rollout.timeout_s)

    @property
    def deadline(self) -> float:
        """The `time.monotonic()` seconds of the end; each wait for a connection makes it later."""
        return self.limit.deadline

    def end_with(self, reason: str) -> EpisodeOver:
        """End the attempt because of an exhausted budget, and return the exception to raise.

        If the agent loop catches the exception, every method that it calls later raises it again.
        """
        self.end_reason = self.end_reason or reason
        return EpisodeOver(self.end_reason)

    def check(self) -> None:
        """Raise `EpisodeOver` if the attempt has ended or its time is over."""
        if self.end_reason:
            raise EpisodeOver(self.end_reason)
        if time.monotonic() >= self.deadline:
            raise self.end_with("time")

    def active(self) -> _Active:
        """Register the current task as active within a block, so that `end` can cancel it.

        Raises:
            EpisodeOver: the attempt has ended, or its time is over.
        """
        self.check()
        return _Active(self.active_tasks)

    async def end(self) -> None:
        """End the attempt: cancel the methods of the episode that still run, and wait for them.

        The wait is at most `CLEANUP_SECONDS`. A task that still runs then is logged and left
        behind.
        """
        self.end_reason = self.end_reason or "done"
        tasks = self.active_tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        ended = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait((ended,), timeout=CLEANUP_SECONDS)
        for task in tasks:
            if not task.done():
                self.active_tasks.discard(task)
                log.error(
                    "row %r: %s still runs %g s after the episode ended and cancelled it (it waits"
                    " for: %s). Does a function there catch asyncio.CancelledError?",
                    self.sample.id,
                    getattr(task.get_coro(), "__qualname__", task.get_name()),
                    CLEANUP_SECONDS,
                    self.state,
                )

    async def prepare(self, images: Iterable[Image]) -> None:
        """Decode images that enter a conversation.

        Raises:
            ImageError: an image cannot be read.
            ConfigError: the policy reads no images.
        """
        for image in images:
            if image.key not in self.images:
                reader = require_rule(self.runtime.template.images)
                self.images[image.key] = await reader.prepare(image)

    async def sample_turn(
        self,
        ids: array[int],
        sampling: Sampling,
        seed: Sequence[int],
        until: float = math.inf,
        images: Sequence[RowImage] = (),
    ) -> tuple[Generation, str]:
        """Let the engine continue a row. Return the tokens, cut at a stop text, and their text.

        Args:
            ids: the row.
            sampling: the parameters of this turn.
            seed: the seed of this turn, in addition to those of the run, the row and the rollout.
            until: an earlier deadline of this request, in `time.monotonic()` seconds.
            images: the images of the row, in order.

        Raises:
            EpisodeOver: the time of the episode is over.
            EngineError: the engine failed. The sample may be played again.
        """
        # An engine that reads no images need not know this argument.
        more: dict[str, Any] = {"images": images} if images else {}
        if images and self.runtime.config.rollout.name == "sglang":
            require_rule(self.runtime.template.images).check_spelling(ids)
        while True:
            deadline = min(until, self.deadline)
            try:
                turn_seed = mix_seed(self.seed, self.rollout, *seed)
                generation = await self.runtime.sampler.generate(
                    ids,
                    sampling,
                    episode_id=self.episode_id,
                    seed=turn_seed,
                    deadline=deadline,
                    **more,
                )
                if sampling.returns_kept and not generation.kept_counts:
                    raise UserError(
                        f"rollout.top_p={sampling.top_p:g} and rollout.top_k={sampling.top_k}: the"
                        " engine does not return the tokens that they keep. Set rollout.name=local"
                        " or sglang, or rollout.top_p=1 and rollout.top_k=0"
                    )
                if sampling.experts_from is not None and not generation.experts:
                    raise UserError(
                        "rollout.router_replay=true: the engine does not return the experts that it"
                        " chooses. Set rollout.name=local or sglang, or rollout.router_replay=false"
                    )
                if wait := self.runtime.resumed.get().enter():
                    self.limit.pause()  # The turn has arrived in time.
                    try:
                        await wait
                    finally:
                        self.limit.resume()
                return cut_at_stop(generation, self.runtime.template, sampling.stop)
            except EngineError:
                self.check()  # Raises `EpisodeOver` if the time of the episode is over as well.
                if time.monotonic() < deadline or min(until, self.deadline) == deadline:
                    raise
                # While the request waited for a connection, the deadline of the episode became
                # later. The engine kept the earlier deadline. Send the request again.

    @property
    def state(self) -> str:
        """The things that the attempt waits for. The watchdog prints them."""
        return ", ".join(self.waits) or self.phase

    def enter(self, phase: str) -> None:
        """Set `phase`, for the watchdog."""
        self.phase, self.since = phase, time.monotonic()

    def waiting_for(self, name: str, conversation: int, where: str = "") -> _Wait:
        """Register what a conversation waits for within a block, and record a span.

        Args:
            name: the name of the `Span`.
            conversation: its number.
            where: the place where the work is done, for the watchdog.
        """
        return _Wait(self, name, conversation, f"{name} {where}" if where else name)

    @contextmanager
    def turn_in_flight(self, tokens: int) -> Iterator[None]:
        """Reserve the tokens that a turn may use, while it is sampled in the block."""
        self.reserved_tokens += tokens
        self.turns_in_flight += 1
        try:
            yield
        finally:
            self.reserved_tokens -= tokens
            self.turns_in_flight -= 1
            self.turn_ended.set()
            self.turn_ended = asyncio.Event()

    def record(self, name: str, start: float, end: float, conversation: int = 0) -> None:
        """Add a span; start and end are `time.monotonic()` seconds."""
        origin = self.created
        self.spans.append(
            Span(name, round(start - origin, 6), round(end - origin, 6), conversation)
        )

    def remaining_tokens(self, row: TokenRow, new: int) -> int:
        """Return how many tokens may be sampled in a row after `new` observed tokens."""
        used = sum(map(len, self.rows)) + self.reserved_tokens
        return min(
            self.runtime.config.rollout.max_trajectory_tokens - used - new,
            self.runtime.sampler.max_length - len(row.ids) - new,
        )


class _Active:
    """A block in which the current task counts as one of `tasks`: what `Attempt.active` returns.

    A class, because entering a generator takes longer than the rest of the block's work.
    """

    __slots__ = "_is_outermost", "_task", "_tasks"

    def __init__(self, tasks: set[asyncio.Task[Any]]):
        self._tasks = tasks

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task, self._is_outermost = task, task not in self._tasks
        self._tasks.add(task)

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            self._tasks.discard(self._task)


class _Wait:
    """A block that waits for something and is recorded as a span: `Attempt.waiting_for`."""

    __slots__ = "_attempt", "_conversation", "_deadline", "_name", "_start", "_state"

    def __init__(self, attempt: Attempt, name: str, conversation: int, state: str):
        self._attempt, self._name = attempt, name
        self._conversation, self._state = conversation, state

    def __enter__(self) -> None:
        attempt = self._attempt
        self._deadline = attempt.deadline
        attempt.waits.append(self._state)
        attempt.since = self._start = time.monotonic()

    def __exit__(self, *error: object) -> None:
        attempt, start = self._attempt, self._start
        attempt.waits.remove(self._state)
        attempt.since = end = time.monotonic()
        # The deadline has moved by the time that requests waited for a free connection, those of
        # other conversations included.
        queued = min(attempt.deadline - self._deadline, end - start)
        if queued > 0 and self._name != "queue":
            attempt.record("queue", start, start + queued, self._conversation)
            start += queued
        attempt.record(self._name, start, end, self._conversation)


def cut_at_stop(
    generation: Generation, template: ChatTemplate, stop: Sequence[str]
) -> tuple[Generation, str]:
    """Cut a turn after the token that completes a stop text. Return it and its text up to there.

    An engine checks for stop texts only every few tokens, and one token may contain the end of a
    stop text and more. Tokens that the policy sampled after the stop text (in ReAct, an invented
    observation) are not part of the turn: they are neither parsed nor trained on.
    """
    text = template.decode_turn(generation.token_ids)
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        return generation, text
    text = text[: min(ends)]
    ids = generation.token_ids
    n = 1 + bisect_left(range(1, len(ids)), True, key=lambda k: text in template.decode(ids[:k]))
    return replace(generation.first(n), finish_reason="stop"), text


def mix_seed(*parts: int) -> int:
    """Return a seed of 63 bits that depends on all of `parts`."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
