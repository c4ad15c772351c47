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
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from agentrl.errors import DataError, UserError
from agentrl.registry import tools
from agentrl.signatures import argument_problems, location, place
from agentrl.tools.catalogue import Offer
from agentrl.tools.schema import Parameters, adopt, describe
from agentrl.trajectory import Sample

log = logging.getLogger("agentrl.tools")

DEFAULT_TIMEOUT = 30.0
HOOKS = ("reward", "close")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class ToolFunction:
    """One function a model may call."""

    name: str
    attribute: str
    """The method of a class tool; "" where the tool is the function."""
    schema: dict[str, Any]
    """OpenAI's function form, as chat templates take it."""
    parameters: Parameters


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """What a dataset row names in `tools`: a function, or a class made once per episode."""

    name: str
    target: Callable[..., Any]
    functions: tuple[ToolFunction, ...]
    timeout: float = DEFAULT_TIMEOUT
    """Seconds a call may take; also a constructor, `reward` and `close`."""
    idempotent: bool = False
    """Running a call again does no harm: one that fails with anything but `ToolError` is tried
    twice more within its timeout."""
    max_concurrency: int = 0
    """Calls running at once, over all episodes of a process; 0 sets no limit."""
    hooks: tuple[str, ...] = ()
    """Which of `reward` and `close` a class tool has."""

    @property
    def stateful(self) -> bool:
        """Whether it is a class: one object per episode, whose calls run one after another."""
        return isinstance(self.target, type)

    @property
    def offer(self) -> Offer:
        """The part that others need to know."""
        return Offer(self.name, [f.schema for f in self.functions], self.timeout, self.stateful)

    def arguments(self, create_kwargs: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """The constructor's arguments: `create_kwargs` by name, and `sample` where it wants one.

        Raises:
            DataError: the constructor does not take them.
        """
        problems = argument_problems(self.target, create_kwargs, given=("sample",))
        if problems:
            raise DataError(
                f"row {sample.row} (id {sample.id!r}): create_kwargs of the tool {self.name!r}:"
                f" {'; '.join(problems)}"
            )
        wants_row = "sample" in inspect.signature(self.target).parameters
        return {**create_kwargs, "sample": sample} if wants_row else dict(create_kwargs)


@overload
def tool(target: T, /) -> T: ...
@overload
def tool(
    *,
    name: str = "",
    timeout: float = DEFAULT_TIMEOUT,
    idempotent: bool = False,
    max_concurrency: int = 0,
    schema: Mapping[str, Any] | None = None,
) -> Callable[[T], T]: ...
def tool(
    target: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    timeout: float = DEFAULT_TIMEOUT,
    idempotent: bool = False,
    max_concurrency: int = 0,
    schema: Mapping[str, Any] | None = None,
) -> Any:
    """Register a function or class as a tool, and hand it back unchanged.

    Example::

        @tool
        def calculator(expression: str) -> str: ...

        @tool(timeout=20, idempotent=True, max_concurrency=8)
        async def search(query: str, k: int = 3) -> str: ...

    What a tool returns is text, anything JSON holds, or a `ToolResult`. It refuses input by raising
    `ToolError`, which the model reads.

    Args:
        target: the function or class, where the decorator stands without parentheses.
        name: what rows list; the function's name, or the class's in snake_case, if empty.
        timeout: seconds a call may take.
        idempotent: running a call again does no harm, so that a failed one may be repeated.
        max_concurrency: calls running at once in a process; 0 sets no limit.
        schema: OpenAI function schema to use in place of the signature's. Functions only.

    Raises:
        UserError: nothing a model could call: the message says what and where.
        RegistryError: another tool has the name.
    """

    def register(target: T) -> T:
        record = _record(target, name, timeout, idempotent, max_concurrency, schema)
        tools.add(record.name, record)
        return target

    return register if target is None else register(target)


def _record(
    target: Callable[..., Any],
    name: str,
    timeout: float,
    idempotent: bool,
    max_concurrency: int,
    schema: Mapping[str, Any] | None,
) -> Tool:
    where = place(target)
    if timeout <= 0 or max_concurrency < 0:
        raise UserError(
            f"@tool on {where}: timeout={timeout} must be above 0 seconds, and"
            f" max_concurrency={max_concurrency} at least 0"
        )
    hooks: tuple[str, ...] = ()
    if isinstance(target, type):
        if schema is not None:
            raise UserError(f"@tool on {where}: schema= is for functions, not for classes")
        name = name or _snake(target.__name__)
        functions = _methods(target, name)
        hooks = tuple(h for h in HOOKS if h in _attributes(target))
    elif inspect.isfunction(target):
        if schema is None:
            name = name or target.__name__
            functions = (_function(target, name, ""),)
        else:
            function = _handmade(target, name, schema)
            name, functions = function.name, (function,)
    else:
        raise UserError(f"@tool goes on a function or a class, not on {where}")
    _check_name(name, target)
    return Tool(name, target, functions, timeout, idempotent, max_concurrency, hooks)


def _function(
    function: types.FunctionType, name: str, attribute: str, bound: bool = False
) -> ToolFunction:
    _check_name(name, function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            f"the tool function {name!r} ({location(function)}) is a generator: return all of the"
            " result instead"
        )
    description, parameters = describe(function, name, bound=bound)
    if not description:
        log.warning("tool function %r has no docstring: the model reads its name only", name)
    schema = {"name": name, "description": description, "parameters": parameters.schema}
    return ToolFunction(name, attribute, {"type": "function", "function": schema}, parameters)


def _handmade(function: types.FunctionType, name: str, schema: Mapping[str, Any]) -> ToolFunction:
    """A function whose schema the user wrote."""
    where = f"@tool(schema=...) at {location(function)}"
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
    return ToolFunction(name, "", {"type": "function", "function": shown}, parameters)


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
            found.append(_function(function, called, attribute, bound))
    if not found:
        raise UserError(
            f"the class tool {name!r} ({place(cls)}) offers nothing to call:"
            f" it needs a public method other than {' and '.join(HOOKS)}"
        )
    return tuple(found)


def _attributes(cls: type) -> dict[str, None]:
    """What a class and its bases define, in order; `object` aside."""
    return dict.fromkeys(a for c in reversed(cls.__mro__[:-1]) for a in vars(c))


def _check_name(name: str, target: Any) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"a tool cannot be called {name!r} ({place(target)}): letters, digits, _ and -,"
            " starting with a letter or _, at most 64 characters"
        )


def _snake(name: str) -> str:
    """`NoteBook` → `note_book`, `HTTPSearch` → `http_search`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
