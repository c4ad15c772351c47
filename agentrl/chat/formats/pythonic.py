"""Formats with calls and literals in Python's syntax: Llama 3.2 and 4, LFM2."""

from __future__ import annotations

import math
import re
from typing import Any

from agentrl.chat.formats.marked_json import MarkedJson
from agentrl.chat.formats.scan import (
    MAX_CALLS,
    THINK_END,
    invalid_call_at,
    limit_calls,
    read_calls,
    shift_spans,
    without_thought,
)
from agentrl.chat.formats.strict_json import (
    end_of_brackets,
    invalid_call,
    is_valid_unicode,
    skip_space,
    with_span,
)
from agentrl.trajectory import ToolCall

_MARK = re.compile(r"<\|python_(?:start|tag)\|>\s*")
_LIST = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(|$)|$)")
_BARE = re.compile(r"\s*[A-Za-z_][\w.-]*\(\s*\w+\s*=(?!=)")
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?=\()")
_KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=")
_TAIL = re.compile(r"\s*(?:<\|python_end\|>)?\s*")


def parse_llama_pythonic(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in Llama's Python format.

        [calculator(expression="3*4"), clock()]

    Arguments are named literals: strings in single or double quotes, numbers, lists, dictionaries
    with string keys, and the words True, False, None of Python or JSON. Nothing is evaluated.
    A string may contain line breaks. Some templates put every value between quotes;
    `cast_arguments` converts these values to the types of the tool's schema. A turn that begins
    with prose has no calls, unless `<|python_start|>` precedes them.
    """
    answer, shift = without_thought(text, _start_of_calls)
    return shift_spans(_read_list(answer), shift)


def _read_list(text: str) -> list[ToolCall]:
    position, length = _start_of_calls(text), len(text)
    if position < 0:
        if _BARE.match(text) and text.rstrip().endswith(")"):
            return [
                with_span(
                    invalid_call(text, "calls must be in a list: [NAME(KEY=VALUE)]"), 0, length
                )
            ]
        return []
    if not text.startswith("[", position):
        why = "calls must be in a list: [NAME(KEY=VALUE)]"
        return [with_span(invalid_call(text[position:], why), position, length)]
    calls: list[ToolCall] = []
    position += 1
    while len(calls) <= MAX_CALLS:
        name = _NAME.match(text, position)
        end = end_of_brackets(text, name.end(), _TO_BRACKET) if name else 0
        if not name or not end:
            why = f"expected NAME(KEY=VALUE), or the list is cut off{_QUOTE_HINT}"
            return [*calls, with_span(invalid_call(text[position:], why), position, length)]
        calls.append(with_span(_read_call(name[1], text[name.end() : end]), name.start(1), end))
        if comma := _COMMA.match(text, end):
            position = comma.end()
            continue
        close = _CLOSE.match(text, end)
        if not close or close[0][-1] != "]":
            calls.append(with_span(invalid_call(text[end:], "missing closing ]"), end, length))
        elif rest := text[_TAIL.match(text, close.end()).end() :]:  # type: ignore[union-attr]
            why = "unexpected text after the calls"
            calls.append(with_span(invalid_call(rest, why), length - len(rest), length))
        break
    return limit_calls(calls)


def _start_of_calls(text: str) -> int:
    """Return the start of the list of calls, or -1 if a turn has none."""
    if match := _LIST.match(text):
        return text.index("[", match.start())
    mark = _MARK.search(text)
    return mark.end() if mark else -1


def _read_call(name: str, body: str) -> ToolCall:
    """Return one call. `body` is the text in parentheses, including the parentheses."""
    arguments: dict[str, Any] = {}
    position = 1
    try:
        while not _end_of_closing(body, position, ")"):
            key = _KEY.match(body, position)
            if not key:
                raise ValueError("arguments must be KEY=VALUE")
            if key[1] in arguments:
                raise ValueError(f"duplicate argument {key[1][:80]}")
            arguments[key[1]], position = read_literal(body, key.end())
            position = _after_comma(body, position, ")")
    except ValueError as e:
        return invalid_call(body, str(e), name)
    return ToolCall(name, arguments)


_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"

_JSON = re.compile(r"\s*\[\s*\{")
_AS_JSON = MarkedJson(((_LFM2, _LFM2_END),))


def parse_lfm2(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in the format of LFM2 and LFM2.5.

        <|tool_call_start|>[calculator(expression="3*4"), clock()]<|tool_call_end|>

    The values are literals, as in `parse_llama_pythonic`. If a prompt asks for JSON, LFM2 writes
    `[{"name": "calculator", "arguments": {"expression": "3*4"}}]`.
    """
    return read_calls(text, (_LFM2,), _LFM2_END, _read_lfm2)


def _read_lfm2(text: str, start: int) -> tuple[list[ToolCall], int]:
    body = start + len(_LFM2)
    if _JSON.match(text, body):
        return _AS_JSON.read_marked(text, start)
    first = skip_space(text, body)
    end = end_of_brackets(text, first, _TO_BRACKET) if text.startswith("[", first) else 0
    after = skip_space(text, end) if end else 0
    if end and text.startswith(_LFM2_END, after):
        calls = parse_llama_pythonic(text[first:end])
        if calls:
            return shift_spans(calls, first), after + len(_LFM2_END)
    why = "expected a list of calls: [NAME(KEY=VALUE)]"
    if end or not text.startswith("[", first):
        return invalid_call_at(text, body, (_LFM2,), _LFM2_END, why, read=end)
    # A list without an end contains the rest, because a mark may be in a string that was cut off.
    thought = text.find(THINK_END, first)
    stop = thought if thought >= 0 else len(text)
    why += f", or cut off{_QUOTE_HINT}"
    return [invalid_call(text[body:stop], why)], stop


# Templates do not escape line breaks in strings, so a string may contain them.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|' r"'[^'\\]*+(?:\\.[^'\\]*+)*+'"
_TO_BRACKET = re.compile(rf"""(?:{_STRING}|[^"'()\[\]{{}}]++)*+([()\[\]{{}}])""", re.DOTALL)
"""Matches up to the next bracket (group 1) that is not within a string."""

_COMMA = re.compile(r"\s*,")
_CLOSE = re.compile(r"\s*[\])}]")
_QUOTE_HINT = " (a quote within a string needs a backslash)"
_COLON = re.compile(r"\s*:")
_VALUE = re.compile(
    rf"\s*(?:({_STRING})|(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])|([A-Za-z_]\w*)|([\[{{]))",
    re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
            "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}  # fmt: skip
_LONGEST_NUMBER = 40


def literal_of(text: str) -> Any:
    """Parse a text that is a list or a dictionary.

    Raises:
        ValueError: if the text is something else.
    """
    if text[:1] not in ("[", "{") or end_of_brackets(text, 0, _TO_BRACKET) != len(text):
        raise ValueError("not a list or a dictionary")
    return read_literal(text, 0)[0]


def read_literal(text: str, position: int) -> tuple[Any, int]:
    """Parse the literal at a position; return its value and the index of its end.

    A literal is a string in single or double quotes, a number, a list, a dictionary with string
    keys, or one of the words True, False, None of Python and true, false, null of JSON.

    Args:
        text: the text. The caller has checked that its brackets are closed, which limits the depth
            of this recursion.
        position: the start of the literal.

    Raises:
        ValueError: if there is no such literal.
    """
    token = _VALUE.match(text, position)
    if not token:
        raise ValueError(f"invalid literal: {text[position : position + 40].strip()!r}")
    position = token.end()
    string, number, word, bracket = token.groups()
    if string is not None:
        return _string(string), position
    if number is not None:
        return _number(number), position
    if word is not None:
        if word not in _WORDS:
            raise ValueError(f"invalid literal: {word[:40]!r}")
        return _WORDS[word], position
    return _list(text, position) if bracket == "[" else _dict(text, position)


def _end_of_closing(text: str, position: int, bracket: str) -> int:
    """Return the index after the closing bracket at `position`; 0 if there is no such bracket."""
    close = _CLOSE.match(text, position)
    return close.end() if close and close[0][-1] == bracket else 0


def _after_comma(text: str, position: int, bracket: str) -> int:
    """Return the start of the next item, or the position of the bracket that ends the items.

    Raises:
        ValueError: if there is neither a comma nor that bracket.
    """
    if comma := _COMMA.match(text, position):
        return comma.end()
    if not _end_of_closing(text, position, bracket):
        why = f"invalid literal: {text[position : position + 40].strip()!r}"
        if text[position - 1] in "\"'":
            why += _QUOTE_HINT
        raise ValueError(why)
    return position


def _list(text: str, position: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while not (end := _end_of_closing(text, position, "]")):
        value, position = read_literal(text, position)
        values.append(value)
        position = _after_comma(text, position, "]")
    return values, end


def _dict(text: str, position: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not (end := _end_of_closing(text, position, "}")):
        key, position = read_literal(text, position)
        colon = _COLON.match(text, position)
        if not isinstance(key, str) or not colon:
            raise ValueError("a dictionary must be {TEXT: VALUE}")
        if key in values:
            raise ValueError(f"duplicate key {key[:80]!r}")
        values[key], position = read_literal(text, colon.end())
        position = _after_comma(text, position, "}")
    return values, end


def _number(text: str) -> int | float:
    if len(text) <= _LONGEST_NUMBER:
        value = float(text) if set(text) & set(".eE") else int(text)
        # Other numbers cannot be sent to the tool as JSON.
        if math.isfinite(value) and (isinstance(value, float) or -(2**63) <= value < 2**64):
            return value
    raise ValueError(f"number out of range: {text[:40]}")


def _string(text: str) -> str:
    text = text[1:-1]
    if "\\" in text:
        text = _ESCAPE.sub(_unescape, text)
    if not is_valid_unicode(text):
        raise ValueError("invalid Unicode: lone surrogate")
    return text


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        point = int(code[1:], 16)
        if point > 0x10FFFF:
            raise ValueError("invalid Unicode escape")
        return chr(point)
    # As in Python, a backslash before any other character is kept.
    return _ESCAPES.get(code, match[0])
