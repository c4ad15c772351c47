"""JSON objects within text, found in linear time and read strictly."""

from __future__ import annotations

import re
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
_SURROGATE = re.compile("[\ud800-\udfff]")


def end_of_object(text: str, start: int) -> int:
    """Where the JSON object at `start` ends (exclusive), or 0 where there is none."""
    return end_of_brackets(text, start) if text.startswith("{", start) else 0


def end_of_array(text: str, start: int) -> int:
    """Where the JSON array at `start` ends (exclusive), or 0 where there is none."""
    return end_of_brackets(text, start) if text.startswith("[", start) else 0


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


def read_object(body: str) -> tuple[dict[str, Any], str]:
    """A JSON object and no error, or an empty one and why."""
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


def read_call(
    body: str,
    arguments_keys: tuple[str, ...] = ("arguments",),
    other_keys: tuple[str, ...] = (),
    required: bool = False,
) -> ToolCall:
    """A call written as one JSON object, `{"name": ..., "arguments": {...}}`, or its error.

    Args:
        body: the text of the object.
        arguments_keys: what the arguments may be called; at most one may be given.
        other_keys: what the object may hold besides, unread.
        required: whether a call without arguments must say so.
    """
    value, error = read_object(body)
    if error:
        return broken(body, error)
    name = value.pop("name", None)
    if not isinstance(name, str) or not name:
        return broken(body, '"name" must be a string')
    given = [key for key in arguments_keys if key in value]
    if required and not given:
        return broken(body, f'no "{arguments_keys[0]}"', name)
    arguments = value.pop(given[0]) if given else {}
    if not isinstance(arguments, dict):
        return broken(body, f'"{given[0]}" must be a JSON object', name)
    if unknown := sorted(value.keys() - set(other_keys)):
        return broken(body, f"unknown keys {unknown}"[:200], name)
    return ToolCall(name, arguments)


def is_sound(text: str) -> bool:
    """Whether text has no lone surrogate, which would break HTTP, parquet and tokenizers later."""
    return text.isascii() or not _SURROGATE.search(text)


def broken(raw: str, error: str, name: str = "") -> ToolCall:
    """Text that tries to be a call, and why it is none. Of a long text only the start is kept."""
    if len(raw) > MAX_RAW:
        raw = f"{raw[:MAX_RAW]}... ({len(raw)} characters)"
    return ToolCall(name, raw, error=error)
