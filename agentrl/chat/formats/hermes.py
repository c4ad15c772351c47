"""Hermes and Qwen: a JSON object within `<tool_call>` tags."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import end_of_object, read_object
from agentrl.trajectory import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
MAX_CALLS = 32
"""More calls than this in one turn are answered with one error: a runaway loop, not a plan."""

_TAG = re.compile("|".join((OPEN, THINK, THOUGHT)))
_SPACE = re.compile(r"\s*")


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in the Hermes / Qwen format.

        <tool_call>
        {"name": "calculator", "arguments": {"expression": "3*4"}}
        </tool_call>

    Calls inside `<think>...</think>` are thoughts, not calls. A tag within a call's JSON string is
    text. A call cut off at the end of the turn is an error, never executed.
    """
    calls: list[ToolCall] = []
    position = 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag[0] == THOUGHT:  # begun in the prompt: what came before was thought
            calls.clear()
        elif tag[0] == THINK:
            position = text.find(THOUGHT, position) + len(THOUGHT)
            if position < len(THOUGHT):
                if text.find(OPEN, tag.end()) >= 0:
                    why = "the call stands in a <think> that is never closed"
                    calls.append(ToolCall("", text[tag.end() :], error=why))
                break
        else:
            call, position = _call_at(text, position)
            calls.append(call)
        if len(calls) > MAX_CALLS:
            calls[-1] = ToolCall("", "", error=f"more than {MAX_CALLS} calls in one turn")
            break
    return calls


def _call_at(text: str, position: int) -> tuple[ToolCall, int]:
    """The call behind an opening tag, and where to go on."""
    body = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    end = end_of_object(text, body)
    after = _SPACE.match(text, end).end() if end else 0  # type: ignore[union-attr]
    if end and text.startswith(CLOSE, after):
        return _read_call(text[body:end]), after + len(CLOSE)
    close, following = text.find(CLOSE, body), text.find(OPEN, body)
    stop = min(p for p in (close, following, len(text)) if p >= 0)
    why = "no closing </tool_call>" if close < 0 else "not one JSON object"
    return ToolCall("", text[body:stop], error=why), stop


def _read_call(body: str) -> ToolCall:
    value, error = read_object(body)
    if error:
        return ToolCall("", body, error=error)
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall("", body, error='"name" must be a string')
    if not isinstance(arguments, dict):
        return ToolCall(name, body, error='"arguments" must be a JSON object')
    if unknown := sorted(value.keys() - {"name", "arguments", "id"}):
        return ToolCall(name, body, error=f"unknown keys {unknown}")
    return ToolCall(name, arguments)
