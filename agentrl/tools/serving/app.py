"""The HTTP API of the tool server, on top of `ToolHost`.

    POST   /sessions                    {episode_id, sample, create_kwargs}     open an episode
                                        -> {"opening": first observations, "tools": names}
    POST   /sessions/{episode}/calls    {turn, call_index, name, arguments}     run one call
    POST   /sessions/{episode}/respond  {turn, messages}      -> the environment's reply, or null
    POST   /sessions/{episode}/reward   {messages}            -> the environment's reward
    DELETE /sessions/{episode}          close it -> {"reward": sum of its class tools' rewards}
    GET    /tools                       the tools, and the ports of the server's workers
    GET    /health                      status, and the numbers of sessions and calls
    GET    /metrics                     metrics of each tool for Prometheus

Every request may be sent twice: (episode, turn, call_index) identifies a call, (episode, turn) a
reply, and the reward is asked once in an episode. The answer to a call is a `ToolResult` with
status 200, also if the model made a mistake. Other statuses carry `{"error": class, "message":
text}`. 4xx means that the request is wrong, 503 that the server cannot answer. A 503 with
`Retry-After` may be sent again. One worker serves an episode (`worker_number`); other workers
answer with 421.

Tools run code, so only the training run may reach them: see `Guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import orjson
import prometheus_client as prometheus
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl import sandbox
from agentrl.errors import AgentRLError, UserCodeError, UserError
from agentrl.http_server.guard import (
    MAX_LONG_BODY,
    REFUSED,
    RETRY_AFTER_SECONDS,
    Guard,
    error_response,
    json_response,
)
from agentrl.installation import install_command
from agentrl.registry import tools
from agentrl.tools.payloads import find_json_fault, from_wire, to_wire
from agentrl.tools.session import (
    Busy,
    CallConflict,
    SessionConflict,
    ToolHost,
    ToolSession,
    UnknownEpisode,
    WrongWorker,
)
from agentrl.trajectory import Message, Sample

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram buckets in /metrics; the last bucket has none."""
SESSION = "/sessions/{episode_id:path}"
ERRORS = (AgentRLError, HTTPException, ValidationError, orjson.JSONDecodeError)
"""The exceptions that are answers to requests."""

# -- requests -------------------------------------------------------------------------------------


