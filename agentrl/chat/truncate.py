"""A tool's result cut to a number of tokens, as text, before any template is around it.

What is kept is always a piece of the text itself: a slice between two characters, never decoded
tokens. So no character is halved, no U+FFFD appears, and the template's closing tokens, which come
later, are always there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Side = Literal["head", "tail", "middle"]
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_LONGEST = 4
"""Bytes of a character in UTF-8, and so the most tokens that one is spread over."""


def truncate(text: str, limit: int, side: Side, encode: Encode, decode: Decode) -> str:
    """Cut a text of more than `limit` tokens and say so: "(n of m tokens shown)".

    A text of at most `limit` bytes is not looked at, for a token is at least one byte. Else it is
    encoded once; if it is cut, what was kept is encoded again, to prove that it fits, and n counts
    these tokens.

    Args:
        text: the result.
        limit: most tokens of it that are kept; the note comes on top.
        side: head keeps the head, tail the tail, middle leaves out the middle: half of `limit` goes
            to the head, what the head does not use to the tail.
        encode: foreign text to ids (`ChatTemplate.encode`: no control tokens).
        decode: ids to text.

    Returns:
        The text itself where it fits.
    """
    if len(text.encode(errors="replace")) <= limit:
        return text
    ids = encode(text)
    if len(ids) <= limit:
        return text
    head, tail, used, shown = "", "", 0, 0
    if side != "tail":
        share = limit if side == "head" else (limit + 1) // 2
        length = _reach(text.startswith, lambda n: decode(ids[:n]), share)
        head, used = _fitting(lambda n: text[:n], length, share, encode)
    if side != "head":
        share = limit - used
        length = _reach(text.endswith, lambda n: decode(ids[len(ids) - n :]), share)
        length = min(length, len(text) - len(head))
        tail, shown = _fitting(lambda n: text[len(text) - n :], length, share, encode)
    note = f"({used + shown} of {len(ids)} tokens shown)"
    return "\n".join(part for part in (head, note, tail) if part)


def _reach(has: Callable[[str], bool], said: Callable[[int], str], tokens: int) -> int:
    """About how many characters of the text so many tokens are.

    Tokens that end within a character do not decode to the text; then some fewer do. Where none do
    (a normalizer composed an accent), what they decode to is about as long.
    """
    for fewer in range(min(_LONGEST, tokens + 1)):
        if has(part := said(tokens - fewer)):
            return len(part)
    return len(said(tokens))


def _fitting(
    part: Callable[[int], str], length: int, limit: int, encode: Encode
) -> tuple[str, int]:
    """A part of about `length` characters that is at most `limit` tokens, and how many it is.

    The length is right but where a merge, or a tokenizer's whim, makes the part alone more tokens
    than it was in the text. Each step takes off twice as much as the last, so it ends soon.
    """
    step = 1
    while length > 0:
        tokens = len(encode(part(length)))
        if tokens <= limit:
            return part(length), tokens
        length, step = length - step, 2 * step
    return "", 0
