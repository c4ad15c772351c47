"""The families' chat templates, and texts that look like their control tokens."""

from __future__ import annotations

import random
import unicodedata
from functools import cache

from support.families import FAMILIES, family_tokenizer
from tokenizers import normalizers

from agentrl.chat.template import ChatTemplate

CACHED = {"byte_level", "tiktoken"}


ALIKE = {
    "<": "＜‹<\u0338", "|": "｜∣ǀ│", ">": "＞›", "_": "＿▁ ", "s": "ſѕｓ", "K": "\u212aＫ",
    "e": "ее\u0301", "▁": "_ ", "[": "［", "]": "］", "/": "／⁄",
}  # fmt: skip


@cache
def chat(name: str, untrusted: bool = False) -> ChatTemplate:
    tokenizer = family_tokenizer(name)
    vocab = tokenizer.get_vocab()
    ends = [vocab[token] for token in FAMILIES[name].end_ids]
    return ChatTemplate(tokenizer, ends, untrusted=untrusted)


def near_control_tokens(token: str, rng: random.Random) -> list[str]:
    """Return a control token and texts that are almost that token."""
    at = rng.randrange(1, len(token))
    letter = rng.choice(token)
    other = rng.choice(ALIKE.get(letter, letter.swapcase()))
    return [
        token,
        token * 2,
        token[:at],
        token[at:],
        f" {token}",
        f"{token} \n",
        token[:at] + rng.choice([" ", "\n", "\u200b", "\ufeff", "\u0301", "\x00"]) + token[at:],
        token.replace(letter, other),
        unicodedata.normalize("NFD", token),
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token),  # NFKC: the token
        token[:at] + token + token[at:],
    ]


def as_decoded(name: str, text: str) -> str:
    """Return what the tokenizer decodes after it encoded a text: the normalized text.

    Lone surrogates have no bytes. SentencePiece writes spaces as U+2581 and decodes each U+2581 as
    a space.
    """
    text = text.encode("utf-8", "replace").decode()
    if FAMILIES[name].nfc:
        text = normalizers.NFC().normalize_str(text)
    return text if FAMILIES[name].kind in CACHED else text.replace("▁", " ")


def control_ids(template: ChatTemplate, ids) -> list[int]:
    return [i for i in ids if i in template.encoder.control_ids]
