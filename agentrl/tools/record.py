"""What the registry holds of a tool: everything that is known of it before an episode calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import DataError
from agentrl.signatures import argument_problems
from agentrl.tools.catalogue import Offer
from agentrl.tools.schema import Parameters
from agentrl.trajectory import Sample
from agentrl.workers.processes import START_S

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 2
Scope = Literal["episode", "call"]


@dataclass(frozen=True, slots=True, eq=False)
class ToolFunction:
    """One function a model may call."""

    name: str
    attribute: str
    """The method of a class tool; "" where the tool is the function."""
    schema: dict[str, Any]
    """OpenAI's function form, as chat templates take it."""
    parameters: Parameters
    is_async: bool = False
    injected: tuple[str, ...] = ()
    """What of the episode it is given, see `agentrl.tools.injected`."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """What a dataset row names in `tools`: a function, or a class made once per episode."""

    name: str
    target: Callable[..., Any]
    functions: tuple[ToolFunction, ...]
    timeout: float = DEFAULT_TIMEOUT
    """Seconds a call may take; also a constructor, `reward` and `close`."""
    idempotent: bool = False
    """Running a call again does no harm."""
    retries: int = 0
    """How often a call that failed with anything but `ToolError` is tried again, within its
    timeout."""
    max_concurrency: int = 0
    """Calls running at once, over all episodes of a process; 0 sets no limit."""
    rate_limit: float = 0.0
    """Calls a second, over all episodes of a process; 0 sets no limit."""
    cache: bool = False
    """Equal arguments get the equal answer, in all episodes of a process."""
    scope: Scope = "episode"
    """How long a class tool's object lives."""
    process: bool = False
    """Runs in a worker process, which is killed at the deadline."""
    hooks: tuple[str, ...] = ()
    """Which of `reward` and `close` a class tool has."""
    made_with: tuple[str, ...] = ()
    """What of the episode a class tool's constructor is given."""

    @property
    def is_class(self) -> bool:
        """Whether objects of it are made, with the row's `create_kwargs`."""
        return isinstance(self.target, type)

    @property
    def stateful(self) -> bool:
        """Whether the calls of an episode share an object, and so run one after another."""
        return self.is_class and self.scope == "episode"

    @property
    def injected(self) -> frozenset[str]:
        """What of the episode it is given, by whichever of its functions or its constructor."""
        return frozenset(self.made_with).union(*(f.injected for f in self.functions))

    @property
    def offer(self) -> Offer:
        """The part that others need to know."""
        # Where a call makes its object and ends it, it may take all of their deadlines.
        steps = 4 if self.is_class and self.scope == "call" else 1
        return Offer(
            self.name,
            [f.schema for f in self.functions],
            self.timeout * steps + (START_S if self.process else 0.0),
            self.stateful,
            sorted(self.injected),
        )

    def arguments(self, create_kwargs: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """The constructor's arguments that come from the row.

        Raises:
            DataError: the constructor does not take them.
        """
        problems = argument_problems(self.target, create_kwargs, given=self.made_with)
        if problems:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}): create_kwargs of the tool {self.name!r}:"
                f" {'; '.join(problems)}"
            )
        return dict(create_kwargs)
