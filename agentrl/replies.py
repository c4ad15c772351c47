"""`Reply`: what the other side of a conversation says to the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import UserCodeError, missing_await
from agentrl.images import Image, ImageError, read_parts
from agentrl.trajectory import as_number, join_parts


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of an interaction or an environment to the assistant's last message.

    Example: `Reply("Not quite. Try again.")`, or `Reply("Right.", score=1.0, done=True)`.

    Example with an image: `Reply(["This is what you see now:", screenshot])`.

    Attributes:
        content: the next user message: a text, or a list of texts and images. The model does not
            see it if `done` is true.
        score: the "turn" reward of the assistant's last turn (`reward.turn_weight`).
        done: true if the conversation ends here.
        images: the images in the content, in which each has a `PLACE` (`agentrl.images`). A list
            as content sets both.
    """

    content: str
    score: float = 0.0
    done: bool = False
    images: tuple[Image, ...] = ()


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
    try:
        parts = read_parts(reply.content)
    except (ImageError, TypeError) as e:
        raise UserCodeError(f"{label}: the content of its reply: {e}") from e
    if parts is not None:
        content, images = join_parts(parts)
        reply = replace(reply, content=content, images=images)
    if not isinstance(reply.content, str):
        raise UserCodeError(
            f"{label}: the content of {reply!r} must be a string{missing_await(reply.content)}"
        )
    if not math.isfinite(as_number(reply.score)):
        raise UserCodeError(
            f"{label}: the score of {reply!r} must be a finite number{missing_await(reply.score)}"
        )
    return reply
