r"""The grader of MATH's rows (arXiv:2103.03874): the last `\boxed{...}` against the right answer.

First by spelling, as verl does, right here; then, where that does not settle it, by algebra in a
worker process with a deadline.

Algebra is not asked what would take for ever, is said in words, or is of another kind: sympy
computes what it reads, and on what a model wrote it may do so until it is killed, which costs
seconds and a worker. Math-Verify takes a pair for a set of two, and leaves out the base of a
number: that is seen here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.answers import as_text, boxed_answer
from agentrl.errors import ConfigError, GraderCrash
from agentrl.rewards.base import reward
from agentrl.rewards.math_text import normal_form, other_name, same_text, tokens_of
from agentrl.workers import Processes, WorkerDied

SECONDS = 5.0
"""For algebra on one answer; what takes longer is not the same."""
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
_FORMULA = re.compile(r"[\\^_+*/=<>|]")
_NUMBERS = re.compile(r"[\d-]")
_BASE = re.compile(r"[0-9A-Z]+_\{?(\d+)\}?")
_LOOSE = frozenset(
    ("<", ">", r"\lt", r"\gt", r"\le", r"\ge", r"\leq", r"\geq", r"\cup", r"\cap", r"\setminus")
)
"""Signs of a set that may as well be written in another way, which algebra knows."""


@reward("math", bounded=True)
class Math:
    """Judges a run's answers."""

    def __init__(self, verify: bool = True):
        """Look for what is needed.

        Args:
            verify: also by algebra; False: by spelling alone, verl's scores.

        Raises:
            ConfigError: Math-Verify is missing.
        """
        self._equivalent: Callable[[str, str], bool] | None = None
        if verify:
            try:
                from agentrl.rewards.math_algebra import equivalent
            except ImportError as e:
                raise ConfigError(
                    f"the grader 'math' needs Math-Verify ({e}): pip install 'agentrl[math]', or"
                    " compare by spelling alone, as verl does: reward.kwargs.verify=false"
                ) from e
            self._equivalent = equivalent

    async def __call__(
        self, solution_str: str, ground_truth: Any, pool: Callable[[], Processes]
    ) -> dict[str, float]:
        """Compare the last box with the right answer.

        Args:
            solution_str: what the assistant wrote.
            ground_truth: the right answer.
            pool: where algebra is done.

        Returns:
            `score` and `acc`: 1.0 for a right answer, else 0.0; `grader_timeout`: 1.0 where algebra
            did not end in time.

        Raises:
            GraderCrash: the worker died.
        """
        answer, truth = boxed_answer(solution_str), as_text(ground_truth)
        right, late = answer is not None and same_text(answer, truth), False
        if answer and not right and not other_kind(answer, truth):
            right = same_words(answer, truth)
            hopeless = any(too_hard(text) or has_words(text) for text in (answer, truth))
            if self._equivalent and not right and not hopeless:
                try:
                    right = await pool().call(self._equivalent, answer, truth, seconds=SECONDS)
                except TimeoutError:
                    late = True
                except WorkerDied as e:
                    raise GraderCrash(
                        f"Math-Verify on {answer!r:.200} and {truth!r:.200}: {e}"
                    ) from e
        return {"score": float(right), "acc": float(right), "grader_timeout": float(late)}


def problem_of(ground_truth: Any) -> str:
    """Why no answer could match this ground truth; "" where one can: its own text in a box."""
    truth = as_text(ground_truth)
    own = boxed_answer(rf"\boxed{{{truth}}}")
    if own is not None and same_text(own, truth):
        return ""
    return "give it the final answer alone"


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
    r"""Whether the two are the same but for capitals, brackets and `\text{...}`.

    Words alone, or a letter: without its brackets, `2^{3}4` would be `2^{34}`.
    """
    said, right = (_WRAPPER.sub("", normal_form(text)).casefold() for text in (answer, truth))
    if not said or said != right or _FORMULA.search(right):
        return False
    return has_words(truth) or not _NUMBERS.search(right)


def other_kind(answer: str, truth: str) -> bool:
    r"""Whether one is in order and the other is not, or in another way.

    `(1,2)` is not `[1,2)`, `\{1,2\}` or `1,2`. So are `x=5` and `y=5`, or `17_8` and `17_9`.
    """
    if other_name(answer, truth):
        return True
    said, right = (normal_form(text) for text in (answer, truth))
    bases = _BASE.fullmatch(said), _BASE.fullmatch(right)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return True
    tokens = [tokens_of(text) for text in (said, right)]
    return _LOOSE.isdisjoint(tokens[0] + tokens[1]) and _ordered(tokens[0]) != _ordered(tokens[1])


def _ordered(tokens: list[str]) -> set[str]:
    """The brackets, as `[)`, around what is a list in itself: the text, or elements of its list."""
    for i in range(len(tokens) - 1, -1, -1):
        if tokens[i] in ("=", r"\in"):
            tokens = tokens[i + 1 :]
            break
    if tokens[:1] == [r"\{"] and tokens[-1:] == [r"\}"]:
        tokens = tokens[1:-1]
    found: set[str] = set()
    depth, start, inner = 0, 0, False  # inner: a comma stands directly in the element's brackets
    closed = -1  # where the first bracket of the element ended
    for i, token in enumerate([*tokens, ","]):
        if token in _OPEN or token == r"\{":
            depth += 1
        elif token in _CLOSE or token == r"\}":
            depth -= 1
            if depth == 0 and closed < 0:
                closed = i
        elif token == "," and (depth <= 0 or i == len(tokens)):
            if inner and closed == i - 1 and tokens[start] in ("(", "["):
                found.add(tokens[start] + tokens[closed])
            start, inner, closed = i + 1, False, -1
        elif token == "," and depth == 1:
            inner = True
    return found
