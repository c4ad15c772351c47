"""Encode text in two ways: as the template's own text, or as untrusted text.

A tokenizer splits a text at its control tokens (`<|im_end|>`, `<tool_call>`) before it does
anything else, even if a user or a tool wrote them. So the text of a tool is encoded by a copy of
the tokenizer that has no control tokens. This copy encodes `<|im_end|>` as ten characters of text.
The options `split_special_tokens` and `encode_special_tokens` are not enough: they affect only the
tokens that are marked as special, and `<tool_call>` is still encoded as one token.

A byte-level BPE tokenizer first splits a text into words by regular expressions, and then merges
within words only. So `BpeCache` keeps the token ids of each word. Unicode libraries disagree about
the class of recently added characters; a text with such characters is encoded by the tokenizer
itself. `ByteDecoder` decodes ids by a table, because the tokenizer's own decoder takes as long as
the rest of a turn.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache, partial
from typing import Any, Literal
from unicodedata import category, is_normalized, ucd_3_2_0

import regex
from tokenizers import Tokenizer

from agentrl.errors import TemplateError
from agentrl.trajectory import token_array

MAX_CONTROL = 256
"""The greatest length of a control token, in characters."""

_LIKE_A_ROLE = re.compile(r"<[|｜].*[|｜]>|\[[A-Z_]+\]")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Texts that regular expression libraries are known to split differently.
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
    """Encodes text with one tokenizer, as trusted or as untrusted text.

    Attributes:
        control_ids: the ids of all added and special tokens.
        ends: the characters that control tokens begin or end with.
        plain_tokenizer: the copy of the tokenizer without control tokens.
        cache: the token ids of words; None if the tokenizer is not byte-level BPE, or if a cache
            would differ from it.
    """

    def __init__(self, tokenizer: Any):
        """Copy the tokenizer without its control tokens, and check the copy.

        Args:
            tokenizer: a fast transformers tokenizer.

        Raises:
            TemplateError: if a text is not the same after it was encoded and decoded.
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
        for i in blank:  # Gemma has tokens for runs of white space; these are not control tokens
            del added[i]
        self._id_of = {token.content: i for i, token in added.items()}
        self.control_ids = frozenset([*added, *tokenizer.all_special_ids])
        # Tags such as `<think>` are part of a turn's text, so prompts may contain them. A token
        # that looks like a role token (`<|im_start|>`) is not a tag, even if it is not marked as
        # special.
        self.tags = frozenset(
            i
            for i, token in added.items()
            if not (token.special or _LIKE_A_ROLE.fullmatch(token.content))
        )
        self.control = _pattern({t.content: (t.lstrip, t.rstrip) for t in added.values()})
        self.restrict_tags(())
        self._openers = "".join(sorted({content[0] for content in self._id_of}))
        self.ends = "".join(
            sorted({c for content in self._id_of for c in (content[0], content[-1])})
        )
        state = _remove_control_tokens(state, blank)
        self.plain_tokenizer = Tokenizer.from_str(json.dumps(state))
        self.cache = None if blank else BpeCache.of(self.plain_tokenizer, state, self.control_ids)
        # SentencePiece's byte tokens: some vocabularies encode the text `<0x0A>` as a newline.
        self._has_byte_tokens = (
            self.plain_tokenizer.decode(self.plain_tokenizer.encode("<0x41>").ids) != "<0x41>"
        )
        self._check()

    def encode_plain(self, text: str) -> array[int]:
        """Encode untrusted text. No id is a control token, whatever the text contains.

        Raises:
            TemplateError: if the vocabulary has no other tokens for a part of the text.
        """
        ids = self.cache.encode(text) if self.cache is not None else None
        return self.encode_uncached(text) if ids is None else ids

    def encode_prompt_text(self, text: str) -> array[int]:
        """Encode a prompt's text. Tags such as `<think>` become tokens, role tokens become text."""
        return self._encode_with(self._tags, text)

    def restrict_tags(self, ids: Iterable[int]) -> None:
        """Treat these ids as role tokens, not as tags: prompts must not contain them."""
        self.tags -= frozenset(ids)
        texts = [text for text, i in self._id_of.items() if i in self.tags]
        self._tags = _pattern(dict.fromkeys(texts, (False, False)))

    def encode_trusted(self, text: str) -> array[int]:
        """Encode text that the chat template wrote, with its control tokens."""
        return self._encode_with(self.control, text)

    def split(self, text: str) -> tuple[str, array[int], str]:
        """Split a template's text around its control tokens.

        Returns:
            The text before the first control token, the ids from the first to the last control
            token, and the text after the last one. Without control tokens, all text is "before".
        """
        spans = [match.span() for match in self.control.finditer(text)]
        if not spans:
            return text, token_array(), ""
        start, end = spans[0][0], spans[-1][1]
        return text[:start], self.encode_trusted(text[start:end]), text[end:]

    def shared_length(self, a: str, b: str) -> int:
        """Return the length of the common prefix of two texts, without part of a control token."""
        n = common_prefix_length(a, b)
        cut = (
            m.start()
            for text in (a, b)
            for m in self.control.finditer(text[: n + MAX_CONTROL])
            if m.start() < n < m.end()
        )
        return min(cut, default=n)

    def count_control_tokens(self, text: str, allowed: Set[int] = frozenset()) -> int:
        """Return the number of control tokens in a text, except those with an allowed id."""
        return sum(self._id_of[token] not in allowed for token in self.control_tokens_in(text))

    def control_tokens_in(self, text: str) -> list[str]:
        """Return the texts of the control tokens in a text, in order."""
        if not any(c in text for c in self._openers):
            return []
        return [self._token_of(match) for match in self.control.finditer(text)]

    def _token_of(self, match: regex.Match[str]) -> str:
        """Return the text of a matched control token, without the white space that it absorbs."""
        return match[0] if match[0] in self._id_of else match[0].strip()

    def cannot_form_control_token(self, text: str) -> bool:
        """Return whether no control token begins or ends with a character of a text."""
        return not any(c in text for c in self.ends)

    def decodes_to(self, ids: Sequence[int], text: str) -> bool:
        """Return whether ids decode to a text, apart from changes that every encoding makes.

        The tokenizer may normalize a text, drop white space next to a control token, or have no
        token for a character.
        """
        decoded = self.decode(ids)
        if decoded == text:
            return True
        texts = (text, self.decode(self.encode_trusted(text)))
        return self._normalize_around_tokens(decoded) in map(self._normalize_around_tokens, texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with control tokens."""
        if self._bytes is not None:
            return self._bytes.decode(ids)
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Return the text of ids from `encode_plain`."""
        return self.plain_tokenizer.decode(list(ids), skip_special_tokens=False)

    # -- helpers ----------------------------------------------------------------------------------

    def _encode_with(self, tokens: regex.Pattern[str], text: str) -> array[int]:
        ids = token_array()
        position = 0
        for match in tokens.finditer(text):
            if match.start() > position:
                ids.extend(self.encode_plain(text[position : match.start()]))
            ids.append(self._id_of[self._token_of(match)])
            position = match.end()
        if position < len(text):
            ids.extend(self.encode_plain(text[position:]))
        return ids

    def encode_uncached(self, text: str) -> array[int]:
        """Encode untrusted text without the cache."""
        try:
            ids = self.plain_tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):  # a lone surrogate
            text = text.encode("utf-8", "replace").decode()
            ids = self.plain_tokenizer.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids) and not (self._has_byte_tokens and "<0x" in text):
            return token_array(ids)
        # The vocabulary itself has a token for a control string: split it after one character.
        cuts = {m.start() + 1 for m in self.control.finditer(text, overlapped=True)}
        if self._has_byte_tokens:
            cuts |= {m.start() + 1 for m in _BYTE.finditer(text)}
        return token_array(self._encode_split_at(text, sorted(cuts)))

    def _encode_split_at(self, text: str, cuts: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = text[start:end]
            encoded = self.plain_tokenizer.encode(piece, add_special_tokens=False)
            # The normalizer can turn another text into the text of a control token.
            control_indices = [i for i, id in enumerate(encoded.ids) if id in self.control_ids]
            if not control_indices:
                ids += encoded.ids
                continue
            if len(piece) == 1:
                raise TemplateError(
                    "the tokenizer turns text into the control token"
                    f" {self._backend.id_to_token(encoded.ids[control_indices[0]])!r} even without"
                    f" its added tokens: agentrl cannot encode {text[:80]!r} as plain text."
                )
            starts = {encoded.offsets[i][0] for i in control_indices}
            ids += self._encode_split_at(piece, sorted(starts | {start + 1 for start in starts}))
        return ids

    def _check(self) -> None:
        """Disable a cache that differs from the tokenizer; check that texts survive decoding."""
        texts = [*_PROBES, *self._id_of, "".join(self._id_of)]
        if self.cache is not None and any(
            self.encode_plain(t) != self.encode_uncached(t) for t in texts
        ):
            self.cache = None
        for text in _PROBES[:5]:
            decoded, expected = self.decode_plain(self.encode_plain(text)), self._normalize(text)
            if decoded != expected:
                raise TemplateError(
                    f"the tokenizer encodes {expected!r} and decodes it as {decoded!r}; tool"
                    " results would be changed. Use a tokenizer that decodes a text to the same"
                    " text."
                )

    def _normalize_around_tokens(self, text: str) -> str:
        """Return a normalized text, without the white space that control tokens absorb."""
        text = self._normalize(text.encode("utf-8", "replace").decode())
        return self.control.sub(lambda match: match[0].strip(), text)

    def _normalize(self, text: str) -> str:
        normalizer = self.plain_tokenizer.normalizer
        return normalizer.normalize_str(text).replace("▁", " ") if normalizer else text


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or two rows of ids."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _pattern(tokens: dict[str, tuple[bool, bool]]) -> regex.Pattern[str]:
    """Return a pattern of tokens, the longest first.

    Args:
        tokens: for the text of each token, whether it absorbs white space before and after it.
    """
    texts = sorted(tokens, key=len, reverse=True)
    joined = "|".join(
        r"\s*" * tokens[t][0] + re.escape(t) + r"\s*" * tokens[t][1] for t in texts if t
    )
    return regex.compile(joined or r"(?!)")


def _remove_control_tokens(state: dict[str, Any], kept_ids: Sequence[int]) -> dict[str, Any]:
    """Return a tokenizer's state without its control tokens. It adds no space before a text.

    Args:
        state: the state from `Tokenizer.to_str`.
        kept_ids: the ids of the added tokens that are not removed.
    """
    state = json.loads(json.dumps(state))
    added = [token for token in state["added_tokens"] if token["id"] in kept_ids]
    state.update(added_tokens=added, post_processor=None, truncation=None, padding=None)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        state[part] = _remove_prefix_steps(state[part])
    return state


def _remove_prefix_steps(part: Any) -> Any:
    """Return a part of a tokenizer without the steps that add or remove a space before a text."""
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
            steps = [p for p in map(_remove_prefix_steps, part[name]) if p is not None]
            return {**part, name: steps} if steps else None
    return part


# -- the cache of words ---------------------------------------------------------------------------

MAX_CACHED_WORDS = 1 << 17
"""The greatest number of words in the cache (about 20 MB). A full cache is cleared."""
MAX_WORD_LENGTH = 48
"""Longer words (base64, minified code) are not cached."""

Split = Callable[[str], list[str]]

# GPT-2's pattern, which `ByteLevel` uses by default.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _ForgedError(Exception):
    """The ids of a word contain a control token."""


class BpeCache(dict[str, bytes]):
    """A cache of the token ids of each word of a byte-level BPE tokenizer.

    The ids are kept as the bytes of an array, because joining bytes is faster than joining lists. A
    word that is not in the cache is encoded and added.
    """

    def __init__(
        self,
        tokenize: Callable[[str], list[Any]],
        split: Split,
        split_ascii: Split,
        forbidden: Set[int] = frozenset(),
        *,
        normalizes: bool,
    ):
        """Start with an empty cache.

        Args:
            tokenize: the `tokenize` of a byte-level BPE model, for one word.
            split: splits a text into words.
            split_ascii: does the same for a text of ASCII characters only.
            forbidden: the ids that no text may become.
            normalizes: whether the tokenizer normalizes text (NFC) before it splits it.
        """
        self._tokenize = tokenize
        self._split = split
        self._split_ascii = split_ascii
        self._forbidden = forbidden
        self._normalizes = normalizes

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, state: dict[str, Any], forbidden: Set[int]
    ) -> BpeCache | None:
        """Return the cache of a tokenizer with this state; None if it does not split into words."""
        model, normalizer = state["model"], state["normalizer"]
        if model["type"] != "BPE" or model.get("continuing_subword_prefix"):
            return None
        if model.get("dropout") or model.get("end_of_word_suffix"):
            return None
        if normalizer and normalizer["type"] != "NFC":
            return None
        splits = _split_functions(state["pre_tokenizer"])
        if not splits:
            return None
        return cls(tokenizer.model.tokenize, *splits, forbidden, normalizes=bool(normalizer))

    def encode(self, text: str) -> array[int] | None:
        """Return the ids of a text, or None if only the tokenizer itself can encode it."""
        if text.isascii():
            words = self._split_ascii(text)
        elif _unstable_characters().search(text) or (
            self._normalizes and not is_normalized("NFC", text)
        ):
            return None
        else:
            words = self._split(text)
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
        if not self._forbidden.isdisjoint(ids):
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
"""The character for each byte in byte-level BPE (GPT-2's table), in the order of the bytes.

A printable byte has its own character, the others have characters from 256 on.
"""


