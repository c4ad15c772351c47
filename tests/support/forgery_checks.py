"""Helpers for the tests that no text can forge a control token, by model family."""

from __future__ import annotations

from support.families import FAMILIES, control_tokens, family_tokenizer
from support.family_chats import as_decoded


def family_control_ids(name: str, ids) -> list[int]:
    """Return the control tokens among ids. Gemma's tokens of white space do not count."""
    tokens = [t for t in control_tokens(name) if t.strip("\n▁")]
    control = {family_tokenizer(name).convert_tokens_to_ids(token) for token in tokens}
    return [i for i in ids if i in control]


def comparable_text(name: str, text: str) -> str:
    """Return the text after encoding and decoding, to compare it with a decoded row.

    It has no white space if the family's tokens drop white space after them, as Phi's do.
    """
    text = as_decoded(name, text)
    return "".join(text.split()) if FAMILIES[name].rstrip else text
