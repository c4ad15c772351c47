"""Exact match for questions that need search, as in Search-R1 (arXiv:2503.09516) and verl.

The normalization is SQuAD's: lower case, no punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from agentrl.answers import as_text, tagged_answer
from agentrl.rewards.base import reward

MAX_TAGS = 10
"""A text with more `<answer>` tags is guessing. It gets a quarter of the score."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@reward("search_qa")
def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, float]:
    """Compare the text in the last `<answer>...</answer>` with each of the right answers.

    Args:
        solution_str: the assistant's text.
        ground_truth: an answer or a list of answers, also as {"target": ...}.
        format_score: the score of a wrong answer in the right form.
        score: the score of a right answer. A text with more than 10 of these tags gets a quarter.

    Returns:
        `score`: `score`, `format_score`, or 0 if there is no answer; `acc`: 1.0 for a right answer,
        else 0.0.
    """
    answer = tagged_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    normal = normal_answer(answer)
    if not normal or normal not in map(normal_answer, right_answers(ground_truth)):
        return {"score": format_score, "acc": 0.0}
    guesses = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return {"score": score / 4 if guesses > MAX_TAGS else score, "acc": 1.0}


def right_answers(ground_truth: Any) -> list[str]:
    """Return the right answers as text; [] if the ground truth has another shape."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [text for answer in answers if (text := as_text(answer))]


def normal_answer(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and extra spaces.

    Example: `normal_answer("The Beatles, (band)")` is "beatles band".
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
