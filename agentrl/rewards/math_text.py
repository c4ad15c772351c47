r"""One form for the many ways to write the same answer in LaTeX: `\dfrac12`, `1/2`, `0.5`.

The rules are those of Hendrycks et al. (MATH, arXiv:2103.03874), as verl compares by, but here they
work on LaTeX's own tokens, so that `\leftarrow` does not lose its `\left`. What two texts have in
common after them is spelling; what only algebra can tell is `agentrl.rewards.math_algebra`'s.

One pass over the tokens each: the time grows with the length alone, and nothing is recursive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_ROWS = re.compile(r"(?<!\\)\\begin(?![A-Za-z])")
_SLASH = re.compile(r"(-?)(0|[1-9][0-9]*)/(-?(?:0|[1-9][0-9]*))")
_UNIT = re.compile(r"(?:\\text\{[^{}\d]*\}(?:\s*\^\s*(?:\{-?\d\}|-?\d))?(?:\s|/|\\cdot|\.)*)+")
_MINUS_INSIDE = re.compile(r"\\frac\{-([0-9]+)\}(\{[0-9]+\})")

_UNSEEN = frozenset(
    (r"\!", r"\,", r"\;", r"\:", r"\left", r"\right", r"\displaystyle", "$", r"\$", "%", r"\%")
)
"""Spacing and sizes, and signs of units: an answer means the same without them."""
_BLANK = frozenset(("\\ ", "\\\n", r"\quad", r"\qquad", "~"))
_FRACTIONS = frozenset((r"\tfrac", r"\dfrac", r"\cfrac"))
_DEGREES = (["^", "{", r"\circ", "}"], ["^", r"\circ"], [r"\degree"])
_OPENING = frozenset(("", "{", "(", "[", ",", "+", "-"))
_ARGUMENTS = {r"\frac": 2, r"\sqrt": 1}


def same_text(answer: str, truth: str) -> bool:
    """Whether the two have the same normal form; nothing is the same as an empty answer.

    `x = 5` is 5, but not `y = 5`.
    """
    normal = normal_form(answer)
    return bool(normal) and normal == normal_form(truth) and not other_name(answer, truth)


def other_name(answer: str, truth: str) -> bool:
    """Whether they tell of two unknowns: `x = 5` and `y = 5`."""
    said, right = (_named(_plain(text))[0] for text in (answer, truth))
    return bool(said and right) and said != right


def normal_form(text: str) -> str:
    r"""The text in its one spelling. Idempotent, never raises, in linear time.

    Example: `normal_form(r"x = \dfrac 12 \text{ cm}")` is `\frac{1}{2}`.
    """
    normal = _spelled(text)
    if _ROWS.search(text) and not _ROWS.search(normal):  # the matrix was in what was cut off
        normal = _spelled(normal)
    return normal


def _spelled(text: str) -> str:
    _, tokens = _named(_plain(text))
    while tokens and tokens[-1] == ".":
        tokens.pop()
    return _whole(_join(_with_braces(_with_zeros(tokens))))


def _plain(text: str) -> list[str]:
    """Its tokens without what does not change what it means."""
    if not _ROWS.search(text):  # a doubled backslash is an escape too many, not a matrix's row
        text = re.sub(r"\\+", r"\\", text)
    tokens = [r"\frac" if t in _FRACTIONS else t for t in tokens_of(text) if t not in _UNSEEN]
    tokens = [t for t in _without_unit(tokens) if not _is_blank(t)]
    return list(_without_degrees(tokens))


def _named(tokens: list[str]) -> tuple[str, list[str]]:
    r"""The unknown before the only `=`, `x`, `AB` or `\theta`, and what it is; 3 is no unknown."""
    if tokens.count("=") == 1 and (at := tokens.index("=")) <= 2:
        name, rest = tokens[:at], tokens[at + 1 :]
        if all(token.lstrip("\\").isalpha() for token in name):
            return "".join(name), rest
    return "", tokens


def tokens_of(text: str) -> list[str]:
    r"""LaTeX's tokens: `\word`, a backslash with what it escapes, or a single character."""
    return _TOKEN.findall(text)


def _is_blank(token: str) -> bool:
    return token.isspace() or token in _BLANK


def _without_unit(tokens: list[str]) -> list[str]:
    r"""`5 \text{ cm}^2` without its unit; `5 \text{ or } 6` and `\text{ east}` have none."""
    something = False
    for i, token in enumerate(tokens):
        if something and token == r"\text" and tokens[i + 1 : i + 3] == ["{", " "]:
            return tokens[:i] if _UNIT.fullmatch("".join(tokens[i:])) else tokens
        something = something or not _is_blank(token)
    return tokens


def _without_degrees(tokens: list[str]) -> Iterator[str]:
    i = 0
    while i < len(tokens):
        for sign in _DEGREES:
            if tokens[i : i + len(sign)] == sign:
                i += len(sign)
                break
        else:
            yield tokens[i]
            i += 1


def _with_zeros(tokens: Iterable[str]) -> Iterator[str]:
    """`.5` as `0.5`, where a number can begin."""
    for before, token in pairwise(["", *tokens]):
        if token == "." and before in _OPENING:
            yield "0"
        yield token


def _with_braces(tokens: Iterable[str]) -> Iterator[str]:
    r"""`\frac12` and `\sqrt3` with the braces that TeX adds in its mind."""
    missing = 0  # arguments that the last command still waits for
    outer: list[int] = []  # the same of the commands around each open brace
    for token in tokens:
        if token == "{":
            outer.append(max(0, missing - 1))
            missing = 0
            yield token
        elif token == "}":
            missing = outer.pop() if outer else 0
            yield token
        elif token in _ARGUMENTS:
            missing = _ARGUMENTS[token]
            yield token
        elif missing and (token.isalnum() or token[0] == "\\"):
            missing -= 1
            yield from ("{", token, "}")
        else:
            missing = 0
            yield token


def _join(tokens: Iterable[str]) -> str:
    r"""The text of the tokens, with a space only where it parts a command from a letter."""
    text: list[str] = []
    for before, token in pairwise(["", *tokens]):
        if before[:1] == "\\" and before[1:2].isalpha() and token[:1].isalpha():
            text.append(" ")
        text.append(token)
    return "".join(text)


def _whole(text: str) -> str:
    r"""What is only done to an answer that is nothing else: `0.5`, `-1/2`, `\frac{-1}{2}`."""
    if text == "0.5":
        return r"\frac{1}{2}"
    if slash := _SLASH.fullmatch(text):
        return r"{}\frac{{{}}}{{{}}}".format(*slash.groups())
    if minus := _MINUS_INSIDE.fullmatch(text):
        return rf"-\frac{{{minus[1]}}}{minus[2]}"
    return text
