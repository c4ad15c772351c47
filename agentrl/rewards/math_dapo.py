r"""The grader of DAPO and AIME (arXiv:2503.14476), with verl's signature and scores.

Answers are compared as text after Minerva's normalization (Lewkowycz et al., 2022,
arXiv:2206.14858, appendix D.1), which removes units, filler words and LaTeX signs.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.answers import as_text, boxed_answer, named_answer
from agentrl.rewards.base import reward

BOX_TAIL = 100
"""The number of characters at the end of the text that are searched for a box, as in verl."""
LONGEST = 1000
"""A text with more characters is not a final answer. It is not normalized."""

_REPLACEMENTS = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples", r"\text{s}",
    r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
# The cost of these patterns is quadratic. They are applied to at most `LONGEST` characters, which
# takes about a millisecond.
_WRAPPED = [re.compile(rf"\\{command}\{{(.*?)\}}") for command in ("text", "textbf", "overline")]
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_FRACTION = re.compile(r"frac([^{])(.)")
_ROOT = re.compile(r"sqrt([^{])")


@reward("math_dapo")
def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False
) -> dict[str, Any]:
    r"""Compare the answer at the end of the text with the right answer.

    Args:
        solution_str: the assistant's text. Its last 300 characters count.
        ground_truth: the right answer.
        strict_box_verify: True: compare `\boxed{...}` in the last 100 characters, without
            normalization. False: compare the last line with `Answer: ...`, or else the box.

    Returns:
        `score`: 1.0 or -1.0; `acc`: 1.0 for a right answer, else 0.0; `pred`: the answer.
    """
    truth = as_text(ground_truth)
    boxed = boxed_answer(solution_str[-BOX_TAIL:])
    if strict_box_verify:
        pred, right = boxed, bool(boxed) and boxed == truth
    else:
        answer = named_answer(solution_str)
        pred = minerva(answer if answer is not None else boxed or "")
        right = bool(pred) and pred == minerva(truth)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred or ""}


def minerva(answer: str) -> str:
    r"""Return the answer after Minerva's normalization.

    Example: `minerva(r"x = $1,000$ dollars")` is "1000".
    """
    if len(answer) > LONGEST:
        return answer.strip()
    answer = answer.split("=")[-1]
    for before, after in _REPLACEMENTS:
        answer = answer.replace(before, after)
    for phrase in _REMOVED:
        answer = answer.replace(phrase, "")
    answer = "\n".join(map(_between_dollars, answer.split("\n")))
    for wrapped in (*_WRAPPED, _BOXED):
        answer = wrapped.sub(r"\1", answer)
    answer = _ROOT.sub(r"sqrt{\1}", _FRACTION.sub(r"frac{\1}{\2}", answer))
    answer = answer.replace("$", "")
    plain = answer.replace(",", "")
    return (plain if plain.isdigit() else answer).strip()


def _between_dollars(line: str) -> str:
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line
