"""What a tool is given and what it answers: arguments that are checked, results that are text.

Calls come from our parsers, from an engine's, from a loop's own. Whatever wrote them, no tool is
given NaN, an infinity, half a character, an integer beyond 64 bits or a nest of a thousand lists:
what breaks HTTP, a tokenizer or a database later is refused by `encode_arguments`, and the model
told why.

The JSON schema that the model is shown decides what is valid (`Parameters.check`). A quick look
passes plain arguments, `validation.Validator` judges all others, and the pydantic model of a
signature turns valid arguments into the annotated types (an Enum arrives as an Enum).

What a tool returned or raised becomes the text that the model reads. It can be encoded, stored and
sent: no lone surrogates, no NUL, no more than `MAX_CHARACTERS`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NamedTuple

import orjson
from jsonschema.exceptions import ValidationError
from pydantic import BaseModel
from pydantic import ValidationError as CoercionError

from agentrl.registry import did_you_mean
from agentrl.tools.validation import (
    LOOP_BYTES,
    LOOP_SECONDS,
    SlowCheck,
    Validator,
    thread_seconds,
)
from agentrl.trajectory import Message, ToolCall, ToolResult
from agentrl.workers import WorkerDied, WorkerError

MAX_ARGUMENT_BYTES = 262_144
MAX_DEPTH = 64
MAX_CHARACTERS = 262_144
"""Far more than a model is shown; keeps a tool's flood out of memory and off the wire."""
MAX_MESSAGE = 300

_TYPES: dict[str, frozenset[type]] = {
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
    "null": frozenset({NoneType}),
}
_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "greater than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}
_SAYS_NOTHING = {"title", "description", "default", "examples"}
"""Keywords that forbid no value."""
_OBJECT = {"type", "properties", "required", "additionalProperties"} | _SAYS_NOTHING
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


# -- arguments ------------------------------------------------------------------------------------


