"""The gate in front of tools: what a call asks for, as JSON that everybody reads in the same way.

Calls come from our parsers, from an engine's, from a loop's own. Whatever wrote them, no tool is
given NaN, an infinity, half a character, an integer beyond 64 bits or a nest of a thousand lists:
what breaks HTTP, a tokenizer or a database later is refused here, and the model told why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from agentrl.tools.results import clean, failure, storable
from agentrl.tools.schema import shorten
from agentrl.trajectory import Message, ToolCall, ToolResult

MAX_ARGUMENT_BYTES = 262_144
MAX_DEPTH = 64


def encode_arguments(call: ToolCall) -> bytes | ToolResult:
    """A call's arguments as JSON bytes, or the result that tells the model they are not JSON.

    All arguments pass through JSON, also those of a call in this process: so that a tool is given
    the same whether it is called here or over HTTP, and may keep what it is given.
    """
    if call.error or not isinstance(call.arguments, dict):
        problem = " ".join(call.error.split()) or "the arguments are not a JSON object"
        return failure(
            "bad_call",
            f"{shorten(problem, 160)}. Expected: a tool's name, and its arguments as one JSON"
            " object.",
        )
    if not isinstance(call.name, str) or not (call.name.isascii() or storable(call.name)):
        return failure("bad_call", "the tool's name is no text")
    try:
        encoded = orjson.dumps(call.arguments, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError as e:
        return failure("bad_call", f"the arguments are not JSON: {e}")
    if len(encoded) > MAX_ARGUMENT_BYTES:
        return failure(
            "bad_call",
            f"the arguments are too long: {len(encoded)} bytes, at most {MAX_ARGUMENT_BYTES}",
        )
    # What is written as null may have been NaN; without either there is nothing to look for.
    if b"null" in encoded or is_deep(encoded):
        problem = _fault(call.arguments)
        if problem:
            return failure("bad_call", f"the arguments are not JSON: {problem}")
    return encoded


def is_deep(encoded: bytes) -> bool:
    """Whether JSON may be nested deeper than `MAX_DEPTH`; where not, it certainly is not."""
    return encoded.count(b"{") + encoded.count(b"[") > MAX_DEPTH


def _fault(arguments: dict[str, Any]) -> str:
    """What is wrong with arguments that can be encoded, or nothing."""
    values: list[Any] = [arguments]
    depth = 0
    while values:
        inner: list[Any] = []
        for value in values:
            if isinstance(value, float):
                if not math.isfinite(value):
                    return f"{value} is no number of JSON's"
            elif isinstance(value, dict | list | tuple):
                if depth == MAX_DEPTH:
                    return f"nested deeper than {MAX_DEPTH}"
                inner.extend(value.values() if isinstance(value, dict) else value)
        values, depth = inner, depth + 1
    return ""


def encode_messages(messages: Sequence[Message]) -> bytes:
    """A conversation as JSON bytes, also where a model's calls in it are not JSON."""
    try:
        return orjson.dumps(messages)
    except TypeError:
        return orjson.dumps([_sendable(m) for m in messages])


def _sendable(message: Message) -> Message:
    calls = tuple(
        c
        if isinstance(encode_arguments(c), bytes)
        else ToolCall(clean(str(c.name)), clean(str(c.arguments)), clean(c.error), clean(c.id))
        for c in message.tool_calls
    )
    return replace(message, content=clean(message.content), tool_calls=calls)
