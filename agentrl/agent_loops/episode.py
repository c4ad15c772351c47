"""An episode: one conversation of an attempt, and the only code that appends tokens.

An agent loop calls four methods: `generate`, `observe`, `call_tools`, `interact`. Loops that edit
their history or run sub-agents call two more: `branch`, `spawn`. The episode handles tokens, masks,
logprobs, budgets, truncation and errors. A row only grows (`context.TokenRow`); a sampled token is
never decoded and encoded again.

An observed message waits until the next `generate`, for three reasons: consecutive tool results are
rendered as one group; an episode that ends there has no masked tail; and a message that no longer
fits the budget is not cut in half.

An assistant message that the policy did not write (`foreign`) has mask 0.

A new row begins where the history is no longer what was sampled: after `branch`, in a conversation
that `spawn` returns, and, with `rollout.history_thinking=strip`, where the chat template drops the
thinking of earlier turns. The tokens that earlier rows sampled are in the prompt of the new row and
are trained in their own rows only.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from agentrl.agent_loops.attempt import Attempt
from agentrl.agent_loops.context import Context, TokenRow
from agentrl.chat import ChatTemplate
from agentrl.config import RolloutConfig
from agentrl.errors import UserCodeError
from agentrl.images import ImageError, RowImage
from agentrl.interactions import Interaction, respond
from agentrl.tools.payloads import error_result
from agentrl.trajectory import (
    Generation,
    Message,
    ToolCall,
    ToolResult,
    Turn,
    as_number,
)


class Episode:
    """A conversation between the policy and its environment: what an agent loop gets.

        @agent_loop("self_check")
        async def self_check(ep):
            await ep.generate()
            ep.observe(Message("user", "Check your work, then give the final answer."))
            await ep.generate()

    A loop calls `generate`, `observe`, `call_tools` and `interact`. Loops that edit their history
    or run sub-agents also call `branch`, `spawn` and `foreign`. The episode handles tokens, masks,
    logprobs and truncation. If a budget is exhausted, a method raises `EpisodeOver`, which ends the
    loop and should not be caught: the trajectory is still scored.

    Attributes:
        sample: the dataset row.
        turns: all turns of the attempt so far, of all conversations (`agentrl.trajectory.Turn`).
    """

    def __init__(
        self,
        attempt: Attempt,
        opening: Sequence[Message],
        schemas: Sequence[Any],
        interaction: Interaction | None = None,
        conversation: int = 0,
        seed: int | None = None,
        observed: Sequence[Message] = (),
    ):
        """Open a conversation.

        Args:
            attempt: the state that all conversations of an attempt share.
            opening: the first messages, as the agent loop shows them.
            schemas: the tools that the chat template shows.
            interaction: the row's interaction, if it has one.
            conversation: 0 for the agent loop's own conversation, n for the n-th that it spawned.
            seed: what the seeds of this conversation depend on, apart from the attempt and the
                turn. None: the number of the conversation.
            observed: the messages of tools and of the interaction that follow the opening.
        """
        self.sample = attempt.sample
        self.turns = attempt.turns
        self._schemas = schemas
        self._attempt = attempt
        self._runtime = attempt.runtime
        self._interaction = interaction
        self._conversation = conversation
        self._seed = conversation if seed is None else seed
        template, is_first = self._runtime.template, conversation == 0
        tools = self._runtime.toolbox.schemas(attempt.sample.tools) if is_first else ()
        # A tool's description may spell a control token. Then the row's messages that contain it
        # are not trusted to use it as one.
        control_tokens = template.control_tokens_of(tools)
        row_messages = [
            m
            for m in opening
            if is_first and not any(token in m.content for token in control_tokens)
        ]
        opening = [*opening, *observed]
        self._context = Context(
            template,
            opening,
            schemas,
            attempt.turn_ids,
            attempt.foreign,
            attempt.images,
            row_messages=row_messages,
            exact=is_first and not observed,
        )
        self._first_row = self._context.row
        self._turn_index = -1
        """The index in `turns` of this conversation's last turn."""
        self._n_turns = 0
        """The number of turns of this conversation."""
        self._tools_index = -1
        """The index in `turns` of the last turn whose tool calls were run."""
        self._is_generating = False
        attempt.messages.extend(opening)
        self._count_control_tokens(m for m in opening if m.role != "assistant")
        attempt.control_token_attempts += template.schema_control_tokens(opening, schemas)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the policy sees it; `observe` and `branch` change it."""
        return tuple(self._context.messages)

    async def generate(
        self,
        *,
        stop: str | Sequence[str] = (),
        parse: Callable[[str], list[ToolCall]] | None = None,
        max_tokens: int | None = None,
    ) -> Message:
        """Let the policy write one message.

        Args:
            stop: texts that end the turn. A stop text is part of the turn; tokens that the engine
                sampled after it are dropped.
            parse: returns the tool calls in the turn's text; by default as `rollout.tool_format`.
            max_tokens: the most tokens of this turn, at least 1. Unlike the budget
                `rollout.max_turn_tokens`, which applies too, it does not end the episode: the turn
                is cut.

        Returns:
            The assistant's message, with its `tool_calls`.

        Raises:
            EpisodeOver: a budget is exhausted. A loop should not catch it.
            UserCodeError: another `generate` of this conversation has not returned yet, or `parse`
                raised.
            Infrastructure: the engine failed. The sample is played again.
        """
        attempt, rollout = self._attempt, self._runtime.config.rollout
        self._require_idle("generate")
        self._is_generating = True
        try:
            with attempt.active():
                stops = (stop,) if isinstance(stop, str) else tuple(stop)
                if self._runtime.sampler.is_concurrent:
                    return await self._generate(rollout, stops, parse, max_tokens)
                if attempt.engine_lock.locked():
                    with attempt.waiting_for("queue", self._conversation):
                        await attempt.engine_lock.acquire()
                else:
                    await attempt.engine_lock.acquire()
                try:
                    attempt.check()  # Another conversation may have used up the budget meanwhile.
                    return await self._generate(rollout, stops, parse, max_tokens)
                finally:
                    attempt.engine_lock.release()
        finally:
            self._is_generating = False

    async def _generate(
        self,
        rollout: RolloutConfig,
        stop: tuple[str, ...],
        parse: Callable[[str], list[ToolCall]] | None,
        requested: int | None,
    ) -> Message:
        attempt, template = self._attempt, self._runtime.template
        if self._context.unprepared:
            try:
                await attempt.prepare(self._context.unprepared)
            except ImageError as e:
                raise UserCodeError(
                    "an image that the agent loop or the interaction added to the conversation:"
                    f" {e}"
                ) from e
            self._context.unprepared.clear()
        row, delta, images = self._context.next_row(strip=rollout.history_thinking == "strip")
        remaining = await self._wait_for_room(rollout, row, len(delta), requested)
        budget, prompt = min(remaining, rollout.max_turn_tokens), row.ids + delta
        max_tokens = min(budget, budget if requested is None else requested)
        sampling = attempt.sampling
        if (sampling.max_tokens, sampling.stop) != (max_tokens, stop):
            sampling = replace(sampling, max_tokens=max_tokens, stop=stop)
        if sampling.experts_from is not None:
            sampling = replace(sampling, experts_from=row.experts_from)
        seed = (self._n_turns, *([self._seed] if self._seed else []))
        start_time = time.monotonic()
        with (
            attempt.turn_in_flight(len(delta) + max_tokens),
            attempt.waiting_for("generate", self._conversation),
        ):
            generation, text = await attempt.sample_turn(
                prompt, sampling, seed, images=(*row.images, *images)
            )
        seconds = time.monotonic() - start_time
        # The prompt may end with an opened thinking tag, which belongs to the text for parsers.
        opening = "" if parse else template.thinking.opening(prompt)
        full_text = opening + text
        calls: list[ToolCall] = []
        if parse:
            calls = parse(full_text)
        elif attempt.parses_calls or self._schemas:
            calls = await self._runtime.parse_calls(full_text, self._schemas)
        if opening:
            calls = _shift_spans(calls, -len(opening))
        # No `await` and no user code follows, so the turn is added completely or not at all.
        message = Message("assistant", text, tuple(calls))
        self._add_turn(row, delta, generation, max_tokens, message, seconds, images)
        if (reader := template.images) and (
            reader.rule.token_id in generation.token_ids
            or (rollout.name == "sglang" and reader.spells(text))
        ):
            raise attempt.end_with("done")  # The engine cannot continue the row.
        if generation.finish_reason == "length" and max_tokens == budget:
            raise attempt.end_with("turn_tokens" if max_tokens < remaining else "trajectory_tokens")
        return message

    async def _wait_for_room(
        self, rollout: RolloutConfig, row: TokenRow, new: int, requested: int | None
    ) -> int:
        """Return the tokens that the next turn of `row`, after `new` tokens, may have.

        Turns in flight may use up the budgets that this one needs, or may not: it waits for them.

        Raises:
            EpisodeOver: a budget is used up.
        """
        attempt = self._attempt
        wanted = min(rollout.max_turn_tokens, requested or rollout.max_turn_tokens)
        while attempt.turns_in_flight and (
            len(attempt.turns) + attempt.turns_in_flight >= rollout.max_turns
            or attempt.remaining_tokens(row, new) < wanted
        ):
            with attempt.waiting_for("queue", self._conversation):
                await attempt.turn_ended.wait()
            attempt.check()
        if len(attempt.turns) >= rollout.max_turns:
            raise attempt.end_with("turns")
        remaining = attempt.remaining_tokens(row, new)
        if remaining < 1:
            raise attempt.end_with("trajectory_tokens")
        return remaining

    def _add_turn(
        self,
        row: TokenRow,
        delta: array[int],
        generation: Generation,
        max_tokens: int,
        message: Message,
        seconds: float,
        images: Sequence[RowImage] = (),
    ) -> None:
        """Append a sampled turn to its row, the conversation and the episode."""
        attempt, start = self._attempt, len(row) + len(delta)
        row.extend(delta, generation, max_tokens, images)
        if row.index < 0:
            row.index = len(attempt.rows)
            attempt.rows.append(row)
        self._context.add_turn(row, message, generation.token_ids)
        index = len(attempt.messages)
        attempt.messages.append(message)
        self._turn_index, self._n_turns = len(attempt.turns), self._n_turns + 1
        attempt.turns.append(
            Turn(
                segment=row.index,
                start=start,
                end=len(row),
                finish_reason=generation.finish_reason,
                tool_calls=message.tool_calls,
                generate_seconds=seconds,
                thread=self._conversation,
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=generation.cached_tokens,
                message_index=index,
            )
        )

    def observe(self, *messages: Message) -> None:
        """Add messages that the policy did not write. The next turn sees them, with mask 0.

        Args:
            messages: user, tool or system messages, or assistant messages of `foreign`.

        Raises:
            EpisodeOver: the episode is over.
            UserCodeError: it is called before the first turn, or with an assistant message that is
                not foreign, or with something that is not a message.
        """
        self._attempt.check()
        self._require_idle("observe")
        for message in _require_messages("observe", messages):
            is_turn = message.role == "assistant" and id(message) not in self._attempt.foreign
            if is_turn or self._turn_index < 0:
                raise UserCodeError(
                    "ep.observe takes messages that answer a turn (role user, tool or system),"
                    f" after the first ep.generate(); got a message of role {message.role!r} after"
                    f" {self._n_turns} turns. To change how a conversation begins, use ep.branch or"
                    " ep.spawn; for an assistant message that the policy did not write, ep.foreign"
                )
        self._count_control_tokens(m for m in messages if m.role != "assistant")
        for message in messages:
            self._context.observe(message)
            self._attempt.messages.append(message)

    def foreign(self, content: str, tool_calls: Sequence[ToolCall] = ()) -> Message:
        """Return an assistant message that the policy did not write, in the format of the model.

            ep.observe(Message("user", "Ready?"), ep.foreign("Yes."), Message("user", "Go."))

        `observe`, `branch` and `spawn` take it. Its tokens have mask 0.

        Args:
            content: the text without tool calls.
            tool_calls: well-formed calls.

        Raises:
            TemplateError: the chat template does not write such a message.
        """
        attempt, template = self._attempt, self._runtime.template
        ids = template.foreign_turn(content, tool_calls)
        message = Message("assistant", template.decode(ids), tuple(tool_calls))
        attempt.foreign[id(message)] = message
        attempt.turn_ids[id(message)] = ids
        return message

    async def call_tools(
        self, answer_as: Callable[[str], Message] | None = None
    ) -> list[ToolResult]:
        """Run the last turn's tool calls concurrently and observe their results in order.

        Args:
            answer_as: makes a message of a result's text; by default a `tool` message.

        Returns:
            The results, in the order of the calls.

        Raises:
            EpisodeOver: the budget of tool calls is exhausted; none of this turn's calls ran.
            UserCodeError: there is no turn yet.
            Infrastructure: the tool server is down. The sample is played again.
        """
        attempt, index = self._attempt, self._require_turn("call_tools")
        calls = attempt.turns[index].tool_calls
        with attempt.active():
            if calls and index == self._tools_index:
                raise UserCodeError(
                    "ep.call_tools() was called twice after one turn. Call ep.generate() in"
                    " between. The first call returned the results; they are also in the turn's"
                    " tool_results"
                )
            if attempt.tool_calls + len(calls) > self._runtime.config.rollout.max_tool_calls:
                raise attempt.end_with("tool_calls")
            attempt.tool_calls += len(calls)
            self._tools_index = index
            start_time = time.monotonic()
            where = self._runtime.toolbox.where
            with attempt.waiting_for("tools", self._conversation, where):
                results = await self._runtime.toolbox.run(
                    calls, attempt.episode_id, index, self._context.messages
                )
        seconds = time.monotonic() - start_time
        results = [self._runtime.truncate(r) for r in results]
        if any(r.images for r in results):
            results = [await self._prepare_result(r) for r in results]
        turn = attempt.turns[index]
        penalties, row = self._runtime.config.tools.penalties, attempt.rows[turn.segment]
        reward = sum(r.reward for r in results if r.reward is not None)
        attempt.turns[index] = replace(
            turn,
            tool_results=tuple(results),
            tool_seconds=seconds,
            penalties=call_penalties(turn, results, penalties, row, self._runtime.template),
            rewards={**turn.rewards, **({"tool": reward} if reward else {})},
        )
        self.observe(
            *(
                replace(answer_as(r.content), images=r.images)
                if answer_as
                else Message("tool", r.content, tool_call_id=c.id, images=r.images)
                for c, r in zip(calls, results, strict=True)
            )
        )
        return results

    async def _prepare_result(self, result: ToolResult) -> ToolResult:
        """Decode the images of a tool's result. If that fails, return the error for the model."""
        try:
            await self._attempt.prepare(result.images)
        except ImageError as e:
            return error_result("tool_error", f"the tool returned an unreadable image: {e}")
        return result

    async def interact(self) -> bool:
        """Ask the row's interaction for a reply to the last turn, and observe it.

        A score of the reply is added to the last turn's reward.

        Returns:
            True if the conversation goes on; False if there is no interaction, or it is done.

        Raises:
            EpisodeOver: the episode's time is over.
            UserCodeError: there is no turn yet, or the interaction raised.
            Infrastructure: a server that the interaction needs is down. The sample is played
                again.
        """
        if self._interaction is None:
            return False
        self._require_turn("interact")
        attempt = self._attempt
        with attempt.active(), attempt.waiting_for("interaction", self._conversation):
            reply = await respond(self._interaction, tuple(self.messages), attempt.deadline)
        if reply is None:
            return False
        if reply.score:
            self.reward(reply.score)
        if reply.done:
            return False
        self.observe(Message("user", reply.content, images=reply.images))
        return True

    def reward(self, value: float) -> None:
        """Add a reward to the last turn.

        Args:
            value: a finite number; the sum of a trajectory is weighted by `reward.turn_weight`.

        Raises:
            UserCodeError: `value` is not a finite number, or there is no turn yet.
        """
        index = self._require_turn("reward")
        number = as_number(value)
        if not math.isfinite(number):
            raise UserCodeError(f"ep.reward takes a finite number, not {value!r}")
        turn = self._attempt.turns[index]
        rewards = {**turn.rewards, "turn": turn.rewards.get("turn", 0.0) + number}
        self._attempt.turns[index] = replace(turn, rewards=rewards)

    def branch(self, messages: Sequence[Message], schemas: Sequence[Any] | None = None) -> None:
        """Replace the history. The next turn sees these messages, in a new row of tokens.

            ep.branch([ep.messages[0], Message("user", f"So far: {summary.content}")])

        Args:
            messages: the new history. The last message must not be an assistant message. Assistant
                messages must be from this episode (sampled, or of `foreign`); the new row contains
                their tokens.
            schemas: the tools that the template shows from now on; by default the same as before.

        Raises:
            UserCodeError: an assistant message is not from this episode, or is the last message.
        """
        attempt = self._attempt
        attempt.check()
        self._require_idle("branch")
        messages = _require_messages("branch", messages)
        self._schemas = self._schemas if schemas is None else schemas
        self._context.edit(messages, self._schemas)
        if not attempt.turns and not self._conversation:
            # The policy never sees the old opening, so the trajectory does not contain it.
            attempt.messages.clear()
            attempt.control_token_attempts = self._runtime.template.schema_control_tokens(
                messages, self._schemas
            )
        known_ids = {id(m) for m in attempt.messages}
        new = [m for m in messages if id(m) not in known_ids]
        self._count_control_tokens(m for m in new if m.role != "assistant")
        attempt.messages.extend(new)

    def spawn(
        self,
        prompt: str | Sequence[Message],
        schemas: Sequence[Any] | None = None,
        *,
        seed: int | None = None,
    ) -> Episode:
        """Return another conversation within this attempt, for a sub-agent.

            critic = ep.spawn("Is this right? " + answer.content)
            verdict = await critic.generate()

        The new conversation shares the attempt's tools, budgets and reward. It has its own row of
        tokens, which is trained as well. Several conversations may run concurrently.

        Args:
            prompt: the text of the first user message, or all first messages. Assistant messages
                among them must be from this episode, as for `branch`.
            schemas: the tools that the template shows; by default those of this conversation.
            seed: a number on which the seeds of the conversation depend, in place of its number. It
                makes them independent of the order in which concurrent conversations begin.

        Raises:
            UserCodeError: there is no message, or an assistant message is not from this episode.
        """
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        messages = _require_messages("spawn", messages)
        attempt = self._attempt
        opening = [*takewhile(lambda m: m.role != "assistant", messages)]
        if not opening:
            raise UserCodeError(
                "ep.spawn needs a text, or messages whose first one is a user or system message"
            )
        if any(m.role == "assistant" and id(m) not in attempt.turn_ids for m in messages):
            raise UserCodeError(
                "ep.spawn takes only assistant messages that ep.generate() or ep.foreign() returned"
                " in this episode. Put examples of answers into the text of other messages, or use"
                " ep.foreign"
            )
        attempt.spawned += 1
        schemas = self._schemas if schemas is None else schemas
        number = attempt.spawned
        spawned = type(self)(attempt, opening, schemas, conversation=number, seed=seed)
        if len(opening) < len(messages):
            spawned.branch(messages)
        return spawned

    # -- helpers ----------------------------------------------------------------------------------

    def _count_control_tokens(self, messages: Iterable[Message]) -> None:
        """Count the texts of control tokens in messages that the policy did not write."""
        template, is_from_row = self._runtime.template, self._context.is_from_row
        attempts = (template.count_control_tokens(m, is_from_row(m)) for m in messages)
        self._attempt.control_token_attempts += sum(attempts)

    def _require_idle(self, method: str) -> None:
        if self._is_generating:
            raise UserCodeError(
                f"ep.{method}: ep.generate() of this conversation has not returned yet. Await it"
                " first, or ep.spawn another conversation"
            )

    def _require_turn(self, method: str) -> int:
        """Return the index of this conversation's last turn."""
        self._require_idle(method)
        if self._turn_index < 0:
            raise UserCodeError(f"ep.{method} needs a turn: call ep.generate() first")
        return self._turn_index


