"""Validate arguments against a JSON schema in bounded time.

A model writes the arguments, and the cost of patterns, unions and references in a schema can grow
exponentially with them. So every keyword checks the clock, patterns are matched by the package
`regex`, which can be interrupted, and `uniqueItems` takes linear time. Validation first runs on the
event loop for `LOOP_SECONDS`. If this is too short, the caller repeats it in a thread.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

LOOP_SECONDS = 0.002
"""Limit of CPU time on the event loop."""
LOOP_BYTES = 4096
"""Arguments that are longer (in bytes of JSON) are validated in a thread from the start."""
BASE_SECONDS = 0.05
SECONDS_PER_BYTE = 1e-5
"""Limit of CPU time in a thread: `BASE_SECONDS`, plus this for each byte of JSON. Validation in
linear time needs at most a third of it."""
MAX_ERRORS = 100
"""Validation stops after this many errors. The model reads three."""

DATA_KEYWORDS = {"default", "enum", "const", "examples"}
"""Keywords whose values are data, not schemas."""
NAMED_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose values map names to schemas."""

_Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class SlowCheck(Exception):
    """Validation reached its limit of CPU time.

    If it ran on the event loop, run `Parameters.check_in_thread` in a thread.
    """


class Validator:
    """A compiled JSON schema of draft 2020-12. `$schema` at its root is ignored.

    Args:
        schema: the schema of an object. Its references must point into itself.

    Raises:
        ValueError: the schema is not valid, or the cost of validation cannot be bounded.
    """

    def __init__(self, schema: Mapping[str, Any]):
        schema = {k: v for k, v in schema.items() if k != "$schema"}
        try:
            _Bounded.check_schema(schema, format_checker=_FORMATS)
        except SchemaError as e:
            raise ValueError(f"it is not a valid JSON schema: {e.message}") from e
        _refuse_unbounded(schema)
        self._validator = _Bounded(schema, registry=Registry())
        try:
            self.errors({}, BASE_SECONDS)
        except RecursionError:
            raise ValueError("a $ref points to itself") from None

    def errors(self, value: Any, seconds: float) -> list[ValidationError]:
        """Return the first errors of a value; an empty list if it is valid.

        Args:
            value: a JSON value.
            seconds: limit of this thread's CPU time.

        Raises:
            SlowCheck: the time limit was reached before an error was found.
            RecursionError: the value is nested too deeply.
        """
        _clock.end = time.thread_time() + seconds
        errors: list[ValidationError] = []
        try:
            for error in itertools.islice(self._validator.iter_errors(value), MAX_ERRORS):
                errors.append(error)
        except SlowCheck:
            if not errors:
                raise
        return errors


def thread_seconds(size: int) -> float:
    """Return the limit of CPU time in a thread for arguments of `size` bytes."""
    return BASE_SECONDS + SECONDS_PER_BYTE * size


