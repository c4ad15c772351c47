"""`@tool` registers a function, or a class with one object per episode, as a tool.

The decorator returns the function unchanged. The registry stores the properties of the tool in a
frozen `Tool`. A dataset row lists tools by name. One tool may offer several functions to
the model:

    @tool function    one function, with the name of the tool
    @tool class       one function per public method, with the name of the method; `__call__` has
                      the name of the tool. Only agentrl calls `opening`, `reward` and `close`
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, overload

from agentrl.errors import DataError, UserError
from agentrl.registry import tools
from agentrl.signatures import find_argument_problems, identify, locate
from agentrl.tools.payloads import Parameters
from agentrl.tools.schema import (
    CONSTRUCTOR_PARAMETERS,
    describe_function,
    injected_parameters,
    parameters_from_schema,
)
from agentrl.trajectory import Sample
from agentrl.workers.processes import START_SECONDS

log = logging.getLogger("agentrl.tools")

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 2
Scope = Literal["episode", "call"]
HOOKS = ("opening", "reward", "close")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for a client, which calls the tool but does not run it."""

    name: str
    """The name that a dataset row lists."""
    schemas: Sequence[dict[str, Any]]
    """OpenAI function schemas of the functions that the model may call."""
    timeout: float
    """The time limit of a call, in seconds."""
    stateful: bool
    """True if the calls of an episode share an object. Then they run one after another."""
    injected: Sequence[str] = ()
    """The parameters that agentrl fills: some of `state`, `sample`, `messages`, `sandbox`."""
    environment: Sequence[str] | None = None
    """None: a tool. Of an environment, which of `respond` and `reward` it has."""

    @property
    def wants_row(self) -> bool:
        """True if the tool receives the dataset row."""
        return "sample" in self.injected

    @property
    def functions(self) -> list[str]:
        """The names that the model calls."""
        return [s["function"]["name"] for s in self.schemas]


@dataclass(frozen=True, slots=True, eq=False)
class ToolFunction:
    """One function that a model may call."""

    name: str
    attribute: str
    """The name of the method of a class tool; "" if the tool is a function."""
    schema: dict[str, Any]
    """OpenAI function schema, as chat templates take it."""
    parameters: Parameters
    is_async: bool = False
    injected: tuple[str, ...] = ()
    """The parameters that agentrl fills, see `agentrl.tools.schema`."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A tool that dataset rows can name: a function, or a class with one object per episode."""

    name: str
    target: Callable[..., Any]
    functions: tuple[ToolFunction, ...]
    timeout: float = DEFAULT_TIMEOUT
    """How long a call may take, in seconds. Also the limit of a constructor and of each hook."""
    idempotent: bool = False
    """True if running a call twice has the same effect as running it once."""
    retries: int = 0
    """How often a failed call is repeated within its timeout. A call that raises `ToolError` is
    never repeated."""
    max_concurrency: int = 0
    """Limit of concurrent calls of all episodes in a process; 0 means no limit."""
    rate_limit: float = 0.0
    """Limit of calls per second of all episodes in a process; 0 means no limit."""
    cache: bool = False
    """True if calls with equal arguments share one result, in all episodes of a process."""
    scope: Scope = "episode"
    """The lifetime of an object of a class tool: an episode or one call."""
    process: bool = False
    """True if the function runs in a worker process, which is killed at the deadline."""
    hooks: tuple[str, ...] = ()
    """The hooks that a class tool has: some of `opening`, `reward` and `close`. Those of an
    environment: some of `start`, `respond`, `reward` and `close`."""
    constructor_injected: tuple[str, ...] = ()
    """The parameters of a class tool's constructor that agentrl fills."""
    is_environment: bool = False
    spec: ToolSpec = field(init=False)
    """The description of the tool for clients."""

    def __post_init__(self) -> None:
        """Compute `spec` once, because each episode that uses the tool reads it."""
        # A call of scope "call" runs the constructor, the function, `reward` and `close`, and each
        # of them may use the timeout.
        steps = 4 if self.is_class and self.scope == "call" else 1
        spec = ToolSpec(
            self.name,
            [f.schema for f in self.functions],
            self.timeout * steps + (START_SECONDS if self.process else 0.0),
            self.stateful,
            sorted(self.injected),
            [h for h in ("respond", "reward") if h in self.hooks] if self.is_environment else None,
        )
        object.__setattr__(self, "spec", spec)

    @property
    def label(self) -> str:
        """The kind and the name, for messages."""
        return f"{'environment' if self.is_environment else 'tool'} {self.name!r}"

    @property
    def is_class(self) -> bool:
        """True if the tool is a class. Its objects are created with the row's `create_kwargs`."""
        return isinstance(self.target, type)

    @property
    def stateful(self) -> bool:
        """True if the calls of an episode share an object. Then they run one after another."""
        return self.is_class and self.scope == "episode"

    @property
    def injected(self) -> frozenset[str]:
        """The parameters that agentrl fills, of all functions and the constructor."""
        return frozenset(self.constructor_injected).union(*(f.injected for f in self.functions))

    def arguments(self, create_kwargs: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """Return the constructor arguments of a row.

        Raises:
            DataError: the constructor does not take them.
        """
        problems = find_argument_problems(
            self.target, create_kwargs, injected=self.constructor_injected
        )
        if problems:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}): the arguments of the {self.label}:"
                f" {'; '.join(problems)}"
            )
        return dict(create_kwargs)


