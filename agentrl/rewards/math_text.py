r"""One normal form for the ways to write an answer in LaTeX: `\dfrac12`, `1/2`, `0.5`.

The rules come from Hendrycks et al. (MATH, arXiv:2103.03874), which verl uses, too. In this
module they work on LaTeX tokens, so that `\leftarrow` does not lose its `\left`. They compare
spellings only;
`agentrl.rewards.math_algebra` compares by algebra.

Each rule is one pass over the tokens. The time is linear, and nothing is recursive.
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
"""Spacing, sizes and signs of units. They do not change the meaning of an answer."""
_BLANK = frozenset(("\\ ", "\\\n", r"\quad", r"\qquad", "~"))
_FRACTIONS = frozenset((r"\tfrac", r"\dfrac", r"\cfrac"))
_DEGREES = (["^", "{", r"\circ", "}"], ["^", r"\circ"], [r"\degree"])
_OPENING = frozenset(("", "{", "(", "[", ",", "+", "-"))
_ARGUMENTS = {r"\frac": 2, r"\sqrt": 1}


def same_text(answer: str, truth: str) -> bool:
    """Return whether two answers have the same normal form. An empty answer equals no other.

    `x = 5` equals 5, but not `y = 5`.
    """
    normal = normal_form(answer)
    return bool(normal) and normal == normal_form(truth) and not has_other_name(answer, truth)


def has_other_name(answer: str, truth: str) -> bool:
    """Return whether two answers name different unknowns, as `x = 5` and `y = 5` do."""
    own, right = (_split_name(_plain(text))[0] for text in (answer, truth))
    return bool(own and right) and own != right


def normal_form(text: str) -> str:
    r"""Return the normal form of a text. It is idempotent, linear in time, and never raises.

    Example: `normal_form(r"x = \dfrac 12 \text{ cm}")` is `\frac{1}{2}`.
    """
    normal = _normalize(text)
    if _ROWS.search(text) and not _ROWS.search(normal):  # The removed part contained the matrix.
        normal = _normalize(normal)
    return normal


def _normalize(text: str) -> str:
    _, tokens = _split_name(_plain(text))
    while tokens and tokens[-1] == ".":
        tokens.pop()
    return _rewrite_fraction(_join(_with_braces(_with_zeros(tokens))))


def _plain(text: str) -> list[str]:
    """Return the tokens of a text without those that do not change its meaning."""
    if not _ROWS.search(text):  # Outside of a matrix, a double backslash stands for a single one.
        text = re.sub(r"\\+", r"\\", text)
    tokens = [r"\frac" if t in _FRACTIONS else t for t in tokens_of(text) if t not in _UNSEEN]
    tokens = [t for t in _without_unit(tokens) if not _is_blank(t)]
    return list(_without_degrees(tokens))


def _split_name(tokens: list[str]) -> tuple[str, list[str]]:
    r"""Split at the only `=`, if an unknown such as `x`, `AB` or `\theta` is before it."""
    if tokens.count("=") == 1 and (at := tokens.index("=")) <= 2:
        name, rest = tokens[:at], tokens[at + 1 :]
        if all(token.lstrip("\\").isalpha() for token in name):
            return "".join(name), rest
    return "", tokens


def tokens_of(text: str) -> list[str]:
    r"""Return LaTeX's tokens: `\word`, a backslash with one character, or a single character."""
    return _TOKEN.findall(text)


def _is_blank(token: str) -> bool:
    return token.isspace() or token in _BLANK


def _without_unit(tokens: list[str]) -> list[str]:
    r"""Remove a unit: `5 \text{ cm}^2` has one, `5 \text{ or } 6` and `\text{ east}` have none."""
    has_value = False
    for i, token in enumerate(tokens):
        if has_value and token == r"\text" and tokens[i + 1 : i + 3] == ["{", " "]:
            return tokens[:i] if _UNIT.fullmatch("".join(tokens[i:])) else tokens
        has_value = has_value or not _is_blank(token)
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
    """Write `.5` as `0.5` at places where a number can begin."""
    for before, token in pairwise(["", *tokens]):
        if token == "." and before in _OPENING:
            yield "0"
        yield token


def _with_braces(tokens: Iterable[str]) -> Iterator[str]:
    r"""Add the braces that are optional in TeX: `\frac12`, `\sqrt3`."""
    missing = 0  # the arguments that the last command still needs
    outer: list[int] = []  # for each open brace, `missing` of the command around it
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
    r"""Join the tokens, with a space between a command and a letter."""
    text: list[str] = []
    for before, token in pairwise(["", *tokens]):
        if before[:1] == "\\" and before[1:2].isalpha() and token[:1].isalpha():
            text.append(" ")
        text.append(token)
    return "".join(text)


def _rewrite_fraction(text: str) -> str:
    r"""Rewrite an answer that is only `0.5`, a fraction such as `-1/2`, or `\frac{-1}{2}`."""
    if text == "0.5":
        return r"\frac{1}{2}"
    if slash := _SLASH.fullmatch(text):
        return r"{}\frac{{{}}}{{{}}}".format(*slash.groups())
    if minus := _MINUS_INSIDE.fullmatch(text):
        return rf"-\frac{{{minus[1]}}}{minus[2]}"
    return text
