"""The grader of GSM8K (Cobbe et al., 2021, arXiv 2110.14168), with verl's signature."""

from __future__ import annotations

from typing import Any

from agentrl.answers import gsm8k_answer, same_number
from agentrl.rewards.base import reward


@reward("gsm8k")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Compare the answer at the end of the text with the right answer. "17" is not "17.0".

    Args:
        solution_str: the assistant's text. Its last 300 characters count.
        ground_truth: the right number.
        method: "strict" reads the last `#### x`, "flexible" the last number.
        format_score: the score of a wrong answer in the right form (0.1 in verl's documentation).
        score: the score of a right answer.

    Returns:
        `score`: `score`, `format_score`, or 0 if there is no answer; `acc`: 1.0 for a right answer,
        else 0.0; `answer`: the number, "" if there is none.

    Raises:
        ConfigError: `method` is unknown.
    """
    answer = gsm8k_answer(solution_str, method)
    right = answer is not None and same_number(answer, ground_truth)
    points = score if right else 0.0 if answer is None else format_score
    return {"score": points, "acc": float(right), "answer": answer or ""}
