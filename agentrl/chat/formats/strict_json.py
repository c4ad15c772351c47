"""Find JSON within text in linear time, and parse it strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from agentrl.trajectory import ToolCall

MAX_DEPTH = 64
MAX_RAW = 2000
"""The maximum number of characters of an invalid call's text that are kept."""

# Matches up to the next bracket of a JSON value: strings, and the characters outside of strings.
# The `<` of a tag is not among them, so a scan can pass a tag only within a string. This keeps the
# sum of all scans linear. The quantifiers are possessive, so there is no backtracking.
_TO_BRACKET = re.compile(
    r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\s:,0-9.eE+\-a-z]++)*+([{}\[\]])', re.DOTALL
)
_SPACE = re.compile(r"\s*")
# Matches closed strings and the characters between them in JSON.
_WHOLE = re.compile(r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]\s:,0-9.eE+\-a-z]++)*+', re.DOTALL)
_KEY_ENDS = re.compile(r'"\s*+:')
_SURROGATE = re.compile("[\ud800-\udfff]")


def end_of_object(text: str, start: int) -> int:
    """Return the end (exclusive) of the JSON object at `start`, or 0 if there is none."""
    return end_of_brackets(text, start) if text.startswith("{", start) else 0


def end_of_brackets(text: str, start: int, to_bracket: re.Pattern[str] = _TO_BRACKET) -> int:
    """Return the end (exclusive) of the brackets that open at `start`, or 0 if they are not closed.

    Args:
        text: the text with the brackets.
        start: the index of the opening bracket.
        to_bracket: matches up to the next bracket (group 1) that is not within a string.
    """
    depth, position, match = 0, start, to_bracket.match
    while bracket := match(text, position):
        position = bracket.end()
        if bracket[1] in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                return 0
        else:
            depth -= 1
            if depth == 0:
                return position
    return 0


def end_of_broken_json(
    text: str, start: int, tags: re.Pattern[str], thought: re.Pattern[str]
) -> int:
    """Return the end of incomplete JSON: the next tag outside of its strings.

    A string that is cut off extends to the end of the turn, or of the thought around it. So if the
    text of a file about tool calls is cut off, no call in it is executed.

    Args:
        text: one assistant turn.
        start: the index of the beginning of the JSON.
        tags: the tags that may follow the JSON.
        thought: the tags that end a thought.
    """
    stop = _WHOLE.match(text, start).end()  # type: ignore[union-attr]
    return find_start(thought if text.startswith('"', stop) else tags, text, stop)


def find_start(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return the start of the next match, or the end of the text if there is none."""
    match = pattern.search(text, position)
    return match.start() if match else len(text)


def skip_space(text: str, position: int) -> int:
    """Return the index of the next character that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def read_object(body: str) -> tuple[dict[str, Any], str]:
    """Parse a JSON object strictly. Return the object and "", or an empty object and the error."""
    value, error = load_object(body)
    error = error or find_loss(body, value)
    return ({}, error) if error else (value, "")


def read_arguments(name: str, body: str, id: str = "") -> ToolCall:
    """Return the call of a tool whose arguments are a JSON object, or its error."""
    arguments, error = read_object(body)
    return invalid_call(body, error, name) if error else ToolCall(name, arguments, id=id)


def load_object(body: str) -> tuple[dict[str, Any], str]:
    """Parse a JSON object like `read_object`, but accept duplicate keys and rounded integers."""
    try:
        # orjson refuses what later breaks HTTP, parquet and tokenizers: NaN, lone surrogates.
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        return {}, f"invalid JSON: {str(e)[:120]}"
    except UnicodeEncodeError:
        return {}, "invalid JSON: lone surrogate"
    if not isinstance(value, dict):
        return {}, "must be a JSON object"
    return value, ""


def find_loss(text: str, value: Any) -> str:
    """Return an error if orjson silently lost a duplicate key or digits of an integer, or "".

    Args:
        text: the JSON text.
        value: the value from orjson. A value nested deeper than `MAX_DEPTH` is an error, too,
            because later code walks through it recursively.
    """
    try:
        # This counts the keys in the text, and texts in strings that look like keys. If the count
        # is the number of keys of the value, none was lost; this takes less than a microsecond.
        if len(_KEY_ENDS.findall(text)) != _count_keys((value,), 0):
            json.loads(text, object_pairs_hook=_each_once, parse_int=_within_range)
    except ValueError as e:
        return str(e)
    return ""


def _count_keys(values: Iterable[Any], depth: int) -> float:
    """Return the number of keys in values; minus infinity if one may be a rounded integer."""
    keys = 0.0
    for value in values:
        kind = type(value)
        if kind is str or kind is int:
            continue
        if kind is dict or kind is list:
            if depth == MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
            if kind is dict:
                keys += len(value)
                value = value.values()
            keys += _count_keys(value, depth + 1)
        elif kind is float and not -(2.0**63) < value < 2.0**63:
            keys = -math.inf
    return keys


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"duplicate key {key[:80]!r}")
        seen.add(key)


def _within_range(digits: str) -> None:
    # Python refuses to convert thousands of digits, so the length is checked first.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"number out of range: {digits[:40]}")


def read_call(
    body: str,
    arguments_keys: tuple[str, ...] = ("arguments",),
    other_keys: tuple[str, ...] = (),
    required: bool = False,
    name_key: str = "name",
) -> ToolCall:
    """Parse a call that is one JSON object, `{"name": ..., "arguments": {...}}`.

    Args:
        body: the text of the object.
        arguments_keys: the possible keys of the arguments; a call may have only one of them.
        other_keys: further keys that a call may have; they are ignored.
        required: whether a call without arguments must still have the key.
        name_key: the key of the name.

    Returns:
        The call, with its error if it is invalid.
    """
    value, error = read_object(body)
    if error:
        return invalid_call(body, error)
    name = value.pop(name_key, None)
    if not isinstance(name, str) or not name:
        return invalid_call(body, f'"{name_key}" must be a string')
    keys = [key for key in arguments_keys if key in value]
    if required and not keys:
        return invalid_call(body, f'missing "{arguments_keys[0]}"', name)
    arguments = value.pop(keys[0]) if keys else {}
    if not isinstance(arguments, dict):
        return invalid_call(body, f'"{keys[0]}" must be a JSON object', name)
    if unknown := sorted(value.keys() - set(other_keys)):
        return invalid_call(body, f"unknown keys {unknown}"[:200], name)
    return ToolCall(name, arguments)


def is_valid_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, which HTTP, parquet and tokenizers refuse."""
    return text.isascii() or not _SURROGATE.search(text)


def with_span(call: ToolCall, start: int, end: int) -> ToolCall:
    """Return the call with this span in its turn, unless it has a span already."""
    return call if call.span else replace(call, span=(start, end))


def invalid_call(raw: str, error: str, name: str = "") -> ToolCall:
    """Return an invalid call with its error and its text, cut after `MAX_RAW` characters."""
    if len(raw) > MAX_RAW:
        raw = f"{raw[:MAX_RAW]}... ({len(raw)} characters)"
    return ToolCall(name, raw, error=error)
