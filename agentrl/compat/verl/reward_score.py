"""verl's graders, `verl.utils.reward_score`, with verl's signatures and results.

Each calls the corresponding grader of agentrl. docs/verl.md lists where the scores differ.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

from agentrl.answers import as_text, boxed_answer, gsm8k_answer, named_answer
from agentrl.errors import UserError
from agentrl.rewards.code import Code
from agentrl.rewards.graders import UNGRADED, grader_of
from agentrl.rewards.gsm8k import compute_score as grade_gsm8k
from agentrl.rewards.math import Math
from agentrl.rewards.math_dapo import compute_score as math_dapo
from agentrl.rewards.math_text import same_text
from agentrl.rewards.search_qa import compute_score as grade_search_qa
from agentrl.workers import Processes

T = TypeVar("T")

MATH_PROCESSES = 2
"""The number of processes for algebra, if a user's function calls these graders."""


def gsm8k(solution_str: str | None, *args: Any, **kwargs: Any) -> float:
    """Return the score of verl's `gsm8k.compute_score`; agentrl's grader returns a mapping."""
    return grade_gsm8k(solution_str or "", *args, **kwargs)["score"]


extract_solution = gsm8k_answer
"""verl's `gsm8k.extract_solution`."""


def math_reward(solution_str: str, ground_truth: Any) -> float:
    """Return 1.0 or 0.0 by comparing spellings, as verl's `math_reward.compute_score` does."""
    answer = boxed_answer(solution_str)
    return float(answer is not None and same_text(answer, as_text(ground_truth)))


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}` of a text, or None, as verl's function of this name does."""
    answer = boxed_answer(string)
    return None if answer is None else rf"\boxed{{{answer}}}"


def remove_boxed(s: str) -> str:
    r"""Return the text in `\boxed{...}`; this is verl's `math_reward.remove_boxed`."""
    return s.removeprefix(r"\boxed").strip().removeprefix("{").removesuffix("}")


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
) -> list[float]:
    """Return the scores of `math_reward` for a batch, as verl's `math_batch` does."""
    return [math_reward(s, t) for s, t in zip(solution_strs, ground_truths, strict=True)]


def math_verify(model_output: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    """Return 1.0 or 0.0 by comparing spellings and by algebra, as verl's `math_verify` does."""
    graded = _grade_math(_final_answer(model_output), ground_truth)
    return float(timeout_score if graded["grader_timeout"] else graded["score"])


def prime_math(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """Grade as verl's `prime_math.compute_score`, by comparing spellings and by algebra.

    Returns:
        Whether the answer is right, whether the text shows its steps, and the answer.
    """
    answer = _final_answer(model_output)
    has_steps = "Step 2:" in model_output and r"\box" in model_output
    return bool(_grade_math(answer, ground_truth)["score"]), has_steps, answer or ""


def prime_code(
    completion: str, test_cases: Any, continuous: bool = False
) -> tuple[bool | float, list[dict[str, float]]]:
    """Run the last program of a text on test cases, as verl's `prime_code.compute_score` does.

    Args:
        completion: the assistant's text. Its last code block is run.
        test_cases: `{"inputs": [...], "outputs": [...]}`, or its JSON.
        continuous: whether to return the share of the first ten tests that pass if not all pass.

    Returns:
        True if all tests pass, else False (or the share); and metadata.
    """
    graded = _wait(Code(continuous=continuous)(completion, test_cases))
    return (True if graded["acc"] else graded["score"] if continuous else False), [graded]


def sandbox_fusion(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, float]]]:
    """Run the last program of a text on test cases, as verl's `sandbox_fusion.compute_score` does.

    Programs run in the run's sandbox. `sandbox.backend` sets it, for example to a SandboxFusion
    server.

    Args:
        sandbox_fusion_url: not used.
        concurrent_semaphore: not used.
        memory_limit_mb: not used.
        completion: the assistant's text. Its last code block is run.
        test_cases: `{"inputs": [...], "outputs": [...]}`, or its JSON.
        continuous: whether the score is the share of the first ten tests that pass if not all pass.
        timeout: the time limit of a test, in seconds.

    Returns:
        The score, and metadata.
    """
    grader = Code(continuous=continuous, seconds=timeout, total_seconds=max(30.0, timeout))
    graded = _wait(grader(completion, test_cases))
    return graded["score"], [graded]


def search_qa(solution_str: str, ground_truth: Any, *args: Any, **kwargs: Any) -> float:
    """Return the score of verl's `search_r1_like_qa_em.compute_score`, a number."""
    return grade_search_qa(solution_str, ground_truth, *args, **kwargs)["score"]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Grade by the grader of the data source, as verl's `default_compute_score` does.

    Raises:
        UserError: the questions of the data source are images.
        NotImplementedError: there is no grader for the data source.
    """
    if data_source == "hiyouga/geometry3k":
        raise UserError(f"default_compute_score({data_source!r}): {UNGRADED[data_source]}")
    if data_source.startswith("numina_"):
        return float(prime_math(solution_str, ground_truth)[0])
    try:
        name = grader_of(data_source, {"verify": False} if "MATH" in data_source else {}).name
    except UserError as e:
        raise NotImplementedError(f"default_compute_score({data_source!r}): {e}") from None
    if name == "code":
        return float(prime_code(solution_str, ground_truth, continuous=True)[0])
    plain = {"gsm8k": gsm8k, "math": math_reward, "math_dapo": math_dapo, "search_qa": search_qa}
    return plain[name](solution_str, ground_truth)


def _final_answer(text: str) -> str | None:
    r"""Return the answer: `\boxed{...}`, else the text after `Answer:`, else the last number."""
    for find in (boxed_answer, named_answer, lambda text: gsm8k_answer(text, "flexible")):
        if (answer := find(text)) is not None:
            return answer
    return None


def _grade_math(answer: str | None, ground_truth: Any) -> dict[str, float]:
    text = "" if answer is None else rf"\boxed{{{answer}}}"
    return _wait(Math()(text, ground_truth, _processes))


@cache
def _processes() -> Processes:
    return Processes(MATH_PROCESSES)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in a separate thread, on which async graders run."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verl graders", daemon=True).start()
    return loop


def _wait(grading: Coroutine[Any, Any, T]) -> T:
    """Wait for the result of an async grader, because verl's graders are plain functions."""
    return asyncio.run_coroutine_threadsafe(grading, _loop()).result()
