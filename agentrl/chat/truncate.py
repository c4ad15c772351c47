"""Truncate the text of a tool result to a number of tokens, before the template is applied.

The result is always a slice of the text, never decoded tokens. So no character is split, no U+FFFD
appears, and the template's closing tokens, which are added later, are never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Side = Literal["head", "tail", "middle"]
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_LONGEST = 4
"""The most bytes of a character in UTF-8, and so the most tokens of one character."""


def truncate(text: str, limit: int, side: Side, encode: Encode, decode: Decode) -> str:
    """Truncate a text of more than `limit` tokens, with the note "(n of m tokens shown)".

    A text of at most `limit` bytes is returned as it is, because a token has at least one byte. Any
    other text is encoded once. If it is truncated, the rest is encoded again to check that it fits;
    n is the number of these tokens.

    Args:
        text: the tool result.
        limit: the most tokens of the text; the note is not counted.
        side: "head" keeps the head, "tail" keeps the tail, "middle" leaves out the middle. Then the
            head gets half of `limit`, and the tail gets what the head does not use.
        encode: encodes untrusted text (`ChatTemplate.encode`: no control tokens).
        decode: decodes ids.

    Returns:
        The truncated text, or the text itself if it fits.
    """
    if len(text.encode(errors="replace")) <= limit:
        return text
    ids = encode(text)
    if len(ids) <= limit:
        return text
    head, tail, used, shown = "", "", 0, 0
    if side != "tail":
        share = limit if side == "head" else (limit + 1) // 2
        length = _estimate_length(text.startswith, lambda n: decode(ids[:n]), share)
        head, used = _fit(lambda n: text[:n], length, share, encode)
    if side != "head":
        share = limit - used
        length = _estimate_length(text.endswith, lambda n: decode(ids[len(ids) - n :]), share)
        length = min(length, len(text) - len(head))
        tail, shown = _fit(lambda n: text[len(text) - n :], length, share, encode)
    note = f"({used + shown} of {len(ids)} tokens shown)"
    return "\n".join(part for part in (head, note, tail) if part)


def _estimate_length(
    has: Callable[[str], bool], decode_tokens: Callable[[int], str], tokens: int
) -> int:
    """Estimate the number of characters of the first or last tokens of a text.

    If the tokens end within a character, they do not decode to a part of the text; then a few
    tokens fewer do. If none do (a normalizer composed an accent), the decoded text has about that
    length.
    """
    for fewer in range(min(_LONGEST, tokens + 1)):
        if has(part := decode_tokens(tokens - fewer)):
            return len(part)
    return len(decode_tokens(tokens))


def _fit(part: Callable[[int], str], length: int, limit: int, encode: Encode) -> tuple[str, int]:
    """Return a part of at most `limit` tokens and about `length` characters, and its token count.

    Usually `length` fits. It does not if the tokenizer encodes the part alone as more tokens than
    within the text. Each further step removes twice as many characters as the last one.
    """
    step = 1
    while length > 0:
        tokens = len(encode(part(length)))
        if tokens <= limit:
            return part(length), tokens
        length, step = length - step, 2 * step
    return "", 0