@cache
def _unstable_characters() -> re.Pattern[str]:
    """Return a pattern of the characters whose class differs between Unicode versions.

    It matches lone surrogates, and all characters that Unicode 3.2 did not have or classified
    differently, except the common emoji.
    """
    stable = {
        i
        for i, c in enumerate(map(chr, range(0x10000)))
        if category(c) == ucd_3_2_0.category(c) and category(c) not in ("Cn", "Cs")
    }
    stable |= {*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6C6), *range(0x1F910, 0x1F93B)}
    starts = sorted(i for i in stable if i - 1 not in stable)
    ends = sorted(i for i in stable if i + 1 not in stable)
    ranges = (f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in zip(starts, ends, strict=True))
    return re.compile(f"[^{''.join(ranges)}]")


def _split_functions(pre_tokenizer: dict[str, Any] | None) -> tuple[Split, Split] | None:
    """Return two functions that split text into words as a byte-level tokenizer does.

    Returns:
        A function for any text, and a faster one for ASCII text. None if the tokenizer is not
        byte-level, or has rules that are not supported here.
    """
    *rules, last = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
    patterns: list[str] = []
    for step in rules:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(text)}, **options} if (
                (options.get("behavior"), options.get("invert")) == ("Isolated", False)
                # Text that does not match is dropped; `encode` then returns None.
                or (
                    len(rules) == 1
                    and (options["behavior"], options["invert"]) == ("Removed", True)
                )
            ):
                patterns.append(text)
            case {"type": "Digits", "individual_digits": individual}:
                patterns.append(r"\p{N}" if individual else r"\p{N}+")
            case _:
                return None
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            patterns += [_GPT2] * use_regex
        case _:
            return None
    try:
        split = _splitter(patterns, regex.compile)
        return (split, _ascii_splitter(patterns) or split) if split else None
    except regex.error:
        return None


