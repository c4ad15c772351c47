"""`@tool`: a function, or a class whose objects live for one episode, becomes something to call.

A function stays the plain function it was. What the framework needs to know stands beside it, in
a frozen `Tool` in the registry. A dataset row lists tools by name; one tool may offer the model
several functions:

    @tool function    one function, under the tool's name
    @tool class       one per public method, under the method's name; `__call__` goes by the tool's
                      name. `reward` and `close` are the framework's to call, never the model's
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, overload

from agentrl.errors import DataError, UserError
from agentrl.registry import tools
from agentrl.signatures import find_argument_problems, locate, identify
from agentrl.tools.payloads import Parameters
from agentrl.tools.schema import TO_CONSTRUCTORS, adopt, describe, injected
from agentrl.trajectory import Sample
from agentrl.workers.processes import START_SECONDS

log = logging.getLogger("agentrl.tools")

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 2
Scope = Literal["episode", "call"]
HOOKS = ("reward", "close")
OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as those see it who do not run it."""

    name: str
    """What a dataset row lists."""
    schemas: Sequence[dict[str, Any]]
    """OpenAI function schemas: what the model may call."""
    timeout: float
    """Seconds a call may take once it runs."""
    stateful: bool
    """Whether the calls of an episode share an object, and so run one after another."""
    injected: Sequence[str] = ()
    """What of the episode it is given: of `state`, `sample`, `messages`, `sandbox`."""

    @property
    def wants_row(self) -> bool:
        """Whether anything of it looks at the row."""
        return self.stateful or "sample" in self.injected

    @property
    def functions(self) -> list[str]:
        """The names the model calls."""
        return [s["function"]["name"] for s in self.schemas]


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
    """What of the episode it is given, see `agentrl.tools.schema`."""


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
            self.timeout * steps + (START_SECONDS if self.process else 0.0),
            self.stateful,
            sorted(self.injected),
        )

    def arguments(self, create_kwargs: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """The constructor's arguments that come from the row.

        Raises:
            DataError: the constructor does not take them.
        """
        problems = find_argument_problems(self.target, create_kwargs, injected=self.made_with)
        if problems:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}): create_kwargs of the tool {self.name!r}:"
                f" {'; '.join(problems)}"
            )
        return dict(create_kwargs)


