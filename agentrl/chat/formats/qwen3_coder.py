"""Qwen3-Coder, Qwen3.5 and later: XML-like tags around values that are plain text."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import is_sound
from agentrl.chat.formats.tagged import read_values
from agentrl.chat.formats.thinking import broken_call, read_calls
from agentrl.trajectory import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, VALUE_END = "<function=", "</function>", "</parameter>"

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_VALUE_END = re.compile("</parameter>|<parameter=|<function=|<tool_call>")
_END = re.compile(r"\s*</function>\s*</tool_call>")


def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in Qwen3-Coder's format; all values are strings (`typed`).

        <tool_call>
        <function=calculator>
        <parameter=expression>
        3*4
        </parameter>
        </function>
        </tool_call>

    Nothing escapes a value, so it ends at the first `</parameter>`. A value that holds one of the
    format's opening tags is an error: more likely a closing tag is missing, and what comes next
    would be swallowed. Other tags within a value are text. One line break at either end is the
    format's, more are the value's.
    """
    return read_calls(text, (OPEN, FUNCTION), CLOSE, _call_at)


def _call_at(text: str, start: int) -> tuple[list[ToolCall], int]:
    if text.startswith(FUNCTION, start):
        why = f"no {OPEN} before {FUNCTION}NAME>"
        return broken_call(text, start, (OPEN,), FUNCTION_END, why)
    body = start + len(OPEN)
    head = _FUNCTION.match(text, body)
    if not head:
        return broken_call(text, body, (OPEN,), CLOSE, f"no {FUNCTION}NAME> in {OPEN}")
    name = head[1]
    arguments, why, position = read_values(text, head.end(), _PARAMETER, _VALUE_END, VALUE_END)
    if not is_sound(name):
        why = "lone surrogate"
    if not why and (end := _END.match(text, position)):
        lines = {k: v.removeprefix("\n").removesuffix("\n") for k, v in arguments.items()}
        return [ToolCall(name, lines)], end.end()
    why = why or f"not <parameter=KEY> VALUE </parameter>, then {FUNCTION_END} {CLOSE}"
    return broken_call(text, body, (OPEN,), CLOSE, why, name, read=position)
