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
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import orjson
import prometheus_client as prometheus
from fastapi import FastAPI, Path, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route, request_response

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
    UnknownEpisode,
    WrongWorker,
)
from agentrl.tools.tool import ToolSpec
from agentrl.trajectory import Message, Sample, ToolResult

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram buckets in /metrics; the last bucket has none."""
CALLS = "/sessions/{episode_id:path}/calls"
RESPOND = "/sessions/{episode_id:path}/respond"
REWARD = "/sessions/{episode_id:path}/reward"
ERRORS = (AgentRLError, HTTPException, ValidationError, orjson.JSONDecodeError)
"""The exceptions that are answers to requests."""

# -- requests and responses -----------------------------------------------------------------------


class OpenRequest(BaseModel):
    """The body of POST /sessions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    episode_id: str = Field(min_length=1, max_length=256)
    sample: dict[str, Any]
    """The fields of a dataset row, see `agentrl.Sample`. Only `tools` is required."""
    create_kwargs: dict[str, dict[str, Any]] = {}


class CallRequest(BaseModel):
    """The body of POST /sessions/{episode_id}/calls."""

    model_config = ConfigDict(extra="forbid", strict=True)
    turn: int = Field(ge=0, le=2**31 - 1)
    call_index: int = Field(ge=0, le=2**31 - 1)
    name: str
    arguments: dict[str, Any]
    messages: list[dict[str, Any]] = []
    """The conversation so far, for tools with a parameter `messages`."""


class RespondRequest(BaseModel):
    """The body of POST /sessions/{episode_id}/respond."""

    model_config = ConfigDict(extra="forbid", strict=True)
    turn: int = Field(ge=0, le=2**31 - 1)
    """The number of the turn. A turn that is sent again gets the same reply."""
    messages: list[dict[str, Any]]
    """The conversation so far."""


class RewardRequest(BaseModel):
    """The body of POST /sessions/{episode_id}/reward."""

    model_config = ConfigDict(extra="forbid", strict=True)
    messages: list[dict[str, Any]]
    """The whole conversation."""


class ReplyResponse(BaseModel):
    """The environment's reply; null ends the episode."""

    content: str
    score: float
    done: bool
    images: list[dict[str, str]] = []
    """The images in the content: the file of each in base64, as `data`."""


class RewardResponse(BaseModel):
    """The result of the environment's `reward()`."""

    reward: float
    """The outcome of the episode."""
    parts: dict[str, float]
    """Named numbers, which become metrics."""
    turns: dict[str, float]
    """Scores of turns, by the index of the turn."""


class ErrorResponse(BaseModel):
    """The error of a request that failed."""

    error: str
    """The class of the error: an exception of agentrl, `BadRequest` or `Refused`."""
    message: str


class OpenResponse(BaseModel):
    """The session is open."""

    opening: list[dict[str, Any]]
    """The messages of its class tools' `opening()`, or of its environment's `start()`, which follow
    the prompt: role and content."""
    tools: list[str]
    """The names of the functions that the model may call."""


class CloseResponse(BaseModel):
    """The session is closed."""

    reward: float
    """The sum of its class tools' rewards."""


class ToolsResponse(BaseModel):
    """The tools and workers of the server."""

    tools: list[ToolSpec]
    workers: list[int]
    """The ports of its workers, by number; empty if there is only one worker."""
    max_client_connections: int
    """The most connections to each worker that a client should open. If there are more, the worker
    closes idle connections, and then answers 503."""


class HealthResponse(BaseModel):
    """The state of the server."""

    status: Literal["ok", "draining"]
    sessions: int
    calls: int


# The limits are documented but not checked: an episode with another id is not open, and gets a 404.
EpisodeId = Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": 256})]

_SAMPLE = TypeAdapter(Sample)
_MESSAGES = TypeAdapter(tuple[Message, ...])

STATUS_TEXTS = {
    400: "The body is not JSON or is incomplete",
    401: "The bearer token is missing or wrong",
    403: "Wrong Host header, or a request of a web page",
    404: "No such session",
    408: "The body took too long",
    409: "The call or the episode was sent before with other contents",
    413: "The body is too long",
    415: "The body is not declared as JSON",
    421: "Another worker serves the episode",
    422: "The body has the wrong shape, or names an unknown tool",
    500: "The constructor or a hook of a tool or environment raised",
    503: "The server is busy or stopping; with Retry-After, the request may be sent again",
}
BODY_STATUSES = (400, 408, 413, 415, 422)


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