def subschemas(schema: Any, depth: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield a schema and all schemas within it, each with its depth, from the outside in.

    Values of unknown keywords are included. The caller may remove keys of a yielded schema; removed
    parts are not visited.
    """
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item, depth + 1)
    elif isinstance(schema, Mapping):
        yield depth, schema
        for key, value in schema.items():
            if key in NAMED_KEYWORDS and isinstance(value, Mapping):
                for inner in value.values():
                    yield from subschemas(inner, depth + 1)
            elif key not in DATA_KEYWORDS:
                yield from subschemas(value, depth + 1)


def _refuse_unbounded(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a schema has keywords whose cost this module does not bound."""
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    for _, inner in subschemas(schema):
        for key in ("unevaluatedItems", "unevaluatedProperties"):
            if key in inner:
                raise ValueError(
                    f"{key} is not supported: its cost cannot be bounded. Use `items` or"
                    " `additionalProperties`"
                )
        if inner is not schema and ("$schema" in inner or "$id" in inner):
            raise ValueError("`$schema` and `$id` are allowed at the root only")
        for key in ("$ref", "$dynamicRef"):
            reference = str(inner.get(key, "#"))
            if not reference.startswith("#"):
                raise ValueError(
                    f"{key} {reference!r} points outside the schema, and agentrl downloads"
                    " nothing. Move the target into `$defs`"
                )
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(f"{key} {reference!r} does not exist") from None


# -- keywords -------------------------------------------------------------------------------------


class _Clock(threading.local):
    """The clock of the validation that runs in this thread."""

    end = 0.0
    """The time limit, on the clock `time.thread_time`."""
    keywords = 0
    """The number of keywords that were checked. Reading the clock costs as much as a cheap keyword,
    so only every 16th keyword reads it."""


_clock = _Clock()


def _time_left() -> float:
    """Return the CPU time that is left.

    Raises:
        SlowCheck: no time is left.
    """
    now = time.thread_time()
    if now >= _clock.end:
        raise SlowCheck
    return _clock.end - now


def _timed(keyword: _Keyword) -> _Keyword:
    """Return a keyword function that checks the clock first."""

    @functools.wraps(keyword)
    def timed(
        validator: Any, value: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError] | None:
        _clock.keywords += 1
        if not _clock.keywords % 16:
            _time_left()
        return keyword(validator, value, instance, schema)

    return timed


_BRACE = re.compile(r"\\[pPN]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?!\d*,?\d*\})", re.DOTALL)
"""Matches a brace that `re` and ECMAScript read literally, and all tokens that may contain braces.
"""


@functools.lru_cache(1024)
def _compile(pattern: str) -> regex.Pattern[str]:
    # The package `regex` reads "a{e}" as a fuzzy match. In a schema the braces are literal.
    return regex.compile(_BRACE.sub(lambda m: r"\{" if m[0] == "{" else m[0], pattern))


def _has_match(pattern: str, text: str) -> bool:
    """Return whether a pattern matches anywhere in a text, as JSON schema defines `pattern`."""
    seconds_left = _time_left()
    try:
        # `concurrent` releases Python's lock during the search.
        return _compile(pattern).search(text, timeout=seconds_left, concurrent=True) is not None
    except (TimeoutError, MemoryError):
        raise SlowCheck from None


def _pattern(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _has_match(value, instance):
        yield ValidationError(f"{instance!r} does not match {value!r}")


def _pattern_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in value.items():
        for name, item in instance.items():
            if _has_match(pattern, name):
                yield from validator.descend(item, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", ())
    extras = [
        name
        for name in instance
        if name not in properties and not any(_has_match(pattern, name) for pattern in patterns)
    ]
    if validator.is_type(value, "object"):
        for name in extras:
            yield from validator.descend(instance[name], value, path=name)
    elif not value and extras:
        names = ", ".join(map(repr, sorted(extras)))
        yield ValidationError(f"unexpected argument{'s' * (len(extras) > 1)} {names}")


def _unique_items(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not value or not validator.is_type(instance, "array"):
        return
    texts: set[str] = set()
    for item in instance:
        _time_left()
        # JSON text is hashed, not the value: an attacker can choose numbers whose hashes collide.
        text = json.dumps(with_whole_numbers(item), sort_keys=True)
        if text in texts:
            yield ValidationError(f"{instance!r} has non-unique elements")
            return
        texts.add(text)


def with_whole_numbers(value: Any) -> Any:
    """Return a JSON value whose whole numbers are integers: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: with_whole_numbers(item) for name, item in value.items()}
    return [*map(with_whole_numbers, value)] if isinstance(value, list) else value


def _is_valid(validator: Any, instance: Any, schema: Any) -> bool:
    return next(validator.descend(instance, schema), None) is None


def _any_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # jsonschema would collect the errors of all choices, which are not used here.
    if not any(_is_valid(validator, instance, choice) for choice in value):
        yield ValidationError(f"{instance!r} does not match any of the allowed schemas")


def _one_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    valid = [choice for choice in value if _is_valid(validator, instance, choice)]
    if not valid:
        yield ValidationError(f"{instance!r} does not match any of the allowed schemas")
    elif len(valid) > 1:
        names = ", ".join(map(repr, valid))
        yield ValidationError(f"{instance!r} must match exactly one schema, but matches {names}")


_KEYWORDS: dict[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "anyOf": _any_of,
    "oneOf": _one_of,
}
_Bounded: Any = extend(
    Draft202012Validator,
    {
        name: _timed(_KEYWORDS.get(name) or keyword)
        for name, keyword in Draft202012Validator.VALIDATORS.items()
    },
)
_FORMATS = FormatChecker(formats=())


@_FORMATS.checks("regex", raises=regex.error)
def _is_pattern(pattern: object) -> bool:
    return not isinstance(pattern, str) or bool(_compile(pattern))
