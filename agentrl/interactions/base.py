"""`Interaction`: the other side of a conversation, such as a teacher, a customer or an examiner.

An interaction replies to the assistant as a user, until it ends the conversation. Each episode has
its own object, made with the row's `interaction_kwargs` and the config's `interaction.kwargs`. Its
state is plain attributes.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentrl.errors import (
    DataError,
    EpisodeOver,
    RegistryError,
    user_code,
)
from agentrl.http.chat import Chat
from agentrl.http.pool import TimeLimit
from agentrl.registry import interactions
from agentrl.replies import Reply, check_reply
from agentrl.signatures import (
    INJECTED_INTO_INTERACTIONS,
    identify,
    locate,
    merge_arguments,
    require_name,
)
from agentrl.trajectory import Message, Sample, copy_value

Opening = str | Sequence[Message] | None
"""The value of `Interaction.opening`: a user message, messages, or nothing."""


class Interaction(ABC):
    """The base class of interactions. A subclass must define `respond`.

        @interaction("examiner")
        class Examiner(Interaction):
            def __init__(self, ground_truth: str):  # from the row's interaction_kwargs
                self.ground_truth, self.tries = ground_truth, 3

            async def respond(self, messages):
                if messages[-1].content.rpartition("####")[2].strip() == self.ground_truth:
                    return Reply("Right.", score=1.0, done=True)
                self.tries -= 1
                return Reply("Not quite. Try again.") if self.tries else None  # None: the end

    agentrl makes one object for each episode, and closes it at the end. If the conversation begins
    with a text of the interaction, `opening` returns it.

    The constructor's arguments are the row's `interaction_kwargs` and the config's
    `interaction.kwargs.NAME`; an argument may be in only one of them. agentrl fills in two
    parameters if the constructor has them: `sample` is the dataset row, and `chat` is the run's own
    engine (`agentrl.http.chat.Chat`).

    Attributes:
        config_only: arguments that only the config may set: a dataset must not choose where
            requests are sent.
    """

    config_only: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def problems(cls, kwargs: Mapping[str, Any]) -> Iterable[str]:
        """Return problems with the arguments' values. agentrl calls this before it loads a model.

        Args:
            kwargs: the arguments of the row and the config. They fit the constructor's signature.

        Returns:
            A sentence for each problem; the run is refused with all of them.
        """
        return ()

    def opening(self) -> Opening | Awaitable[Opening]:
        """Return the text or the messages that follow the row's prompt; None if there are none.

        agentrl calls this once, before the first turn. It may be `async`; if not, it must not wait.
        """
        return None

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Reply to the assistant's last message.

        Args:
            messages: the conversation so far, with the prompt.

        Returns:
            The reply, or None to end the conversation without a score.

        Raises:
            Infrastructure: a server that the interaction needs is down: the episode is played
                again, then dropped. Any other exception counts as a bug: the episode is dropped.
        """

    async def close(self) -> None:
        """Free the episode's resources. agentrl calls this once, even if the episode fails."""
        return None


I = TypeVar("I", bound=type[Interaction])  # noqa: E741


def interaction(name: str) -> Callable[[I], I]:
    """Register an `Interaction` under the name that rows use. The class is returned unchanged.

    Args:
        name: the name that rows have in `interaction`.

    Raises:
        RegistryError: the class is not an `Interaction`, its methods are not async, or another
            class has the name.
    """
    require_name("interaction", name)

    def register(cls: I) -> I:
        if not (isinstance(cls, type) and issubclass(cls, Interaction)):
            raise RegistryError(
                f"@interaction({name!r}) is for subclasses of Interaction, not {identify(cls)}"
            )
        for method in ("respond", "close"):
            function = inspect.getattr_static(cls, method)
            if not inspect.iscoroutinefunction(function):
                where = locate(function if inspect.isfunction(function) else cls)
                raise RegistryError(
                    f"{cls.__qualname__}.{method} ({where}) must be `async def`: many episodes"
                    " share a thread"
                )
        if inspect.isabstract(cls):
            raise RegistryError(
                f"{cls.__qualname__} ({locate(cls)}) must define"
                " `async def respond(self, messages) -> Reply | None`"
            )
        return interactions.add(name, cls)

    return register


def build_interaction(
    sample: Sample,
    configured: Mapping[str, Mapping[str, Any]] | None = None,
    chat: Chat | None = None,
) -> Interaction | None:
    """Make the interaction of an episode; return None if the row has none.

    Args:
        sample: the dataset row.
        configured: the config's `interaction.kwargs`.
        chat: the run's engine, for an interaction that has a parameter `chat`.

    Raises:
        RegistryError: there is no interaction with that name.
        DataError: the row sets an argument that it must not set, or that the config also sets.
        UserCodeError: the constructor raised.
    """
    name = sample.interaction
    if not name:
        return None
    cls = interactions.get(name)
    config = (configured or {}).get(name, {})
    merged, problems = merge_arguments(
        f"interaction.kwargs.{name}", sample.interaction_kwargs, config, cls.config_only
    )
    if problems:
        raise DataError(f"row {sample.id!r}, interaction_kwargs: {'; '.join(problems)}")
    kwargs = copy_value(merged)  # All rollouts share the lists of the config.
    injected = dict(zip(INJECTED_INTO_INTERACTIONS, (sample, chat), strict=True))
    parameters = inspect.signature(cls).parameters
    kwargs |= {name: value for name, value in injected.items() if name in parameters}
    with user_code(f"interaction {name!r} of sample {sample.id!r}: its constructor"):
        return cls(**kwargs)


async def respond(
    interaction: Interaction, messages: Sequence[Message], deadline: float
) -> Reply | None:
    """Call `interaction.respond(messages)` and check the reply.

    Args:
        interaction: the episode's interaction.
        messages: the conversation so far.
        deadline: the `time.monotonic()` seconds at which to stop waiting.

    Raises:
        EpisodeOver: the deadline has passed.
        UserCodeError: the interaction raised, or returned something other than a `Reply` or None.
        Infrastructure: the interaction raised this exception. The sample is played again.
    """
    label = f"interaction {type(interaction).__qualname__}"
    try:
        async with TimeLimit(deadline - time.monotonic()):
            # Inside the time limit, so that a TimeoutError of the user's code becomes a
            # `UserCodeError`.
            with user_code(f"{label}: respond"):
                reply = await interaction.respond(copy_value([*messages]))
    except TimeoutError:
        raise EpisodeOver("time") from None
    return check_reply(label, reply)
