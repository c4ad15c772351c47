"""What files import of `verl.utils`: graders by verl's names, returning what verl's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.answers import as_text, boxed_answer, gsm8k_answer

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Verl's tracing decorator: agentrl traces episodes itself."""
    return function


def gsm8k(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`gsm8k.compute_score`: a number, where agentrl's grader returns a mapping."""
    from agentrl.rewards.gsm8k import compute_score

    return compute_score(solution_str, ground_truth, method, format_score, score)["score"]


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """`gsm8k.extract_solution`."""
    return gsm8k_answer(solution_str, method)


def math_reward(solution_str: str, ground_truth: Any) -> float:
    """`math_reward.compute_score`: by spelling alone, as verl has it; 1.0 or 0.0."""
    from agentrl.rewards.math_text import same_text

    answer = boxed_answer(solution_str)
    return float(answer is not None and same_text(answer, as_text(ground_truth)))


def math_dapo(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False
) -> dict[str, Any]:
    """`math_dapo.compute_score`."""
    from agentrl.rewards.math_dapo import compute_score

    return compute_score(solution_str, ground_truth, strict_box_verify)


def search_qa(solution_str: str, ground_truth: Any) -> float:
    """`search_r1_like_qa_em.compute_score`."""
    from agentrl.rewards.search_qa import compute_score

    return compute_score(solution_str, ground_truth)["score"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """`reward_score.default_compute_score`: by the grader of the data source.

    Raises:
        NotImplementedError: none that answers at once, as verl has it.
    """
    from agentrl.rewards.graders import grader_of

    at_once: dict[str, Callable[..., Any]] = {
        "gsm8k": gsm8k,
        "math": math_reward,
        "math_dapo": math_dapo,
        "search_qa": search_qa,
    }
    name = grader_of(data_source, {}).name
    if name not in at_once:
        raise NotImplementedError(
            f"default_compute_score({data_source!r}): the grader {name!r} cannot be called from a"
            f" function; leave reward.function empty to use it. Here: {', '.join(at_once)}"
        )
    return at_once[name](solution_str, ground_truth)