def _ascii_splitter(patterns: Sequence[str]) -> Split | None:
    """Return a split function for ASCII text that uses `re`, which is twice as fast as `regex`.

    None if a pattern cannot be written for `re`.
    """
    try:
        return _splitter(
            [_to_ascii_pattern(p) for p in patterns], partial(re.compile, flags=re.ASCII)
        )
    except (re.error, KeyError):
        return None


# The ASCII characters of each Unicode class.
_ASCII = {
    **{"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "Mn": ""},
    **{"N": "0-9", "Nd": "0-9", "Nl": "", "No": ""},
    "P": re.escape("!\"#%&'()*,-./:;?@[\\]_{}"),
    "S": re.escape("$+<=>^`|~"),
}
_CLASSES = re.compile(r"\\p\{(\w+)\}|\\p(\w)|(\\.|\[\^?|\])", re.DOTALL)


def _to_ascii_pattern(pattern: str) -> str:
    """Return a pattern with ASCII characters in place of Unicode classes.

    Raises:
        KeyError: if the pattern has a class that is not in `_ASCII`.
    """
    within = False

    def in_ascii(match: re.Match[str]) -> str:
        nonlocal within
        if match[3]:
            within = (within or match[3][0] == "[") and match[3] != "]"
            return match[3]
        letters = _ASCII[match[1] or match[2]]
        return letters if within else f"[{letters}]" if letters else "(?!)"

    return _CLASSES.sub(in_ascii, pattern)


def _splitter(patterns: Sequence[str], compile: Callable[[str], Any]) -> Split | None:
    """Return a function that splits by each pattern in turn; None if a pattern has groups."""
    compiled = [compile(p) for p in patterns]
    if not compiled or any(p.groups for p in compiled):
        return None
    if len(compiled) == 1:
        return compiled[0].findall
    return partial(_split_in_turn, [compile(f"({p})") for p in patterns])


def _split_in_turn(patterns: Sequence[Any], text: str) -> list[str]:
    """Split a text by the first pattern, each part by the second one, and so on."""
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in pattern.split(word) if piece]
    return words


