"""An attempt at a sample being played: the only mutable noun, and the only writer of tokens.

An agent loop sees four verbs: `generate`, `observe`, `call_tools`, `interact`; and two for loops
that edit their history or run others: `branch`, `spawn`. Tokens, masks, logprobs, budgets,
truncation and errors are the episode's business. Rows only grow (`row.py`); a sampled token is
never decoded and encoded again.

What was observed waits until the next `generate`, for three reasons: consecutive tool results are
rendered as one group, an episode that ends there has no masked tail, and a message that no longer
fits the budget is not half in the row.

A new row begins where the history is no longer what was sampled: after `branch`, for what `spawn`
returns, and, with `rollout.history_thinking=strip`, where the chat template drops the thinking of
earlier turns. What earlier rows sampled stands in its prompt and is trained there, not here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from agentrl.agent_loops.attempt import Attempt, mix_seed
from agentrl.agent_loops.context import Context
from agentrl.agent_loops.stop import cut_at_stop
from agentrl.chat import truncate
from agentrl.errors import EngineError, EpisodeOver, UserCodeError
from agentrl.interactions import Interaction, respond
from agentrl.trajectory import (
    Generation,
    Message,
    Sample,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


class Episode:
    """See the module. Loops read `sample`, `messages`, `turns`, `schemas`; verbs write."""

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
        self._attempt = attempt
        self._world = attempt.world
        self._interaction = interaction
        self._thread = thread
        self._context = Context(self._world.template, opening, schemas)
        self._first = self._context.row
        self._turn, self._spoken = -1, 0
        """This conversation's last turn, and how many it had."""
        attempt.messages.extend(opening)
        self._count(m for m in opening if m.role != "assistant")

    @property
    def sample(self) -> Sample:
        """The row being played."""
        return self._attempt.sample

    @property
    def episode_id(self) -> str:
        """Unique per attempt."""
        return self._attempt.episode_id

    @property
    def rollout(self) -> int:
        """Which of the sample's n rollouts."""
        return self._attempt.rollout

    @property
    def messages(self) -> list[Message]:
        """The conversation as the policy sees it."""
        return self._context.messages

    @property
    def schemas(self) -> Sequence[Any]:
        """The tools that the chat template shows."""
        return self._context.schemas

    @property
    def turns(self) -> list[Turn]:
        """All turns of the attempt so far."""
        return self._attempt.turns

    @property
    def deadline(self) -> float:
        """When the attempt's time is over, in `time.monotonic()` seconds."""
        return self._attempt.deadline

    # -- the verbs --------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        stop: Sequence[str] = (),
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
        attempt.check_time()
        if len(attempt.turns) >= rollout.max_turns:
            raise EpisodeOver("turns")
        row, delta = self._context.next(strip=rollout.history_thinking == "strip")
        room = attempt.room(row, len(delta))
        if room < 1:
            raise EpisodeOver("trajectory_tokens")
        max_tokens = min(room, rollout.max_turn_tokens)
        generation = await self._ask(row.ids + delta, max_tokens, tuple(stop))
        seconds = attempt.enter("loop")
        generation, text = cut_at_stop(generation, self._world.template, stop)
        row.observe(delta)
        start = len(row)
        row.sample(generation, max_tokens)
        self._context.begun(row)
        attempt.register(row)
        message = Message("assistant", text, tuple(await self._read(text, parse)))
        self._context.spoke(message, generation.token_ids)
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
            if message.role == "assistant" or self._turn < 0:
                raise UserCodeError(
                    "ep.observe takes what answers a turn (user, tool), after the first"
                    f" ep.generate(); got a message of role {message.role!r} after"
                    f" {self._spoken} turns"
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
        attempt, at = self._attempt, self._turn
        attempt.check_time()
        calls = attempt.turns[at].tool_calls
        if attempt.tool_calls + len(calls) > self._world.config.rollout.max_tool_calls:
            raise EpisodeOver("tool_calls")
        attempt.tool_calls += len(calls)
        attempt.enter(f"tools {self._world.toolbox.where}")
        results = await self._world.toolbox.run(calls, self.episode_id, at)
        seconds = attempt.enter("loop")
        results = [self._fit(r) for r in results]
        reward = sum(r.reward for r in results if r.reward is not None)
        turn = attempt.turns[at]
        attempt.turns[at] = replace(
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
        self._attempt.check_time()
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
        turn = self._attempt.turns[self._turn]
        rewards = {**turn.rewards, "turn": turn.rewards.get("turn", 0.0) + float(value)}
        self._attempt.turns[self._turn] = replace(turn, rewards=rewards)

    def branch(self, messages: Sequence[Message]) -> None:
        """Go on from an edited history: the next turn sees these messages, in a row of its own.

            ep.branch([ep.messages[0], Message("user", f"So far: {summary.content}")])

        Args:
            messages: the conversation, ending with what is to be answered. Assistant messages must
                be this episode's own; they stand there as they were sampled.

        Raises:
            UserCodeError: another assistant message, or one at the end.
        """
        known = {id(m) for m in self._attempt.messages}
        for message in messages:
            if not isinstance(message, Message):
                raise UserCodeError(f"ep.branch takes messages, not {message!r}")
            if message.role == "assistant" and id(message) not in known:
                raise UserCodeError(
                    "ep.branch takes assistant messages of this episode only, as it got them; put"
                    f" {message.content[:60]!r} into a user message: the policy did not say it"
                )
        if not messages or messages[-1].role == "assistant":
            raise UserCodeError("ep.branch: the last message must be one to answer (user, tool)")
        new = [m for m in messages if id(m) not in known]
        self._count(new)
        self._attempt.messages.extend(new)
        self._context.edit(messages)

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

        Raises:
            UserCodeError: something else than messages, or an assistant's.
        """
        opening = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        if not opening or not all(isinstance(m, Message) for m in opening):
            raise UserCodeError(f"ep.spawn takes a text or messages, not {prompt!r:.80}")
        if any(m.role == "assistant" for m in opening):
            raise UserCodeError(
                "ep.spawn takes system and user messages: put examples of answers into their text"
            )
        self._attempt.spawned += 1
        schemas = self.schemas if schemas is None else schemas
        return Episode(self._attempt, opening, schemas, thread=self._attempt.spawned)

    def finish(self, stop_reason: str, tool_reward: float) -> Trajectory:
        """The frozen trajectory of what was played."""
        return self._attempt.trajectory(self._first, stop_reason, tool_reward)

    # -- inside -----------------------------------------------------------------------------------

    def _count(self, messages: Iterable[Message]) -> None:
        """Note what control tokens others have spelled out."""
        attempts = self._world.template.attempts
        self._attempt.control_token_attempts += sum(map(attempts, messages))

    async def _ask(self, ids: array[int], max_tokens: int, stop: tuple[str, ...]) -> Generation:
        attempt = self._attempt
        seed = (attempt.seed, attempt.rollout, self._spoken)
        if self._thread:
            seed = (*seed, self._thread)
        async with attempt.engine:
            attempt.enter("generate")
            try:
                return await self._world.sampler.generate(
                    ids,
                    attempt.sampling_of(max_tokens, stop),
                    episode_id=attempt.episode_id,
                    seed=mix_seed(*seed),
                    deadline=attempt.deadline,
                )
            except EngineError:
                attempt.check_time()  # it was given no more time than the episode has
                raise

    async def _read(
        self, text: str, parse: Callable[[str], list[ToolCall]] | None
    ) -> list[ToolCall]:
        if parse is not None:
            return parse(text)
        assert self._world.read is not None
        calls = self._world.read(self._world.template.thinking.opened + text, self.schemas)
        return await calls if isawaitable(calls) else calls

    def _fit(self, result: ToolResult) -> ToolResult:
        """A tool's answer cut to `tools.max_result_tokens`, and saying so."""
        tools, template = self._world.config.tools, self._world.template
        limit, side = tools.max_result_tokens, tools.truncate
        shown = truncate(result.content, limit, side, template.encode, template.decode_plain)
        return result if shown is result.content else replace(result, content=shown)