def schemas_of(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    """The schemas of several tools together.

    Raises:
        UserError: two of them offer a function of the same name.
    """
    owners: dict[str, str] = {}
    for offer in offers:
        for function in offer.functions:
            owner = owners.setdefault(function, offer.name)
            if owner != offer.name:
                raise UserError(
                    f"the tools {owner!r} and {offer.name!r} both offer a function {function!r}."
                    " Rename one, or do not give a row both."
                )
    return [schema for offer in offers for schema in offer.schemas]


def lanes_of(offers: Sequence[Offer]) -> dict[str, str]:
    """By function, what its calls share with others' in the episode: those run one after another.

    That is the object of a class tool, or the episode's `state` (""). So a turn's calls have the
    same outcome every time.
    """
    return {
        function: "" if "state" in offer.injected else offer.name
        for offer in offers
        if offer.stateful or "state" in offer.injected
        for function in offer.functions
    }


# -- the decorator --------------------------------------------------------------------------------


@overload
def tool(target: T, /) -> T: ...
@overload
def tool(
    *,
    name: str = "",
    timeout: float = DEFAULT_TIMEOUT,
    idempotent: bool = False,
    retries: int | None = None,
    max_concurrency: int = 0,
    rate_limit: float = 0.0,
    cache: bool = False,
    scope: Scope = "episode",
    process: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> Callable[[T], T]: ...
def tool(
    target: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    timeout: float = DEFAULT_TIMEOUT,
    idempotent: bool = False,
    retries: int | None = None,
    max_concurrency: int = 0,
    rate_limit: float = 0.0,
    cache: bool = False,
    scope: Scope = "episode",
    process: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> Any:
    """Register a function or class as a tool, and hand it back unchanged.

    Example::

        @tool
        def calculator(expression: str) -> str: ...

        @tool(timeout=20, idempotent=True, max_concurrency=8)
        async def search(query: str, k: int = 3) -> str: ...

    What a tool returns is text, anything JSON holds, or a `ToolResult`. It refuses input by raising
    `ToolError`, which the model reads. Parameters named `state`, `sample`, `messages` and `sandbox`
    are given by agentrl, see `agentrl.tools.schema`.

    Args:
        target: the function or class, where the decorator stands without parentheses.
        name: what rows list; the function's name, or the class's in snake_case, if empty.
        timeout: seconds a call may take.
        idempotent: running a call again does no harm, so that a failed one may be repeated.
        retries: how often a call that failed with anything but `ToolError` is tried again, within
            its timeout; by default twice where it is idempotent.
        max_concurrency: calls running at once in a process; 0 sets no limit.
        rate_limit: calls a second in a process, evenly spread; 0 sets no limit. Waiting for it does
            not count as the call's time.
        cache: equal arguments get the equal answer, and calls that wait for it share one run. For
            idempotent functions that need nothing of the episode.
        scope: how long a class's object lives: for the "episode", or for one "call".
        process: run it in a worker process, which is killed at the deadline: for what may hang in
            C, crash or eat memory. Functions only.
        schema: OpenAI function schema to use in place of the signature's. Functions only.

    Raises:
        UserError: nothing a model could call: the message says what and where.
        RegistryError: another tool has the name.
    """
    options = {
        "timeout": timeout,
        "idempotent": idempotent,
        "retries": retries if retries is not None else DEFAULT_RETRIES * idempotent,
        "max_concurrency": max_concurrency,
        "rate_limit": rate_limit,
        "cache": cache,
        "scope": scope,
        "process": process,
    }

    def register(target: T) -> T:
        record = _record(target, name, schema, options)
        tools.add(record.name, record)
        return target

    return register if target is None else register(target)


def _record(
    target: Callable[..., Any],
    name: str,
    schema: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Tool:
    made: Mapping[str, Any] = {}
    if isinstance(target, type):
        if schema is not None:
            raise UserError(f"@tool on {identify(target)}: schema= is for functions, not for classes")
        name = name or _snake(target.__name__)
        functions = _methods(target, name)
        made = {"hooks": _hooks(target), "made_with": injected(target, TO_CONSTRUCTORS)}
    elif inspect.isfunction(target):
        if schema is None:
            name = name or target.__name__
            functions = (_function(target, name, ""),)
        else:
            function = _handmade(target, name, schema)
            name, functions = function.name, (function,)
    else:
        raise UserError(f"@tool goes on a function or a class, not on {identify(target)}")
    _check_name(name, target)
    record = Tool(name, target, functions, **options, **made)
    problems = [*_problems(record)]
    if problems:
        raise UserError(f"@tool on {identify(target)}: {'; '.join(problems)}")
    return record


def _function(
    function: types.FunctionType, name: str, attribute: str, bound: bool = False
) -> ToolFunction:
    _check_name(name, function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            f"the tool function {name!r} ({locate(function)}) is a generator: return all of the"
            " result instead"
        )
    given = injected(function)
    description, parameters = describe(function, name, bound=bound, given=given)
    if not description:
        log.warning("tool function %r has no docstring: the model reads its name only", name)
    schema = {"name": name, "description": description, "parameters": parameters.schema}
    shown = {"type": "function", "function": schema}
    is_async = inspect.iscoroutinefunction(function)
    return ToolFunction(name, attribute, shown, parameters, is_async, given)


def _handmade(function: types.FunctionType, name: str, schema: Mapping[str, Any]) -> ToolFunction:
    """A function whose schema the user wrote."""
    where = f"@tool(schema=...) at {locate(function)}"
    written = schema.get("function")
    if not isinstance(written, Mapping) or not isinstance(written.get("parameters"), Mapping):
        raise UserError(
            f'{where}: expected {{"type": "function", "function": {{"name": ..., "parameters":'
            f' {{"type": "object", ...}}}}}}, got {dict(schema)}'
        )
    name = name or written.get("name") or function.__name__
    if written.get("name", name) != name:
        raise UserError(f"{where}: the schema is called {written['name']!r}, the tool {name!r}")
    parameters = adopt(written["parameters"], name, where)
    shown = {**written, "name": name, "parameters": parameters.schema}
    given = injected(function, models_own=parameters.schema.get("properties", {}))
    shown = {"type": "function", "function": shown}
    return ToolFunction(name, "", shown, parameters, inspect.iscoroutinefunction(function), given)


def _methods(cls: type, name: str) -> tuple[ToolFunction, ...]:
    """The functions of a class tool, base classes' first, in the order they are written."""
    found = []
    for attribute in _attributes(cls):
        if attribute in HOOKS or (attribute.startswith("_") and attribute != "__call__"):
            continue
        method = inspect.getattr_static(cls, attribute)
        if isinstance(method, staticmethod | classmethod):
            function, bound = method.__func__, isinstance(method, classmethod)
        else:
            function, bound = method, True
        if inspect.isfunction(function):
            called = name if attribute == "__call__" else attribute
            if called in [f.name for f in found]:
                raise UserError(
                    f"the class tool {name!r} ({identify(cls)}) offers two functions {called!r}: its"
                    " __call__ goes by the tool's name. Rename the method, or give the tool a name="
                )
            found.append(_function(function, called, attribute, bound))
    if not found:
        raise UserError(
            f"the class tool {name!r} ({identify(cls)}) offers nothing to call:"
            f" it needs a public method other than {' and '.join(HOOKS)}"
        )
    return tuple(found)


def _hooks(cls: type) -> tuple[str, ...]:
    """Which of `reward` and `close` it has: methods to be called with nothing."""
    hooks = tuple(h for h in HOOKS if h in _attributes(cls))
    for hook in hooks:
        method = getattr(cls, hook)
        if callable(method):
            own = inspect.isfunction(inspect.getattr_static(cls, hook))
            taken = list(inspect.signature(method).parameters.values())[1 if own else 0 :]
            if all(p.default is not p.empty or p.kind in OPEN_ENDED for p in taken):
                continue
        raise UserError(
            f"the class tool {cls.__name__!r} ({identify(cls)}): {hook} is a method that agentrl calls"
            " without arguments at the end of an episode, never the model. Give yours another name,"
            " or defaults to its parameters."
        )
    return hooks


def _attributes(cls: type) -> dict[str, None]:
    """What a class and its bases define, in order; `object` aside."""
    return dict.fromkeys(a for c in reversed(cls.__mro__[:-1]) for a in vars(c))


def _check_name(name: str, target: Any) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"a tool cannot be called {name!r} ({identify(target)}): letters, digits, _ and -,"
            " starting with a letter or _, at most 64 characters"
        )


def _snake(name: str) -> str:
    """`NoteBook` → `note_book`, `HTTPSearch` → `http_search`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _problems(tool: Tool) -> Iterator[str]:
    """Yield why the options of a tool cannot be kept, or do not fit together."""
    if not 0 < tool.timeout < math.inf:
        yield f"timeout={tool.timeout} must be above 0 seconds"
    if tool.retries < 0:
        yield f"retries={tool.retries} must be at least 0"
    if tool.max_concurrency < 0:
        yield f"max_concurrency={tool.max_concurrency} must be at least 0"
    if not 0 <= tool.rate_limit < math.inf:
        yield f"rate_limit={tool.rate_limit} must be at least 0 calls a second"
    if tool.scope not in get_args(Scope):
        yield f"scope={tool.scope!r} must be one of {', '.join(get_args(Scope))}"

    if tool.retries and not tool.idempotent:
        yield (
            f"retries={tool.retries} runs a failed call again: say idempotent=True if that does no"
            " harm"
        )
    if tool.scope == "call" and not tool.is_class:
        yield "scope='call' is for classes: a function keeps nothing between calls"
    if tool.cache:
        if tool.is_class:
            yield "cache=True is for functions: an object's answers depend on its earlier calls"
        elif not tool.idempotent:
            yield "cache=True leaves calls out: say idempotent=True if that does no harm"
        of_episode = sorted(tool.injected - {"sandbox"})
        if of_episode and not tool.is_class:
            yield (
                f"cache=True gives one episode's answer to another, but it takes"
                f" {' and '.join(of_episode)}"
            )
    if tool.process:
        if tool.is_class:
            yield "process=True is for functions: an object lives in this process"
        elif "." in tool.target.__qualname__ or tool.target.__module__ == "__main__":
            # Its module is still being loaded: a worker looks for it when it is there.
            yield (
                "process=True needs a function that the worker finds by its name: define it at the"
                " top level of a file of its own"
            )
        stays = sorted(tool.injected - {"sample"})
        if stays and not tool.is_class:
            yield (
                f"process=True cannot hand {' and '.join(stays)} to another process, only `sample`"
            )
