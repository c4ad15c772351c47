"""What comes with verl and user files name: graders, and the tool and interaction of GSM8K.

Graders have verl's names and return what verl's do.
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
from agentrl.rewards.gsm8k import compute_score as graded_gsm8k
from agentrl.rewards.math_dapo import compute_score as math_dapo
from agentrl.rewards.math_text import same_text
from agentrl.rewards.search_qa import compute_score as graded_search_qa

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Verl's tracing decorator: agentrl traces episodes itself."""
    return function


def gsm8k(*args: Any, **kwargs: Any) -> float:
    """`gsm8k.compute_score`: a number, where agentrl's grader returns a mapping."""
    return graded_gsm8k(*args, **kwargs)["score"]


extract_solution = gsm8k_answer
"""`gsm8k.extract_solution`."""


def math_reward(solution_str: str, ground_truth: Any) -> float:
    """`math_reward.compute_score`: by spelling alone, as verl has it; 1.0 or 0.0."""
    answer = boxed_answer(solution_str)
    return float(answer is not None and same_text(answer, as_text(ground_truth)))


def search_qa(solution_str: str, ground_truth: Any) -> float:
    """`search_r1_like_qa_em.compute_score`: a number, as `gsm8k`."""
    return graded_search_qa(solution_str, ground_truth)["score"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """`reward_score.default_compute_score`: by the grader of the data source.

    Raises:
        NotImplementedError: none that answers at once, as verl has it.
    """
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
    """Checks an answer that the model hands in; one that is no better than the last costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._checks = _Checks()

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode; the ground truth by name, or within `create_kwargs`."""
        given = kwargs.get("create_kwargs") or {}
        truth = given.get("ground_truth") if ground_truth is None else ground_truth
        return self._checks.begin(instance_id, truth), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Check an answer."""
        answer = str(parameters.get("answer", ""))
        last = self._checks.score(instance_id)
        reward = self._checks.score(instance_id, answer)
        earned = 0.0 if reward > last else -0.05
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), earned, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the last answer is worth."""
        return self._checks.score(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the episode."""
        self._checks.end(instance_id)


class Gsm8kInteraction(BaseInteraction):
    """Says whether the assistant's last message is right, until it is."""

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
        """Judge the last assistant message."""
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        score = self._checks.score(instance_id, said[-1] if said else "")
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """What the last answer is worth."""
        return self._checks.score(instance_id)

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Forget the episode."""
        self._checks.end(instance_id)
