"""Ids to text where each token is a row of bytes: a table in place of the tokenizer's decoder.

A turn is decoded once to be read, and the tokenizer takes as long for that as for all else that a
turn costs. Checked against the tokenizer when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from agentrl.chat.words import LETTERS

_BYTES = {letter: bytes([b]) for b, letter in LETTERS.items()}


class Pieces(dict[int, bytes]):
    """The bytes that each token of a byte-level vocabulary stands for."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_of = tokenizer.id_to_token

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: dict[str, Any]) -> Pieces | None:
        """The table of a tokenizer whose state this is, or None where it decodes otherwise."""
        if (state["decoder"] or {}).get("type") != "ByteLevel":
            return None
        pieces = cls(tokenizer)
        size = tokenizer.get_vocab_size()
        rows = [list(range(i, min(i + 64, size))) for i in range(0, size, max(64, size // 64))]
        if any(
            pieces.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False) for ids in rows
        ):
            return None
        return pieces

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no characters become U+FFFD."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")

    def __missing__(self, token: int) -> bytes:
        text = self._token_of(token)
        if text is None:
            piece = b""
        elif all(c in _BYTES for c in text):
            piece = b"".join(_BYTES[c] for c in text)
        else:  # an added token that is no row of bytes
            piece = text.encode()
        self[token] = piece
        return piece
