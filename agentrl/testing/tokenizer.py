"""A tokenizer for tests: one token for each byte, Qwen's control tokens, nothing to download.

The ids of a text are its bytes, so that exact token streams can be written by hand:
`list(b"12") + [258]` is `12<|im_end|>`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special tokens: they are part of the text of a turn."""

# The turns of a conversation as in Qwen2.5's template, with tool results in tags.
TURNS = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and asked) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The start of the template: the system message, and the tools in place of `TOOLS`.
START = """\
{%- set asked = messages[0].role == 'system' %}
{%- if asked or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if asked %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
TOOLS
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
"""

# Tools in the Hermes format, as in Qwen2.5's template, but without a default system message.
HERMES = """\
        {{- '\\n\\n' if asked }}
        {{- '# Tools\\n\\nYou may call functions. Their signatures:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nTo call one, answer with a JSON object within these tags:\\n' }}
        {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n' }}
        {{- '</tool_call>' }}"""


def chatml(tools: str) -> str:
    """Return a ChatML template that shows tools with this Jinja text."""
    return START.replace("TOOLS", tools) + TURNS


CHAT_TEMPLATE = chatml(HERMES)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are 256 bytes, then `SPECIAL` (256-258) and `TAGS` (259-262).

    `<|im_end|>` is the EOS token, `<|endoftext|>` the padding token. All callers in a process share
    one object. To change it, copy it first.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    from agentrl.chat.encoding import BYTE_LETTERS

    tokenizer = Tokenizer(BPE({letter: byte for byte, letter in BYTE_LETTERS.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer, CHAT_TEMPLATE)


def fast_tokenizer(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    """Add `SPECIAL` and `TAGS` to a byte-level tokenizer, and wrap it for transformers."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
