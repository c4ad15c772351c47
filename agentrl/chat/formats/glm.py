"""GLM 4.5 and later: a name, then keys and values in tags of their own."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import is_sound
from agentrl.chat.formats.tagged import read_values
from agentrl.chat.formats.thinking import broken_call, read_calls
from agentrl.trajectory import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>")
_VALUE_END = re.compile("</arg_value>|<arg_key>|<arg_value>|<tool_call>")
_END = re.compile(r"\s*</tool_call>")


def parse_glm(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in GLM's format; all values are strings (`typed`).

        <tool_call>calculator
        <arg_key>expression</arg_key>
        <arg_value>3*4</arg_value>
        </tool_call>

    Nothing escapes a value, so it ends at the first `</arg_value>`. A value that holds one of the
    format's opening tags is an error: more likely a closing tag is missing, and what comes next
    would be swallowed. Other tags within a value are text, and so is all space.
    """
    return read_calls(text, (OPEN,), CLOSE, _call_at)


def _call_at(text: str, start: int) -> tuple[list[ToolCall], int]:
    body = start + len(OPEN)
    head = _NAME.match(text, body)
    if not head:
        return broken_call(text, body, (OPEN,), CLOSE, f"no name behind {OPEN}")
    name = head[1]
    arguments, why, position = read_values(text, head.end(), _KEY, _VALUE_END, "</arg_value>")
    if not is_sound(name):
        why = "lone surrogate"
    if not why and (end := _END.match(text, position)):
        return [ToolCall(name, arguments)], end.end()
    why = why or f"not <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>, then {CLOSE}"
    return broken_call(text, body, (OPEN,), CLOSE, why, name, read=position)
