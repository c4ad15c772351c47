"""A cache in front of byte-level BPE: a text's ids are those of its words, one after another.

Such a tokenizer first cuts a text into words by regular expressions, and then merges within words
only. Libraries disagree about what is a letter where Unicode is still growing; text with such
characters is left to the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from functools import cache, partial
from itertools import chain
from typing import Any
from unicodedata import category, is_normalized, ucd_3_2_0

import regex
from tokenizers import Tokenizer

MAX_WORDS = 1 << 17
"""Words in the cache, some 20 MB; when it is full, it is emptied."""
MAX_WORD = 48
"""Longer words (base64, minified code) are not kept."""

Cut = Callable[[str], list[str]]

# GPT-2's rule, which a tokenizer with a plain `ByteLevel` follows.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _ForgedError(Exception):
    """A word has become what no text may become."""


class Words(dict[str, tuple[int, ...]]):
    """What a tokenizer makes of each word; a word not seen before is encoded."""

    def __init__(
        self,
        tokenize: Callable[[str], list[Any]],
        cut: Cut,
        never: Set[int] = frozenset(),
        *,
        normalized: bool,
    ):
        """Start empty.

        Args:
            tokenize: a byte-level BPE's, for one word.
            cut: a text into words.
            never: the ids that no text may become.
            normalized: the tokenizer normalizes text (NFC) before it cuts it.
        """
        self._tokenize = tokenize
        self._cut = cut
        self._never = never
        self._normalized = normalized

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: dict[str, Any], never: Set[int]) -> Words | None:
        """A cache for a tokenizer whose state this is, or None where it is not made of words."""
        model, normalizer = state["model"], state["normalizer"]
        if model["type"] != "BPE" or model.get("continuing_subword_prefix"):
            return None
        if model.get("dropout") or model.get("end_of_word_suffix"):
            return None
        if normalizer and normalizer["type"] != "NFC":
            return None
        cut = _cut_of(state["pre_tokenizer"])
        if not cut:
            return None
        return cls(tokenizer.model.tokenize, cut, never, normalized=bool(normalizer))

    def encode(self, text: str) -> list[int] | None:
        """A text's ids, or None where only the tokenizer itself can tell."""
        if not text.isascii() and (
            _unsettled().search(text) or (self._normalized and not is_normalized("NFC", text))
        ):
            return None
        words = self._cut(text)
        if sum(map(len, words)) != len(text):
            return None
        try:
            return list(chain.from_iterable(map(self.__getitem__, words)))
        except _ForgedError:
            return None

    def __missing__(self, word: str) -> tuple[int, ...]:
        letters = word.encode().decode("latin-1").translate(LETTERS)
        ids = tuple([token.id for token in self._tokenize(letters)])
        if not self._never.isdisjoint(ids):
            raise _ForgedError
        if len(word) <= MAX_WORD:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _letters() -> dict[int, str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(256 + i) for i, b in enumerate(others)}


LETTERS = _letters()


@cache
def _unsettled() -> re.Pattern[str]:
    """Any character that is not the same in all versions of Unicode, from 3.2 on.

    Lone surrogates and whatever was added later are among them, but not the common emoji.
    """
    ranges: list[list[int]] = []
    for i in range(0x10000):
        kind = category(chr(i))
        if kind in ("Cn", "Cs") or kind != ucd_3_2_0.category(chr(i)):
            continue
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    ranges += [[0x1F300, 0x1F64F], [0x1F680, 0x1F6C5], [0x1F910, 0x1F93A]]
    return re.compile(
        "[^" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges) + "]"
    )


def _cut_of(pre_tokenizer: dict[str, Any] | None) -> Cut | None:
    """How a byte-level tokenizer cuts text into words, or None for any other."""
    match pre_tokenizer:
        case {"type": "ByteLevel"}:
            steps = [pre_tokenizer]
        case {"type": "Sequence", "pretokenizers": [*steps]} if steps:
            pass
        case _:
            return None
    patterns: list[str] = []
    for step in steps[:-1]:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(text)}, **how} if (
                (how.get("behavior"), how.get("invert")) == ("Isolated", False)
                # Drops what does not match: `encode` sees that something is missing.
                or (len(steps) == 2 and (how["behavior"], how["invert"]) == ("Removed", True))
            ):
                patterns.append(text)
            case {"type": "Digits", "individual_digits": alone}:
                patterns.append(r"\p{N}" if alone else r"\p{N}+")
            case _:
                return None
    match steps[-1]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": on}:
            patterns += [_GPT2] * on
        case _:
            return None
    try:
        compiled = [regex.compile(p) for p in patterns]
        around = [regex.compile(f"({p})") for p in patterns]
    except regex.error:
        return None
    if not compiled or any(p.groups for p in compiled):
        return None
    return compiled[0].findall if len(compiled) == 1 else partial(_cut_again, around)


def _cut_again(patterns: list[regex.Pattern[str]], text: str) -> list[str]:
    """Cut by one rule after another, each within what the one before has left."""
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in pattern.split(word) if piece]
    return words
