"""An attempt at a sample being played: the only mutable noun, and the only writer of tokens.

An agent loop sees four verbs: `generate`, `observe`, `call_tools`, `interact`; and two for loops
that edit their history or run others: `branch`, `spawn`. Tokens, masks, logprobs, budgets,
truncation and errors are the episode's business. Rows only grow (`context.Row`); a sampled token is
never decoded and encoded again.

What was observed waits until the next `generate`, for three reasons: consecutive tool results are
rendered as one group, an episode that ends there has no masked tail, and a message that no longer
fits the budget is not half in the row.

A new row begins where the history is no longer what was sampled: after `branch`, for what `spawn`
returns, and, with `rollout.history_thinking=strip`, where the chat template drops the thinking of
earlier turns. What earlier rows sampled stands in its prompt and is trained there, not here.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loops.attempt import Attempt
from agentrl.agent_loops.context import Context, Row
from agentrl.chat import ChatTemplate
from agentrl.config import RolloutConfig
from agentrl.errors import UserCodeError
from agentrl.interactions import Interaction, respond
from agentrl.trajectory import (
    Message,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


class Episode:
    """See the module. Loops read `sample`, `messages`, `turns`, `schemas`."""

    def __init__(
        self,
        attempt: Attempt,
        opening: Sequence[Message],
        schemas: Sequence[Any],
        interaction: Interaction | None = None,
        thread: int = 0,
    ):
        """Open a conversation.

        Args:
            attempt: what it shares with other conversations of the same attempt.
            opening: the first messages, as the agent loop shows them.
            schemas: the tools the chat template shows.
            interaction: the row's, if it has one.
            thread: 0 for the agent loop's own conversation, n for the n-th that it spawned.
        """
        self.sample = attempt.sample
        """The row being played."""
        self.episode_id = attempt.episode_id
        """Unique per attempt."""
        self.rollout = attempt.rollout
        """Which of the sample's n rollouts."""
        self.turns = attempt.turns
        """All turns of the attempt so far."""
        self.schemas = schemas
        """The tools that the chat template shows."""
        self._attempt = attempt
        self._world = attempt.world
        self._interaction = interaction
        self._thread = thread
        template, is_first = self._world.template, thread == 0
        tools = self._world.toolbox.schemas(attempt.sample.tools) if is_first else ()
        spelled = template.control_tokens_of(tools)
        # What is the row's, and holds no token that a tool's text spells.
        given = [
            m for m in opening if is_first and not any(token in m.content for token in spelled)
        ]
        self._context = Context(
            template, opening, schemas, attempt.sampled, given=given, exact=is_first
        )
        self._first = self._context.row
        self._turn, self._spoken = -1, 0
        """This conversation's last turn, and how many it had."""
        self._speaks = False
        attempt.messages.extend(opening)
        self._count(m for m in opening if m.role != "assistant")
        attempt.control_token_attempts += template.schema_control_tokens(opening, schemas)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the policy sees it; `observe` and `branch` change it."""
        return tuple(self._context.messages)

    @property
    def deadline(self) -> float:
        """When the attempt's time is over, in `time.monotonic()` seconds."""
        return self._attempt.deadline

    # -- the verbs --------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        stop: str | Sequence[str] = (),
        parse: Callable[[str], list[ToolCall]] | None = None,
    ) -> Message:
        """Let the policy speak once.

        Args:
            stop: texts that end the turn; what completes one is sampled and kept, what the engine
                sampled after it is not.
            parse: reads the turn's tool calls from its text; by default as `rollout.tool_format`.

        Returns:
            The assistant's message; its `tool_calls` are what `parse` found.

        Raises:
            EpisodeOver: a budget is spent. Loops let it pass.
        """
        attempt, rollout = self._attempt, self._world.config.rollout
        self._not_while_speaking("generate")
        self._speaks = True
        try:
            with attempt.verb():
                async with attempt.engine:
                    attempt.check()  # others may have spent the budget meanwhile
                    stops = (stop,) if isinstance(stop, str) else tuple(stop)
                    return await self._speak(rollout, stops, parse)
        finally:
            self._speaks = False

    async def _speak(
        self,
        rollout: RolloutConfig,
        stop: tuple[str, ...],
        parse: Callable[[str], list[ToolCall]] | None,
    ) -> Message:
        attempt, template = self._attempt, self._world.template
        if len(attempt.turns) >= rollout.max_turns:
            raise attempt.over("turns")
        row, delta = self._context.next(strip=rollout.history_thinking == "strip")
        room = attempt.room(row, len(delta))
        if room < 1:
            raise attempt.over("trajectory_tokens")
        max_tokens, prompt = min(room, rollout.max_turn_tokens), row.ids + delta
        sampling = replace(attempt.sampling, max_tokens=max_tokens, stop=stop)
        seed = (self._spoken, *([self._thread] if self._thread else []))
        attempt.enter("generate")
        generation, text = await attempt.ask(prompt, sampling, seed)
        seconds = attempt.enter("loop")
        opened = "" if parse else template.thinking.opened(prompt)
        said = opened + text
        calls = parse(said) if parse else await self._world.calls(said, self.schemas)
        if opened:
            calls = _moved(calls, len(opened))
        # Nothing waits and nothing of the user's runs from here on: all of the turn, or none.
        start = len(row) + len(delta)
        row.extend(delta, generation, max_tokens)
        if row.index < 0:
            row.index = len(attempt.rows)
            attempt.rows.append(row)
        message = Message("assistant", text, tuple(calls))
        self._context.spoke(row, message, generation.token_ids)
        index = len(attempt.messages)
        attempt.messages.append(message)
        self._turn, self._spoken = len(attempt.turns), self._spoken + 1
        attempt.turns.append(
            Turn(
                segment=row.index,
                start=start,
                end=len(row),
                finish_reason=generation.finish_reason,
                tool_calls=message.tool_calls,
                generate_seconds=seconds,
                thread=self._thread,
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=generation.cached_tokens,
                message_index=index,
            )
        )
        if generation.finish_reason == "length":
            raise attempt.over("turn_tokens" if max_tokens < room else "trajectory_tokens")
        return message

    def observe(self, *messages: Message) -> None:
        """Add messages the policy did not write: the next turn sees them, with mask 0.

        Raises:
            UserCodeError: before the first turn, an assistant message, or no message at all.
        """
        self._attempt.check()
        self._not_while_speaking("observe")
        for message in _checked("observe", messages):
            if message.role not in ("user", "tool") or self._turn < 0:
                raise UserCodeError(
                    "ep.observe takes what answers a turn (user, tool), after the first"
                    f" ep.generate(); got a message of role {message.role!r} after"
                    f" {self._spoken} turns. To begin otherwise: ep.branch, or messages in ep.spawn"
                )
        self._count(messages)
        for message in messages:
            self._context.observe(message)
            self._attempt.messages.append(message)

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
        attempt, at = self._attempt, self._last_turn("call_tools")
        calls = attempt.turns[at].tool_calls
        with attempt.verb():
            if attempt.tool_calls + len(calls) > self._world.config.rollout.max_tool_calls:
                raise attempt.over("tool_calls")
            attempt.tool_calls += len(calls)
            attempt.enter(f"tools {self._world.toolbox.where}")
            results = await self._world.toolbox.run(
                calls, self.episode_id, at, self._context.messages
            )
        seconds = attempt.enter("loop")
        results = [self._world.fit(r) for r in results]
        turn = attempt.turns[at]
        prices, row = self._world.config.tools.penalties, attempt.rows[turn.segment]
        reward = sum(r.reward for r in results if r.reward is not None)
        attempt.turns[at] = replace(
            turn,
            tool_results=tuple(results),
            tool_seconds=seconds,
            penalties=penalties_of(turn, results, prices, row, self._world.template),
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
        self._last_turn("interact")
        with self._attempt.verb():
            self._attempt.enter("interaction")
            reply = await respond(self._interaction, tuple(self.messages), self.deadline)
        self._attempt.enter("loop")
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
        at = self._last_turn("reward")
        if isinstance(value, str) or not math.isfinite(value):
            raise UserCodeError(f"ep.reward takes a finite number, not {value!r}")
        turn = self._attempt.turns[at]
        rewards = {**turn.rewards, "turn": turn.rewards.get("turn", 0.0) + float(value)}
        self._attempt.turns[at] = replace(turn, rewards=rewards)

    def branch(self, messages: Sequence[Message]) -> None:
        """Go on from an edited history: the next turn sees these messages, in a row of its own.

            ep.branch([ep.messages[0], Message("user", f"So far: {summary.content}")])

        Args:
            messages: ending with what is to be answered. Assistant messages must be this episode's
                own; they stand there as they were sampled.

        Raises:
            UserCodeError: another assistant message, or one at the end.
        """
        self._attempt.check()
        self._not_while_speaking("branch")
        messages = _checked("branch", messages)
        known = {id(m) for m in self._attempt.messages}
        self._context.edit(messages)
        new = [m for m in messages if id(m) not in known]
        self._count(new)
        self._attempt.messages.extend(new)

    def spawn(
        self, prompt: str | Sequence[Message], schemas: Sequence[Any] | None = None
    ) -> Episode:
        """A conversation of its own within this attempt, for a sub-agent.

            critic = ep.spawn("Is this right? " + answer.content)
            verdict = await critic.generate()

        It shares the attempt's tools, budgets and reward; its tokens are trained in a row of their
        own. Several may be played at once.

        Args:
            prompt: the first user message, or all first messages.
            schemas: the tools it is shown; by default this conversation's.
        """
        opening = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        opening = _checked("spawn", opening)
        if not opening:
            raise UserCodeError("ep.spawn takes a text or messages, not nothing")
        if any(m.role == "assistant" for m in opening):
            raise UserCodeError(
                "ep.spawn takes system and user messages: put examples of answers into their text"
            )
        self._attempt.spawned += 1
        schemas = self.schemas if schemas is None else schemas
        return Episode(self._attempt, opening, schemas, thread=self._attempt.spawned)

    def finish(self, stop_reason: str, tool_reward: float) -> Trajectory:
        """The frozen trajectory of what was played; its first row where nothing was sampled."""
        attempt = self._attempt
        return Trajectory(
            sample=attempt.sample,
            episode_id=attempt.episode_id,
            rollout=attempt.rollout,
            segments=tuple(row.segment() for row in attempt.rows or [self._first]),
            turns=tuple(attempt.turns),
            messages=tuple(attempt.messages),
            sampling=attempt.sampling.as_dict(),
            stop_reason=stop_reason,
            tool_reward=tool_reward,
            seconds=time.monotonic() - attempt.started,
            control_token_attempts=attempt.control_token_attempts,
        )

    # -- inside -----------------------------------------------------------------------------------

    def _count(self, messages: Iterable[Message]) -> None:
        """Count the control tokens that others have spelled out."""
        template, is_given = self._world.template, self._context.is_given
        attempts = (template.attempts(m, is_given(m)) for m in messages)
        self._attempt.control_token_attempts += sum(attempts)

    def _not_while_speaking(self, verb: str) -> None:
        if self._speaks:
            raise UserCodeError(
                f"ep.{verb}: this conversation's ep.generate() has not returned yet. Await it"
                " first, or ep.spawn another conversation"
            )

    def _last_turn(self, verb: str) -> int:
        """This conversation's last turn."""
        self._not_while_speaking(verb)
        if self._turn < 0:
            raise UserCodeError(f"ep.{verb} is about a turn: call ep.generate() first")
        return self._turn


def _checked(verb: str, messages: Any) -> list[Message]:
    """Return the messages that a verb was given, as a list.

    Raises:
        UserCodeError: they are none.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    listed: list[Any] = list(messages) if is_list else [messages]
    for message in listed:
        if not isinstance(message, Message):
            raise UserCodeError(
                f'ep.{verb} takes messages: Message("user", {message!r:.60}), not {message!r:.60}'
            )
    if not is_list:
        raise UserCodeError(f"ep.{verb} takes a list of messages: [{messages!r:.60}]")
    return listed


Penalties = tuple[tuple[int, int, float], ...]
"""Failed calls: the response tokens [start, end) that wrote each, and its price."""


def penalties_of(
    turn: Turn,
    results: Sequence[ToolResult],
    prices: Mapping[str, float],
    row: Row,
    template: ChatTemplate,
) -> Penalties:
    """Return the penalties of a turn's failed calls: response tokens [start, end), and the price.

    Args:
        turn: with its calls.
        results: theirs, in order.
        prices: by class of failure; a class that is not there costs nothing.
        row: in which the turn was sampled.
        template: the policy's.
    """
    failed = [
        (call.span, prices[result.error])
        for call, result in zip(turn.tool_calls, results, strict=True)
        if result.error in prices
    ]
    if not failed:
        return ()
    ids = row.ids[len(row.prompt) + turn.start : len(row.prompt) + turn.end]
    tokens = [(*_tokens(ids, span, template), price) for span, price in failed]
    return tuple((turn.start + a, turn.start + b, price) for a, b, price in tokens)


def _moved(calls: Iterable[ToolCall], by: int) -> list[ToolCall]:
    """The calls of a text, their spans as of one that begins so many characters later."""
    return [
        replace(c, span=(max(c.span[0] - by, 0), c.span[1] - by)) if c.span else c for c in calls
    ]


def _tokens(
    ids: Sequence[int], span: tuple[int, int] | None, template: ChatTemplate
) -> tuple[int, int]:
    """The tokens that wrote some characters of a turn, those that wrote but a part included.

    All of the turn where its parser did not tell the characters.
    """
    if span is None:
        return 0, len(ids)
    lengths = range(1, len(ids))
    start, end = span
    text = template.decode(ids)[:end]
    # A character whose bytes are not all there counts as one, and differs from what it will be.
    first = bisect_left(lengths, True, key=lambda n: len(template.decode(ids[:n])) > start)
    last = bisect_left(lengths, True, key=lambda n: template.decode(ids[:n])[:end] == text)
    return first, last + 1
