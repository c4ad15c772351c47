"""Makes a tokenizer for any chat template. Its control tokens are those in the template's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import trl
from support.vocabularies import QWEN2, vocabulary
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

TRL = Path(next(iter(trl.__path__))) / "chat_templates"

_TAG = (
    "tool_call|tool_calls|tool_response|think|thinking|tools|arg_key|arg_value|function_call"
    "|(?:start|end)_function_(?:call|declaration|response)|start_of_turn|end_of_turn|turn|escape|s|eos|bos"
)
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,60}｜>|\[/?[A-Z_]{3,30}\]|<\|?[A-Z_]{4,40}\|?>"
    rf"|</?(?:{_TAG})>|<\|[a-z_\"]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>"
)
_TEXT = re.compile(r"</?(?:tool_call|tool_calls|tool_response|think|thinking|tools|arg_\w+)>")
# What ends a turn, and what begins a conversation, the surest first.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|return|>", "<|end|>", "<｜end▁of▁sentence｜>", "</s>"),
    *("<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<turn|>", "<|endoftext|>", "<|user|>"),
    *("<|end_of_text|>", "<|message_sep|>"),
)
_BEGINS = ("<|begin_of_text|>", "<s>", "<｜begin▁of▁sentence｜>", "<bos>", "<|startoftext|>")


def tokenizer_of_trl(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one of TRL's templates."""
    return tokenizer_for((TRL / f"{name}.jinja").read_text("utf-8"))


def templates_of_trl() -> list[str]:
    """Return the names of the templates that models ship with, without TRL's training versions."""
    return sorted(p.stem for p in TRL.glob("*.jinja") if not p.stem.endswith("_training"))


def tokenizer_for(
    source: str, further: Sequence[str] = (), bos: str = "", eos: str = ""
) -> PreTrainedTokenizerFast:
    """Return a small byte-level tokenizer with the control tokens that a template names.

    Args:
        source: the template.
        further: control tokens whose form does not show that they are such.
        bos: its token for the begin of a text; "" if it is one that the template names.
        eos: its token for the end of a text, likewise.
    """
    tokens = list(dict.fromkeys([*_CONTROL.findall(source), *further]))
    eos = eos or next((t for t in _ENDS if t in tokens), "</s>")
    bos = bos or next((t for t in _BEGINS if t in tokens), "<s>")
    tokens += [t for t in (eos, bos) if t not in tokens]
    tokenizer = vocabulary("byte_level", tuple(tokens), QWEN2, "none", False)
    for token in tokens:
        if _TEXT.fullmatch(token):
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        else:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        clean_up_tokenization_spaces=False,
        chat_template=source,
    )
