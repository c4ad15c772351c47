"""verl's interactions as agentrl's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from agentrl.errors import UserCodeError, UserError
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.trajectory import Message


def register_interaction(theirs: Any, name: str, where: str) -> None:
    """Register one object of verl's `BaseInteraction`, or of what looks like one.

    Raises:
        UserError: it has not verl's methods.
        RegistryError: another interaction has the name.
    """
    for method in ("start_interaction", "generate_response"):
        if not inspect.iscoroutinefunction(getattr(theirs, method, None)):
            raise UserError(
                f"{where}: {type(theirs).__qualname__} is no interaction of verl's: it needs"
                f" `async def {method}`"
            )

    class Share(Interaction):
        """One episode's share of verl's interaction."""

        def __init__(self, **kwargs: Any):
            self._kwargs = {"name": name, **kwargs}
            self._id = ""

        async def respond(self, messages: Sequence[Message]) -> Reply:
            if not self._id:
                given = str(uuid4())
                self._id = await theirs.start_interaction(given, **self._kwargs) or given
            answer = await theirs.generate_response(
                self._id, [m.as_dict() for m in messages], **self._kwargs
            )
            if not isinstance(answer, tuple) or len(answer) != 4:
                raise UserCodeError(
                    f"the interaction {name!r}: generate_response returned {answer!r:.100}, not"
                    " (should_terminate_sequence, response_content, current_turn_score, more)"
                )
            done, content, score, _ = answer
            return Reply(content, score=float(score or 0.0), done=bool(done))

        async def close(self) -> None:
            finalize = getattr(theirs, "finalize_interaction", None)
            if self._id and finalize:
                # Older ones are not told which episode is meant.
                takes = inspect.signature(finalize).parameters
                await finalize(*([self._id] if takes else []))

    Share.__name__ = Share.__qualname__ = type(theirs).__name__
    Share.__module__ = type(theirs).__module__
    interaction(name)(Share)


def name_of(class_name: str) -> str:
    """The name that verl gives an interaction whose YAML file gives it none.

    Example: `Gsm8kInteraction` is "gsm8k".
    """
    simple = class_name.rpartition(".")[2]
    return simple.removesuffix("Interaction").lower()
