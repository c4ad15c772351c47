"""What the framework and the gateway do with an episode, and agent loops do not."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loops.episode import Episode
from agentrl.config.environment import hide_secrets
from agentrl.errors import UserCodeError
from agentrl.trajectory import Message, Scores, ToolResult, Trajectory, Turn, as_number


class EpisodeControl:
    """Controls the attempt that an episode belongs to: its outcome, its results and its end.

    Args:
        episode: the episode.

    Attributes:
        attempt: the state that the episode shares with those that it spawns.
    """

    def __init__(self, episode: Episode):
        self.attempt = episode._attempt
        self._first_row, self._context = episode._first_row, episode._context

    def recall(self, message: Message, ids: array[int]) -> None:
        """Make a turn that the policy sampled in another episode known to this one.

        `Episode.branch` takes it then, and the row contains its tokens as they were sampled.

        Args:
            message: the message that `generate` returned. The caller keeps it until `branch`.
            ids: its tokens.
        """
        self.attempt.turn_ids[id(message)] = ids

    def count_tokens(self, messages: Sequence[Message], schemas: Sequence[Any]) -> int:
        """Return the number of tokens of a conversation as a prompt.

        Args:
            messages: as for `Episode.branch`. Turns of `foreign` or `recall` that no conversation
                contains are forgotten.
            schemas: the tools that the template shows.

        Raises:
            TemplateError: the chat template does not write such a conversation.
        """
        attempt, ids = self.attempt, self.attempt.turn_ids
        turns = {i: ids[id(m)] for i, m in enumerate(messages) if id(m) in ids}
        foreign = {i for i in turns if id(messages[i]) in attempt.foreign}
        try:
            return len(attempt.runtime.template.conversation(
                messages, schemas, turns, foreign=foreign, is_from_row=self._context.is_from_row,
                strip=attempt.runtime.config.rollout.history_thinking == "strip",
            ))  # fmt: skip
        finally:
            for key in {id(messages[i]) for i in turns} - {id(m) for m in attempt.messages}:
                del ids[key]
                attempt.foreign.pop(key, None)

    def record_results(self, turn: Turn, results: Sequence[ToolResult], seconds: float) -> None:
        """Record the results of tool calls that the agent itself has run.

        Args:
            turn: one of the attempt's turns.
            results: one for each of its calls, in order.
            seconds: how long the calls took.

        Raises:
            EpisodeOver: the budget of tool calls is exhausted.
        """
        attempt, index = self.attempt, self.attempt.turns.index(turn)
        attempt.turns[index] = replace(turn, tool_results=tuple(results), tool_seconds=seconds)
        now = time.monotonic()
        attempt.record("tools", now - seconds, now, turn.thread)
        attempt.tool_calls += len(results)
        if attempt.tool_calls > attempt.runtime.config.rollout.max_tool_calls:
            raise attempt.end_with("tool_calls")

    def make_main(self, conversation: Episode) -> None:
        """Make a conversation of this attempt number 0 of the trajectory (`Turn.thread`).

        `Trajectory.final_text` is its last message. By default it is the agent loop's own.

        Args:
            conversation: the episode, or one that its `spawn` returned.
        """
        self.attempt.main = conversation._conversation

    def turns_of(self, conversation: Episode, start: int = 0) -> list[int]:
        """Return the indices, from `start` on, of the attempt's turns in one conversation."""
        turns, number = self.attempt.turns, conversation._conversation
        return [i for i in range(start, len(turns)) if turns[i].thread == number]

    def set_outcome(self, reward: float | Scores) -> None:
        """Set the outcome reward of the trajectory, in place of that of a reward function.

        Args:
            reward: a finite number, or such an outcome with metrics.

        Raises:
            UserCodeError: `reward` is not a finite number.
        """
        if not isinstance(reward, Scores) and not math.isfinite(as_number(reward)):
            raise UserCodeError(f"the reward must be a finite number, not {reward!r}")
        self.attempt.scores = reward if isinstance(reward, Scores) else Scores(reward)

    def fail(self, error: str) -> None:
        """End the episode, which is kept, because the user's agent failed.

        Its outcome is 0, unless the agent has reported one.

        Args:
            error: the message of the agent's error.
        """
        attempt = self.attempt
        attempt.error, attempt.end_reason = hide_secrets(error), "agent_error"
        attempt.scores = attempt.scores or Scores(0.0)

    def split_thinking(self, turn: Turn) -> tuple[str, str]:
        """Return the thinking of a turn, and its other text without its well-formed tool calls.

        Neither contains control tokens. Without such calls, the text keeps tags (`<tool_call>`).

        Args:
            turn: one of the attempt's turns.
        """
        attempt = self.attempt
        text = attempt.messages[turn.message_index].content
        row = attempt.rows[turn.segment]
        start = len(row.prompt) + turn.start
        return attempt.runtime.template.split_thinking(
            row.ids[max(start - 16, 0) : start], text, [c for c in turn.tool_calls if not c.error]
        )

    def finish(self, stop_reason: str, tool_reward: float) -> Trajectory:
        """Return the finished trajectory, after the loop has returned.

        If nothing was sampled, its only segment is the first row, without a response.

        Args:
            stop_reason: as in `Trajectory`.
            tool_reward: the sum of the values that the class tools' `reward()` returned.
        """
        attempt = self.attempt
        turns, spans = attempt.turns, attempt.spans
        if attempt.main:
            renumbered = {attempt.main: 0, 0: attempt.main}
            turns = [replace(t, thread=renumbered.get(t.thread, t.thread)) for t in turns]
            spans = [replace(s, thread=renumbered.get(s.thread, s.thread)) for s in spans]
        return Trajectory(
            sample=attempt.sample,
            episode_id=attempt.episode_id,
            rollout=attempt.rollout,
            segments=tuple(row.segment() for row in attempt.rows or [self._first_row]),
            turns=tuple(turns),
            messages=tuple(attempt.messages),
            sampling=attempt.sampling.as_dict(),
            stop_reason=stop_reason,
            tool_reward=tool_reward,
            seconds=time.monotonic() - attempt.started,
            control_token_attempts=attempt.control_token_attempts,
            started=time.time() - (time.monotonic() - attempt.created),
            spans=tuple(spans),
            scores=attempt.scores,
            counts=dict(attempt.counts),
            error=attempt.error,
        )
