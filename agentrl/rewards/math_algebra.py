r"""Whether two answers mean the same, by Math-Verify and sympy: `2\sqrt{3}` and `\sqrt{12}`.

Runs in a worker process, where it may take too long or too much and be killed for it.
"""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

# It warns that its own deadlines are off: they are signals, and the worker's is its caller's.
for module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

_BOX = [LatexExtractionConfig(boxed_match_priority=0)]


def equivalent(answer: str, truth: str) -> bool:
    """Whether Math-Verify takes the answer for the truth; what it cannot read is not."""
    right, said = (
        parse(rf"\boxed{{{text}}}", _BOX, parsing_timeout=None)  # type: ignore[arg-type]
        for text in (truth, answer)
    )
    return bool(verify(right, said, timeout_seconds=None))
