"""Llama 3.1 and later: a turn that consists of one or several JSON objects."""

from __future__ import annotations

import re
from itertools import islice

from agentrl.chat.formats.scan import (
    MAX_CALLS,
    limit_calls,
    shift_spans,
    without_thought,
)
from agentrl.chat.formats.strict_json import (
    end_of_object,
    invalid_call,
    load_object,
    read_call,
    with_span,
)
from agentrl.trajectory import ToolCall

_KEYS = ("parameters", "arguments")
_TAG = re.compile(r"<\|python_(?:tag|start)\|>")
_TAG_END = "<|python_end|>"
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_(?:tag|start|end)\|>)*")
_OPENS = re.compile(r"\s*[\[{]")
# Matches the beginning of a turn that is a call: an object with a key, or cut off before its key.
_CALL_START = re.compile(r"""\s*(?:\{\s*(?:["']|\w+\s*:|$)|\[\s*\{\s*"name")""")
# Matches the beginning of the call after an invalid one. A JSON string has no line breaks and no
# unescaped quotes, so this does not match within a string.
_NEXT = re.compile(r'(?:(?<=\})\s*;\s*|\n)(?:<\|python_(?:tag|start)\|>)?(?=\{\s*"(?:name|type)")')


def parse_llama_json(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in Llama's JSON format.

        {"name": "calculator", "parameters": {"expression": "3*4"}}

    Several calls are separated by `;`, `,` or white space, or are in a JSON list. A call needs no
    tag, so a turn that begins with prose has no calls, even if it contains JSON, unless
    `<|python_tag|>` precedes it. A JSON object with none of the keys of a call is an answer. Llama
    4 writes text before its calls between `<|python_start|>` and `<|python_end|>`.
    """
    text, shift = without_thought(text, lambda text: _start_of_calls(text)[0])
    position, has_tag = _start_of_calls(text)
    calls: list[ToolCall] = []
    is_in_list = False
    while 0 <= position < len(text):
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if text.startswith("]" if is_in_list else "[", position):
            is_in_list = not is_in_list
            position += 1
            continue
        end = end_of_object(text, position)
        if not end:
            calls += _line_by_line(text, position, not calls)
            break
        body = text[position:end]
        if not (calls or has_tag or is_in_list or text[end:].strip()) and _is_answer(body):
            return []
        calls.append(with_span(_read(body), position, end))
        position = end
        if len(calls) > MAX_CALLS:
            break
    else:
        if is_in_list:
            calls.append(with_span(invalid_call("", "missing closing ]"), len(text), len(text)))
    return shift_spans(limit_calls(calls), shift)


def _start_of_calls(text: str) -> tuple[int, bool]:
    """Return the start of a turn's calls or -1, and whether a tag precedes them."""
    if match := _CALL_START.match(text):
        return match.start(), False
    tag = _TAG.search(text)
    if not tag:
        return -1, False
    if not _OPENS.match(text, tag.end()):
        end = text.find(_TAG_END, tag.end())
        if end >= 0 and _OPENS.match(text, end + len(_TAG_END)):
            return end, True
    return tag.start(), True


def _read(body: str) -> ToolCall:
    return read_call(body, _KEYS, other_keys=("type", "id"), required=True)


def _is_answer(body: str) -> bool:
    value, error = load_object(body)
    return not error and value.keys().isdisjoint(("name", "function", *_KEYS))


def _line_by_line(text: str, position: int, first: bool) -> list[ToolCall]:
    """Return the calls on separate lines of a text that is not JSON as a whole, and errors."""
    calls: list[ToolCall] = []
    if position == len(text) and not first:
        return calls
    cuts = [m.span() for m in islice(_NEXT.finditer(text, position), MAX_CALLS)]
    starts = [position, *(end for _, end in cuts)]
    ends = [*(start for start, _ in cuts), len(text)]
    for start, end in zip(starts, ends, strict=True):
        part = text[start:end].strip("; \r\n\t")
        if cuts and part and end_of_object(part, 0) == len(part):
            call = _read(part)
        else:
            prose = not first and part[:1] not in ("{", "[")
            call = invalid_call(
                part, "unexpected text after the calls" if prose else "must be one JSON object"
            )
        calls.append(with_span(call, start, end))
    return calls
