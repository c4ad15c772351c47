"""One attempt at a sample, as all conversations in it share it: budgets, turns, rows, the clock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from inspect import isawaitable
from typing import Any

from agentrl.agent_loops.context import Row
from agentrl.chat import (
    ChatTemplate,
    ForeignParser,
    Reader,
    load_tokenizer,
    open_reader,
    truncate,
)
from agentrl.chat.render import check_variables
from agentrl.chat.tokenizer import end_of_turn_ids, template_source
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import EngineError, EpisodeOver
from agentrl.http.time_limit import TimeLimit
from agentrl.tools import Toolbox
from agentrl.trajectory import Generation, Message, Sample, ToolCall, ToolResult, Turn


@dataclass(frozen=True, slots=True)
class World:
    """What an episode acts in: shared by all episodes of a run."""

    sampler: Sampler
    template: ChatTemplate
    toolbox: Toolbox
    config: Config
    read: Reader = field(init=False)
    """Reads tool calls from a turn's text, as `rollout.tool_format` says."""

    def __post_init__(self):
        rollout = self.config.rollout
        read = open_reader(rollout.tool_format, self.template, rollout.python)
        object.__setattr__(self, "read", read)

    async def calls(self, text: str, schemas: Sequence[Any]) -> list[ToolCall]:
        """The tool calls in a turn's text."""
        calls = self.read(text, schemas)
        return await calls if isawaitable(calls) else calls

    def fit(self, result: ToolResult) -> ToolResult:
        """A tool's answer cut to `tools.max_result_tokens`, and saying so."""
        tools, template = self.config.tools, self.template
        limit, side = tools.max_result_tokens, tools.truncate
        shown = truncate(result.content, limit, side, template.encode, template.decode_plain)
        return result if shown is result.content else replace(result, content=shown)

    def close(self) -> None:
        """End the process of a foreign parser, if there is one."""
        if isinstance(self.read, ForeignParser):
            self.read.close()


def load_template(config: Config) -> ChatTemplate:
    """The policy's chat template, as the run uses it.

    Raises:
        UserError: no tokenizer there, a template that no turns can be made with, or variables
            that it never reads.
    """
    path = config.model.path
    return template_of(load_tokenizer(path), config, end_of_turn_ids(path))


def template_of(tokenizer: Any, config: Config, end_ids: Sequence[int] = ()) -> ChatTemplate:
    """A tokenizer's chat template, as the run uses it; see `load_template`."""
    variables = config.model.template_kwargs
    check_variables(template_source(tokenizer), variables)
    return ChatTemplate(tokenizer, end_ids, variables=variables, untrusted=config.data.untrusted)


