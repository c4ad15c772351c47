"""verl's tools that use a service: passage search and a sandbox."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl import sandbox
from agentrl.compat.verl.bases import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from agentrl.errors import Infrastructure, UserError
from agentrl.http import HttpClient
from agentrl.sandbox.report import report

log = logging.getLogger("agentrl")


class SearchTool(BaseTool):
    r"""Asks a retrieval server for passages.

    The server is that of Search-R1 (arXiv:2503.09516), `retrieval_server.py` in verl's examples. It
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


class SandboxFusionTool(BaseTool):
    """Runs Python programs in the run's sandbox, which `sandbox.backend` sets.

    That may be a SandboxFusion server. The config's own `sandbox_fusion_url` is not used: one key
    decides where all programs of a run are executed.
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
            log.warning(
                "the tool %s runs programs in sandbox.backend, not at its sandbox_fusion_url. To"
                " use that server, set sandbox.backend=%s",
                self.name,
                str(url).removesuffix("/run_code"),
            )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a program and return its output.

        Raises:
            SandboxError: the sandbox does not work.
        """
        done = await sandbox.current().run(str(parameters.get("code", "")))
        return ToolResponse(text=report(done)), 0.0, {}
