"""Llama 3.1 and later: a turn that is nothing but a JSON object, or several."""

from __future__ import annotations

import re
from itertools import islice

from agentrl.chat.formats.strict_json import at, broken, end_of_object, load_object, read_call
from agentrl.chat.formats.thinking import MAX_CALLS, answer_of, first_tag, placed, too_many
from agentrl.trajectory import ToolCall

_KEYS = ("parameters", "arguments")
_TAG = re.compile(r"<\|python_(?:tag|start)\|>")
_BETWEEN = re.compile(r"(?:\s|;|<\|python_(?:tag|start|end)\|>)*")
# How a turn begins that tries to be a call: an object with a key (or cut before it), not a set.
_TRIES = re.compile(r"""\s*(?:\{\s*(?:["']|\w+\s*:|$)|\[\s*\{\s*"name")""")
# Where the next call begins when one cannot be read: a JSON string holds neither line breaks nor
# unescaped quotes, so this is not inside of one.
_NEXT = re.compile(r'(?:(?<=\})\s*;\s*|\n)(?:<\|python_(?:tag|start)\|>)?(?=\{\s*"(?:name|type)")')


def parse_llama_json(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in Llama's JSON format.

        {"name": "calculator", "parameters": {"expression": "3*4"}}

    Several are separated by `;` or space. No tag marks a call, so a turn that begins as prose has
    none, whatever JSON it mentions, unless `<|python_tag|>` announces it; nor has a turn that is a
    JSON object with none of a call's keys: that is an answer.
    """
    turn, text = text, answer_of(text, _end_of_calls)
    position = _start_of_calls(text)
    tagged = bool(_TAG.match(text, max(position, 0)))
    calls: list[ToolCall] = []
    while 0 <= position < len(text):
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        end = end_of_object(text, position)
        if not end:
            calls += _line_by_line(text, position, not calls)
            break
        body = text[position:end]
        if not calls and not tagged and not text[end:].strip() and _is_answer(body):
            return []
        calls.append(at(_read(body), position, end))
        position = end
        if len(calls) > MAX_CALLS:
            break
    calls = calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], too_many()]
    return placed(calls, turn, text)


def _start_of_calls(text: str) -> int:
    """Where a turn's calls begin, or -1 where it does not try to call."""
    if tries := _TRIES.match(text):
        return tries.start()
    tag = _TAG.search(text)
    return tag.start() if tag else -1


def _end_of_calls(text: str, start: int) -> int:
    position = _start_of_calls(text)
    if not 0 <= position < first_tag(text):
        return start
    while True:
        begin = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if not (end := end_of_object(text, begin)):
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
            call = broken(part, "text after the calls" if prose else "not one JSON object")
        calls.append(at(call, start, end))
    return calls