@dataclass(slots=True)
class Attempt:
    """The state that an episode shares with those it spawns."""

    world: World
    sample: Sample
    episode_id: str
    """Unique: a retry is another attempt."""
    rollout: int
    """Which of the sample's n rollouts."""
    sampling: Sampling
    """How turns are sampled; how long they are and what ends them is filled in."""
    seed: int
    """With rollout and turn, the only source of randomness."""
    messages: list[Message] = field(default_factory=list)
    """All that was said, in the order in which it was."""
    turns: list[Turn] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sampled: dict[int, array[int]] = field(default_factory=dict)
    """The ids of messages that were sampled, by `id`; `messages` keeps them alive."""
    tool_calls: int = 0
    spawned: int = 0
    control_token_attempts: int = 0
    """Control tokens that prompts, tools and interactions spelled out."""
    state: str = "opening"
    since: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    limit: TimeLimit = field(init=False)
    """`rollout.timeout_s`, from `begin` on; waits for a free connection are not counted."""
    spent: str = ""
    """The budget that ended it, also where the agent loop went on; or "done" once it is over."""
    engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """An engine answers one request of an episode at a time."""
    busy: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks within a verb."""

    def __post_init__(self):
        self.begin()
        self.sampling = replace(
            self.sampling,
            max_tokens=self.world.config.rollout.max_turn_tokens,
            stop_ids=self.world.template.stop_ids,
        )

    def begin(self) -> None:
        """Start or restart the time limit; opening tools does not count."""
        self.started = time.monotonic()
        self.limit = TimeLimit(self.world.config.rollout.timeout_s)

    @property
    def deadline(self) -> float:
        """The end, in `time.monotonic()` seconds; each wait for a connection extends it."""
        return self.limit.deadline

    def over(self, reason: str) -> EpisodeOver:
        """End it: whatever the loop does about the exception, no verb works any more."""
        self.spent = self.spent or reason
        return EpisodeOver(self.spent)

    def check(self) -> None:
        """Raises EpisodeOver once a budget is spent, or the time is."""
        if self.spent:
            raise EpisodeOver(self.spent)
        if time.monotonic() >= self.deadline:
            raise self.over("time")

    @contextlib.contextmanager
    def verb(self) -> Iterator[None]:
        """A verb is at work in the current task."""
        self.check()
        task = asyncio.current_task()
        assert task
        outermost = task not in self.busy
        self.busy.add(task)
        try:
            yield
        finally:
            if outermost:
                self.busy.discard(task)

    async def end(self) -> None:
        """Nothing is played any more: what a loop has left running is cancelled and waited for."""
        self.spent = self.spent or "done"
        left = self.busy - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def ask(
        self, ids: array[int], sampling: Sampling, seed: Sequence[int], until: float = math.inf
    ) -> tuple[Generation, str]:
        """Let the engine continue a row; what it sampled, cut at a stop text, and its text.

        Args:
            ids: the row.
            sampling: of this turn.
            seed: with those of the run, row and rollout, the turn's randomness.
            until: `time.monotonic()` seconds at which to give up before the episode's time is over.

        Raises:
            EpisodeOver: "time".
            EngineError: the engine failed; the episode may be played again.
        """
        while True:
            deadline = min(until, self.deadline)
            try:
                generation = await self.world.sampler.generate(
                    ids,
                    sampling,
                    episode_id=self.episode_id,
                    seed=mix_seed(self.seed, self.rollout, *seed),
                    deadline=deadline,
                )
                return cut_at_stop(generation, self.world.template, sampling.stop)
            except EngineError:
                self.check()  # it was given no more time than the episode has
                if time.monotonic() < deadline or min(until, self.deadline) == deadline:
                    raise
                # A wait for a connection has moved the deadline that the engine was told, and the
                # engine gave up at the earlier one.

    def enter(self, state: str) -> float:
        """Note what the episode waits for, for the watchdog; returns the last state's seconds."""
        now = time.monotonic()
        seconds = now - self.since
        self.state, self.since = state, now
        return seconds

    def room(self, row: Row, new: int) -> int:
        """How many tokens may be sampled in a row after `new` observed ones."""
        used = sum(map(len, self.rows)) + (len(row) if row.index < 0 else 0)
        return min(
            self.world.config.rollout.max_trajectory_tokens - used - new,
            self.world.sampler.max_length - len(row.ids) - new,
        )


def cut_at_stop(
    generation: Generation, template: ChatTemplate, stop: Sequence[str]
) -> tuple[Generation, str]:
    """A turn up to the token that completes a stop text, and its text up to the end of that.

    An engine looks for stop texts every so often, and one token may hold the end of a stop text and
    more. Whatever the policy went on to say (in ReAct, an observation it made up) is not part of
    the turn: it is neither read nor trained on.
    """
    text = template.decode_turn(generation.token_ids)
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        return generation, text
    end = min(ends)
    found = text[:end]
    ids = generation.token_ids
    n = 1 + bisect_left(range(1, len(ids)), True, key=lambda k: found in template.decode(ids[:k]))
    cut = replace(
        generation,
        token_ids=ids[:n],
        logprobs=generation.logprobs[:n],
        versions=generation.versions[:n],
        finish_reason="stop",
    )
    return cut, found


def mix_seed(*parts: int) -> int:
    """63 bits that depend on all of `parts`: seeds of turns, rollouts, rows."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
