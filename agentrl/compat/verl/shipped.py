"""Parts of verl that user files import: graders, and the tool and interaction of GSM8K.

The graders have verl's names and return what verl's graders return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from uuid import uuid4

from agentrl.answers import as_text, boxed_answer, gsm8k_answer
from agentrl.compat.verl.bases import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agentrl.rewards.graders import grader_of
from agentrl.rewards.gsm8k import compute_score as grade_gsm8k
from agentrl.rewards.math_dapo import compute_score as math_dapo
from agentrl.rewards.math_text import same_text
from agentrl.rewards.search_qa import compute_score as grade_search_qa

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Return the function unchanged; in verl, this decorator traces calls."""
    return function


def gsm8k(*args: Any, **kwargs: Any) -> float:
    """`gsm8k.compute_score`: it returns a number; agentrl's grader returns a mapping."""
    return grade_gsm8k(*args, **kwargs)["score"]


extract_solution = gsm8k_answer
"""`gsm8k.extract_solution`."""


def math_reward(solution_str: str, ground_truth: Any) -> float:
    """`math_reward.compute_score`: it compares spellings only and returns 1.0 or 0.0."""
    answer = boxed_answer(solution_str)
    return float(answer is not None and same_text(answer, as_text(ground_truth)))


def search_qa(solution_str: str, ground_truth: Any) -> float:
    """`search_r1_like_qa_em.compute_score`: it returns a number."""
    return grade_search_qa(solution_str, ground_truth)["score"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """`reward_score.default_compute_score`: grade by the grader of the data source.

    Raises:
        NotImplementedError: the grader is not a plain function.
    """
    plain: dict[str, Callable[..., Any]] = {
        "gsm8k": gsm8k,
        "math": math_reward,
        "math_dapo": math_dapo,
        "search_qa": search_qa,
    }
    name = grader_of(data_source, {}).name
    if name not in plain:
        raise NotImplementedError(
            f"default_compute_score({data_source!r}): the grader {name!r} cannot be called from a"
            f" function. Leave reward.function empty to use it. Choices: {', '.join(plain)}"
        )
    return plain[name](solution_str, ground_truth)


RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class _Checks:
    """The ground truth and the last answer of each episode."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[Any, str]] = {}

    def begin(self, instance_id: str | None, ground_truth: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self._episodes[instance_id] = ground_truth, ""
        return instance_id

    def score(self, instance_id: str, answer: str | None = None) -> float:
        """Score a new answer, or the last one again."""
        truth, last = self._episodes[instance_id]
        if answer is not None:
            last = answer if answer.startswith("#### ") else f"#### {answer}"
            self._episodes[instance_id] = truth, last
        return gsm8k(last, truth, method="flexible")

    def end(self, instance_id: str) -> None:
        self._episodes.pop(instance_id, None)


class Gsm8kTool(BaseTool):
    """Checks an answer. An answer that is not better than the last one costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._checks = _Checks()

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode. The ground truth is an argument or in `create_kwargs`."""
        create_kwargs = kwargs.get("create_kwargs") or {}
        truth = create_kwargs.get("ground_truth") if ground_truth is None else ground_truth
        return self._checks.begin(instance_id, truth), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Check an answer and return its score as text."""
        answer = str(parameters.get("answer", ""))
        last = self._checks.score(instance_id)
        reward = self._checks.score(instance_id, answer)
        penalty = 0.0 if reward > last else -0.05
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), penalty, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return self._checks.score(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the state of the episode."""
        self._checks.end(instance_id)


class Gsm8kInteraction(BaseInteraction):
    """Tells the assistant whether its last message is right, until it is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._checks = _Checks()

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Begin an episode."""
        return self._checks.begin(instance_id, ground_truth)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Check the last assistant message."""
        texts = [m["content"] for m in messages if m["role"] == "assistant"]
        score = self._checks.score(instance_id, texts[-1] if texts else "")
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return self._checks.score(instance_id)

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Remove the state of the episode."""
        self._checks.end(instance_id)
