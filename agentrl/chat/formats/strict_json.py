"""JSON within text, found in linear time and read strictly."""

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
"""So much of a broken call's text is kept: enough to tell the model, however long the loop was."""

# Up to the next bracket of a JSON value: strings, and runs of what may stand outside of them. A
# tag's `<` is none of these, so that a scan can pass a tag only within a string; that keeps the sum
# of all scans linear. Possessive: what was once matched is not tried again.
_TO_BRACKET = re.compile(
    r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\s:,0-9.eE+\-a-z]++)*+([{}\[\]])', re.DOTALL
)
_SPACE = re.compile(r"\s*")
# Strings that end, and what may stand between them in JSON.
_WHOLE = re.compile(r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]\s:,0-9.eE+\-a-z]++)*+', re.DOTALL)
_KEY_ENDS = re.compile(r'"\s*+:')
_SURROGATE = re.compile("[\ud800-\udfff]")


def end_of_object(text: str, start: int) -> int:
    """Where the JSON object at `start` ends (exclusive), or 0 where there is none."""
    return end_of_brackets(text, start) if text.startswith("{", start) else 0


def end_of_brackets(text: str, start: int, to_bracket: re.Pattern[str] = _TO_BRACKET) -> int:
    """Where the bracket at `start` is closed (exclusive), or 0.

    Args:
        text: where it stands.
        start: at the bracket.
        to_bracket: matches up to the next bracket, group 1, that does not stand in a string.
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
    """Where JSON without an end is given up: at the next tag that is not in its strings.

    A string that is cut off goes on to the end of the turn, or of the thought that it stands in: a
    file about tool calls that did not fit into the turn is not executed.

    Args:
        text: one assistant turn.
        start: where the JSON begins.
        tags: what else may follow there.
        thought: the tags that end a thought.
    """
    broken = _WHOLE.match(text, start).end()  # type: ignore[union-attr]
    return find_start(thought if text.startswith('"', broken) else tags, text, broken)


def find_start(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return where the next match begins, or the end of the text if there is none."""
    found = pattern.search(text, position)
    return found.start() if found else len(text)


def skip_space(text: str, position: int) -> int:
    """Return where the next character that is not space stands."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def read_object(body: str) -> tuple[dict[str, Any], str]:
    """A JSON object that says all that its text does and no error, or an empty one and why."""
    value, error = load_object(body)
    error = error or find_loss(body, value)
    return ({}, error) if error else (value, "")


def read_arguments(name: str, body: str, id: str = "") -> ToolCall:
    """Return the call of a tool whose arguments are a JSON object, or its error."""
    arguments, error = read_object(body)
    return invalid_call(body, error, name) if error else ToolCall(name, arguments, id=id)


def load_object(body: str) -> tuple[dict[str, Any], str]:
    """As `read_object`, but of a key given twice the last value is taken, and so on."""
    try:
        # orjson refuses what later breaks HTTP, parquet and tokenizers: NaN, lone surrogates.
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        return {}, f"not JSON: {str(e)[:120]}"
    except UnicodeEncodeError:
        return {}, "not JSON: lone surrogate"
    if not isinstance(value, dict):
        return {}, "not a JSON object"
    return value, ""


def find_loss(text: str, value: Any) -> str:
    """What orjson lost in silence, a key's first value or an integer's digits; or "".

    Args:
        text: JSON.
        value: what orjson read there. Nested deeper than `MAX_DEPTH` it is refused as well: what
            walks through it later, or writes it down, is recursive.
    """
    try:
        # The text's keys are counted with what looks like one in a string, so none is missed; most
        # calls are told to be sound in less than a microsecond.
        if len(_KEY_ENDS.findall(text)) != _count_keys((value,), 0):
            json.loads(text, object_pairs_hook=_each_once, parse_int=_within_range)
    except ValueError as e:
        return str(e)
    return ""


def _count_keys(values: Iterable[Any], depth: int) -> float:
    """How many keys stand in values; minus infinity where one may be a rounded integer."""
    keys = 0.0
    for value in values:
        kind = type(value)
        if kind is str or kind is int:
            continue
        if kind is dict or kind is list:
            if depth == MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
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
            raise ValueError(f"{key[:80]!r} is given twice")
        seen.add(key)


def _within_range(digits: str) -> None:
    # As text where it is long: Python refuses to read thousands of digits.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"number out of range: {digits[:40]}")


def read_call(
    body: str,
    arguments_keys: tuple[str, ...] = ("arguments",),
    other_keys: tuple[str, ...] = (),
    required: bool = False,
    name_key: str = "name",
) -> ToolCall:
    """A call written as one JSON object, `{"name": ..., "arguments": {...}}`, or its error.

    Args:
        body: the text of the object.
        arguments_keys: what the arguments may be called; at most one may be given.
        other_keys: what the object may hold besides, unread.
        required: whether a call without arguments must say so.
        name_key: what the name is called.
    """
    value, error = read_object(body)
    if error:
        return invalid_call(body, error)
    name = value.pop(name_key, None)
    if not isinstance(name, str) or not name:
        return invalid_call(body, f'"{name_key}" must be a string')
    given = [key for key in arguments_keys if key in value]
    if required and not given:
        return invalid_call(body, f'no "{arguments_keys[0]}"', name)
    arguments = value.pop(given[0]) if given else {}
    if not isinstance(arguments, dict):
        return invalid_call(body, f'"{given[0]}" must be a JSON object', name)
    if unknown := sorted(value.keys() - set(other_keys)):
        return invalid_call(body, f"unknown keys {unknown}"[:200], name)
    return ToolCall(name, arguments)


def is_valid_unicode(text: str) -> bool:
    """Whether text has no lone surrogate, which would break HTTP, parquet and tokenizers later."""
    return text.isascii() or not _SURROGATE.search(text)


def with_span(call: ToolCall, start: int, end: int) -> ToolCall:
    """The call, standing at these characters of its turn, unless it says already where."""
    return call if call.span else replace(call, span=(start, end))


def invalid_call(raw: str, error: str, name: str = "") -> ToolCall:
    """Text that tries to be a call, and why it is none. Of a long text only the start is kept."""
    if len(raw) > MAX_RAW:
        raw = f"{raw[:MAX_RAW]}... ({len(raw)} characters)"
    return ToolCall(name, raw, error=error)
