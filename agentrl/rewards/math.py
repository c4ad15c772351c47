r"""The grader of MATH (arXiv:2103.03874): compare the last `\boxed{...}` with the right answer.

It first compares spellings, as verl does. If they differ, it compares by algebra (Math-Verify), in
a worker process with a deadline.

Algebra is skipped for expressions that could take forever, for answers in words, and for answers of
another kind. sympy evaluates an expression while it parses it, and some expressions of a model run
until the worker is killed, which costs seconds. Math-Verify also treats a pair as a set of two and
ignores the base of a number, so both are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.answers import as_text, boxed_answer
from agentrl.errors import ConfigError, GraderCrash
from agentrl.installation import install_command
from agentrl.rewards.base import reward
from agentrl.rewards.math_text import has_other_name, normal_form, same_text, tokens_of
from agentrl.workers import Processes, WorkerDied

SECONDS = 5.0
"""The time limit for algebra on one answer. An answer that takes longer is wrong."""
LONGEST = 500
"""The maximum length of an answer in characters. The longest of MATH-500 has 159."""
DEEPEST = 16
"""The maximum depth of nested brackets."""
DIGITS = 4
"""The maximum number of digits of an exponent, or of a number before `!`."""

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
"""Signs of inequalities and set operations. Only algebra can compare answers with these."""


@reward("math", bounded=True)
class Math:
    """Grades the answers of a run."""

    def __init__(self, verify: bool = True):
        """Import Math-Verify if it is needed.

        Args:
            verify: whether to compare by algebra, too. False gives verl's scores.

        Raises:
            ConfigError: Math-Verify is not installed.
        """
        self._equivalent: Callable[[str, str], bool] | None = None
        if verify:
            try:
                from agentrl.rewards.math_algebra import equivalent
            except ImportError as e:
                raise ConfigError(
                    f"the grader 'math' needs Math-Verify ({e}): {install_command('math')}. Or"
                    " compare spellings only, as verl does: reward.kwargs.verify=false"
                ) from e
            self._equivalent = equivalent

    async def __call__(
        self, solution_str: str, ground_truth: Any, pool: Callable[[], Processes]
    ) -> dict[str, Any]:
        """Compare the last box with the right answer.

        Args:
            solution_str: the assistant's text.
            ground_truth: the right answer.
            pool: a function that returns the worker processes for algebra.

        Returns:
            `score` and `acc`: 1.0 for a right answer, else 0.0; `grader_timeout`: 1.0 if algebra
            did not end in time, else 0.0; `answer`: the text in the box.

        Raises:
            GraderCrash: the worker died.
        """
        answer, truth = boxed_answer(solution_str), as_text(ground_truth)
        right, is_late = answer is not None and same_text(answer, truth), False
        if answer and not right and not is_other_kind(answer, truth):
            right = same_words(answer, truth)
            skip = any(is_too_hard(text) or has_words(text) for text in (answer, truth))
            if self._equivalent and not right and not skip:
                try:
                    right = await pool().call(self._equivalent, answer, truth, seconds=SECONDS)
                except TimeoutError:
                    is_late = True
                except WorkerDied as e:
                    raise GraderCrash(
                        f"Math-Verify failed on {answer!r:.200} and {truth!r:.200}: {e}"
                    ) from e
        score, late = float(right), float(is_late)
        return {"score": score, "acc": score, "grader_timeout": late, "answer": answer or ""}


def problem_of(ground_truth: Any) -> str:
    r"""Return why no answer can match this ground truth; "" if its text in `\boxed{}` matches."""
    truth = as_text(ground_truth)
    boxed = boxed_answer(rf"\boxed{{{truth}}}")
    if boxed is not None and same_text(boxed, truth):
        return ""
    return "it must be the final answer only"


def is_too_hard(text: str) -> bool:
    """Return whether algebra on a text may take forever.

    Such a text is too long or too deeply nested, or has a tower of powers or a huge factorial.

    Example: `9^{9^{9}}`, `2^{100000}` and `10^9!` are too hard. `e^{x^2}` is not, because sympy
    does not evaluate powers of a symbol.
    """
    if len(text) > LONGEST:
        return True
    depth = 0
    exponents: list[int] = []  # the depth at which each open exponent began
    # due: an exponent must begin now. bare: an exponent without brackets is open.
    # ended: an exponent ended at this token.
    due = bare = ended = False
    digits, before = 0, ""  # the digits of the current number; the token before
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
    r"""Return whether a text has words. In algebra "listen" is a product, and equals "silent"."""
    return _WORD.search(_COMMAND.sub(" ", text)) is not None


def same_words(answer: str, truth: str) -> bool:
    r"""Return whether the two differ only in capitals, brackets and `\text{...}`.

    This applies to words and to a single letter only: without brackets, `2^{3}4` equals `2^{34}`.
    """
    own, right = (_WRAPPER.sub("", normal_form(text)).casefold() for text in (answer, truth))
    if not own or own != right or _FORMULA.search(right):
        return False
    return has_words(truth) or not _NUMBERS.search(right)


def is_other_kind(answer: str, truth: str) -> bool:
    r"""Return whether the two cannot be equal because they are of different kinds.

    `(1,2)` is not `[1,2)`, `\{1,2\}` or `1,2`; `x=5` is not `y=5`; `17_8` is not `17_9`.
    """
    if has_other_name(answer, truth):
        return True
    own, right = (normal_form(text) for text in (answer, truth))
    bases = _BASE.fullmatch(own), _BASE.fullmatch(right)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return True
    tokens = [tokens_of(text) for text in (own, right)]
    return _LOOSE.isdisjoint(tokens[0] + tokens[1]) and _ordered(tokens[0]) != _ordered(tokens[1])


def _ordered(tokens: list[str]) -> set[str]:
    """Return the pairs of brackets, such as `[)`, around ordered lists in an answer.

    The answer is one list, `[1, 2)`, or has lists as elements, `(1, 2), (3, 4)`.
    """
    for i in range(len(tokens) - 1, -1, -1):
        if tokens[i] in ("=", r"\in"):
            tokens = tokens[i + 1 :]
            break
    if tokens[:1] == [r"\{"] and tokens[-1:] == [r"\}"]:
        tokens = tokens[1:-1]
    brackets: set[str] = set()
    depth, start, inner = 0, 0, False  # inner: a comma is directly inside the element's brackets
    closed = -1  # the index at which the element's first bracket ends
    for i, token in enumerate([*tokens, ","]):
        if token in _OPEN or token == r"\{":
            depth += 1
        elif token in _CLOSE or token == r"\}":
            depth -= 1
            if depth == 0 and closed < 0:
                closed = i
        elif token == "," and (depth <= 0 or i == len(tokens)):
            if inner and closed == i - 1 and tokens[start] in ("(", "["):
                brackets.add(tokens[start] + tokens[closed])
            start, inner, closed = i + 1, False, -1
        elif token == "," and depth == 1:
            inner = True
    return brackets
