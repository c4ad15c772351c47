"""gpt-oss: messages in channels; a call is a message to a function (OpenAI's harmony format)."""

from __future__ import annotations

import re

from agentrl.chat.formats.scan import MAX_CALLS, limit_calls
from agentrl.chat.formats.strict_json import (
    end_of_broken_json,
    end_of_object,
    invalid_call,
    read_arguments,
    skip_space,
    with_span,
)
from agentrl.trajectory import ToolCall

MESSAGE = "<|message|>"

_CONTROL = re.compile(r"<\|(?:start|message|end|call|return)\|>")
_END = re.compile(r"<\|(?:start|end|call|return)\|>")
_END_OF_CALL = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|\Z)")
_NEVER = re.compile(r"(?!)")  # a thought is a separate message
# A message to any other recipient than the assistant is a call, or an invalid call.
_ADDRESSED = re.compile(r"\bto=(?!assistant\b)")
_HEADER = re.compile(
    r"assistant(?: to=(?P<early>[^\s<]+))?<\|channel\|>(?P<channel>\w+)(?: to=(?P<late>[^\s<]+))?"
    r"(?:\s*<\|constrain\|>\s*(?P<constrained>\w+)| (?P<type>\w+))?"
)
_FUNCTION = re.compile(r"(?!functions\.?\Z)(?:functions\.)?([\w.\-]+)")


def parse_gpt_oss(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn of gpt-oss, which continues `<|start|>assistant`.

        <|channel|>analysis<|message|>A product.<|end|><|start|>assistant<|channel|>commentary
         to=functions.calculator <|constrain|>json<|message|>{"expression": "3*4"}

    The recipient may also be before the channel, and without `functions.`. A message in the
    analysis channel is a thought. A message to a function in another channel than commentary is an
    error. A tag within a JSON string of a call is text.
    """
    calls: list[ToolCall] = []
    position, role = 0, "assistant"  # the role of the first message is in the prompt
    while position < len(text):
        control = _CONTROL.search(text, position)
        stop, after = control.span() if control else (len(text), len(text))
        header, role = role + text[position:stop], ""
        has_message = control is not None and control[0] == MESSAGE
        if "to=" in header and _ADDRESSED.search(header):
            if has_message:
                call, after = _call(text, header, after)
            else:
                call = invalid_call(header, f"missing {MESSAGE} after the recipient")
            calls.append(with_span(call, position, after))
            if len(calls) > MAX_CALLS:
                break
        elif has_message:
            after = _next_message(text, after)
        position = after
    return limit_calls(calls)


def _call(text: str, header: str, start: int) -> tuple[ToolCall, int]:
    """Return the call whose arguments begin at `start`, and the start of the next header."""
    name, error = _recipient(header)
    body = skip_space(text, start)
    end = end_of_object(text, body)
    end_of_call = _END_OF_CALL.match(text, end) if end else None
    if not end_of_call:
        after = _next_message(text, end or end_of_broken_json(text, body, _END, _NEVER))
        error = error or "the message must be one complete JSON object"
        return invalid_call(text[start:after], error, name), after
    call = read_arguments(name, text[body:end])
    return invalid_call(text[body:end], error, name) if error else call, end_of_call.end()


def _recipient(header: str) -> tuple[str, str]:
    """Return the function that a header names, and the error of the header or ""."""
    parts = _HEADER.fullmatch(header.rstrip())
    if not parts or (parts["early"] and parts["late"]):
        return "", f"invalid header of a call: {header[:100]!r}"
    function = _FUNCTION.fullmatch(parts["early"] or parts["late"])
    if not function:
        return "", f"invalid function name: {(parts['early'] or parts['late'])[:80]!r}"
    if parts["channel"] != "commentary":
        return function[1], "a call must be in the commentary channel"
    if (parts["constrained"] or parts["type"] or "json") != "json":
        return function[1], "the arguments of a call must be json"
    return function[1], ""


def _next_message(text: str, position: int) -> int:
    end = _END.search(text, position)
    return end.end() if end else len(text)
