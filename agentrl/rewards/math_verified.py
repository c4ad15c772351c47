r"""Whether two answers mean the same, by Math-Verify and sympy: `2\sqrt{3}` and `\sqrt{12}`.

Algebra on what a model wrote can take for ever or all memory. So what is sure to is refused here
before it is begun, and the rest runs in a process that is killed at its deadline.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from agentrl.errors import ConfigError
from agentrl.rewards.math_text import normal_form, tokens_of

LONGEST = 2000
"""Characters of an answer that is looked at."""
DEEPEST = 64
"""Brackets within brackets."""
DIGITS = 4
"""Of a number in an exponent, or before a `!`."""

_OPEN, _CLOSE = frozenset("{(["), frozenset("})]")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)(?=\{)|[{}()\s]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")


def equivalent(answer: str, truth: str) -> bool:
    """Whether Math-Verify takes the answer for the truth; runs in a worker process.

    Words are compared as words: to algebra, "listen" is a product like "silent".
    """
    if too_hard(answer) or too_hard(truth):
        return False
    if _has_words(answer) or _has_words(truth):
        said, right = (_WRAPPER.sub("", normal_form(t)).casefold() for t in (answer, truth))
        return bool(said) and said == right
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # the deadline is its caller's
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    right, said = (
        parse(rf"\boxed{{{t}}}", latex, parsing_timeout=None)  # type: ignore[arg-type]
        for t in (truth, answer)
    )
    return bool(verify(right, said, timeout_seconds=None))


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


def check_installed() -> None:
    """Say what to do where Math-Verify is missing.

    Raises:
        ConfigError: it is.
    """
    if find_spec("math_verify") is None:
        raise ConfigError(
            "the grader 'math' needs Math-Verify: pip install 'agentrl[math]', or compare spelling"
            " alone, as verl does: reward.kwargs.verify=false"
        )


def _has_words(text: str) -> bool:
    return _WORD.search(_COMMAND.sub(" ", text)) is not None
