r"""Whether two answers mean the same, by Math-Verify and sympy: `2\sqrt{3}` and `\sqrt{12}`.

Runs in a worker process, where it may take too long or too much and be killed for it.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Float, MatrixBase, Rational
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

# It warns that its own deadlines are off: they are signals, and the worker's is its caller's.
for module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

_BOX = [LatexExtractionConfig(boxed_match_priority=0)]
_DIGITS = 50
"""To which sums of numbers must agree that have no form in common."""


def equivalent(answer: str, truth: str) -> bool:
    r"""Whether Math-Verify takes the answer for the truth; what it cannot read is not.

    Decimals are what they say: 3.1415926 is not `\pi`, and 0.333333 no third. A percent sign is a
    unit, as it is in spelling. An equation of numbers must hold: `6 = 5` is not 5.
    """
    right, said = _read(truth), _read(answer)
    return all(map(_holds, said)) and _same(right, said)


def _read(text: str) -> list[Any]:
    text = text.replace(r"\%", "").replace("%", "")
    read = parse(rf"\boxed{{{text}}}", _BOX, parsing_timeout=None)  # type: ignore[arg-type]
    try:
        return [_exact(part) for part in read]
    except Exception:  # sympy's, of many kinds, where a form cannot be built again
        return []


def _same(right: Any, said: Any) -> bool:
    return bool(verify(right, said, numeric_precision=_DIGITS, timeout_seconds=None))


def _exact(part: Any) -> Any:
    """With fractions for its decimals, which Math-Verify would round to six digits."""
    if isinstance(part, Float):
        return Rational(str(part))
    if not isinstance(part, Basic | MatrixBase) or not part.has(Float):
        return part
    if isinstance(part, MatrixBase):
        return part.applyfunc(_exact)
    args = map(_exact, getattr(part, "_unsorted_args", part.args))
    if isinstance(part, Relational):
        return part.func(*args, evaluate=False)  # or it is no equation any more, but true
    return part.func(*args)


def _holds(part: Any) -> bool:
    """Whether equations of numbers alone are true; chains of them are, too."""
    links = getattr(part, "_unsorted_args", (part,))
    equations = [link for link in links if isinstance(link, Eq)]
    return all(e.free_symbols or e.has(AppliedUndef) or _same(e.rhs, e.lhs) for e in equations)
