"""The tool and the interaction of verl's GSM8K tutorial."""

from __future__ import annotations

import importlib
from typing import Any
from uuid import uuid4

from agentrl.compat.verl.bases import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agentrl.compat.verl.stand_in import stand_in

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


def _new_state(ground_truth: Any) -> dict[str, Any]:
    return {"response": "", "ground_truth": ground_truth, "reward": 0.0}


def _score(state: dict[str, Any], method: str) -> float:
    """Grade the response by `verl.utils.reward_score.gsm8k`, which a test may have replaced."""
    stand_in()
    grader = importlib.import_module("verl.utils.reward_score.gsm8k")
    return grader.compute_score(
        state["response"], state["ground_truth"], method=method, format_score=0.0, score=1.0
    )


class Gsm8kTool(BaseTool):
    """Checks an answer. An answer that is not better than the last one costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode. The ground truth is an argument or in `create_kwargs`."""
        instance_id = instance_id or str(uuid4())
        create_kwargs = kwargs.get("create_kwargs") or {}
        truth = create_kwargs.get("ground_truth") if ground_truth is None else ground_truth
        self._instance_dict[instance_id] = _new_state(truth)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Check an answer and return its score as text."""
        state, answer = self._instance_dict[instance_id], str(parameters.get("answer", ""))
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        penalty = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), penalty, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return _score(self._instance_dict[instance_id], "flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the state of the episode."""
        del self._instance_dict[instance_id]


class Gsm8kInteraction(BaseInteraction):
    """Tells the assistant whether its last message is right, until it is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Begin an episode."""
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = _new_state(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Check the last assistant message, which must end with `#### ` and the number."""
        texts = [m.get("content") for m in messages if m.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = texts[-1] if texts else ""
        score = await self.calculate_score(instance_id)
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return _score(self._instance_dict[instance_id], "strict")

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Remove the state of the episode."""
        del self._instance_dict[instance_id]
