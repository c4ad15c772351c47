"""`@environment` registers a class. Each episode has its own object of it.

An environment is the whole world of an episode: its first observation, its tools, the other side of
the conversation, and the reward. Inside agentrl it is a class tool with more hooks, so its objects
are where those of class tools are: in the tool server or in this process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from agentrl.errors import RegistryError, UserCodeError, UserError, missing_await
from agentrl.registry import tools
from agentrl.replies import Reply
from agentrl.signatures import identify, require_name
from agentrl.tools.schema import (
    CONSTRUCTOR_PARAMETERS,
    injected_parameters,
    parameters_from_schema,
)
from agentrl.tools.tool import DEFAULT_TIMEOUT, Tool, ToolFunction, check_tool, methods_of
from agentrl.trajectory import Message, Sample, Scores, ToolCall, as_number

HOOKS = ("start", "respond", "reward", "close")
"""The methods that agentrl calls in an episode, and the model cannot call."""


class Environment:
    """The base class of environments. All methods are optional, and may be `async`.

        @environment("guess")
        class Guess(Environment):
            def __init__(self, word: str):  # the row's environment_kwargs
                self.word, self.found = word, False

            async def start(self):
                return [Message("user", f"The word has {len(self.word)} letters.")]

            def guess(self, word: str) -> str:
                \"\"\"Guess the word.\"\"\"  # a public method is a tool of the model
                self.found = word == self.word
                return "Right!" if self.found else "Wrong."

            async def reward(self):
                return float(self.found)

    agentrl makes one object for each episode, and closes it on every exit. The methods of an object
    are called one after another. A parameter `sample` of the constructor gets the dataset row.

    Attributes:
        tools: the names of the methods that the model may call in this episode; None: all public
            ones. The constructor or `start` may set it, so that the model sees fewer tools. If
            `respond` adds names, the model may call them from then on, but no schema of them is in
            its context: the reply must describe them.
        reward_range: the least and the greatest possible outcome. `agentrl check environment`
            reads it.
        chance: the average reward that random valid calls may earn; None: the least outcome.
            `agentrl check environment` reads it.
    """

    tools: Sequence[str] | None = None
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    chance: ClassVar[float | None] = None

    async def start(self) -> str | Sequence[Message] | None:
        """Return the first observation, which follows the row's prompt.

        It is a user message, or messages. agentrl calls this once, before the first turn. The text
        is never encoded as control tokens.
        """
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Reply to a turn without tool calls; without this method, such a turn ends the episode.

        Args:
            messages: the conversation so far.

        Returns:
            The reply, whose score is added to the reward of the turn; None ends the episode.
        """
        return None

    async def reward(self) -> float | Mapping[str, float] | Scores:
        """Return the outcome of the episode. agentrl calls this once, when the episode has ended.

        If a class does not have this method, a reward function scores the episode. If the method
        has a parameter `messages`, it gets the conversation.

        Returns:
            A number; or a mapping of named parts, whose sum is the outcome and which become
            metrics; or `Scores`.
        """
        # agentrl calls only methods that a subclass defines. It knows no outcome without one.
        raise NotImplementedError

    async def close(self) -> None:
        """Free the resources of the episode."""
        return None

    @classmethod
    def gold(cls, sample: Sample) -> Sequence[str | ToolCall] | None:
        """Return a solution of a row, for `agentrl check environment`.

        Args:
            sample: the dataset row.

        Returns:
            The turns of the assistant in order, each a text or a call; None if none is known.
        """
        return None

    @classmethod
    def _problems(cls, arguments: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with the values in a row's environment_kwargs. Doors define it."""
        return []


E = TypeVar("E", bound=type[Environment])
_BASE_ATTRIBUTES = frozenset(vars(Environment))
"""The model cannot call methods with these names."""


def environment(name: str, *, timeout: float = DEFAULT_TIMEOUT) -> Callable[[E], E]:
    """Register an `Environment` under the name that rows use. The class is returned unchanged.

    Args:
        name: the name that rows have in `environment`.
        timeout: how long the constructor and each method may take, in seconds.

    Raises:
        RegistryError: the class is not an `Environment`, or another tool or class has the name.
        UserError: a model cannot call one of its methods. The message says why and where.
    """
    require_name("environment", name)

    def register(cls: E) -> E:
        if not (isinstance(cls, type) and issubclass(cls, Environment)):
            raise RegistryError(
                f"@environment({name!r}) is for subclasses of Environment, not {identify(cls)}"
            )
        overridden = tuple(h for h in HOOKS if getattr(cls, h) is not getattr(Environment, h))
        for hook in overridden:
            _check_hook(cls, hook)
        record = Tool(
            name,
            cls,
            methods_of(cls, name, excluded=_BASE_ATTRIBUTES),
            timeout=timeout,
            hooks=overridden,
            constructor_injected=injected_parameters(cls, CONSTRUCTOR_PARAMETERS),
            is_environment=True,
        )
        check_tool(record)
        tools.add(name, record)
        return cls

    return register


def environment_of_schemas(
    name: str,
    cls: type[Environment],
    schemas: Sequence[Mapping[str, Any]],
    where: str,
    *,
    timeout: float,
    hooks: Sequence[str],
    injected: Sequence[str] = (),
    constructor_injected: Sequence[str] = (),
) -> Tool:
    """Return an environment whose functions another program has, and whose class calls them.

    Args:
        name: the name that rows have in `environment`.
        cls: the class. Its `call_function(name, arguments, messages)` calls a function; it gets the
            conversation if `messages` is in `injected`.
        schemas: the functions, as OpenAI function schemas.
        where: the program, for messages.
        timeout: how long each method may take, in seconds.
        hooks: those that the environment has.
        injected: the parameters of `call_function` that agentrl fills.
        constructor_injected: the parameters of the constructor that agentrl fills.

    Raises:
        UserError: a function's name or its schema cannot be used.
    """
    functions = {schema["function"]["name"]: dict(schema) for schema in schemas}
    # Not by the functions' own names: the program may call one `start` or `tools`.
    methods = {f"_call_{name}": _caller(name, "messages" in injected) for name in functions}
    record = Tool(
        name,
        type(name, (cls,), methods),
        tuple(
            ToolFunction(
                function,
                f"_call_{function}",
                schema,
                parameters_from_schema(schema["function"]["parameters"], function, where),
                is_async=True,
                injected=tuple(injected),
            )
            for function, schema in functions.items()
        ),
        timeout=timeout,
        hooks=tuple(hooks),
        constructor_injected=tuple(constructor_injected),
        is_environment=True,
    )
    check_tool(record)
    return record


def _caller(name: str, wants_messages: bool) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the method that calls a function of the program."""

    async def call(self: Any, /, **arguments: Any) -> Any:
        messages = arguments.pop("messages") if wants_messages else ()
        return await self.call_function(name, arguments, messages)

    return call


def _check_hook(cls: type[Environment], hook: str) -> None:
    """Raise `UserError` if agentrl cannot call a hook."""
    method = getattr(cls, hook)
    try:
        inspect.signature(with_messages(partial(method, None), hook, ())).bind()
    except (TypeError, ValueError):  # ValueError: too many arguments
        forms = {
            "respond": "respond(self, messages)",
            "reward": "reward(self)` or `async def reward(self, messages)",
        }
        raise UserError(
            f"{identify(method)}: agentrl itself calls this method, not the model. Write"
            f" `async def {forms.get(hook, f'{hook}(self)')}`, or rename a method that the model"
            " may call"
        ) from None


def with_messages(
    method: Callable[..., Any], hook: str, messages: Sequence[Message]
) -> Callable[..., Any]:
    """Return a hook bound to the conversation, if it takes one."""
    if hook == "respond":
        return partial(method, messages)
    if hook == "reward" and "messages" in inspect.signature(method).parameters:
        return partial(method, messages=messages)
    return method


def offered_functions(tool: Tool, value: Environment) -> list[str]:
    """Return the names of the functions that the model may call in an episode.

    Raises:
        UserCodeError: the environment's `tools` has a name that is no public method.
    """
    names = [f.name for f in tool.functions]
    chosen = value.tools
    if chosen is None:
        return names
    is_list = isinstance(chosen, Iterable) and not isinstance(chosen, str)
    if not is_list or any(name not in names for name in chosen):
        raise UserCodeError(
            f"{tool.label}: tools={chosen!r:.200} must be a list of names of its methods:"
            f" {', '.join(names) or 'none'}"
        )
    return [name for name in names if name in chosen]


def to_scores(label: str, returned: Any) -> Scores:
    """Return the result of an environment's `reward()` as `Scores`.

    Raises:
        UserCodeError: it is neither a finite number, nor named numbers, nor `Scores`.
    """
    if isinstance(returned, Scores):
        return returned
    parts = returned if isinstance(returned, Mapping) else {"": returned}
    numbers = {str(name): as_number(value) for name, value in parts.items()}
    if "score" in numbers:
        raise UserCodeError(
            f"{label} returned {returned!r:.200}: the values of a mapping are parts, whose sum is"
            " the reward. For a score with other numbers return Scores(outcome, metrics={...})"
        )
    if not numbers or len(numbers) < len(parts) or not math.isfinite(sum(numbers.values())):
        raise UserCodeError(
            f"{label} returned {returned!r:.200} ({type(returned).__name__}); it must be a finite"
            f" number, a mapping of named finite numbers, or Scores{missing_await(returned)}"
        )
    metrics = numbers if isinstance(returned, Mapping) else {}
    return Scores(math.fsum(numbers.values()), metrics=metrics)
