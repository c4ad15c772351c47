"""Strict parsers of tool calls, in linear time.

A policy in training writes every kind of invalid call. No such call may crash a parser, take
quadratic time, or get lost: an invalid call becomes a `ToolCall` with an error, which the model
reads and the metrics count.

`FORMATS` has the formats by name; `detect.py` finds the format that a chat template teaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.formats.gemma import parse_functiongemma, parse_gemma
from agentrl.chat.formats.gpt_oss import parse_gpt_oss
from agentrl.chat.formats.llama_json import parse_llama_json
from agentrl.chat.formats.marked_json import (
    parse_apertus,
    parse_cohere_command,
    parse_gigachat3,
    parse_granite,
    parse_hermes,
    parse_hunyuan_a13b,
    parse_internlm,
    parse_minimax_m1,
    parse_phi4_mini,
)
from agentrl.chat.formats.mistral import parse_mistral
from agentrl.chat.formats.pythonic import parse_lfm2, parse_llama_pythonic
from agentrl.chat.formats.react import REACT_STOP as REACT_STOP
from agentrl.chat.formats.react import parse_react as parse_react
from agentrl.chat.formats.sections import parse_deepseek, parse_kimi_k2
from agentrl.chat.formats.tagged import (
    parse_deepseek_v4,
    parse_deepseek_v32,
    parse_glm,
    parse_hunyuan,
    parse_minimax_m2,
    parse_muse,
    parse_qwen3_coder,
    parse_seed_oss,
)
from agentrl.chat.formats.typed import cast_arguments
from agentrl.trajectory import ToolCall

Parser = Callable[[str], list[ToolCall]]
"""Returns the calls in the text of one assistant turn (without its closing token). Never raises."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format in which models write calls.

    Args:
        parse: the parser.
        marks: a template that does not render calls teaches the format if it contains one of these
            texts, or all texts of a tuple.
        is_text: whether values may be written as text, so that the tool's schema decides their
            type.
    """

    parse: Parser
    marks: Sequence[str | tuple[str, ...]]
    is_text: bool = False

    def __call__(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn, with values as they are written."""
        return self.parse(text)

    def is_in(self, source: str) -> bool:
        """Return whether a template contains a mark of the format."""
        marks = ((m,) if isinstance(m, str) else m for m in self.marks)
        return any(all(text in source for text in mark) for mark in marks)


FORMATS: dict[str, Format] = {
    "kimi_k2": Format(parse_kimi_k2, ["<|tool_calls_section_begin|>"]),
    "minimax_m2": Format(parse_minimax_m2, ["<minimax:tool_call>"], is_text=True),
    "deepseek_v32": Format(parse_deepseek_v32, ["｜DSML｜function_calls"]),
    "deepseek_v4": Format(parse_deepseek_v4, ["｜DSML｜tool_calls"]),
    "muse": Format(parse_muse, ["<atem:function_calls>"], is_text=True),
    "seed_oss": Format(parse_seed_oss, ["<seed:tool_call>"], is_text=True),
    "hunyuan": Format(parse_hunyuan, ["<tool_sep"], is_text=True),
    "cohere_command": Format(parse_cohere_command, ["<|START_ACTION|>"]),
    "apertus": Format(parse_apertus, ["<|tools_prefix|>"]),
    "lfm2": Format(parse_lfm2, ["<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["]),
    "internlm": Format(parse_internlm, ["<|action_start|>"]),
    "gigachat3": Format(parse_gigachat3, ["<|function_call|>", "function call<|role_sep|>"]),
    "qwen3_coder": Format(parse_qwen3_coder, ["<function="], is_text=True),
    "glm": Format(parse_glm, ["<arg_key>"], is_text=True),
    "mistral": Format(parse_mistral, ["[TOOL_CALLS]"]),
    "deepseek": Format(parse_deepseek, ["<｜tool▁calls▁begin｜>"]),
    "gpt_oss": Format(parse_gpt_oss, [("<|channel|>", "<|call|>")]),
    "functiongemma": Format(parse_functiongemma, ["<start_function_call>"], is_text=True),
    "gemma": Format(parse_gemma, ["<|tool_call>"]),
    "llama_pythonic": Format(parse_llama_pythonic, ["[func_name1("], is_text=True),
    "llama_json": Format(parse_llama_json, ["<|python_tag|>", "ipython"]),
    "phi4_mini": Format(parse_phi4_mini, [("<|tool|>", "<|/tool|>"), "<|/tool_call|>"]),
    "granite": Format(parse_granite, ["<|tool_call|>", "<function_call>"]),
    "minimax_m1": Format(parse_minimax_m1, [("<tool_calls>", "<tool-name>")]),
    "hunyuan_a13b": Format(parse_hunyuan_a13b, ["<tool_calls>"]),
    "hermes": Format(parse_hermes, ["<tool_call>", "<tool_response>"]),
}
"""The formats by name, those with the rarest marks first."""


def parser_of(name: str) -> Callable[[str, Sequence[Mapping[str, Any]]], list[ToolCall]]:
    """Return the parser of a format, which takes the text of a turn and the schemas of its tools.

    Args:
        name: a key of `FORMATS`.
    """
    parse = FORMATS[name].parse
    if FORMATS[name].is_text:
        return lambda text, schemas: cast_arguments(parse(text), schemas)
    return lambda text, schemas: parse(text)
