"""One attempt at a sample, as all conversations in it share it: budgets, turns, rows, the clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from agentrl.agent_loops.row import Row
from agentrl.chat import ChatTemplate, ForeignParser, Reader, open_reader
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import EpisodeOver
from agentrl.tools import Toolbox
from agentrl.trajectory import Message, Sample, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class World:
    """What an episode acts in: shared by all episodes of a run."""

    sampler: Sampler
    template: ChatTemplate
    toolbox: Toolbox
    config: Config
    read: Reader | None = None
    """Reads tool calls from a turn's text; None: as `rollout.tool_format` says."""

    def __post_init__(self):
        if self.read is None:
            read = open_reader(self.config.rollout.tool_format, self.template.tokenizer)
            object.__setattr__(self, "read", read)

    def close(self) -> None:
        """End the process of a foreign parser, if there is one."""
        if isinstance(self.read, ForeignParser):
            self.read.close()


def load_template(config: Config) -> ChatTemplate:
    """The policy's chat template, as the run uses it.

    Raises:
        UserError: no tokenizer there, or a template that no turns can be made with.
    """
    return ChatTemplate.load(
        config.model.path,
        variables=config.model.template_kwargs,
        untrusted=config.data.untrusted,
    )


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
    tool_calls: int = 0
    spawned: int = 0
    control_token_attempts: int = 0
    """Control tokens that prompts, tools and interactions spelled out."""
    last_sampling: Sampling | None = None
    state: str = "opening"
    since: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """An engine answers one request of an episode at a time."""

    def __post_init__(self):
        self.sampling = replace(
            self.sampling,
            max_tokens=self.world.config.rollout.max_turn_tokens,
            stop_ids=self.world.template.stop_ids,
        )

    @property
    def deadline(self) -> float:
        """`time.monotonic()` seconds."""
        return self.started + self.world.config.rollout.timeout_s

    def check_time(self) -> None:
        """Raises EpisodeOver("time") after the deadline."""
        if time.monotonic() >= self.deadline:
            raise EpisodeOver("time")

    def sampling_of(self, max_tokens: int, stop: tuple[str, ...]) -> Sampling:
        """How the next turn is sampled; as the last one was, where nothing differs."""
        last = self.last_sampling or self.sampling
        if (last.max_tokens, last.stop) != (max_tokens, stop):
            last = replace(last, max_tokens=max_tokens, stop=stop)
        self.last_sampling = last
        return last

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

    def register(self, row: Row) -> None:
        """Something is sampled in this row: it will be a segment."""
        if row.index < 0:
            row.index = len(self.rows)
            self.rows.append(row)

    def trajectory(self, first: Row, stop_reason: str, tool_reward: float) -> Trajectory:
        """All of it, frozen; `first` stands where nothing was sampled."""
        sampling: dict[str, Any] = self.sampling.as_dict()
        return Trajectory(
            sample=self.sample,
            episode_id=self.episode_id,
            rollout=self.rollout,
            segments=tuple(row.segment() for row in self.rows or [first]),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            sampling=sampling,
            stop_reason=stop_reason,
            tool_reward=tool_reward,
            seconds=time.monotonic() - self.started,
            control_token_attempts=self.control_token_attempts,
        )


def mix_seed(*parts: int) -> int:
    """63 bits that depend on all of `parts`: seeds of turns, rollouts, rows."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
