"""What a prompt holds of control tokens, by family."""

from __future__ import annotations

from support.families import FAMILIES, control_tokens, family_tokenizer
from support.family_chats import as_decoded


def control_of(name: str, ids) -> list[int]:
    """The control tokens among ids; Gemma's runs of white space are none."""
    tokens = [t for t in control_tokens(name) if t.strip("\n▁")]
    control = {family_tokenizer(name).convert_tokens_to_ids(token) for token in tokens}
    return [i for i in ids if i in control]


def squeezed(name: str, text: str) -> str:
    """As decoded; Phi's tokens drop the white space behind them."""
    text = as_decoded(name, text)
    return "".join(text.split()) if FAMILIES[name].rstrip else text
