"""A teacher who checks the answer to a word problem and lets the assistant try again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.answers import gsm8k_answer, same_number
from agentrl.interactions.base import Interaction, Reply, interaction
from agentrl.trajectory import Message

RIGHT = "Correct."
WRONG = "{answer} is not correct. Check your work and try again."
NO_ANSWER = "I see no answer. End with '#### ' and the number, for example '#### 12'."


@interaction("gsm8k")
class Gsm8kInteraction(Interaction):
    """A teacher who checks the assistant's last message as the gsm8k grader does.

    A right answer has score 1 and ends the conversation. A wrong answer has score 0, and the
    assistant may try again, up to `max_attempts` answers.
    """

    def __init__(
        self, ground_truth: Any, query: str = "", max_attempts: int = 3, method: str = "strict"
    ):
        """Make the teacher of one episode.

        Args:
            ground_truth: the right number.
            query: the question. It is accepted because verl's rows contain it, and not used.
            max_attempts: the number of answers that the assistant may give.
            method: "strict" (`#### 12`) or "flexible" (the last number). The grader's default is
                also strict.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be at least 1")
        self.ground_truth = ground_truth
        self.query = query
        self.max_attempts = max_attempts
        self.method = method
        self.attempts = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Check the last assistant message."""
        texts = [m.content for m in messages if m.role == "assistant"]
        answer = gsm8k_answer(texts[-1], self.method) if texts else None
        if answer is not None and same_number(answer, self.ground_truth):
            return Reply(RIGHT, score=1.0, done=True)
        self.attempts += 1
        content = NO_ANSWER if answer is None else WRONG.format(answer=answer)
        return Reply(content, done=self.attempts >= self.max_attempts)
