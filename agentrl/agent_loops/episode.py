"""An attempt at a sample being played: the only mutable noun, and the only writer of tokens.

An agent loop sees four verbs: `generate`, `observe`, `call_tools`, `interact`. Tokens, masks,
logprobs, budgets, truncation and errors are the episode's business. The row grows in one place,
`_append`, where a token gets its mask, logprob and version in the same call; a sampled token is
never decoded and encoded again.

What was observed waits until the next `generate`, for three reasons: consecutive tool results are
rendered as one group, an episode that ends there has no masked tail, and a message that no longer
fits the budget is not half in the row.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from agentrl.chat import ChatTemplate, parse_hermes
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import EngineError, EpisodeOver, UserCodeError
from agentrl.interactions import Interaction, respond
from agentrl.tools import Toolbox
from agentrl.trajectory import (
    Generation,
    Message,
    Sample,
    Segment,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    float_array,
    token_array,
)


@dataclass(frozen=True, slots=True)
class World:
    """What an episode acts in: shared by all episodes of a run."""

    sampler: Sampler
    template: ChatTemplate
    toolbox: Toolbox
    config: Config


class Episode:
    """See the module. Loops read `sample`, `messages`, `turns`, `schemas`; verbs write."""

    def __init__(
        self,
        world: World,
        sample: Sample,
        interaction: Interaction | None,
        *,
        episode_id: str,
        rollout: int,
        sampling: Sampling,
        seed: int,
        opening: Sequence[Message],
        schemas: Sequence[Any],
    ):
        """Open the conversation.

        Args:
            world: engine, template, toolbox, config.
            sample: the row.
            interaction: the row's, if it has one.
            episode_id: unique per attempt.
            rollout: which of the sample's n rollouts.
            sampling: how turns are sampled.
            seed: with rollout and turn, the only source of randomness.
            opening: the first messages, as the agent loop shows them.
            schemas: the tools the chat template shows.
        """
        self.sample = sample
        self.episode_id = episode_id
        self.rollout = rollout
        self.schemas = schemas
        self.messages: list[Message] = list(opening)
        self.turns: list[Turn] = []
        self.state, self.since = "opening", time.monotonic()
        self.started = self.since
        self.deadline = self.since + world.config.rollout.timeout_s
        self._world = world
        self._interaction = interaction
        self._sampling = replace(
            sampling,
            max_tokens=world.config.rollout.max_turn_tokens,
            stop_ids=world.template.stop_ids,
        )
        self._seed = seed
        self._tool_calls = 0
        self._waiting: list[Message] = []
        self._prompt = world.template.prompt(opening, schemas)
        # The row: prompt and response in one array, as the engine is asked; the others: response.
        self._row = token_array(self._prompt)
        self._mask = token_array()
        self._logprobs = float_array()
        self._versions = token_array()

    # -- the four verbs ---------------------------------------------------------------------------

    async def generate(
        self,
        *,
        stop: Sequence[str] = (),
        parse: Callable[[str], list[ToolCall]] = parse_hermes,
    ) -> Message:
        """Let the policy speak once.

        Args:
            stop: texts that end the turn; what completes one is sampled and kept.
            parse: reads the turn's tool calls from its text.

        Returns:
            The assistant's message; its `tool_calls` are what `parse` found.

        Raises:
            EpisodeOver: a budget is spent. Loops let it pass.
        """
        rollout = self._world.config.rollout
        self._check_time()
        if len(self.turns) >= rollout.max_turns:
            raise EpisodeOver("turns")
        template = self._world.template
        delta = template.delta(self._waiting, self._row[-1]) if self.turns else token_array()
        room = min(
            rollout.max_trajectory_tokens - len(self._mask) - len(delta),
            self._world.sampler.max_length - len(self._row) - len(delta),
        )
        if room < 1:
            raise EpisodeOver("trajectory_tokens")
        max_tokens = min(room, rollout.max_turn_tokens)
        self.enter("generate")
        try:
            generation = await self._world.sampler.generate(
                self._row + delta,
                replace(self._sampling, max_tokens=max_tokens, stop=tuple(stop)),
                episode_id=self.episode_id,
                seed=mix_seed(self._seed, self.rollout, len(self.turns)),
                deadline=self.deadline,
            )
        except EngineError:
            self._check_time()  # it was given no more time than the episode has
            raise
        seconds = self.enter("loop")
        self._append(delta)
        self._waiting.clear()
        self._check(generation, max_tokens)
        start = len(self._mask)
        self._append(generation.token_ids, generation)
        text = template.decode_turn(generation.token_ids)
        message = Message("assistant", text, tuple(parse(text)))
        self.messages.append(message)
        self.turns.append(
            Turn(
                segment=0,
                start=start,
                end=len(self._mask),
                finish_reason=generation.finish_reason,
                tool_calls=message.tool_calls,
                generate_seconds=seconds,
            )
        )
        if generation.finish_reason == "length":
            raise EpisodeOver("turn_tokens" if max_tokens < room else "trajectory_tokens")
        return message

    def observe(self, *messages: Message) -> None:
        """Add messages the policy did not write: the next turn sees them, with mask 0.

        Raises:
            UserCodeError: before the first turn, an assistant message, or no message at all.
        """
        for message in messages:
            if not isinstance(message, Message):
                raise UserCodeError(
                    f'ep.observe takes messages: Message("user", {message!r}), not {message!r}'
                )
            if message.role == "assistant" or not self.turns:
                raise UserCodeError(
                    "ep.observe takes what answers a turn (user, tool), after the first"
                    f" ep.generate(); got a message of role {message.role!r} after"
                    f" {len(self.turns)} turns"
                )
        self.messages.extend(messages)
        self._waiting.extend(messages)

    async def call_tools(
        self, answer_as: Callable[[str], Message] | None = None
    ) -> list[ToolResult]:
        """Run the last turn's tool calls side by side and observe their answers in order.

        Args:
            answer_as: makes the message of one answer; by default a `tool` message.

        Raises:
            EpisodeOver: the budget of calls is spent; none of this turn's calls ran.
            Infrastructure: the tool server is down.
        """
        self._check_time()
        turn = self.turns[-1]
        calls = turn.tool_calls
        if self._tool_calls + len(calls) > self._world.config.rollout.max_tool_calls:
            raise EpisodeOver("tool_calls")
        self._tool_calls += len(calls)
        self.enter(f"tools {self._world.toolbox.where}")
        results = await self._world.toolbox.run(calls, self.episode_id, len(self.turns) - 1)
        seconds = self.enter("loop")
        results = [replace(r, content=self._fit(r.content)) for r in results]
        reward = sum(r.reward for r in results if r.reward is not None)
        self.turns[-1] = replace(
            turn,
            tool_results=tuple(results),
            tool_seconds=seconds,
            rewards={**turn.rewards, **({"tool": reward} if reward else {})},
        )
        self.observe(
            *(
                answer_as(r.content) if answer_as else Message("tool", r.content, tool_call_id=c.id)
                for c, r in zip(calls, results, strict=True)
            )
        )
        return results

    async def interact(self) -> bool:
        """Hear what the row's interaction has to say about the last turn.

        Returns:
            True where the talk goes on (its reply waits for the next turn), False where there is no
            interaction or it is done.
        """
        if self._interaction is None:
            return False
        self._check_time()
        self.enter("interaction")
        reply = await respond(self._interaction, tuple(self.messages), self.deadline)
        self.enter("loop")
        if reply is None:
            return False
        if reply.score:
            self.reward(reply.score)
        if reply.done:
            return False
        self.observe(Message("user", reply.content))
        return True

    def reward(self, value: float) -> None:
        """Give the last turn a reward of its own (weighed by `reward.turn_weight`)."""
        turn = self.turns[-1]
        rewards = {**turn.rewards, "turn": turn.rewards.get("turn", 0.0) + float(value)}
        self.turns[-1] = replace(turn, rewards=rewards)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, stop_reason: str, tool_reward: float) -> Trajectory:
        """The frozen trajectory of what was played."""
        return Trajectory(
            sample=self.sample,
            episode_id=self.episode_id,
            rollout=self.rollout,
            segments=(
                Segment(
                    prompt_ids=self._prompt,
                    response_ids=self._row[len(self._prompt) :],
                    response_mask=self._mask,
                    logprobs=self._logprobs,
                    versions=self._versions,
                ),
            ),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            sampling=self._sampling.as_dict(),
            stop_reason=stop_reason,
            tool_reward=tool_reward,
            seconds=time.monotonic() - self.started,
        )

    # -- inside -----------------------------------------------------------------------------------

    def _append(self, ids: array[int], sampled: Generation | None = None) -> None:
        """The only place where the row grows."""
        self._row.extend(ids)
        if sampled is None:
            self._mask.extend([0] * len(ids))
            self._logprobs.extend([0.0] * len(ids))
            self._versions.extend([-1] * len(ids))
        else:
            self._mask.extend([1] * len(ids))
            self._logprobs.extend(sampled.logprobs)
            self._versions.extend(sampled.versions)

    def _check(self, generation: Generation, max_tokens: int) -> None:
        """Always on, at the cost of the new tokens only: the engine continued this row."""
        n = len(generation.token_ids)
        if generation.prompt_tokens != len(self._row):
            raise EngineError(
                f"episode {self.episode_id}: the engine continued {generation.prompt_tokens}"
                f" tokens, but the row has {len(self._row)}"
            )
        if not (n == len(generation.logprobs) == len(generation.versions) and 0 < n <= max_tokens):
            raise EngineError(
                f"episode {self.episode_id}: the engine answered {n} tokens,"
                f" {len(generation.logprobs)} logprobs and {len(generation.versions)} versions;"
                f" at most {max_tokens} were asked for"
            )

    def _fit(self, content: str) -> str:
        """A tool's answer cut to `tools.max_result_tokens`, and saying so."""
        limit = self._world.config.tools.max_result_tokens
        if len(content.encode(errors="replace")) <= limit:  # a token is at least one byte
            return content
        ids = self._world.template.encode(content)
        if len(ids) <= limit:
            return content
        kept = self._world.template.decode(ids[:limit]).rstrip("\ufffd")
        return f"{kept}\n(the first {limit} of {len(ids)} tokens)"

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise EpisodeOver("time")

    def enter(self, state: str) -> float:
        """Note what the episode waits for, for the watchdog; returns the last state's seconds."""
        now = time.monotonic()
        seconds = now - self.since
        self.state, self.since = state, now
        return seconds


def mix_seed(*parts: int) -> int:
    """63 bits that depend on all of `parts`: seeds of turns, rollouts, rows."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