# -- decoding -----------------------------------------------------------------------------------

_BYTES = {letter: b for b, letter in BYTE_LETTERS.items()}


class ByteDecoder(dict[int, bytes]):
    """A table of the bytes of each token of a byte-level vocabulary."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_of = tokenizer.id_to_token

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: dict[str, Any]) -> ByteDecoder | None:
        """Return the table of a tokenizer with this state, or None if it is not byte-level."""
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
        """Return the text of ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")

    def __missing__(self, token: int) -> bytes:
        text = self._token_of(token) or ""
        try:
            piece = bytes(_BYTES[c] for c in text)
        except KeyError:  # an added token, which is not written in byte characters
            piece = text.encode()
        self[token] = piece
        return piece


# -- texts of a limited number of tokens ---------------------------------------------------------

Side = Literal["head", "tail", "middle"]
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_MAX_BYTES_OF_CHARACTER = 4
"""The maximum number of bytes of a character in UTF-8. So one character has at most four tokens."""
_LONG_TEXT = 2**16
"""A text of more characters is not encoded as a whole: 1 MB would take 50 milliseconds."""
_LONG_TOKEN = 32
"""The number of characters of an unusually long token."""


def truncate(text: str, limit: int, side: Side, encode: Encode, decode: Decode) -> str:
    """Truncate a text of more than `limit` tokens, with the note "(n of m tokens shown)".

    A text of at most `limit` bytes is returned unchanged, because a token has at least one byte.
    Any other text is encoded once; of a very long one, only the beginning and the end, and then m
    is an estimate ("about"). If the text is too long, the parts that are kept are encoded again to
    check that they fit; n is the number of their tokens.

    Args:
        text: the tool result.
        limit: the maximum number of tokens of the text; the note is not counted.
        side: "head" keeps the head, "tail" keeps the tail. "middle" removes the middle: the head
            gets half of `limit`, and the tail gets the tokens that the head does not use.
        encode: encodes untrusted text (`ChatTemplate.encode`: no control tokens).
        decode: decodes ids.

    Returns:
        The truncated text, or the text itself if it fits.
    """
    if len(text.encode(errors="replace")) <= limit:
        return text
    first, last, total = _encode_ends(text, limit, encode)
    if len(first) <= limit:
        return text
    head, tail, head_tokens, tail_tokens = "", "", 0, 0
    if side != "tail":
        share = limit if side == "head" else (limit + 1) // 2
        length = _estimate_length(text.startswith, lambda n: decode(first[:n]), share)
        head, head_tokens = _fit(lambda n: text[:n], length, share, encode)
    if side != "head":
        share = limit - head_tokens
        length = _estimate_length(text.endswith, lambda n: decode(last[len(last) - n :]), share)
        length = min(length, len(text) - len(head))
        tail, tail_tokens = _fit(lambda n: text[len(text) - n :], length, share, encode)
    note = f"({head_tokens + tail_tokens} of {total} tokens shown)"
    return "\n".join(part for part in (head, note, tail) if part)


