"""Chat templates that write tool calls in a given way."""

from __future__ import annotations

import copy

from support.families import family_tokenizer

from agentrl.chat import ChatTemplate


def with_calls(written: str) -> ChatTemplate:
    """A template that shows tools, and writes calls as this."""
    tokenizer = copy.copy(family_tokenizer("chatml"))
    said = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    source = str(tokenizer.chat_template)
    assert said in source
    calls = (
        "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
        "{%- for call in message.tool_calls or [] %}" + written + "{%- endfor %}"
        "{{- '<|im_end|>\\n' }}"
    )
    tokenizer.chat_template = source.replace(said, calls)
    return ChatTemplate(tokenizer)


PYTHONIC = (
    "[{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    """{{ key }}="{{ value }}"{{ ", " if not loop.last }}{% endfor %})]"""
)
