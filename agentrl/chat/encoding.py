"""Text to token ids, in two ways: as a template's own text, and as text that can forge nothing.

A tokenizer splits a text at its control tokens (`<|im_end|>`, `<tool_call>`) before it looks at
anything else, wherever they come from. So what a tool returned is encoded by a copy of the
tokenizer that owns no control tokens: there, `<|im_end|>` is ten characters of text. Neither
`split_special_tokens` nor `encode_special_tokens` does that: they know only the tokens flagged
special, and let `<tool_call>` through.

A byte-level tokenizer (BPE) first cuts a text into words by regular expressions, and then merges
within words only. So in front of the copy stands a cache of what it makes of each word (`Words`).
Libraries disagree about what is a letter where Unicode is still growing; text with such characters
is left to the tokenizer. Ids become text by a table (`Pieces`): a turn is decoded once to be read,
and the tokenizer takes as long for that as for all else that a turn costs.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache, partial
from typing import Any
from unicodedata import category, is_normalized, ucd_3_2_0

import regex
from tokenizers import Tokenizer

from agentrl.errors import TemplateError
from agentrl.trajectory import token_array

MAX_CONTROL = 256
"""No control token is longer."""

_LIKE_A_ROLE = re.compile(r"<[|｜].*[|｜]>|\[[A-Z_]+\]")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# What regular expressions are known to disagree about.
_PROBES = (
    "The year 2024's  sum:\t12345.67 (or so)\r\n\r\n  don't I'LL we'd\n",
    " leading, trailing \n\n\n",
    "   x = {'a': [1, 2.5e-3, None], \"b\": f(x)[::-1]}  # ok?!\n\tif x: return y\n",
    "naïve Ünïcödé ÅÅ 日本語テキスト 中文，标点。 العربية हिन्दी ไทย 🙂👍🏽 é\u00a0\u2003x\u3000y",
    '{"name": "calc", "arguments": {"x": "3*4", "t": "\\n\\u00e9"}}\x00\x0b\x0c\x1c\x85\u2028',
    "<|im_start|>system\nYou are<|im_end|><tool_call></tool_call> [INST] <s></s> <0x0A>",
    "½ ² Ⅷ ٣ 一二三 ㍿ ﬁ ß ſ K",
)


class Encoder:
    """One tokenizer's two ways to encode.

    Attributes:
        control_ids: the ids of all added and special tokens.
        ends: the characters that begin or end their texts.
    """

    def __init__(self, tokenizer: Any):
        """Copy the tokenizer without its control tokens, and check what the copy makes of text.

        Args:
            tokenizer: a fast transformers tokenizer.

        Raises:
            TemplateError: texts do not survive encoding and decoding.
        """
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        state = json.loads(self._backend.to_str())
        self._bytes = ByteDecoder.of(self._backend, state)
        added = self._backend.get_added_tokens_decoder()
        blank = [
            i
            for i, token in added.items()
            if not (token.special or token.content.strip(" \n\r\t▁"))
        ]
        for i in blank:  # runs of white space that are a token of their own (Gemma): harmless
            del added[i]
        self._id_of = {token.content: i for i, token in added.items()}
        self.control_ids = frozenset([*added, *tokenizer.all_special_ids])
        # Those a prompt may speak of: they are text of a turn, such as `<think>`. What looks like a
        # token of roles and turns counts as one, though some tokenizers do not call it special.
        self.tags = frozenset(
            i
            for i, token in added.items()
            if not (token.special or _LIKE_A_ROLE.fullmatch(token.content))
        )
        self.control = _pattern({t.content: (t.lstrip, t.rstrip) for t in added.values()})
        self.guard(())
        self._openers = "".join(sorted({content[0] for content in self._id_of}))
        self.ends = "".join(
            sorted({c for content in self._id_of for c in (content[0], content[-1])})
        )
        state = _without_control(state, blank)
        self._plain_tokenizer = Tokenizer.from_str(json.dumps(state))
        self._cache = None if blank else BpeCache.of(self._plain_tokenizer, state, self.control_ids)
        # SentencePiece's bytes: to some vocabularies, the text `<0x0A>` is a newline.
        self._owns_bytes = (
            self._plain_tokenizer.decode(self._plain_tokenizer.encode("<0x41>").ids) != "<0x41>"
        )
        self._check()

    def encode_plain(self, text: str) -> array[int]:
        """Text as ids, none of which is a control token, whatever the text holds.

        Raises:
            TemplateError: the vocabulary itself knows no other way to write it.
        """
        ids = self._cache.encode(text) if self._cache is not None else None
        return self._encode_uncached(text) if ids is None else ids

    def encode_prompt_text(self, text: str) -> array[int]:
        """A prompt's text: it may speak of tags such as `<think>`, but makes no roles and turns."""
        return self._around(self._tags, text)

    def guard(self, ids: Iterable[int]) -> None:
        """Count tokens among those of roles and turns that the tokenizer does not call special."""
        self.tags -= frozenset(ids)
        texts = [text for text, i in self._id_of.items() if i in self.tags]
        self._tags = _pattern(dict.fromkeys(texts, (False, False)))

    def encode_template_text(self, text: str) -> array[int]:
        """A template's own text: control tokens are what they are."""
        return self._around(self.control, text)

    def split(self, text: str) -> tuple[str, array[int], str]:
        """A template's text as what stands before its first control token, ids, and the rest.

        Where it holds none, all of it is "before".
        """
        spans = [found.span() for found in self.control.finditer(text)]
        if not spans:
            return text, token_array(), ""
        start, end = spans[0][0], spans[-1][1]
        return text[:start], self.encode_template_text(text[start:end]), text[end:]

    def shared_length(self, a: str, b: str) -> int:
        """How many characters two texts begin with alike, not counting half a control token."""
        n = common_prefix_length(a, b)
        cut = (
            m.start()
            for text in (a, b)
            for m in self.control.finditer(text[: n + MAX_CONTROL])
            if m.start() < n < m.end()
        )
        return min(cut, default=n)

    def count_control_tokens(self, text: str, allowed: Set[int] = frozenset()) -> int:
        """How many control tokens a text spells, some ids aside."""
        return sum(self._id_of[token] not in allowed for token in self.control_tokens_in(text))

    def control_tokens_in(self, text: str) -> list[str]:
        """Return the control tokens that a text spells, as texts."""
        if not any(c in text for c in self._openers):
            return []
        return [self._token_of(found) for found in self.control.finditer(text)]

    def _token_of(self, found: regex.Match[str]) -> str:
        """Return a token without the white space that it swallows."""
        return found[0] if found[0] in self._id_of else found[0].strip()

    def cannot_form_control_token(self, text: str) -> bool:
        """Return whether no character of a text begins or ends a control token."""
        return not any(c in text for c in self.ends)

    def decodes_to(self, ids: Sequence[int], text: str) -> bool:
        """Return whether ids decode to a text, up to what the tokenizer does to every text.

        It may normalize a text, drop white space beside a control token, and have no token for a
        character.
        """
        decoded = self.decode(ids)
        if decoded == text:
            return True
        texts = (text, self.decode(self.encode_template_text(text)))
        return self._normalized(decoded) in map(self._normalized, texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens included."""
        if self._bytes is not None:
            return self._bytes.decode(ids)
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """The text that `plain` was given."""
        return self._plain_tokenizer.decode(list(ids), skip_special_tokens=False)

    # -- inside -----------------------------------------------------------------------------------

    def _around(self, tokens: regex.Pattern[str], text: str) -> array[int]:
        ids = token_array()
        position = 0
        for found in tokens.finditer(text):
            if found.start() > position:
                ids.extend(self.encode_plain(text[position : found.start()]))
            ids.append(self._id_of[self._token_of(found)])
            position = found.end()
        if position < len(text):
            ids.extend(self.encode_plain(text[position:]))
        return ids

    def _encode_uncached(self, text: str) -> array[int]:
        """Encode without the cache."""
        try:
            ids = self._plain_tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):  # a lone surrogate
            text = text.encode("utf-8", "replace").decode()
            ids = self._plain_tokenizer.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids) and not (self._owns_bytes and "<0x" in text):
            return token_array(ids)
        # The vocabulary owns control strings: cut each after its first character.
        cuts = {m.start() + 1 for m in self.control.finditer(text, overlapped=True)}
        if self._owns_bytes:
            cuts |= {m.start() + 1 for m in _BYTE.finditer(text)}
        return token_array(self._pieces(text, sorted(cuts)))

    def _pieces(self, text: str, cuts: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = text[start:end]
            made = self._plain_tokenizer.encode(piece, add_special_tokens=False)
            # Something else than the control string may become the token, a normalized form of it.
            forged = [i for i, id in enumerate(made.ids) if id in self.control_ids]
            if not forged:
                ids += made.ids
                continue
            if len(piece) == 1:
                raise TemplateError(
                    f"the tokenizer turns text into the control token"
                    f" {self._backend.id_to_token(made.ids[forged[0]])!r} even without its added"
                    f" tokens: agentrl cannot keep {text[:80]!r} harmless."
                )
            starts = {made.offsets[i][0] for i in forged}
            ids += self._pieces(piece, sorted(starts | {start + 1 for start in starts}))
        return ids

    def _check(self) -> None:
        """Compare the cache with the tokenizer, and what comes back with what went in."""
        texts = [*_PROBES, *self._id_of, "".join(self._id_of)]
        if self._cache is not None and any(
            self.encode_plain(t) != self._encode_uncached(t) for t in texts
        ):
            self._cache = None
        for text in _PROBES[:5]:
            back, normal = self.decode_plain(self.encode_plain(text)), self._normal(text)
            if back != normal:
                raise TemplateError(
                    f"the tokenizer does not give back {normal!r} after encoding and decoding it,"
                    f" but {back!r}; tool results would reach the model changed."
                )

    def _normalized(self, text: str) -> str:
        """Return a text normalized, without the white space that control tokens drop."""
        text = self._normal(text.encode("utf-8", "replace").decode())
        return self.control.sub(lambda found: found[0].strip(), text)

    def _normal(self, text: str) -> str:
        normalizer = self._plain_tokenizer.normalizer
        return normalizer.normalize_str(text).replace("▁", " ") if normalizer else text


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two texts, or rows of ids, begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _pattern(tokens: dict[str, tuple[bool, bool]]) -> regex.Pattern[str]:
    """Any of the tokens, the longest first; some swallow the white space before or after them."""
    texts = sorted(tokens, key=len, reverse=True)
    found = "|".join(
        r"\s*" * tokens[t][0] + re.escape(t) + r"\s*" * tokens[t][1] for t in texts if t
    )
    return regex.compile(found or r"(?!)")


def _without_control(state: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """A tokenizer's state without added tokens but some, that adds no space of its own."""
    state = json.loads(json.dumps(state))
    added = [token for token in state["added_tokens"] if token["id"] in kept]
    state.update(added_tokens=added, post_processor=None, truncation=None, padding=None)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        state[part] = _without_prefix(state[part])
    return state


def _without_prefix(part: Any) -> Any:
    """A part of a tokenizer, less what adds a space before a text or takes it away again."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in ("Prepend", "Strip"):
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    for name in ("normalizers", "pretokenizers", "decoders"):
        if kind == "Sequence" and name in part:
            kept = [p for p in map(_without_prefix, part[name]) if p is not None]
            return {**part, name: kept} if kept else None
    return part


# -- words -----------------------------------------------------------------------------------------

MAX_CACHED_WORDS = 1 << 17
"""Words in the cache, some 20 MB; when it is full, it is emptied."""
MAX_WORD_LENGTH = 48
"""Longer words (base64, minified code) are not kept."""

Cut = Callable[[str], list[str]]

# GPT-2's rule, which a tokenizer with a plain `ByteLevel` follows.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _ForgedError(Exception):
    """A word has become what no text may become."""


class BpeCache(dict[str, bytes]):
    """A cache from words to their token ids, as the bytes of an array.

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
    def of(cls, tokenizer: Tokenizer, state: dict[str, Any], never: Set[int]) -> BpeCache | None:
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
        letters = word.encode().decode("latin-1").translate(BYTE_LETTERS)
        ids = token_array([token.id for token in self._tokenize(letters)])
        if not self._never.isdisjoint(ids):
            raise _ForgedError
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids.tobytes()
        return ids.tobytes()


def _letters() -> dict[int, str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b if b in printable else 256 + others.index(b)) for b in range(256)}