def _require_messages(method: str, messages: Any) -> list[Message]:
    """Return the arguments of a method as a list of messages.

    Raises:
        UserCodeError: something is not a message, or the argument is not a list.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    items: list[Any] = list(messages) if is_list else [messages]
    for message in items:
        if not isinstance(message, Message):
            raise UserCodeError(
                f'ep.{method} takes messages: Message("user", {message!r:.60}), not {message!r:.60}'
            )
    if not is_list:
        raise UserCodeError(f"ep.{method} takes a list of messages: [{messages!r:.60}]")
    return items


Penalties = tuple[tuple[int, int, float], ...]
"""For each failed call: the response tokens [start, end) that wrote it, and its penalty."""


def call_penalties(
    turn: Turn,
    results: Sequence[ToolResult],
    penalties: Mapping[str, float],
    row: TokenRow,
    template: ChatTemplate,
) -> Penalties:
    """Return the penalties of a turn's failed calls.

    Args:
        turn: the turn, with its calls.
        results: the results of the calls, in order.
        penalties: the penalty of each error class (`tools.penalties`). Other classes have none.
        row: the row in which the turn was sampled.
        template: the policy's chat template.
    """
    failed = [
        (call.span, penalties[result.error])
        for call, result in zip(turn.tool_calls, results, strict=True)
        if result.error in penalties
    ]
    if not failed:
        return ()
    ids = row.ids[len(row.prompt) + turn.start : len(row.prompt) + turn.end]
    tokens = [(*_token_span(ids, span, template), price) for span, price in failed]
    return tuple((turn.start + a, turn.start + b, price) for a, b, price in tokens)


def _shift_spans(calls: Iterable[ToolCall], by: int) -> list[ToolCall]:
    """Return the calls with the character spans moved by `by`."""
    return [
        replace(c, span=(max(c.span[0] + by, 0), c.span[1] + by)) if c.span else c for c in calls
    ]


def _token_span(
    ids: Sequence[int], span: tuple[int, int] | None, template: ChatTemplate
) -> tuple[int, int]:
    """Return the token span [start, end) that covers a character span of a turn.

    A token that overlaps the character span only partly is included. If the parser reported no
    character span, the token span is the whole turn.
    """
    if span is None:
        return 0, len(ids)
    lengths = range(1, len(ids))
    start, end = span
    text = template.decode(ids)[:end]
    # An incomplete character decodes as one character, and differs from the complete one.
    first = bisect_left(lengths, True, key=lambda n: len(template.decode(ids[:n])) > start)
    last = bisect_left(lengths, True, key=lambda n: template.decode(ids[:n])[:end] == text)
    return first, last + 1
