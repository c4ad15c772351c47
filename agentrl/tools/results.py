"""What a tool returned, or how it failed, as the text the model reads.

Text from here can be encoded, stored and sent: no lone surrogates, no NUL, no more than
`MAX_CHARACTERS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import orjson
from pydantic import BaseModel

from agentrl.registry import did_you_mean
from agentrl.tools.schema import shorten
from agentrl.trajectory import ToolCall, ToolResult

MAX_CHARACTERS = 262_144
"""Far more than a model is shown; keeps a tool's flood out of memory and off the wire."""
MAX_ARGUMENT_BYTES = 262_144
MAX_MESSAGE = 300

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def success(value: Any) -> ToolResult:
    """The result of a call that returned `value`.

    Text is kept; None is the empty text; bytes are decoded; numbers are written as Python writes
    them; everything else is JSON, and what JSON cannot hold is written by `str`. A `ToolResult` is
    kept, its text cleaned.

    Raises:
        TypeError: a `ToolResult` whose content is not text, or whose reward is not a finite number.
    """
    if isinstance(value, ToolResult):
        if not isinstance(value.content, str):
            raise TypeError(f"ToolResult.content must be text, got {value.content!r}")
        if value.reward is not None and not is_finite(value.reward):
            raise TypeError(f"ToolResult.reward must be a finite number, got {value.reward!r}")
        error = "" if value.ok else value.error or "tool_error"
        return replace(value, content=clean(value.content), error=error)
    return ToolResult(clean(_text(value)))


def failure(error: str, message: str) -> ToolResult:
    """The result of a call that failed, as the model reads it.

    Args:
        error: the class of failure, see `ToolResult.error`.
        message: what is wrong and what was expected; cut to 300 characters.
    """
    return ToolResult(
        shorten(clean(f"Error ({error}): {message}"), MAX_MESSAGE), False, None, error
    )


def unknown_tool(name: str, offered: Collection[str]) -> ToolResult:
    """The result of a call to what is not offered."""
    listed = ", ".join(offered) or "none"
    return failure(
        "unknown_tool", f"no tool {name!r}.{did_you_mean(name, offered)} Tools: {listed}"
    )


def encode_arguments(call: ToolCall) -> bytes | ToolResult:
    """A call's arguments as JSON bytes, or the result that tells the model they are not JSON.

    All arguments pass through JSON, also those of a call in this process: so that a tool is given
    the same whether it is called here or over HTTP, and may keep what it is given.
    """
    if call.error or not isinstance(call.arguments, dict):
        problem = call.error or "the arguments are not a JSON object"
        return failure(
            "bad_call",
            f"{shorten(problem, 160)}. Expected: a tool's name, and its arguments as one JSON"
            " object.",
        )
    try:
        encoded = orjson.dumps(call.arguments)
    except TypeError as e:
        return failure("bad_call", f"the arguments are not JSON: {e}")
    if len(encoded) > MAX_ARGUMENT_BYTES:
        return failure(
            "bad_call",
            f"the arguments are too long: {len(encoded)} bytes, at most {MAX_ARGUMENT_BYTES}",
        )
    return encoded


def clean(text: str) -> str:
    """The text with unstorable characters replaced, and its middle left out where it is a flood."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
    return text if _storable(text) else _UNSTORABLE.sub("\ufffd", text)


def _storable(text: str) -> bool:
    """Whether `_UNSTORABLE` finds nothing, a hundred times sooner."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def is_finite(value: Any) -> bool:
    """Whether it is a number that may be a reward."""
    return isinstance(value, int | float) and math.isfinite(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    try:
        return orjson.dumps(value, default=_jsonable, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, a loop
        return str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
