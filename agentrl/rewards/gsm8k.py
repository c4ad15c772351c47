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
) -> dict[str, float]:
    """Compare the answer at the end of the text with the right one: as strings, "17" is not "17.0".

    Args:
        solution_str: what the assistant wrote; its last 300 characters count.
        ground_truth: the right number.
        method: "strict" reads the last `#### x`, "flexible" the last number.
        format_score: for a wrong answer in the right form (0.1 in verl's documentation).
        score: for a right answer.

    Returns:
        `score`: `score`, `format_score`, or 0 where there is no answer; `acc`: 1.0 for a right
        answer, else 0.0.

    Raises:
        ConfigError: an unknown method.
    """
    answer = gsm8k_answer(solution_str, method)
    right = answer is not None and same_number(answer, ground_truth)
    earned = score if right else 0.0 if answer is None else format_score
    return {"score": earned, "acc": float(right)}
