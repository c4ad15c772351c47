"""Tokenizers of model families: real control tokens and chat templates, small vocabularies.

The vocabularies are made here. The templates are TRL's package data or files in
`fixtures/templates/`; nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.family_table import FAMILIES, Family
from support.vocabularies import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "FAMILIES",
    "TOOLS",
    "Family",
    "answering",
    "calling",
    "control_tokens",
    "families_of_all_templates",
    "families_of_all_vocabularies",
    "family_names",
    "family_tokenizer",
    "templates_see_none",
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "What to evaluate."}
                },
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "k": {"type": "integer", "description": "How many results."},
                },
                "required": ["query", "k"],
            },
        },
    },
]


def family_names() -> list[str]:
    return list(FAMILIES)


OF_EACH_VOCABULARY = (
    "qwen3",
    "llama3_1",
    "glm4moe",
    "gemma4",
    "gemma3_unigram",
    "deepseekv3",
    "phi3",
    "bpe_owning",
    "mistral_v3",
)
"""A family of each kind of vocabulary and of control tokens, with and without a normalizer."""


ALMOST_THE_SAME_TEMPLATE = (
    "qwen3_5_nothink",
    "llama3",
    "llama3_2",
    "gemma3_unigram",
    "phi3_5",
    "mistral_v3_legacy",
)
"""Each has the roles, turns and tool calls of another family."""


def families_of_all_templates() -> list[Any]:
    """Return the names as parameters. Families with almost the template of another are `slow`."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in ALMOST_THE_SAME_TEMPLATE else name
        for name in FAMILIES
    ]


def families_of_all_vocabularies() -> list[Any]:
    """Return the names as parameters. Families with the vocabulary of another one are `slow`."""
    return [
        name if name in OF_EACH_VOCABULARY else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ]


def control_tokens(name: str) -> tuple[str, ...]:
    """Return all added tokens of a family, special or not."""
    return FAMILIES[name].special + FAMILIES[name].tags


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the family's tokenizer. All tests of a process share it: change only copies."""
    from tokenizers import AddedToken, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    tokenizer = vocabulary(
        family.kind, control_tokens(name), family.split, family.prefix, family.owned
    )
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    for tokens, special in ((family.special, True), (family.tags, False)):
        for token in tokens:
            rstrip = token in family.rstrip
            flags = AddedToken(token, special=special, normalized=False, rstrip=rstrip)
            tokenizer.add_special_tokens([flags]) if special else tokenizer.add_tokens([flags])
    if family.adds_bos:
        assert family.bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[family.bos, "$A"],
            pair=[family.bos, "$A", family.bos, "$B"],
            special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        clean_up_tokenization_spaces=False,
        chat_template=_template(family.template),
    )


def calling(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return an assistant message with tool calls, in the form that the family's template takes.

    The ids of the calls are `call00000`, `call00001` and so on: Mistral wants 9 letters or digits.
    """
    family = FAMILIES[name]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {
                    "name": tool,
                    "arguments": json.dumps(args) if family.arguments == "text" else args,
                },
            }
            for i, (tool, args) in enumerate(calls)
        ],
    }


def answering(text: str, call: int = 0, tool: str = "calculator") -> dict[str, Any]:
    """Return the tool message that answers call number `call` of the message before it."""
    return {"role": "tool", "name": tool, "tool_call_id": f"call{call:05}", "content": text}


def _template(file: str) -> str:
    import trl

    from agentrl.testing.tokenizer import CHAT_TEMPLATE

    if file == "chatml.jinja":
        return CHAT_TEMPLATE
    here = Path(__file__).parents[1] / "fixtures" / "templates" / file
    package = Path(next(iter(trl.__path__))) / "chat_templates" / file
    return (here if here.exists() else package).read_text(encoding="utf-8")


def templates_see_none() -> bool:
    """Return whether a message without content has the key: in older versions of transformers."""
    tokenizer = copy.copy(family_tokenizer("chatml"))
    tokenizer.chat_template = "{{ 'content' in messages[0] }}"
    message = {"role": "assistant", "content": None}
    return tokenizer.apply_chat_template([message], tokenize=False) == "True"
