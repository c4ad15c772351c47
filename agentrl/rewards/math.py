r"""The grader of MATH's rows (arXiv:2103.03874): the last `\boxed{...}` against the right answer.

First by spelling, as verl does, right here; then, where that does not settle it, by algebra in a
worker process with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.answers import as_text, boxed_answer
from agentrl.errors import ConfigError, GraderCrash
from agentrl.rewards.base import reward
from agentrl.rewards.math_limits import has_words, other_kind, same_words, too_hard
from agentrl.rewards.math_text import same_text
from agentrl.workers import Processes, WorkerDied

SECONDS = 5.0
"""For algebra on one answer; what takes longer is not the same."""


@reward("math", bounded=True)
class Math:
    """Judges a run's answers."""

    def __init__(self, verify: bool = True):
        """Look for what is needed.

        Args:
            verify: also by algebra; False: by spelling alone, verl's scores.

        Raises:
            ConfigError: Math-Verify is missing.
        """
        self._equivalent = _equivalent() if verify else None

    async def __call__(
        self, solution_str: str, ground_truth: Any, pool: Callable[[], Processes]
    ) -> dict[str, float]:
        """Compare the last box with the right answer.

        Args:
            solution_str: what the assistant wrote.
            ground_truth: the right answer.
            pool: where algebra is done.

        Returns:
            `score` and `acc`: 1.0 for a right answer, else 0.0; `grader_timeout`: 1.0 where algebra
            did not end in time.

        Raises:
            GraderCrash: the worker died.
        """
        answer, truth = boxed_answer(solution_str), as_text(ground_truth)
        right, late = answer is not None and same_text(answer, truth), False
        if answer and not right and not other_kind(answer, truth):
            right = same_words(answer, truth)
            if self._equivalent and not right and _worth_it(answer, truth):
                try:
                    right = await pool().call(self._equivalent, answer, truth, seconds=SECONDS)
                except TimeoutError:
                    late = True
                except WorkerDied as e:
                    raise GraderCrash(
                        f"Math-Verify on {answer!r:.200} and {truth!r:.200}: {e}"
                    ) from e
        return {"score": float(right), "acc": float(right), "grader_timeout": float(late)}


def problem_of(ground_truth: Any) -> str:
    """Why no answer could match this ground truth; "" where one can: its own text in a box."""
    truth = as_text(ground_truth)
    own = boxed_answer(rf"\boxed{{{truth}}}")
    if own is not None and same_text(own, truth):
        return ""
    return "give it the final answer alone"


def _worth_it(*texts: str) -> bool:
    return not any(too_hard(text) or has_words(text) for text in texts)


def _equivalent() -> Callable[[str, str], bool]:
    try:
        from agentrl.rewards.math_algebra import equivalent
    except ImportError as e:
        raise ConfigError(
            f"the grader 'math' needs Math-Verify ({e}): pip install 'agentrl[math]', or compare by"
            " spelling alone, as verl does: reward.kwargs.verify=false"
        ) from e
    return equivalent