def _encode_ends(text: str, limit: int, encode: Encode) -> tuple[Sequence[int], Sequence[int], str]:
    """Return tokens with which a text begins, tokens with which it ends, and the number of all.

    If the text is so long that this saves time, they are those of its first and last `_LONG_TOKEN *
    limit` characters, unless these parts have `limit` tokens or fewer. The number is an estimate
    then, with the word "about". Otherwise they are all tokens, twice.
    """
    size = _LONG_TOKEN * limit
    if len(text) > max(_LONG_TEXT, 4 * size):
        first, last = encode(text[:size]), encode(text[-size:])
        if min(len(first), len(last)) > limit:
            tokens = (len(first) + len(last)) * len(text) // (2 * size)
            digits = max(len(str(tokens)) - 2, 0)
            return first, last, f"about {round(tokens, -digits)}"
    ids = encode(text)
    return ids, ids, str(len(ids))


def _estimate_length(
    has: Callable[[str], bool], decode_tokens: Callable[[int], str], tokens: int
) -> int:
    """Estimate the number of characters in the first or last tokens of a text.

    If the tokens end within a character, their decoded text is not a part of the text. Then up to
    three tokens are left out. If this does not help (a normalizer may have composed an accent), the
    estimate is the length of the decoded text.
    """
    for fewer in range(min(_MAX_BYTES_OF_CHARACTER, tokens + 1)):
        if has(part := decode_tokens(tokens - fewer)):
            return len(part)
    return len(decode_tokens(tokens))


def _fit(part: Callable[[int], str], length: int, limit: int, encode: Encode) -> tuple[str, int]:
    """Return a part of at most `limit` tokens and about `length` characters, and its token count.

    Usually a part of `length` characters fits. It may not, because the tokenizer may need more
    tokens for the part alone than for the same characters within the text. Then characters are
    removed, in each step twice as many as in the previous step.
    """
    step = 1
    while length > 0:
        tokens = len(encode(part(length)))
        if tokens <= limit:
            return part(length), tokens
        length, step = length - step, 2 * step
    return "", 0