def encode_arguments(call: ToolCall) -> bytes | ToolResult:
    """A call's arguments as JSON bytes, or the result that tells the model they are not JSON.

    All arguments pass through JSON, also those of a call in this process: so that a tool is given
    the same whether it is called here or over HTTP, and may keep what it is given.
    """
    if call.error or not isinstance(call.arguments, dict):
        problem = " ".join(call.error.split()) or "the arguments are not a JSON object"
        return failure(
            "bad_call",
            f"invalid tool call: {shorten(problem, 160)}. Expected a tool name and its arguments"
            " as a JSON object.",
        )
    if not isinstance(call.name, str) or not (call.name.isascii() or storable(call.name)):
        return failure("bad_call", "invalid tool call: the tool name is not valid text")
    try:
        encoded = orjson.dumps(call.arguments, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError as e:
        return failure("bad_call", f"invalid tool call: the arguments are not valid JSON: {e}")
    if len(encoded) > MAX_ARGUMENT_BYTES:
        return failure(
            "bad_call",
            f"invalid tool call: the arguments are too long: {len(encoded)} bytes, maximum"
            f" {MAX_ARGUMENT_BYTES}",
        )
    return refused(encoded, call.arguments) or encoded


def refused(encoded: bytes, arguments: dict[str, Any]) -> ToolResult | None:
    """What the model is told of arguments that are JSON by their letters alone, or None.

    Args:
        encoded: JSON that they stand in.
        arguments: as they were read, or before they were written.
    """
    # What is written as null may have been NaN. Without that, and with few brackets, there is
    # nothing to look for.
    if b"null" in encoded or encoded.count(b"{") + encoded.count(b"[") > MAX_DEPTH:
        problem = _json_problem(arguments)
        if problem:
            return failure("bad_call", f"invalid tool call: {problem}")
    return None


def canonical(value: Any) -> bytes:
    """Return the JSON text of a value, with sorted keys: two values are equal if their texts are.

    `1`, `1.0` and `true` are three values, as a tool receives an int, a float or a bool. `1.0` and
    `1.00` are one. A value that JSON cannot hold is written as its `repr`.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return repr(value).encode()


def _json_problem(arguments: dict[str, Any]) -> str:
    """What is wrong with arguments that can be encoded, or nothing."""
    values: list[Any] = [arguments]
    depth = 0
    while values:
        inner: list[Any] = []
        for value in values:
            if isinstance(value, float):
                if not math.isfinite(value):
                    name = {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
                    return f"{name} is not valid JSON"
            elif isinstance(value, dict | list | tuple):
                if depth == MAX_DEPTH:
                    return f"the arguments are nested more than {MAX_DEPTH} levels deep"
                inner.extend(value.values() if isinstance(value, dict) else value)
        values, depth = inner, depth + 1
    return ""


def readable(messages: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation for tools to read: a call in it that is not JSON stands there as text."""
    return tuple(map(_readable, messages))


def _readable(message: Message) -> Message:
    calls = tuple(
        c
        if isinstance(encode_arguments(c), bytes)
        else replace(
            c,
            name=clean(str(c.name)),
            arguments=clean(str(c.arguments)),
            error=clean(c.error or "not JSON"),
            id=clean(c.id),
        )
        for c in message.tool_calls
    )
    if storable(message.content) and calls == message.tool_calls:
        return message
    return replace(message, content=clean(message.content), tool_calls=calls)


class BadArguments(Exception):
    """Arguments that break the schema; the text tells the model where and what was expected."""


class SlowArguments(BadArguments):
    """Arguments whose check took too long in a thread; the text is for the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """What a function takes: a schema to show and a check to run."""

    schema: dict[str, Any]
    """JSON schema of the arguments object: closed, without `title` and `$ref`."""
    usage: str
    """One line, for error messages: `search(query: string, k: integer = 3)`."""
    certainly_valid: Callable[[Mapping[str, Any]], bool]
    """See `quick_check`."""
    validator: Validator
    model: type[BaseModel] | None
    """Makes the annotated types of valid arguments; None where the schema is the user's own."""

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments to call the function with.

        Only what was given is passed on: the function's own defaults hold.

        Raises:
            BadArguments: they break the schema.
            SlowCheck: the check needs too much time for the event loop. Run `check_in_thread`.
        """
        if self.certainly_valid(arguments):
            return self._typed(arguments)
        if len(orjson.dumps(arguments)) > LOOP_BYTES:
            raise SlowCheck
        return self._checked(arguments, LOOP_SECONDS)

    def check_in_thread(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do the same as `check`, in CPU time that grows with the length of the arguments alone.

        Raises:
            BadArguments: they break the schema.
            SlowArguments: the time was over.
        """
        try:
            seconds = thread_seconds(len(orjson.dumps(arguments)))
            return self._checked(arguments, seconds, pauses=True)
        except SlowCheck:
            raise self.too_slow() from None

    def too_slow(self) -> SlowArguments:
        """Return the error for arguments whose check took too long in a thread."""
        return SlowArguments(
            f"validating them took too long. Use shorter and simpler values. Expected: {self.usage}"
        )

    def _checked(
        self, arguments: dict[str, Any], seconds: float, *, pauses: bool = False
    ) -> dict[str, Any]:
        try:
            errors = self.validator.errors(arguments, seconds, pauses=pauses)
        except RecursionError:
            raise BadArguments(f"they are nested too deeply. Expected: {self.usage}") from None
        if errors:
            faults = sorted(map(_fault, errors))
            raise BadArguments(f"{'; '.join(faults[:3])}. Expected: {self.usage}")
        return self._typed(arguments)

    def _typed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Valid arguments as the annotated types."""
        if self.model is None:
            return arguments
        try:
            checked = self.model.model_validate(arguments)
        except CoercionError as e:
            faults = [
                _located(_path(f["loc"]), f["msg"].removeprefix("Value error, "))
                for f in e.errors(include_url=False)
            ]
            raise BadArguments(f"{'; '.join(faults[:3])}. Expected: {self.usage}") from None
        fields = self.model.model_fields
        return {str(fields[f].alias): getattr(checked, f) for f in checked.model_fields_set}


def _fault(error: ValidationError) -> str:
    """Return what is wrong with one value, such as `'points[0].x' must be an integer, got "1"`."""
    path, limit = _path(error.absolute_path), error.validator_value
    match error.validator:
        case "type" | "enum" | "anyOf" | "oneOf":
            rule = _kind(error.schema)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf":
            rule = f"{_BOUNDS[str(error.validator)]} {limit}"
        case "required":
            name = error.message.removesuffix(" is a required property").strip("'\"")
            return f"{_path([*error.absolute_path, name])!r} is required"
        case _:
            rule = ""
    if not rule or not path:
        return _located(path, shorten(error.message, 100))
    value = orjson.dumps(error.instance, default=str).decode()
    return f"{path!r} must be {rule}, got {shorten(value, 40)}"


def _kind(schema: Any) -> str:
    """Return what values a schema allows, in words; nothing where words do not say it."""
    if "enum" in schema:
        return f"one of {', '.join(orjson.dumps(v).decode() for v in schema['enum'])}"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        kinds = list(dict.fromkeys(_kind(c) if isinstance(c, Mapping) else "" for c in choices))
    else:
        names = schema.get("type", "")
        kinds = [_KINDS.get(name, "") for name in ([names] if isinstance(names, str) else names)]
    return " or ".join(kinds) if all(kinds) else ""


def _path(path: Iterable[str | int]) -> str:
    """Return the place of a value as `a.b[0]`; nothing for the arguments as a whole."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    return shorten(text, 60)


def _located(path: str, message: str) -> str:
    return f"{path!r}: {message}" if path else message


def quick_check(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
    """A function that is true only of arguments that satisfy the schema.

    Nearly all calls hold what a function of texts, numbers and flags asked for, and a general
    validator takes longer to see that than the rest of a call. The quick look knows a few types. It
    only ever says "certainly valid"; everything else is the validator's to judge, and to explain.

    Args:
        schema: a valid JSON schema of an object.
    """
    if not schema.keys() <= _OBJECT or schema.get("type", "object") != "object":
        return lambda arguments: False
    certain = {name: _certain(s) for name, s in schema.get("properties", {}).items()}
    required = frozenset(schema.get("required", ()))

    def certainly_valid(arguments: Mapping[str, Any]) -> bool:
        for name, value in arguments.items():
            types, words, items = certain.get(name, _NOTHING)
            kind = type(value)
            if not (
                kind in types
                or (kind is str and value in words)
                or (kind is list and items and items.issuperset(map(type, value)))
            ):
                return False
        return required <= arguments.keys()

    return certainly_valid


class _Certain(NamedTuple):
    """Values of which it is certain that they satisfy a schema."""

    types: frozenset[type] = frozenset()
    """All values of exactly these types."""
    words: frozenset[str] = frozenset()
    items: frozenset[type] = frozenset()
    """All lists whose items have exactly these types; none if empty."""


_NOTHING = _Certain()


def _certain(schema: Any) -> _Certain:
    if not isinstance(schema, Mapping):
        return _NOTHING
    match {k: v for k, v in schema.items() if k not in _SAYS_NOTHING}:
        case {"type": str(name), **other} if not other:
            return _Certain(types=_TYPES.get(name, frozenset()))
        case {"anyOf": choices, **other} if not other:
            return _Certain(types=frozenset().union(*(_certain(c).types for c in choices)))
        case {"enum": choices, **other} if other in ({}, {"type": "string"}):
            return _Certain(words=frozenset(c for c in choices if type(c) is str))
        case {"type": "array", "items": items, **other} if not other:
            return _Certain(items=_certain(items).types)
    return _NOTHING


# -- results --------------------------------------------------------------------------------------


def answered(target: Callable[..., Any], /, **arguments: Any) -> Any:
    """The target's answer, made where the target runs: in a thread, a flood holds nobody up.

    Text, and what must be awaited first, is left as it is.
    """
    value = target(**arguments)
    return value if type(value) is str or inspect.isawaitable(value) else success(value)


def success(value: Any) -> ToolResult:
    """The result of a call that returned `value`.

    Text is kept; None is the empty text; bytes are decoded; numbers are written as Python writes
    them; everything else is JSON, and what JSON cannot hold is written by `str`. A `ToolResult` is
    kept, its content written in the same way.

    Raises:
        TypeError: a `ToolResult` whose reward is not a finite number; a generator, which may never
            end.
    """
    if isinstance(value, ToolResult):
        if value.reward is not None and not is_finite(value.reward):
            raise TypeError(f"ToolResult.reward must be a finite number, got {value.reward!r}")
        error = "" if value.ok else clean(str(value.error)) or "tool_error"
        # A plain float: what numpy calls one, JSON does not.
        reward = None if value.reward is None else float(value.reward)
        return ToolResult(clean(_text(value.content)), bool(value.ok), reward, error)
    return ToolResult(clean(_text(value)))


def failure(error: str, message: str) -> ToolResult:
    """The result of a call that failed, as the model reads it.

    Args:
        error: the class of failure, see `ToolResult.error`.
        message: what is wrong and what was expected; cut to 300 characters.
    """
    return ToolResult(shorten(clean(f"Error: {message}"), MAX_MESSAGE), False, None, error)


def unknown_tool(name: str, offered: Collection[str]) -> ToolResult:
    """The result of a call to what is not offered."""
    listed = ", ".join(offered) or "none"
    return failure(
        "unknown_tool",
        f"unknown tool {name!r}.{did_you_mean(name, offered)} Available tools: {listed}",
    )


def shown_to_model(error: BaseException) -> str:
    """Return what a model reads of an exception: its type.

    Its text is for the log: it may hold a path, an address or a password. `ToolError` is for texts
    that are meant for the model. How a worker process ended is a text of agentrl's own.
    """
    if isinstance(error, WorkerError):
        return error.kind
    return describe_for_log(error) if isinstance(error, WorkerDied) else type(error).__name__


def describe_for_log(error: BaseException) -> str:
    """Return the type and the text of an exception, for the log."""
    if isinstance(error, WorkerError):
        return f"{error.kind}: {error.text}"
    if isinstance(error, WorkerDied):
        return text_of(error).partition("\n")[0]
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or "?" if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "?"


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: the middle gives way, as both ends tell more."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def clean(text: str) -> str:
    """The text with unstorable characters replaced, and its middle left out where it is a flood."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[... {left_out} characters omitted ...]\n{text[-half:]}"
    return text if storable(text) else _UNSTORABLE.sub("\ufffd", text)


def storable(text: str) -> bool:
    """Whether `_UNSTORABLE` finds nothing, a hundred times sooner."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def is_finite(value: Any) -> bool:
    """Whether it is a number that may be a reward."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview):
        return _decoded(bytes(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(
            f"the tool returned a {type(value).__name__}: return all of the result instead, such as"
            " a list"
        )
    try:
        return orjson.dumps(value, default=_jsonable, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, a loop
        return str(value)


def _decoded(value: bytes) -> str:
    """Bytes as text. Of a flood only the ends are decoded: as text it takes up to four times more.

    A character has at most four bytes, so that both ends have enough of them.
    """
    end = 2 * MAX_CHARACTERS
    if len(value) <= 2 * end:
        return value.decode("utf-8", "replace")
    half = MAX_CHARACTERS // 2 - 50
    head = value[:end].decode("utf-8", "replace")[:half]
    tail = value[-end:].decode("utf-8", "replace")[-half:]
    return f"{head}\n[... middle of {len(value)} bytes omitted ...]\n{tail}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
