r"""The grader of DAPO's and AIME's rows (arXiv:2503.14476), with verl's signature and scores.

An answer is compared as text, after the normalisation of Minerva (Lewkowycz et al., 2022,
arXiv:2206.14858, appendix D.1): units, filler words and signs of LaTeX are left out.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.answers import as_text, boxed_answer, named_answer
from agentrl.rewards.base import reward

BOX_TAIL = 100
"""Characters at the end of the text in which a box is looked for, as in verl."""
LONGEST = 1000
"""A longer text is no final answer, and stays as it is."""

_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_LEFT_OUT = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples", r"\text{s}",
    r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_WRAPPED = [re.compile(rf"\\{command}\{{(.*?)\}}") for command in ("text", "textbf", "overline")]
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_FRACTION = re.compile(r"frac([^{])(.)")
_ROOT = re.compile(r"sqrt([^{])")


@reward("math_dapo")
def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False
) -> dict[str, Any]:
    r"""Compare the answer at the end of the text with the right one.

    Args:
        solution_str: what the assistant wrote; its last 300 characters count.
        ground_truth: the right answer.
        strict_box_verify: read `\boxed{...}` in the last 100 characters alone, and compare it
            letter by letter; else the last line that says `Answer: ...`, or, without one, the box.

    Returns:
        `score`: 1.0 or -1.0; `acc`: 1.0 for a right answer, else 0.0; `pred`: what was read.
    """
    truth = as_text(ground_truth)
    boxed = boxed_answer(solution_str[-BOX_TAIL:])
    if strict_box_verify:
        pred, right = boxed, bool(boxed) and boxed == truth
    else:
        said = named_answer(solution_str)
        pred = minerva(said if said is not None else boxed or "")
        right = bool(pred) and pred == minerva(truth)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred or ""}


def minerva(answer: str) -> str:
    r"""The answer in Minerva's spelling.

    Example: `minerva(r"x = $1,000$ dollars")` is "1000".
    """
    if len(answer) > LONGEST:
        return answer.strip()
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for words in _LEFT_OUT:
        answer = answer.replace(words, "")
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
