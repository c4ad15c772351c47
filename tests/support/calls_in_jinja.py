"""ChatML templates whose tool calls are written by any piece of Jinja."""

from __future__ import annotations

import copy

from support.families import family_tokenizer

from agentrl.chat import ChatTemplate


def template_with(calls: str) -> ChatTemplate:
    """Return ChatML with the Jinja `calls` after the content of each message."""
    tokenizer = copy.copy(family_tokenizer("chatml"))
    message = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    source = str(tokenizer.chat_template)
    assert message in source
    start = "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    tokenizer.chat_template = source.replace(message, start + calls + "{{- '<|im_end|>\\n' }}")
    return ChatTemplate(tokenizer)


def with_calls(call: str) -> ChatTemplate:
    """Return ChatML that writes each tool call by the Jinja `call`."""
    return template_with("{%- for call in message.tool_calls or [] %}" + call + "{%- endfor %}")


PYTHONIC = (
    "[{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    """{{ key }}="{{ value }}"{{ ", " if not loop.last }}{% endfor %})]"""
)
