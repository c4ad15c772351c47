r"""Compare two answers by Math-Verify and sympy: `2\sqrt{3}` equals `\sqrt{12}`.

This runs in a worker process, which is killed if it takes too much time or memory.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Float, MatrixBase, Rational
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

# Math-Verify warns that its own time limits, which use signals, are off. The worker has a deadline.
for module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

_BOX = [LatexExtractionConfig(boxed_match_priority=0)]
_DIGITS = 50
"""The number of digits to which numbers must agree if they have no common form."""


def equivalent(answer: str, truth: str) -> bool:
    r"""Return whether Math-Verify finds two answers equal; False if it cannot parse one of them.

    Decimals are exact: 3.1415926 is not `\pi`, and 0.333333 is not a third. A percent sign is a
    unit, as in the comparison of spellings. An equation of numbers must hold: `6 = 5` is not 5.
    """
    right, parsed = _parse(truth), _parse(answer)
    return all(map(_holds, parsed)) and _is_same(right, parsed)


def _parse(text: str) -> list[Any]:
    text = text.replace(r"\%", "").replace("%", "")
    parts = parse(rf"\boxed{{{text}}}", _BOX, parsing_timeout=None)  # type: ignore[arg-type]
    try:
        return [_exact(part) for part in parts]
    except Exception:  # sympy raises many exceptions if it cannot rebuild an expression
        return []


def _is_same(right: Any, parsed: Any) -> bool:
    return bool(verify(right, parsed, numeric_precision=_DIGITS, timeout_seconds=None))


def _exact(part: Any) -> Any:
    """Replace decimals by fractions. Math-Verify would round decimals to six digits."""
    if isinstance(part, Float):
        return Rational(str(part))
    if not isinstance(part, Basic | MatrixBase) or not part.has(Float):
        return part
    if isinstance(part, MatrixBase):
        return part.applyfunc(_exact)
    args = map(_exact, getattr(part, "_unsorted_args", part.args))
    if isinstance(part, Relational):
        return part.func(*args, evaluate=False)  # Evaluated, it would become `True`.
    return part.func(*args)


def _holds(part: Any) -> bool:
    """Return whether all equations between numbers are true, also in a chain of equations."""
    links = getattr(part, "_unsorted_args", (part,))
    equations = [link for link in links if isinstance(link, Eq)]
    return all(e.free_symbols or e.has(AppliedUndef) or _is_same(e.rhs, e.lhs) for e in equations)
