"""The tool and the interaction that verl's tutorials on GSM8K name in their YAML files."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from agentrl.compat.verl.bases import BaseInteraction, BaseTool
from agentrl.compat.verl.rewards import gsm8k
from agentrl.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class _Checks:
    """An answer per episode, and what it is worth."""

    def __init__(self) -> None:
        self.truth: dict[str, Any] = {}
        self.answer: dict[str, str] = {}

    def begin(self, instance_id: str | None, ground_truth: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self.truth[instance_id], self.answer[instance_id] = ground_truth, ""
        return instance_id

    def hear(self, instance_id: str, answer: str) -> None:
        self.answer[instance_id] = answer if answer.startswith("#### ") else f"#### {answer}"

    def score(self, instance_id: str) -> float:
        return gsm8k(self.answer[instance_id], self.truth[instance_id], method="flexible")

    def end(self, instance_id: str) -> None:
        self.truth.pop(instance_id, None)
        self.answer.pop(instance_id, None)


class Gsm8kTool(BaseTool):
    """Checks an answer that the model hands in; one that is no better than the last costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._checks = _Checks()
        self._best: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode; the ground truth by name, or within `create_kwargs`."""
        given = kwargs.get("create_kwargs") or {}
        truth = given.get("ground_truth") if ground_truth is None else ground_truth
        instance_id = self._checks.begin(instance_id, truth)
        self._best[instance_id] = 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Check an answer."""
        answer = str(parameters.get("answer", ""))
        self._checks.hear(instance_id, answer)
        reward = self._checks.score(instance_id)
        earned = 0.0 if reward > self._best[instance_id] else -0.05
        self._best[instance_id] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), earned, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the last answer is worth."""
        return self._checks.score(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the episode."""
        self._checks.end(instance_id)
        self._best.pop(instance_id, None)


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
        self._checks.hear(instance_id, said[-1] if said else "")
        score = self._checks.score(instance_id)
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """What the last answer is worth."""
        return self._checks.score(instance_id)

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Forget the episode."""
        self._checks.end(instance_id)
