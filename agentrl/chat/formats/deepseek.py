"""DeepSeek V3, R1 and V3.1: calls between tags of full-width bars."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import at, broken, end_of_object, read_object
from agentrl.chat.formats.thinking import MAX_CALLS, read_calls
from agentrl.chat.formats.unclosed import end_of_broken_json
from agentrl.trajectory import ToolCall

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_TAG = re.compile("|".join((CALLS, CALLS_END, CALL, CALL_END, "</?think>")))
_THOUGHT = re.compile("</think>")
# V3 and R1 write the kind of tool, then name and arguments in a fence; V3.1 writes them alone.
_HEAD = re.compile(
    rf"\s*(?:function{SEPARATOR}\s*(?P<fenced>[\w.\-]+)\s*```json\s*"
    rf"|(?P<plain>[\w.\-]+)\s*{SEPARATOR}\s*)(?={{)"
)
_FENCED_END = re.compile(rf"\s*```\s*{CALL_END}")
_PLAIN_END = re.compile(rf"\s*{CALL_END}")


def parse_deepseek(text: str) -> list[ToolCall]:
    r"""The calls of one assistant turn in DeepSeek's formats, V3 and R1 first, then V3.1.

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator
        ```json
        {"expression": "3*4"}
        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "3*4"}
        <｜tool▁call▁end｜><｜tool▁calls▁end｜>

    Calls inside `<think>...</think>` are thoughts. A call has its own closing tag and counts once
    that was written; a missing `<｜tool▁calls▁end｜>` takes nothing from it.
    """
    return read_calls(text, (CALLS, CALL), CALLS_END, _read)


def _read(text: str, start: int) -> tuple[list[ToolCall], int]:
    if text.startswith(CALLS, start):
        return _group(text, start + len(CALLS))
    stop = _next(text, start + len(CALL))
    return [broken(text[start:stop], f"a call outside of {CALLS}")], stop


def _group(text: str, start: int) -> tuple[list[ToolCall], int]:
    """The calls behind the tag that begins a group of them."""
    calls: list[ToolCall] = []
    position = start
    while len(calls) <= MAX_CALLS:
        stop = _next(text, position)
        if gap := text[position:stop].strip():
            calls.append(at(broken(gap, "text between calls"), position, stop))
        position = stop
        if text.startswith(CALL, stop):
            call, position = _call(text, stop + len(CALL))
            calls.append(at(call, stop, position))
        elif text.startswith(CALL_END, stop):
            position += len(CALL_END)
            calls.append(at(broken(CALL_END, f"no {CALL} before {CALL_END}"), stop, position))
        else:
            if text.startswith(CALLS_END, stop):
                position += len(CALLS_END)
            break
    return calls or [broken(text[start:position], f"no call behind {CALLS}")], position


def _call(text: str, start: int) -> tuple[ToolCall, int]:
    head = _HEAD.match(text, start)
    if not head:
        stop, closed = _end(text, start)
        return broken(text[start:stop], _why(closed, f"not NAME{SEPARATOR}{{...}}")), closed or stop
    name = head["fenced"] or head["plain"]
    end = end_of_object(text, head.end())
    tail = (_FENCED_END if head["fenced"] else _PLAIN_END).match(text, end) if end else None
    if not tail:
        given_up = end or end_of_broken_json(text, head.end(), _TAG, _THOUGHT)
        stop, closed = _end(text, given_up)
        why = _why(closed, "the arguments are not one JSON object")
        return broken(text[start:stop], why, name), closed or stop
    body = text[head.end() : end]
    arguments, error = read_object(body)
    return broken(body, error, name) if error else ToolCall(name, arguments), tail.end()


def _end(text: str, start: int) -> tuple[int, int]:
    """Where a broken call ends, and where its closing tag does (0 where it has none)."""
    stop = _next(text, start)
    return stop, stop + len(CALL_END) if text.startswith(CALL_END, stop) else 0


def _why(closed: int, error: str) -> str:
    return error if closed else f"no {CALL_END}"


def _next(text: str, position: int) -> int:
    tag = _TAG.search(text, position)
    return tag.start() if tag else len(text)
