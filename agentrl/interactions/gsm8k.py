"""A teacher who checks a word problem's answer and lets the assistant try again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.answers import gsm8k_answer, same_number
from agentrl.interactions.base import Interaction, Reply, interaction
from agentrl.trajectory import Message

RIGHT = "Correct."
WRONG = "{answer} is not correct. Check your work and try again."
UNREADABLE = "I see no answer. End with '#### ' and the number, for example '#### 12'."


@interaction("gsm8k")
class Gsm8kInteraction(Interaction):
    """Says whether the assistant's last message is right, reading it as the gsm8k grader does.

    Right: score 1 and the end. Wrong: score 0, a word on what was wrong, and another attempt, up to
    `max_attempts` in all.
    """

    def __init__(
        self, ground_truth: Any, query: str = "", max_attempts: int = 3, method: str = "strict"
    ):
        """Make the teacher of one episode.

        Args:
            ground_truth: the right number.
            query: the question; kept for rows that carry it, never said.
            max_attempts: how many answers are heard.
            method: "strict" (`#### 12`) or "flexible" (the last number); the grader's default is
                strict too.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be at least 1")
        self.ground_truth = ground_truth
        self.query = query
        self.max_attempts = max_attempts
        self.method = method
        self.attempts = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Judge the last assistant message."""
        said = [m.content for m in messages if m.role == "assistant"]
        answer = gsm8k_answer(said[-1], self.method) if said else None
        if answer is not None and same_number(answer, self.ground_truth):
            return Reply(RIGHT, score=1.0, done=True)
        self.attempts += 1
        content = UNREADABLE if answer is None else WRONG.format(answer=answer)
        return Reply(content, done=self.attempts >= self.max_attempts)
