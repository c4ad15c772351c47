"""Hermes and Qwen: a JSON object within `<tool_call>` tags."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import end_of_object, read_call
from agentrl.chat.formats.thinking import broken_call, read_calls
from agentrl.trajectory import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"\s*")


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in the Hermes / Qwen format.

        <tool_call>
        {"name": "calculator", "arguments": {"expression": "3*4"}}
        </tool_call>

    Calls inside `<think>...</think>` are thoughts, not calls. A tag within a call's JSON string is
    text. A call cut off at the end of the turn is an error, never executed.
    """
    return read_calls(text, (OPEN,), CLOSE, _call_at)


def _call_at(text: str, start: int) -> tuple[list[ToolCall], int]:
    body = _SPACE.match(text, start + len(OPEN)).end()  # type: ignore[union-attr]
    end = end_of_object(text, body)
    after = _SPACE.match(text, end).end() if end else 0  # type: ignore[union-attr]
    if end and text.startswith(CLOSE, after):
        return [read_call(text[body:end], other_keys=("id",))], after + len(CLOSE)
    return broken_call(text, body, (OPEN,), CLOSE, "not one JSON object")
