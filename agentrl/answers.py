"""Extract the final answer from a text.

Graders and interactions share this, so that they agree on what is right. The time is linear in the
length of the text; some rules look at the end of the text only.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.errors import ConfigError
from agentrl.registry import did_you_mean

METHODS = ("strict", "flexible")
TAIL = 300
"""The number of characters at the end of the text that are searched for an answer, as in verl."""

_HASH_ANSWER = re.compile(r"#### (-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9.,]+")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BRACE = re.compile(r"[{}]")


def without_thoughts(text: str) -> str:
    """Return the part of a text after the last `</think>`, or the whole text."""
    return text.rpartition("</think>")[2]


def gsm8k_answer(text: str, method: str = "strict") -> str | None:
    r"""Return the answer at the end of a text, without commas and `$`; None if there is none.

    `strict` takes the last `#### x` (so it also tests the format), `flexible` the last number. This
    function differs from verl's `gsm8k.extract_solution` in three ways: it accepts `#### $12`, and
    a `flexible` answer has no commas and no final period.

    Example: `gsm8k_answer("3*4 = 12\n#### 1,012")` is "1012".

    Raises:
        ConfigError: `method` is unknown.
    """
    tail = text[-TAIL:]
    if method == "strict":
        answers = _HASH_ANSWER.findall(tail)
        return without_signs(answers[-1]) if answers else None
    if method == "flexible":
        numbers = [n for n in _NUMBER.findall(tail) if any(c.isdigit() for c in n)]
        return without_signs(numbers[-1]).rstrip(".") if numbers else None
    raise ConfigError(
        f"method={method!r} is unknown.{did_you_mean(method, METHODS)}"
        f" Choices: {', '.join(METHODS)}"
    )


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or else of the last `\fbox{...}`.

    Nested braces are matched. `\boxed 5` extends to the next `$` or the end of the line. The result
    is None if there is no box, or the last one is not closed.

    Example: `boxed_answer(r"so $\boxed{\frac{1}{2}}$.")` is `\frac{1}{2}`.
    """
    for command in ("\\boxed", "\\fbox"):
        start = text.rfind(command)
        if start >= 0:
            return _argument(text, start + len(command))
    return None


def _argument(text: str, end_of_name: int) -> str | None:
    """Return the argument of a LaTeX command whose name ends at the index `end_of_name`.

    None if the command has no argument, or its brace is not closed.
    """
    start = end_of_name
    while start < len(text) and text[start] in " \t":
        start += 1
    if text[start : start + 1] != "{":
        line = re.split(r"[$\n]", text[start:], maxsplit=1)[0].strip()
        return (line or None) if start > end_of_name else None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start + 1 : brace.start()]
    return None


def named_answer(text: str) -> str | None:
    """Return the rest of the line after the last `Answer:`, or None if there is none.

    Only the last `TAIL` characters of the text are searched.

    Example: `named_answer("2+2 is 4. Answer: 4")` is "4".
    """
    answers = _ANSWER_LINE.findall(text[-TAIL:])
    return answers[-1] if answers else None


def tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, or None.

    Example: `tagged_answer("<think>?</think> <answer> Paris </answer>")` is "Paris".
    """
    answer, position = None, 0
    while (start := text.find("<answer>", position)) >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            break
        answer, position = text[start + len("<answer>") : end].strip(), end
    return answer


def same_number(answer: str, ground_truth: Any) -> bool:
    """Return whether an answer equals the ground truth as text: "17" is not "17.0".

    The answer has no commas and no `$`; they are removed from the ground truth.
    """
    return answer == plain_number(ground_truth)


def plain_number(ground_truth: Any) -> str:
    """Return a ground truth as text without commas and `$`."""
    return without_signs(as_text(ground_truth))


def as_text(ground_truth: Any) -> str:
    """Return a ground truth as text; "" if it is neither a string nor a number.

    18.0 is "18": tables with missing values store integers as floats.
    """
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    is_text = isinstance(ground_truth, str | int | float) and not isinstance(ground_truth, bool)
    return str(ground_truth).strip() if is_text else ""


def without_signs(number: str) -> str:
    """Return a number without commas and `$`."""
    return number.replace(",", "").replace("$", "")
