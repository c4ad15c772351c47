"""Chat templates that write tool calls in a given way."""

from __future__ import annotations

import copy

from support.families import family_tokenizer

from agentrl.chat import ChatTemplate


def template_with(written: str) -> ChatTemplate:
    """ChatML that writes calls as this Jinja text does."""
    tokenizer = copy.copy(family_tokenizer("chatml"))
    said = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    source = str(tokenizer.chat_template)
    assert said in source
    turn = "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    tokenizer.chat_template = source.replace(said, turn + written + "{{- '<|im_end|>\\n' }}")
    return ChatTemplate(tokenizer)


def with_calls(written: str) -> ChatTemplate:
    """ChatML that shows tools, and writes each call as this Jinja text does."""
    return template_with("{%- for call in message.tool_calls or [] %}" + written + "{%- endfor %}")


PYTHONIC = (
    "[{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    """{{ key }}="{{ value }}"{{ ", " if not loop.last }}{% endfor %})]"""
)
