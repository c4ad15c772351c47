"""A cache in front of byte-level BPE: a text's ids are those of its words, one after another.

Such a tokenizer first cuts a text into words by regular expressions, and then merges within words
only. Libraries disagree about what is a letter where Unicode is still growing; text with such
characters is left to the tokenizer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence, Set
from functools import cache, partial
from typing import Any
from unicodedata import category, is_normalized, ucd_3_2_0

import regex
from tokenizers import Tokenizer

from agentrl.trajectory import token_array

MAX_WORDS = 1 << 17
"""Words in the cache, some 20 MB; when it is full, it is emptied."""
MAX_WORD = 48
"""Longer words (base64, minified code) are not kept."""

Cut = Callable[[str], list[str]]

# GPT-2's rule, which a tokenizer with a plain `ByteLevel` follows.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _ForgedError(Exception):
    """A word has become what no text may become."""


class Words(dict[str, bytes]):
    """What a tokenizer makes of each word, as the bytes of an array of ids.

    A word not seen before is encoded. Joining bytes is faster than joining lists of numbers.
    """

    def __init__(
        self,
        tokenize: Callable[[str], list[Any]],
        cut: Cut,
        cut_ascii: Cut,
        never: Set[int] = frozenset(),
        *,
        normalized: bool,
    ):
        """Start empty.

        Args:
            tokenize: a byte-level BPE's, for one word.
            cut: a text into words.
            cut_ascii: the same for a text of ASCII alone.
            never: the ids that no text may become.
            normalized: the tokenizer normalizes text (NFC) before it cuts it.
        """
        self._tokenize = tokenize
        self._cut = cut
        self._cut_ascii = cut_ascii
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
        return cls(tokenizer.model.tokenize, *cut, never, normalized=bool(normalizer))

    def encode(self, text: str) -> array[int] | None:
        """A text's ids, or None where only the tokenizer itself can tell."""
        if text.isascii():
            words = self._cut_ascii(text)
        elif _unsettled().search(text) or (self._normalized and not is_normalized("NFC", text)):
            return None
        else:
            words = self._cut(text)
        if "".join(words) != text:
            return None
        ids = token_array()
        try:
            ids.frombytes(b"".join(map(self.__getitem__, words)))
        except _ForgedError:
            return None
        return ids

    def __missing__(self, word: str) -> bytes:
        letters = word.encode().decode("latin-1").translate(LETTERS)
        ids = token_array([token.id for token in self._tokenize(letters)])
        if not self._never.isdisjoint(ids):
            raise _ForgedError
        if len(word) <= MAX_WORD:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids.tobytes()
        return ids.tobytes()


def _letters() -> dict[int, str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b if b in printable else 256 + others.index(b)) for b in range(256)}


LETTERS = _letters()
"""The character that stands for each byte in byte-level BPE (GPT-2's table), in their order.

Printable bytes stand for themselves, the others for characters from 256 on.
"""


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


def _cut_of(pre_tokenizer: dict[str, Any] | None) -> tuple[Cut, Cut] | None:
    """How a byte-level tokenizer cuts text, and ASCII, into words; None for any other tokenizer."""
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
        cut = _cutter(patterns, regex.compile)
        return (cut, _ascii_cutter(patterns) or cut) if cut else None
    except regex.error:
        return None


def _ascii_cutter(patterns: Sequence[str]) -> Cut | None:
    """The same rules for the standard library's expressions: twice as fast, where they suffice."""
    try:
        return _cutter([_in_ascii(p) for p in patterns], partial(re.compile, flags=re.ASCII))
    except (re.error, KeyError):
        return None


# What each class of characters has in ASCII.
_ASCII = {
    **{"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "Mn": ""},
    **{"N": "0-9", "Nd": "0-9", "Nl": "", "No": ""},
    "P": re.escape("!\"#%&'()*,-./:;?@[\\]_{}"),
    "S": re.escape("$+<=>^`|~"),
}
_CLASSES = re.compile(r"\\p\{(\w+)\}|\\p(\w)|(\\.|\[\^?|\])", re.DOTALL)


def _in_ascii(pattern: str) -> str:
    """An expression with the characters of ASCII in place of Unicode's classes."""
    parts, position, within = [], 0, False
    for found in _CLASSES.finditer(pattern):
        parts.append(pattern[position : found.start()])
        position = found.end()
        if found[3]:
            within = (within or found[3][0] == "[") and found[3] != "]"
            parts.append(found[3])
        else:
            letters = _ASCII[found[1] or found[2]]
            parts.append(letters if within else f"[{letters}]" if letters else "(?!)")
    return "".join([*parts, pattern[position:]])


def _cutter(patterns: Sequence[str], compile: Callable[[str], Any]) -> Cut | None:
    """Cut by one rule after another, each within what the one before has left."""
    compiled = [compile(p) for p in patterns]
    if not compiled or any(p.groups for p in compiled):
        return None
    if len(compiled) == 1:
        return compiled[0].findall
    return partial(_cut_again, [compile(f"({p})") for p in patterns])


def _cut_again(patterns: Sequence[Any], text: str) -> list[str]:
    """Cut by one rule after another, each within what the one before has left."""
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in pattern.split(word) if piece]
    return words
