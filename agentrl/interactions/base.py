"""The other side of a conversation: a teacher, a customer, an examiner.

An interaction hears the assistant out and answers as a user, until it has no more to say. There is
one object per episode, made from the row's `interaction_kwargs`; its state is plain attributes.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

from agentrl.errors import EpisodeOver, RegistryError, UserCodeError, user_code
from agentrl.registry import interactions
from agentrl.signatures import location, place
from agentrl.trajectory import Message, Sample


@dataclass(frozen=True, slots=True)
class Reply:
    """What the interaction says to the assistant's last message.

    Example: `Reply("Not quite. Try again.")`, or `Reply("Right.", score=1.0, done=True)`.
    """

    content: str
    """The next user message. Not shown to the model where `done` is true."""
    score: float = 0.0
    """What the assistant's last turn earned: its "turn" reward."""
    done: bool = False
    """The episode ends here."""


class Interaction(ABC):
    """Base of all interactions; subclasses need only `respond`.

    The constructor's arguments are the row's `interaction_kwargs`, by name. A constructor with a
    parameter named `sample` is given the row itself there.
    """

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Answer the assistant's last message.

        Args:
            messages: the conversation so far, prompt included.

        Returns:
            The reply, or None to end the talk without a score.
        """

    async def close(self) -> None:
        """Free what the episode held. Called once, however the episode ends."""
        return None


I = TypeVar("I", bound=type[Interaction])  # noqa: E741


def interaction(name: str) -> Callable[[I], I]:
    """Register an `Interaction` under the name that rows use; the class stays as it is.

    Raises:
        RegistryError: not an `Interaction`, or its methods are not async, or the name is taken.
    """
    if not isinstance(name, str):
        raise RegistryError(
            f'write @interaction("name") above {place(name)}: rows refer to it by name'
        )

    def register(cls: I) -> I:
        if not (isinstance(cls, type) and issubclass(cls, Interaction)):
            raise RegistryError(
                f"@interaction({name!r}) is for subclasses of Interaction, not {place(cls)}"
            )
        for method in ("respond", "close"):
            function = inspect.getattr_static(cls, method)
            if not inspect.iscoroutinefunction(function):
                where = location(function if inspect.isfunction(function) else cls)
                raise RegistryError(
                    f"{cls.__qualname__}.{method} ({where}) must be `async def`: many episodes"
                    " share a thread"
                )
        if inspect.isabstract(cls):
            raise RegistryError(
                f"{cls.__qualname__} ({location(cls)}) lacks"
                " `async def respond(self, messages) -> Reply | None`"
            )
        return interactions.add(name, cls)

    return register


def build_interaction(sample: Sample) -> Interaction | None:
    """The episode's own interaction, or None where the row has none.

    Raises:
        RegistryError: no interaction of that name.
        UserCodeError: its constructor raised.
    """
    if not sample.interaction:
        return None
    cls = interactions.get(sample.interaction)
    # Copied deep: the rollouts of one row must not share a list that one of them changes.
    kwargs = copy.deepcopy(dict(sample.interaction_kwargs))
    if "sample" in inspect.signature(cls).parameters:
        kwargs["sample"] = sample
    with user_code(f"interaction {sample.interaction!r} of sample {sample.id!r}: its constructor"):
        return cls(**kwargs)


async def respond(
    interaction: Interaction, messages: Sequence[Message], deadline: float
) -> Reply | None:
    """`interaction.respond(messages)`, with every mistake of its code laid at its door.

    Args:
        interaction: the episode's.
        messages: the conversation so far.
        deadline: `time.monotonic()` seconds at which the wait ends.

    Raises:
        EpisodeOver: "time", the deadline passed.
        UserCodeError: it raised, or returned something else than a `Reply` or None.
        Infrastructure: as it raised it: the episode is played again.
    """
    named = f"interaction {type(interaction).__qualname__}"
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            # Inside of the deadline, so that a TimeoutError of the user's stays the user's.
            with user_code(f"{named}: respond"):
                reply = await interaction.respond(messages)
    except TimeoutError:
        raise EpisodeOver("time") from None
    if reply is None:
        return None
    if not isinstance(reply, Reply):
        raise UserCodeError(
            f"{named}: respond returned {reply!r} ({type(reply).__name__});"
            " it must return Reply(content, score=0.0, done=False), or None to end the talk"
        )
    if not isinstance(reply.content, str):
        raise UserCodeError(f"{named}: the content of {reply!r} must be a string")
    if not isinstance(reply.score, Real) or not math.isfinite(reply.score):
        raise UserCodeError(f"{named}: the score of {reply!r} must be a finite number")
    return reply
