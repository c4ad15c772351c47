"""Llama 3.1 and later: a turn that is nothing but a JSON object, or several."""

from __future__ import annotations

import re
from itertools import islice

from agentrl.chat.formats.scan import (
    MAX_CALLS,
    first_tag,
    limit_calls,
    remove_thoughts,
    with_spans_of_turn,
)
from agentrl.chat.formats.strict_json import (
    end_of_brackets,
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
# How a turn begins that tries to be a call: an object with a key (or cut before it), not a set.
_TRIES = re.compile(r"""\s*(?:\{\s*(?:["']|\w+\s*:|$)|\[\s*\{\s*"name")""")
# Where the next call begins when one cannot be read: a JSON string holds neither line breaks nor
# unescaped quotes, so this is not inside of one.
_NEXT = re.compile(r'(?:(?<=\})\s*;\s*|\n)(?:<\|python_(?:tag|start)\|>)?(?=\{\s*"(?:name|type)")')


def parse_llama_json(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in Llama's JSON format.

        {"name": "calculator", "parameters": {"expression": "3*4"}}

    Several are separated by `;`, `,` or space, or stand in a JSON list. No tag marks a call, so a
    turn that begins as prose has none, whatever JSON it mentions, unless `<|python_tag|>` announces
    it; nor has a turn that is a JSON object with none of a call's keys: that is an answer. Llama 4
    writes text that precedes its calls between `<|python_start|>` and `<|python_end|>`.
    """
    turn, text = text, remove_thoughts(text, _end_of_calls)
    position, tagged = _start_of_calls(text)
    calls: list[ToolCall] = []
    listed = False
    while 0 <= position < len(text):
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if text.startswith("]" if listed else "[", position):
            listed = not listed
            position += 1
            continue
        end = end_of_object(text, position)
        if not end:
            calls += _line_by_line(text, position, not calls)
            break
        body = text[position:end]
        if not (calls or tagged or listed or text[end:].strip()) and _is_answer(body):
            return []
        calls.append(with_span(_read(body), position, end))
        position = end
        if len(calls) > MAX_CALLS:
            break
    else:
        if listed:
            calls.append(with_span(invalid_call("", "no closing ]"), len(text), len(text)))
    return with_spans_of_turn(limit_calls(calls), turn, text)


def _start_of_calls(text: str) -> tuple[int, bool]:
    """Return where a turn's calls begin, and whether a tag announces them; -1 if there are none."""
    if tries := _TRIES.match(text):
        return tries.start(), False
    tag = _TAG.search(text)
    if not tag:
        return -1, False
    if not _OPENS.match(text, tag.end()):
        end = text.find(_TAG_END, tag.end())
        if end >= 0 and _OPENS.match(text, end + len(_TAG_END)):
            return end, True
    return tag.start(), True


def _end_of_calls(text: str, start: int) -> int:
    position, _ = _start_of_calls(text)
    if not 0 <= position < first_tag(text):
        return start
    while True:
        begin = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        end = end_of_brackets(text, begin) if text.startswith(("{", "["), begin) else 0
        if not end:
            # A call that is broken off holds what follows: better one error than none.
            return len(text) if _TRIES.match(text, begin) else position
        position = end


def _read(body: str) -> ToolCall:
    return read_call(body, _KEYS, other_keys=("type", "id"), required=True)


def _is_answer(body: str) -> bool:
    value, error = load_object(body)
    return not error and value.keys().isdisjoint(("name", "function", *_KEYS))


def _line_by_line(text: str, position: int, first: bool) -> list[ToolCall]:
    """What cannot be read as a whole: errors, and the calls that begin on lines of their own."""
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
            call = invalid_call(part, "text after the calls" if prose else "not one JSON object")
        calls.append(with_span(call, start, end))
    return calls