class RequestBody(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenRequest(RequestBody):
    """The body of POST /sessions."""

    episode_id: str = Field(min_length=1, max_length=256)
    sample: dict[str, Any]
    """The fields of a dataset row, see `agentrl.Sample`. Only `tools` is required."""
    create_kwargs: dict[str, dict[str, Any]] = {}


class CallRequest(RequestBody):
    """The body of POST /sessions/{episode_id}/calls."""

    turn: int = Field(ge=0, le=2**31 - 1)
    call_index: int = Field(ge=0, le=2**31 - 1)
    name: str
    arguments: dict[str, Any]
    messages: list[dict[str, Any]] = []
    """The conversation so far, for tools with a parameter `messages`."""


class RespondRequest(RequestBody):
    """The body of POST /sessions/{episode_id}/respond."""

    turn: int = Field(ge=0, le=2**31 - 1)
    """The number of the turn. A turn that is sent again gets the same reply."""
    messages: list[dict[str, Any]]
    """The conversation so far."""


class RewardRequest(RequestBody):
    """The body of POST /sessions/{episode_id}/reward."""

    messages: list[dict[str, Any]]
    """The whole conversation."""


B = TypeVar("B", bound=RequestBody)
_SAMPLE = TypeAdapter(Sample)
_MESSAGES = TypeAdapter(tuple[Message, ...])


class ToolMetrics:
    """The Prometheus metrics of a server process."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()
        self._registry = prometheus.CollectorRegistry()
        labels: Any = {"labelnames": ["tool"], "registry": self._registry, "buckets": SECONDS}
        queue_time = prometheus.Histogram(
            "agentrl_tool_queue_seconds", "Time a call waited to start", **labels
        )
        execution_time = prometheus.Histogram(
            "agentrl_tool_execute_seconds", "Time a call ran", **labels
        )
        calls = prometheus.Counter(
            "agentrl_tool_calls", "Calls by outcome", ["tool", "outcome"], registry=self._registry
        )
        self._sessions = prometheus.Gauge(
            "agentrl_tool_sessions", "Open episodes", registry=self._registry
        )
        self._in_flight = prometheus.Gauge(
            "agentrl_tool_calls_in_flight", "Calls in flight", registry=self._registry
        )
        # Looking up a metric by its labels costs more than incrementing it.
        self._of_tool = functools.cache(
            lambda tool: (queue_time.labels(tool), execution_time.labels(tool))
        )
        self._calls = functools.cache(calls.labels)

    def observe_call(self, tool: str, queue_seconds: float, execution_seconds: float) -> None:
        """Record the seconds that a call waited to start, and the seconds that it ran."""
        queue_histogram, execute_histogram = self._of_tool(tool)
        queue_histogram.observe(queue_seconds)
        execute_histogram.observe(execution_seconds)

    def count_result(self, tool: str, outcome: str) -> None:
        """Count a call by its outcome.

        Args:
            tool: the function; "" if the model asked for one that the episode does not have.
            outcome: `ok`, an error class (`ToolResult.error`) or the name of an exception.
        """
        self._calls(tool, outcome).inc()

    def render(self, host: ToolHost) -> bytes:
        """Return the page /metrics."""
        self._sessions.set(len(host))
        self._in_flight.set(host.calls_in_flight)
        return prometheus.generate_latest(self._registry)


# -- the application ------------------------------------------------------------------------------


def create_app(
    host: ToolHost,
    tool_metrics: ToolMetrics,
    *,
    token: str,
    names: frozenset[str],
    max_client_connections: int,
    mcp: bool,
) -> Starlette:
    """Create the application for the tools that are registered in this process.

    Args:
        host: runs the calls.
        tool_metrics: counts the calls.
        token: the bearer token; "" asks for none.
        names: the host names of the server; an empty set allows all.
        max_client_connections: the most connections that one client should open.
        mcp: also serve the Model Context Protocol, at /mcp.
    """
    mcp_endpoint = _make_mcp_endpoint(host) if mcp else None
    sessions, limits = SessionRoutes(host, tool_metrics), {"/sessions": MAX_LONG_BODY}
    routes = [
        Route(f"{SESSION}/calls", sessions.call, methods=["POST"]),
        Route("/sessions", sessions.open, methods=["POST"]),
        Route(f"{SESSION}/respond", sessions.respond, methods=["POST"]),
        Route(f"{SESSION}/reward", sessions.reward, methods=["POST"]),
        Route(SESSION, sessions.close, methods=["DELETE"]),
        *_pages(host, tool_metrics, max_client_connections),
    ]
    if mcp_endpoint:
        routes.append(Route(mcp_endpoint.path, mcp_endpoint.app))
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token, hosts=names, limits=limits)],
        exception_handlers=dict.fromkeys(ERRORS, _answer_error),
        lifespan=_lifespan(host, mcp_endpoint),
    )


def _lifespan(host: ToolHost, mcp_endpoint: Any) -> Callable[[Starlette], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        cleanup_task = asyncio.create_task(host.close_idle_sessions())
        async with mcp_endpoint.running() if mcp_endpoint else contextlib.nullcontext():
            yield
        cleanup_task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await host.aclose()
        await sandbox.release()

    return lifespan


async def _read_body(request: Request, kind: type[B]) -> B:
    return kind.model_validate(orjson.loads(await request.body()))


def _read_messages(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    return _MESSAGES.validate_python([*map(from_wire, messages)])


def _read_sample(fields: dict[str, Any]) -> Sample:
    row = {"id": "", "prompt": (), **fields}
    if isinstance(row["prompt"], list):
        row["prompt"] = [from_wire(m) if isinstance(m, dict) else m for m in row["prompt"]]
    return _SAMPLE.validate_python(row)


def _write_opening(message: Message) -> dict[str, Any]:
    return message.as_dict() | ({"images": to_wire(message)["images"]} if message.images else {})


class SessionRoutes:
    """The routes that open a session, use its tools or its environment, and close it."""

    def __init__(self, host: ToolHost, tool_metrics: ToolMetrics):
        self._host, self._metrics = host, tool_metrics

    async def open(self, request: Request) -> Response:
        """Open a session."""
        body = await _read_body(request, OpenRequest)
        sample = _read_sample(body.sample)
        opened = await self._host.open(body.episode_id, sample, body.create_kwargs)
        opening = [*map(_write_opening, opened.messages)]
        return json_response({"opening": opening, "tools": opened.functions})

    async def call(self, request: Request) -> Response:
        """Run a call."""
        with self._host.counted_call():
            name, outcome = "", "BadRequest"
            try:
                body = await _read_body(request, CallRequest)
                result = find_json_fault(await request.body(), body.arguments)
                if not result:
                    messages = _read_messages(body.messages) if body.messages else ()
                    result = await self._session(request).call(
                        body.turn, body.call_index, body.name, body.arguments, messages
                    )
                outcome = result.error or "ok"
                name = "" if outcome == "unknown_tool" else body.name
                return json_response(to_wire(result))
            except AgentRLError as e:
                outcome = type(e).__name__
                raise
            finally:
                self._metrics.count_result(name, outcome)

    async def respond(self, request: Request) -> Response:
        """Return the environment's reply."""
        body = await _read_body(request, RespondRequest)
        messages = _read_messages(body.messages)
        with self._host.counted_call():
            return json_response(to_wire(await self._session(request).respond(body.turn, messages)))

    async def reward(self, request: Request) -> Response:
        """Return the environment's reward."""
        body = await _read_body(request, RewardRequest)
        scores = await self._session(request).score(_read_messages(body.messages))
        turns = {str(index): score for index, score in scores.turns.items()}
        parts = dict(scores.metrics)
        return json_response({"reward": scores.outcome, "parts": parts, "turns": turns})

    async def close(self, request: Request) -> Response:
        """Close a session."""
        return json_response({"reward": await self._host.close(request.path_params["episode_id"])})

    def _session(self, request: Request) -> ToolSession:
        return self._host.session(request.path_params["episode_id"])


def _pages(host: ToolHost, tool_metrics: ToolMetrics, max_client_connections: int) -> list[Route]:
    """Return the routes that describe the server."""

    async def list_tools(_: Request) -> Response:
        limit, ports = max_client_connections, host.shard.ports
        specs = [tools.get(n).spec for n in tools.names()]
        return json_response({"tools": specs, "workers": ports, "max_client_connections": limit})

    async def health(_: Request) -> Response:
        status = "draining" if host.is_draining else "ok"
        return json_response(
            {"status": status, "sessions": len(host), "calls": host.calls_in_flight}
        )

    async def metrics(_: Request) -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(tool_metrics.render(host), media_type=media_type)

    pages = {"/tools": list_tools, "/health": health, "/metrics": metrics}
    return [Route(path, page, methods=["GET"]) for path, page in pages.items()]


async def _answer_error(_: Request, e: Exception) -> Response:
    """Return the answer to a request that raised one of `ERRORS`."""
    if isinstance(e, AgentRLError):
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if isinstance(e, Busy) else None
        return error_response(_status(e), type(e).__name__, str(e), headers)
    if isinstance(e, HTTPException):
        return error_response(e.status_code, REFUSED, str(e.detail), e.headers)
    if isinstance(e, ValidationError):
        first = e.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return error_response(422, "BadRequest", f"{where}: {first['msg']}")
    return error_response(400, "BadRequest", f"the body is not JSON: {e}")


def _make_mcp_endpoint(host: ToolHost) -> Any:
    try:
        from agentrl.tools.mcp.served import McpEndpoint
    except ImportError as e:
        raise UserError(f"--mcp needs the extra `mcp` ({e}): {install_command('mcp')}") from None
    return McpEndpoint(host)


def _status(error: AgentRLError) -> int:
    if isinstance(error, UserError):
        return 422
    if isinstance(error, UserCodeError):
        return 500
    statuses = {UnknownEpisode: 404, CallConflict: 409, SessionConflict: 409, WrongWorker: 421}
    return statuses.get(type(error), 503)
