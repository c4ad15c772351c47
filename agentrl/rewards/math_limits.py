"""What algebra is not asked: what would take for ever, and what is said in words.

Sympy computes what it reads: on what a model wrote, it may do so until it is killed, which costs
seconds and a worker. What is sure to end so is refused before it begins.
"""

from __future__ import annotations

import re

from agentrl.rewards.math_text import normal_form, tokens_of

LONGEST = 500
"""Characters of an answer; the longest of MATH-500 has 159."""
DEEPEST = 16
"""Brackets within brackets."""
DIGITS = 4
"""Of a number in an exponent, or before a `!`."""

_OPEN, _CLOSE = frozenset("{(["), frozenset("})]")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)(?=\{)|[{}()\s]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")


def too_hard(text: str) -> bool:
    """Whether algebra on it may explode: too long, too deep, a tower of powers, a huge factorial.

    Example: `9^{9^{9}}`, `2^{100000}` and `10^9!` are; `e^{x^2}` is not, since sympy leaves powers
    of a letter as they are.
    """
    if len(text) > LONGEST:
        return True
    depth = 0
    exponents: list[int] = []  # how deep each exponent that has not ended began
    due = bare = ended = False  # an exponent must begin; is one without brackets; ended just now
    digits, before = 0, ""  # of the number that is being read; the token before
    for token in tokens_of(text.replace("**", "^")):
        if token.isspace():
            continue
        bare = bare and token.isdecimal() and before.isdecimal()
        if token == "^":
            if due or ended or (exponents and not before[-1:].isalpha()):
                return True
            due = True
            continue
        if token == "!" and (ended or digits > DIGITS or before in _CLOSE or before == "!"):
            return True
        digits = digits + 1 if token.isdecimal() else 0
        ended = bare
        if token in _OPEN:
            depth += 1
            if depth > DEEPEST:
                return True
            if due:
                exponents.append(depth)
            due = False
        elif token in _CLOSE:
            while exponents and exponents[-1] >= depth:
                exponents.pop()
                ended = True
            depth -= 1
        elif due and token not in "+-":
            due, bare, ended = False, True, True
        if digits > DIGITS and (bare or exponents):
            return True
        before = token
    return False


def has_words(text: str) -> bool:
    r"""Whether it is said in words: to algebra, "listen" is a product, and the same as "silent"."""
    return _WORD.search(_COMMAND.sub(" ", text)) is not None


def same_words(answer: str, truth: str) -> bool:
    r"""Whether the two are the same but for capitals, brackets and `\text{...}`."""
    said, right = (_WRAPPER.sub("", normal_form(text)).casefold() for text in (answer, truth))
    return bool(said) and said == right
