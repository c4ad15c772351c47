"""How a final answer is read out of text.

Graders and interactions share it: what an interaction calls right, the grader rewards. The time
never grows faster than the text; where a rule allows it, only the end of a text is looked at.
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
_NAMED = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BRACE = re.compile(r"[{}]")


def without_thoughts(text: str) -> str:
    """Return what stands behind the last `</think>` of a text, or all of it."""
    return text.rpartition("</think>")[2]


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
        return without_signs(marked[-1]) if marked else None
    if method == "flexible":
        numbers = [n for n in _NUMBER.findall(tail) if any(c.isdigit() for c in n)]
        return without_signs(numbers[-1]).rstrip(".") if numbers else None
    raise ConfigError(
        f"no such method of reading an answer: {method!r}.{did_you_mean(method, METHODS)}"
        f" Choices: {', '.join(METHODS)}"
    )


def boxed_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of `text` (or `\fbox{...}`, where there is no other).

    Braces inside are matched; `\boxed 5` is read up to the next `$` or the end of the line. None
    where there is no box, or the last one never closes.

    Example: `boxed_answer(r"so $\boxed{\frac{1}{2}}$.")` is `\frac{1}{2}`.
    """
    for command in ("\\boxed", "\\fbox"):
        at = text.rfind(command)
        if at >= 0:
            return _argument(text, at + len(command))
    return None


def _argument(text: str, at: int) -> str | None:
    """The argument of a command whose name ends at `at`."""
    start = at
    while start < len(text) and text[start] in " \t":
        start += 1
    if text[start : start + 1] != "{":
        line = re.split(r"[$\n]", text[start:], maxsplit=1)[0].strip()
        return (line or None) if start > at else None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start + 1 : brace.start()]
    return None


def named_answer(text: str) -> str | None:
    """The rest of the line behind the last `Answer:` at the end of the text; None without one.

    Example: `named_answer("2+2 it is. Answer: 4")` is "4".
    """
    named = _NAMED.findall(text[-TAIL:])
    return named[-1] if named else None


def tagged_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None where there is none.

    Example: `tagged_answer("<think>?</think> <answer> Paris </answer>")` is "Paris".
    """
    found, at = None, 0
    while (start := text.find("<answer>", at)) >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            break
        found, at = text[start + len("<answer>") : end].strip(), end
    return found


def same_number(answer: str, ground_truth: Any) -> bool:
    """Whether the two are the same string, commas and `$` aside: "17" is not "17.0"."""
    return answer == plain_number(ground_truth)


def plain_number(ground_truth: Any) -> str:
    """A ground truth as text without commas and `$`."""
    return without_signs(as_text(ground_truth))


def as_text(ground_truth: Any) -> str:
    """A ground truth as text; "" for what is no text and no number.

    A float without a fraction is an integer that a table with gaps has widened: 18.0 is "18".
    """
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    known = isinstance(ground_truth, str | int | float) and not isinstance(ground_truth, bool)
    return str(ground_truth).strip() if known else ""


def without_signs(number: str) -> str:
    """A number without its commas and `$`."""
    return number.replace(",", "").replace("$", "")
