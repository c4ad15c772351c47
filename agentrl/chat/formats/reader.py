"""How a run reads the policy's tool calls: `rollout.tool_format`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.formats import FORMATS, detect
from agentrl.chat.formats.adapters import ForeignParser
from agentrl.chat.formats.typed import typed
from agentrl.errors import UserError
from agentrl.registry import did_you_mean
from agentrl.trajectory import ToolCall

Calls = list[ToolCall]
Reader = Callable[[str, Sequence[Mapping[str, Any]]], Calls | Awaitable[Calls]]
"""The text of one turn and the tools it was shown, to its calls."""

_UNTYPED = ("glm", "qwen3_coder")
"""Formats in which every value is text: the tool's schema says what it means."""


def open_reader(name: str, tokenizer: Any) -> Reader:
    """The reader of a format.

    Args:
        name: "auto" for what the chat template teaches, a key of `FORMATS`, `sglang:NAME` or `hf`.
        tokenizer: the policy's.

    Raises:
        UserError: a parser that is not installed or not known.
    """
    if name == "auto":
        name = detect(str(tokenizer.chat_template))
    if name == "hf" or name.startswith("sglang:"):
        return ForeignParser(name, tokenizer)
    if name not in FORMATS:
        raise UserError(
            f"no tool format {name!r}.{did_you_mean(name, FORMATS)} Formats: auto,"
            f" {', '.join(sorted(FORMATS))}, sglang:NAME, hf"
        )
    parse = FORMATS[name]
    if name in _UNTYPED:
        return lambda text, schemas: typed(parse(text), schemas)
    return lambda text, schemas: parse(text)