def schemas_of(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the function schemas of several tools.

    Raises:
        UserError: two of them offer a function of the same name.
    """
    owners: dict[str, str] = {}
    for spec in specs:
        for function in spec.functions:
            owner = owners.setdefault(function, spec.name)
            if owner != spec.name:
                raise UserError(
                    f"the tools {owner!r} and {spec.name!r} both offer a function {function!r}."
                    " Rename one, or do not list both in a row."
                )
    return [schema for spec in specs for schema in spec.schemas]


def serial_groups_of(specs: Sequence[ToolSpec]) -> dict[str, str]:
    """Return the serial group of each function. Calls of one group run one after another.

    The functions of a group share the object of a class tool or the episode's `state` (group "").
    Because of the order, the calls of a turn have the same results in every run.
    """
    return {
        function: "" if "state" in spec.injected else spec.name
        for spec in specs
        if spec.stateful or "state" in spec.injected
        for function in spec.functions
    }


def environment_hooks(specs: Sequence[ToolSpec]) -> Sequence[str]:
    """Return the hooks of the environment among the tools of a row; () if there is none."""
    return next((s.environment for s in specs if s.environment is not None), ())


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
    """Register a function or class as a tool and return it unchanged.

    Example::

        @tool
        def calculator(expression: str) -> str: ...

        @tool(timeout=20, idempotent=True, max_concurrency=8)
        async def search(query: str, k: int = 3) -> str: ...

    A tool returns text, any JSON value or a `ToolResult`. It raises `ToolError` to refuse an input;
    the model reads the message. agentrl fills the parameters named `state`, `sample`, `messages`
    and `sandbox`, see `agentrl.tools.schema`.

    Args:
        target: the function or class, if the decorator is used without parentheses.
        name: the name that dataset rows list. By default the name of the function, or the name of
            the class in snake_case.
        timeout: how long a call may take, in seconds.
        idempotent: running a call twice has the same effect as running it once, so a failed call
            may be repeated.
        retries: how often a failed call is repeated within its timeout. A call that raises
            `ToolError` is not repeated. By default 2 if the tool is idempotent, else 0.
        max_concurrency: limit of concurrent calls in a process; 0 means no limit.
        rate_limit: limit of calls per second in a process, evenly spread; 0 means no limit. The
            wait does not count as the call's time.
        cache: calls with equal arguments share one result. For idempotent functions that receive
            nothing of the episode.
        scope: how long an object of a class lives: for the "episode" or for one "call".
        process: run the function in a worker process, which is killed at the deadline. For code
            that may hang in C, crash or use much memory. Functions only.
        schema: an OpenAI function schema, used instead of the signature. Functions only.

    Raises:
        UserError: a model cannot call this. The message says why and where.
        RegistryError: another tool has this name.
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
        record = _make_record(target, name, schema, options)
        tools.add(record.name, record)
        return target

    return register if target is None else register(target)


def _make_record(
    target: Callable[..., Any],
    name: str,
    schema: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Tool:
    class_fields: Mapping[str, Any] = {}
    if isinstance(target, type):
        if schema is not None:
            raise UserError(
                f"@tool on {identify(target)}: schema= is for functions, not for classes"
            )
        name = name or _snake_case(target.__name__)
        functions = methods_of(target, name)
        if not functions:
            raise UserError(
                f"the class tool {name!r} ({identify(target)}) has no function to call:"
                f" it needs a public method other than {', '.join(HOOKS)}"
            )
        class_fields = {
            "hooks": _hooks(target),
            "constructor_injected": injected_parameters(target, CONSTRUCTOR_PARAMETERS),
        }
    elif inspect.isfunction(target):
        if schema is None:
            name = name or target.__name__
            functions = (_function_from_signature(target, name, ""),)
        else:
            function = _function_from_schema(target, name, schema)
            name, functions = function.name, (function,)
    else:
        raise UserError(f"@tool is for functions and classes, not for {identify(target)}")
    record = Tool(name, target, functions, **options, **class_fields)
    check_tool(record)
    return record


def check_tool(record: Tool) -> None:
    """Raise `UserError` if the name or an option of a tool is wrong."""
    _check_name(record.name, record.target)
    if problems := [*_option_problems(record)]:
        decorator = "environment" if record.is_environment else "tool"
        raise UserError(f"@{decorator} on {identify(record.target)}: {'; '.join(problems)}")


def _function_from_signature(
    function: types.FunctionType, name: str, attribute: str, bound: bool = False
) -> ToolFunction:
    _check_name(name, function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            f"the tool function {name!r} ({locate(function)}) is a generator: return the"
            " whole result instead"
        )
    injected = injected_parameters(function)
    description, parameters = describe_function(function, name, bound=bound, excluded=injected)
    if not description:
        log.warning("tool function %r has no docstring: the model only sees its name", name)
    schema = {"name": name, "description": description, "parameters": parameters.schema}
    function_schema = {"type": "function", "function": schema}
    is_async = inspect.iscoroutinefunction(function)
    return ToolFunction(name, attribute, function_schema, parameters, is_async, injected)


def _function_from_schema(
    function: types.FunctionType, name: str, schema: Mapping[str, Any]
) -> ToolFunction:
    """Return the `ToolFunction` of a function whose schema the user wrote."""
    where = f"@tool(schema=...) at {locate(function)}"
    inner = schema.get("function")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("parameters"), Mapping):
        raise UserError(
            f'{where}: expected {{"type": "function", "function": {{"name": ..., "parameters":'
            f' {{"type": "object", ...}}}}}}, got {dict(schema)}'
        )
    name = name or inner.get("name") or function.__name__
    if inner.get("name", name) != name:
        raise UserError(
            f"{where}: the schema has the name {inner['name']!r}, but the tool has {name!r}"
        )
    parameters = parameters_from_schema(inner["parameters"], name, where)
    inner = {**inner, "name": name, "parameters": parameters.schema}
    injected = injected_parameters(function, schema_names=parameters.schema.get("properties", {}))
    function_schema = {"type": "function", "function": inner}
    is_async = inspect.iscoroutinefunction(function)
    return ToolFunction(name, "", function_schema, parameters, is_async, injected)


def methods_of(cls: type, name: str, excluded: Collection[str] = HOOKS) -> tuple[ToolFunction, ...]:
    """Return the functions of a class tool in source order, those of base classes first.

    Args:
        cls: the class.
        name: the name of the tool, which `__call__` has.
        excluded: the methods that the model does not call.

    Raises:
        UserError: a model cannot call one of them, or two have the same name.
    """
    functions = []
    for attribute in _attributes(cls):
        if attribute in excluded or (attribute.startswith("_") and attribute != "__call__"):
            continue
        method = inspect.getattr_static(cls, attribute)
        if isinstance(method, staticmethod | classmethod):
            function, bound = method.__func__, isinstance(method, classmethod)
        else:
            function, bound = method, True
        if inspect.isfunction(function):
            function_name = name if attribute == "__call__" else attribute
            if function_name in [f.name for f in functions]:
                raise UserError(
                    f"the class tool {name!r} ({identify(cls)}) offers two functions"
                    f" {function_name!r}: its __call__ has the name of the tool. Rename the"
                    " method, or give the decorator another name"
                )
            functions.append(_function_from_signature(function, function_name, attribute, bound))
    return tuple(functions)


def _hooks(cls: type) -> tuple[str, ...]:
    """Return which of `HOOKS` a class has, and check that they need no arguments."""
    hooks = tuple(h for h in HOOKS if h in _attributes(cls))
    for hook in hooks:
        method = getattr(cls, hook)
        if callable(method):
            own = inspect.isfunction(inspect.getattr_static(cls, hook))
            parameters = list(inspect.signature(method).parameters.values())[1 if own else 0 :]
            if all(p.default is not p.empty or p.kind in VARIADIC for p in parameters):
                continue
        raise UserError(
            f"the class tool {cls.__name__!r} ({identify(cls)}): {hook} is a method that agentrl"
            f" calls without arguments at the {'start' if hook == 'opening' else 'end'} of an"
            " episode, never the model. Rename yours, or give all its parameters defaults."
        )
    return hooks


def _attributes(cls: type) -> dict[str, None]:
    """Return the attributes of a class and its bases in order, without those of `object`."""
    return dict.fromkeys(a for c in reversed(cls.__mro__[:-1]) for a in vars(c))


def _check_name(name: str, target: Any) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} ({identify(target)}) is not a valid tool name: use letters, digits, _ and -,"
            " starting with a letter or _, at most 64 characters"
        )


