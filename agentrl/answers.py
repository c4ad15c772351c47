"""How a final answer is read out of text.

Graders and interactions share it: what an interaction calls right, the grader rewards. Only the end
of a text is looked at, so the time does not grow with the text.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.errors import ConfigError
from agentrl.registry import did_you_mean

METHODS = ("strict", "flexible")
TAIL = 300
"""Characters at the end of the text in which an answer is looked for, as in verl."""

_MARKED = re.compile(r"#### (-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9.,]+")


def gsm8k_answer(text: str, method: str = "strict") -> str | None:
    r"""The answer that `text` ends in, without commas and `$`; None if there is none.

    `strict` takes the last `#### x` (it also tests the format), `flexible` the last number, less a
    full stop behind it. As verl's `gsm8k.extract_solution`, but for three things: `#### $12` is
    read, and a `flexible` answer, too, loses its commas, and its full stop.

    Example: `gsm8k_answer("3*4 = 12\n#### 1,012")` is "1012".

    Raises:
        ConfigError: an unknown method.
    """
    tail = text[-TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        return _bare(marked[-1]) if marked else None
    if method == "flexible":
        numbers = [n for n in _NUMBER.findall(tail) if any(c.isdigit() for c in n)]
        return _bare(numbers[-1]).rstrip(".") if numbers else None
    raise ConfigError(
        f"no such method of reading an answer: {method!r}.{did_you_mean(method, METHODS)}"
        f" Choices: {', '.join(METHODS)}"
    )


def same_number(answer: str, ground_truth: Any) -> bool:
    """Whether the two are the same string, commas and `$` aside: "17" is not "17.0"."""
    return answer == plain_number(ground_truth)


def plain_number(ground_truth: Any) -> str:
    """A ground truth as text without commas and `$`.

    A float without a fraction is an integer that a table with gaps has widened: 18.0 is "18".
    """
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    return _bare(str(ground_truth).strip())


def _bare(number: str) -> str:
    return number.replace(",", "").replace("$", "")
