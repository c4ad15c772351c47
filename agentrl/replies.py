"""`Reply`: what the other side of a conversation says to the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserCodeError, missing_await
from agentrl.trajectory import as_number


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of an interaction or an environment to the assistant's last message.

    Example: `Reply("Not quite. Try again.")`, or `Reply("Right.", score=1.0, done=True)`.

    Attributes:
        content: the next user message. The model does not see it if `done` is true.
        score: the "turn" reward of the assistant's last turn (`reward.turn_weight`).
        done: true if the conversation ends here.
    """

    content: str
    score: float = 0.0
    done: bool = False


def check_reply(label: str, reply: Any) -> Reply | None:
    """Return the result of a `respond()` if it is a reply or None.

    Args:
        label: the interaction or environment, for messages.
        reply: the result.

    Raises:
        UserCodeError: it is something else, or its score is not a finite number.
    """
    if reply is None:
        return None
    if not isinstance(reply, Reply):
        raise UserCodeError(
            f"{label}: respond returned {reply!r} ({type(reply).__name__});"
            " it must return Reply(content, score=0.0, done=False), or None to end the conversation"
            f"{missing_await(reply)}"
        )
    if not isinstance(reply.content, str):
        raise UserCodeError(
            f"{label}: the content of {reply!r} must be a string{missing_await(reply.content)}"
        )
    if not math.isfinite(as_number(reply.score)):
        raise UserCodeError(
            f"{label}: the score of {reply!r} must be a finite number{missing_await(reply.score)}"
        )
    return reply
