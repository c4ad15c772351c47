"""Llama 3.2 and 4: a turn that is a Python list of calls with literals."""

from __future__ import annotations

import math
import re
from typing import Any

from agentrl.chat.formats.strict_json import at, broken, end_of_brackets, is_sound
from agentrl.chat.formats.thinking import MAX_CALLS, answer_of, first_tag, placed, too_many
from agentrl.trajectory import ToolCall

_MARK = re.compile(r"<\|python_(?:start|tag)\|>\s*")
_LIST = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(|$)|$)")
_BARE = re.compile(r"\s*[A-Za-z_][\w.-]*\(\s*\w+\s*=(?!=)")
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?=\()")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_COLON = re.compile(r"\s*:")
_COMMA = re.compile(r"\s*,")
_CLOSE = re.compile(r"\s*[\])}]")
_TAIL = re.compile(r"\s*(?:<\|python_end\|>)?\s*")
_STRING = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|' r"'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'"
# Up to the next bracket that does not stand in a string.
_TO_BRACKET = re.compile(rf"""(?:{_STRING}|[^"'()\[\]{{}}]++)*+([()\[\]{{}}])""", re.DOTALL)
_VALUE = re.compile(
    rf"\s*(?:({_STRING})|(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])|([A-Za-z_]\w*)|([\[{{]))",
    re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
            "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}  # fmt: skip
_LONGEST_NUMBER = 40


class _Fault(Exception):
    """Why a call is none."""


def parse_llama_pythonic(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in Llama's Python format.

        [calculator(expression="3*4"), clock()]

    Arguments are named literals: strings in single or double quotes, numbers, lists, dictionaries
    with string keys, and the words True, False, None of Python or JSON. Nothing is evaluated.
    A turn that begins as prose has no calls, unless `<|python_start|>` announces them.
    """
    answer = answer_of(text, _end_of_calls)
    return placed(_calls(answer), text, answer)


def _calls(text: str) -> list[ToolCall]:
    position, length = _start_of_calls(text), len(text)
    if position < 0:
        if _BARE.match(text) and text.rstrip().endswith(")"):
            return [at(broken(text, "calls stand in a list: [NAME(KEY=VALUE)]"), 0, length)]
        return []
    if not text.startswith("[", position):
        why = "calls stand in a list: [NAME(KEY=VALUE)]"
        return [at(broken(text[position:], why), position, length)]
    calls: list[ToolCall] = []
    position += 1
    while len(calls) <= MAX_CALLS:
        name = _NAME.match(text, position)
        end = end_of_brackets(text, name.end(), _TO_BRACKET) if name else 0
        if not name or not end:
            cut = broken(text[position:], "not NAME(KEY=VALUE), or cut off")
            return [*calls, at(cut, position, length)]
        calls.append(at(_call(name[1], text[name.end() : end]), name.start(1), end))
        if comma := _COMMA.match(text, end):
            position = comma.end()
            continue
        close = _CLOSE.match(text, end)
        if not close or close[0][-1] != "]":
            calls.append(at(broken(text[end:], "no closing ]"), end, length))
        elif rest := text[_TAIL.match(text, close.end()).end() :]:  # type: ignore[union-attr]
            why = "text after the calls"
            calls.append(at(broken(rest, why), length - len(rest), length))
        break
    return calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], too_many()]


def _start_of_calls(text: str) -> int:
    """Where the list of calls should begin, or -1 where a turn does not try to call."""
    if tries := _LIST.match(text):
        return text.index("[", tries.start())
    mark = _MARK.search(text)
    return mark.end() if mark else -1


def _end_of_calls(text: str, start: int) -> int:
    begin = _start_of_calls(text)
    if not 0 <= begin < first_tag(text) or not text.startswith("[", begin):
        return start
    return end_of_brackets(text, begin, _TO_BRACKET) or len(
        text
    )  # one that is broken off holds what follows


def _call(name: str, body: str) -> ToolCall:
    """One call, of which `body` is the text in parentheses, these included."""
    arguments: dict[str, Any] = {}
    position = 1
    try:
        while not _ends(body, position, ")"):
            key = _KEY.match(body, position)
            if not key:
                raise _Fault("arguments must be KEY=VALUE")
            if key[1] in arguments:
                raise _Fault(f"argument {key[1][:80]} is given twice")
            arguments[key[1]], position = _value(body, key.end())
            position = _next(body, position, ")")
    except _Fault as fault:
        return broken(body, str(fault), name)
    return ToolCall(name, arguments)


def _value(text: str, position: int) -> tuple[Any, int]:
    """The literal at a position, and where it ends. Depth is bounded: brackets were matched."""
    token = _VALUE.match(text, position)
    if not token:
        raise _Fault(f"not a literal: {text[position : position + 40].strip()!r}")
    position = token.end()
    string, number, word, bracket = token.groups()
    if string is not None:
        return _string(string), position
    if number is not None:
        return _number(number), position
    if word is not None:
        if word not in _WORDS:
            raise _Fault(f"not a literal: {word[:40]!r}")
        return _WORDS[word], position
    return _list(text, position) if bracket == "[" else _dict(text, position)


def _list(text: str, position: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while not (end := _ends(text, position, "]")):
        value, position = _value(text, position)
        values.append(value)
        position = _next(text, position, "]")
    return values, end


def _dict(text: str, position: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not (end := _ends(text, position, "}")):
        key, position = _value(text, position)
        colon = _COLON.match(text, position)
        if not isinstance(key, str) or not colon:
            raise _Fault("a dictionary must be {TEXT: VALUE}")
        if key in values:
            raise _Fault(f"{key[:80]!r} is given twice")
        values[key], position = _value(text, colon.end())
        position = _next(text, position, "}")
    return values, end


def _ends(text: str, position: int, bracket: str) -> int:
    close = _CLOSE.match(text, position)
    return close.end() if close and close[0][-1] == bracket else 0


def _next(text: str, position: int, bracket: str) -> int:
    """Behind the comma after a value, or at the bracket that ends them all."""
    if comma := _COMMA.match(text, position):
        return comma.end()
    if not _ends(text, position, bracket):
        raise _Fault(f"not a literal: {text[position : position + 40].strip()!r}")
    return position


def _number(text: str) -> int | float:
    if len(text) <= _LONGEST_NUMBER:
        value = float(text) if set(text) & set(".eE") else int(text)
        # What JSON, and so the tool, cannot be sent.
        if math.isfinite(value) and (isinstance(value, float) or -(2**63) <= value < 2**64):
            return value
    raise _Fault(f"number out of range: {text[:40]}")


def _string(text: str) -> str:
    text = text[1:-1]
    if "\\" in text:
        text = _ESCAPE.sub(_unescape, text)
    if not is_sound(text):
        raise _Fault("lone surrogate")
    return text


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        point = int(code[1:], 16)
        if point > 0x10FFFF:
            raise _Fault("no such character")
        return chr(point)
    # As Python: a backslash before another character is a backslash.
    return _ESCAPES.get(code, match[0])