class PlainRoute(APIRoute):
    """A documented route without FastAPI's dependency injection, which costs a call too much time.

    Its function takes the request and the parameters of the path, reads the body and returns a
    response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any):
        super().__init__(path, endpoint, **options)

        async def answer(request: Request) -> Response:
            return await endpoint(request, **request.path_params)

        self.app = request_response(answer)


def create_app(
    host: ToolHost,
    tool_metrics: ToolMetrics,
    *,
    token: str,
    names: frozenset[str],
    max_client_connections: int,
    mcp: bool,
) -> FastAPI:
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
    app = FastAPI(
        title="agentrl tools", lifespan=_lifespan(host, mcp_endpoint), docs_url=None, redoc_url=None
    )
    app.router.route_class = PlainRoute
    app.add_middleware(Guard, token=token, hosts=names, limits={"/sessions": MAX_LONG_BODY})
    _add_session_routes(app, host, tool_metrics, needs_token=bool(token))
    _add_pages(app, host, tool_metrics, max_client_connections, needs_token=bool(token))
    if mcp_endpoint:
        app.router.routes.append(Route(mcp_endpoint.path, mcp_endpoint.app))
    for error in ERRORS:
        app.add_exception_handler(error, _answer_error)
    return app


def _lifespan(host: ToolHost, mcp_endpoint: Any) -> Callable[[FastAPI], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        cleanup_task = asyncio.create_task(host.close_idle_sessions())
        async with mcp_endpoint.running() if mcp_endpoint else contextlib.nullcontext():
            yield
        cleanup_task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await host.aclose()
        await sandbox.release()

    return lifespan


def _describe(
    answer: type | None,
    *statuses: int,
    body: type[BaseModel] | None = None,
    needs_token: bool,
    anybody: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a route that document its body, answer and error statuses."""
    # The guard checks the token. This declares it in the OpenAPI document.
    security = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))] if needs_token else []
    always = (403,) if anybody else (401, 403)
    extra = {}
    if body:
        content = {"application/json": {"schema": body.model_json_schema()}}
        extra = {"requestBody": {"required": True, "content": content}}
        statuses += BODY_STATUSES
    return {
        "openapi_extra": extra,
        "response_model": answer,
        "response_description": answer.__doc__ if answer else "Text",
        "dependencies": [] if anybody else security,
        "responses": {
            status: {"model": ErrorResponse, "description": STATUS_TEXTS[status]}
            for status in sorted((*always, *statuses))
        },
    }


def _read_messages(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    return _MESSAGES.validate_python([*map(from_wire, messages)])


def _read_sample(fields: dict[str, Any]) -> Sample:
    row = {"id": "", "prompt": (), **fields}
    if isinstance(row["prompt"], list):
        row["prompt"] = [from_wire(m) if isinstance(m, dict) else m for m in row["prompt"]]
    return _SAMPLE.validate_python(row)


def _write_opening(message: Message) -> dict[str, Any]:
    return message.as_dict() | ({"images": to_wire(message)["images"]} if message.images else {})


def _add_session_routes(
    app: FastAPI, host: ToolHost, tool_metrics: ToolMetrics, *, needs_token: bool
) -> None:
    """Add the routes that open a session, call its tools and close it."""
    describe_route = partial(_describe, needs_token=needs_token)
    statuses = (404, 409, 421, 500, 503)

    @app.post(CALLS, **describe_route(ToolResult, *statuses, body=CallRequest))
    async def call(request: Request, episode_id: EpisodeId) -> Response:
        host.enter()
        name, outcome = "", "BadRequest"
        try:
            content = await request.body()
            body = CallRequest.model_validate(orjson.loads(content))
            result = find_json_fault(content, body.arguments)
            if not result:
                messages = _read_messages(body.messages) if body.messages else ()
                session = host.session(episode_id)
                result = await session.call(
                    body.turn, body.call_index, body.name, body.arguments, messages
                )
            outcome = result.error or "ok"
            name = "" if outcome == "unknown_tool" else body.name
            return json_response(to_wire(result))
        except AgentRLError as e:
            outcome = type(e).__name__
            raise
        finally:
            host.leave()
            tool_metrics.count_result(name, outcome)

    @app.post("/sessions", **describe_route(OpenResponse, *statuses, body=OpenRequest))
    async def open_session(request: Request) -> Response:
        body = OpenRequest.model_validate(orjson.loads(await request.body()))
        opened = await host.open(body.episode_id, _read_sample(body.sample), body.create_kwargs)
        opening = [*map(_write_opening, opened.messages)]
        return json_response({"opening": opening, "tools": opened.functions})

    @app.post(RESPOND, **describe_route(ReplyResponse, *statuses, body=RespondRequest))
    async def respond(request: Request, episode_id: EpisodeId) -> Response:
        body = RespondRequest.model_validate(orjson.loads(await request.body()))
        messages = _read_messages(body.messages)
        host.enter()
        try:
            reply = await host.session(episode_id).respond(body.turn, messages)
            return json_response(to_wire(reply))
        finally:
            host.leave()

    @app.post(REWARD, **describe_route(RewardResponse, *statuses, body=RewardRequest))
    async def reward(request: Request, episode_id: EpisodeId) -> Response:
        body = RewardRequest.model_validate(orjson.loads(await request.body()))
        scores = await host.session(episode_id).score(_read_messages(body.messages))
        turns = {str(index): score for index, score in scores.turns.items()}
        parts = dict(scores.metrics)
        return json_response({"reward": scores.outcome, "parts": parts, "turns": turns})

    @app.delete(
        "/sessions/{episode_id:path}", **describe_route(CloseResponse, 404, 421, 422, 500, 503)
    )
    async def close_session(_: Request, episode_id: EpisodeId) -> Response:
        return json_response({"reward": await host.close(episode_id)})


def _add_pages(
    app: FastAPI,
    host: ToolHost,
    tool_metrics: ToolMetrics,
    max_client_connections: int,
    *,
    needs_token: bool,
) -> None:
    """Add the routes that describe the server."""
    describe_route = partial(_describe, needs_token=needs_token)

    @app.get("/tools", **describe_route(ToolsResponse))
    async def list_tools(_: Request) -> Response:
        specs = [tools.get(n).spec for n in tools.names()]
        return json_response(
            {
                "tools": specs,
                "workers": host.shard.ports,
                "max_client_connections": max_client_connections,
            }
        )

    @app.get("/health", **describe_route(HealthResponse, anybody=True))
    async def health(_: Request) -> Response:
        status = "draining" if host.is_draining else "ok"
        return json_response(
            {"status": status, "sessions": len(host), "calls": host.calls_in_flight}
        )

    text_page = describe_route(None)
    text_page["responses"][200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", **text_page, response_class=Response)
    async def metrics(_: Request) -> Response:
        return Response(
            tool_metrics.render(host), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


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