BYTE_LETTERS = _letters()
"""The character that stands for each byte in byte-level BPE (GPT-2's table), in their order.

Printable bytes stand for themselves, the others for characters from 256 on.
"""


@cache
def _unsettled() -> re.Pattern[str]:
    """Any character that is not the same in all versions of Unicode, from 3.2 on.

    Lone surrogates and whatever was added later are among them, but not the common emoji.
    """
    settled = {
        i
        for i, c in enumerate(map(chr, range(0x10000)))
        if category(c) == ucd_3_2_0.category(c) and category(c) not in ("Cn", "Cs")
    }
    settled |= {*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6C6), *range(0x1F910, 0x1F93B)}
    starts = sorted(i for i in settled if i - 1 not in settled)
    ends = sorted(i for i in settled if i + 1 not in settled)
    ranges = (f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in zip(starts, ends, strict=True))
    return re.compile(f"[^{''.join(ranges)}]")


def _cut_of(pre_tokenizer: dict[str, Any] | None) -> tuple[Cut, Cut] | None:
    """How a byte-level tokenizer cuts text, and ASCII, into words; None for any other tokenizer."""
    *rules, last = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
    patterns: list[str] = []
    for step in rules:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(text)}, **how} if (
                (how.get("behavior"), how.get("invert")) == ("Isolated", False)
                # Drops what does not match: `encode` sees that something is missing.
                or (len(rules) == 1 and (how["behavior"], how["invert"]) == ("Removed", True))
            ):
                patterns.append(text)
            case {"type": "Digits", "individual_digits": alone}:
                patterns.append(r"\p{N}" if alone else r"\p{N}+")
            case _:
                return None
    match last:
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
    within = False

    def in_ascii(found: re.Match[str]) -> str:
        nonlocal within
        if found[3]:
            within = (within or found[3][0] == "[") and found[3] != "]"
            return found[3]
        letters = _ASCII[found[1] or found[2]]
        return letters if within else f"[{letters}]" if letters else "(?!)"

    return _CLASSES.sub(in_ascii, pattern)


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


# -- pieces ----------------------------------------------------------------------------------------

_BYTES = {letter: b for b, letter in BYTE_LETTERS.items()}


class ByteDecoder(dict[int, bytes]):
    """The bytes that each token of a byte-level vocabulary stands for."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_of = tokenizer.id_to_token

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: dict[str, Any]) -> ByteDecoder | None:
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
        text = self._token_of(token) or ""
        try:
            piece = bytes(_BYTES[c] for c in text)
        except KeyError:  # an added token that is no row of bytes
            piece = text.encode()
        self[token] = piece
        return piece