def _snake_case(name: str) -> str:
    """Convert a class name: `NoteBook` to `note_book`, `HTTPSearch` to `http_search`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _option_problems(tool: Tool) -> Iterator[str]:
    """Yield a message for each wrong option of a tool."""
    if not 0 < tool.timeout < math.inf:
        yield f"timeout={tool.timeout} must be greater than 0 seconds"
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
            f"retries={tool.retries} repeats failed calls: set idempotent=True if this is harmless"
        )
    if tool.scope == "call" and "opening" in tool.hooks:
        yield "opening() needs scope='episode': with scope='call' no object exists at the start"
    if tool.scope == "call" and not tool.is_class:
        yield "scope='call' is for classes: a function keeps nothing between calls"
    if tool.cache:
        if tool.is_class:
            yield "cache=True is for functions: an object's answers depend on its earlier calls"
        elif not tool.idempotent:
            yield "cache=True skips repeated calls: set idempotent=True if this is harmless"
        episode_parameters = sorted(tool.injected - {"sandbox"})
        if episode_parameters and not tool.is_class:
            yield (
                f"cache=True shares results between episodes, but the function takes"
                f" {' and '.join(episode_parameters)}"
            )
    if tool.process:
        if tool.is_class:
            yield "process=True is for functions: an object lives in this process"
        elif "." in tool.target.__qualname__ or tool.target.__module__ == "__main__":
            # The module is still being imported, so only the form of the name can be checked here.
            yield (
                "process=True needs a function that the worker can import by its name: define it at"
                " the top level of a file"
            )
        unpicklable = sorted(tool.injected - {"sample"})
        if unpicklable and not tool.is_class:
            yield (
                f"process=True cannot pass {' and '.join(unpicklable)} to another process,"
                " only `sample`"
            )
