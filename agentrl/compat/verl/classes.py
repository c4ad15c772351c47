"""verl's own tools and interaction: of its GSM8K tutorial, passage search, and a sandbox."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from agentrl import sandbox
from agentrl.compat.verl.bases import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agentrl.compat.verl.stand_in import stand_in
from agentrl.errors import Infrastructure, UserError
from agentrl.http import HttpClient
from agentrl.sandbox.report import report
from agentrl.workers import PerLoop, Threads

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


log = logging.getLogger("agentrl.tools")


class SearchTool(BaseTool):
    r"""Asks a retrieval server for passages.

    The server is Search-R1's (arXiv:2503.09516), `retrieval_server.py` in verl's examples. It
    answers `{"queries": [...], "topk": 3, "return_scores": true}` with `{"result": [[{"document":
    {"contents": "TITLE\nTEXT"}, "score": ...}, ...], ...]}`.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        url = config.get("retrieval_service_url")
        if not url:
            raise UserError("the tool's config needs retrieval_service_url")
        self._client = HttpClient(str(url))
        self._topk = int(config.get("topk", 3))
        self._seconds = float(config.get("timeout", 30))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the passages of all queries.

        Raises:
            Infrastructure: the server is not reachable or answers an error.
        """
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries:
            text = "Error: 'query_list' is missing, empty, or not a list in parameters."
        else:
            text = await self._search(queries)
        return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False)), 0.0, {}

    async def _search(self, queries: list[Any]) -> str:
        request = {"queries": queries, "topk": self._topk, "return_scores": True}
        status, answer = await self._client.request_json(
            "POST", "", request, deadline=time.monotonic() + self._seconds, retries=2
        )
        try:
            if status != 200:
                raise ValueError
            found = [_passages(passages) for passages in answer["result"]]
        except (ValueError, TypeError, KeyError):
            raise Infrastructure(
                f"the retrieval server {self._client.base_url} answered with status {status}:"
                f" {answer!r:.200}"
            ) from None
        return "\n---\n".join(found) or "No search results found."


def _passages(passages: Iterable[Mapping[str, Any]]) -> str:
    """Return passages as the model reads them, in verl's form."""
    parts = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage["document"]["contents"].partition("\n")
        parts.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(parts)


@cache
def _note_other_sandbox(tool: str, url: str) -> None:
    """Warn once that a tool's own sandbox is not used: a run loads its files several times."""
    log.warning(
        "the tool %s runs programs in sandbox.backend, which need not be its sandbox_fusion_url."
        " To use that server, set sandbox.backend=%s",
        tool,
        url,
    )


class SandboxFusionTool(BaseTool):
    """Runs Python programs in the run's sandbox, which `sandbox.backend` sets.

    That may be a SandboxFusion server. The config's own `sandbox_fusion_url` is not used: one key
    decides where all programs of a run are executed. Subclasses find verl's attributes here.
    """

    runs_programs = True

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        language = config.get("default_language", "python")
        if language != "python":
            raise UserError(f"default_language={language!r}: the sandbox runs python")
        if url := config.get("sandbox_fusion_url"):
            _note_other_sandbox(self.name, str(url).removesuffix("/run_code"))
        self.sandbox_fusion_url = url or ""
        self.default_language = language
        self.default_timeout = config.get("default_timeout", 30)
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.num_workers = config.get("num_workers", 10)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self._threads = PerLoop(
            lambda: Threads(self.num_workers, f"agentrl-{self.name}"), Threads.close
        )
        # verl's is a Ray actor, of which subclasses use this method alone.
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=self._execute))

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode."""
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {**_new_state(ground_truth), "reward": []}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a program and return its output.

        Raises:
            SandboxError: the sandbox does not work.
        """
        code = str(parameters.get("code", ""))
        response = await self.execution_pool.execute.remote(self.execute_code, instance_id, code)
        return response, 0.0, {}

    async def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> ToolResponse:
        """Run a program. Its time limit is `sandbox.timeout_s`, whatever `timeout` is."""
        return ToolResponse(text=report(await sandbox.current().run(code)))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the state of the episode."""
        self._instance_dict.pop(instance_id, None)

    async def _execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of a subclass. It runs in a thread if it is not async."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self._threads.get().run(partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result
