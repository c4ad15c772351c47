"""The tool server: the same `ToolHost` as in process, behind HTTP.

    POST   /sessions                  {episode_id, sample, create_kwargs}       open an episode
    POST   /sessions/{episode}/calls  {turn, call_index, name, arguments}       run one call
    DELETE /sessions/{episode}        close it -> {"reward": sum of its class tools' rewards}
    GET    /tools                     what is offered, and the ports of the server's workers
    GET    /health                    alive, and how much is going on
    GET    /metrics                   the same for Prometheus, by tool

Anything may be sent twice: (episode, turn, call_index) is what makes a call the same call. A call's
answer is a `ToolResult` with status 200, also where it tells the model of a mistake. Other statuses
carry `{"error": class, "message": text}`: 4xx the request's fault, 503 the server's; a 503 with
`Retry-After` is worth sending again. An episode stays with one worker, see `worker_of`; another one
answers 421.

Tools run code, so nobody else may reach them: see `Guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import orjson
import prometheus_client as prometheus
from fastapi import FastAPI, Path, Request, Response, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from agentrl import sandbox
from agentrl.errors import AgentRLError, UserCodeError, UserError
from agentrl.registry import tools
from agentrl.tools.payloads import refused
from agentrl.tools.serving.guard import REFUSED, Guard, refusal
from agentrl.tools.session import (
    Busy,
    CallConflict,
    SessionConflict,
    ToolHost,
    UnknownEpisode,
    WrongWorker,
)
from agentrl.tools.tool import Offer
from agentrl.trajectory import Message, Sample, ToolResult

MAX_SESSION_BODY = 2**24
"""Rows may hold whole documents."""
RETRY_AFTER_SECONDS = 1
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper ends of the buckets of /metrics, before infinity."""
CALLS = "/sessions/{episode_id:path}/calls"

# -- what is sent ---------------------------------------------------------------------------------


class OpenBody(BaseModel):
    """POST /sessions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    episode_id: str = Field(min_length=1, max_length=256)
    sample: dict[str, Any]
    """A dataset row's fields, see `agentrl.Sample`; at least `tools`."""
    create_kwargs: dict[str, dict[str, Any]] = {}


class CallBody(BaseModel):
    """POST /sessions/{episode_id}/calls."""

    model_config = ConfigDict(extra="forbid", strict=True)
    turn: int = Field(ge=0, le=2**31 - 1)
    call_index: int = Field(ge=0, le=2**31 - 1)
    name: str
    arguments: dict[str, Any]
    messages: list[dict[str, Any]] = []
    """The conversation so far, where the tool asks for it."""


class Refusal(BaseModel):
    """Why there is no answer."""

    error: str
    """The class: of an exception of agentrl's, `BadRequest` or `Refused`."""
    message: str


class Opened(BaseModel):
    """The session is open."""


class Closed(BaseModel):
    """The session is closed."""

    reward: float
    """Sum of what its class tools' `reward()` gave."""


class Offered(BaseModel):
    """What the server is."""

    tools: list[Offer]
    workers: list[int]
    """The ports of its workers, by number; empty where it is one process."""


class Health(BaseModel):
    """That the server is."""

    status: Literal["ok", "draining"]
    sessions: int
    calls: int


# Described, and not checked: an episode with another id is not open, which is answered with 404.
EpisodeId = Annotated[str, Path(json_schema_extra={"minLength": 1, "maxLength": 256})]

_SAMPLE = TypeAdapter(Sample)
_MESSAGES = TypeAdapter(tuple[Message, ...])

REFUSALS = {
    400: "Not JSON, or the body ended early",
    401: "No bearer token, or a wrong one",
    403: "Another host's name, or a web page",
    404: "No such session",
    408: "The body took too long",
    409: "The turn and index, or the episode, were used with other contents",
    413: "The body is too long",
    415: "The body is not said to be JSON",
    421: "The episode stays with another worker",
    422: "The body has another shape, or names what is not there",
    500: "A tool's own code failed in its constructor or reward",
    503: "No room, or about to stop; with Retry-After it is worth sending again",
}
OF_BODIES = (400, 408, 413, 415, 422)


class Meter:
    """What a server's process tells of itself at /metrics, in Prometheus' format."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()
        self._registry = prometheus.CollectorRegistry()
        of_tool: Any = {"labelnames": ["tool"], "registry": self._registry, "buckets": SECONDS}
        waited = prometheus.Histogram(
            "agentrl_tool_queue_seconds", "Time a call waited to start", **of_tool
        )
        ran = prometheus.Histogram(
            "agentrl_tool_execute_seconds", "Time a call took once started", **of_tool
        )
        calls = prometheus.Counter(
            "agentrl_tool_calls",
            "Calls by how they ended",
            ["tool", "outcome"],
            registry=self._registry,
        )
        self._sessions = prometheus.Gauge(
            "agentrl_tool_sessions", "Open episodes", registry=self._registry
        )
        self._in_flight = prometheus.Gauge(
            "agentrl_tool_calls_in_flight", "Calls now", registry=self._registry
        )
        # Finding a metric by its labels costs more than adding to it.
        self._of_tool = functools.cache(lambda tool: (waited.labels(tool), ran.labels(tool)))
        self._calls = functools.cache(calls.labels)

    def ran(self, tool: str, waited: float, took: float) -> None:
        """A call ran: how long it waited to start, and how long it took from there, in seconds."""
        of_waiting, of_running = self._of_tool(tool)
        of_waiting.observe(waited)
        of_running.observe(took)

    def answered(self, tool: str, outcome: str) -> None:
        """A call was answered, or could not be.

        Args:
            tool: the function; "" where the model asked for one that is not offered.
            outcome: `ok`, a class of failure (`ToolResult.error`), or the name of an exception.
        """
        self._calls(tool, outcome).inc()

    def page(self, host: ToolHost) -> bytes:
        """All of it as text."""
        self._sessions.set(len(host))
        self._in_flight.set(host.calls_in_flight)
        return prometheus.generate_latest(self._registry)


# -- the application ------------------------------------------------------------------------------


def create_app(
    host: ToolHost, meter: Meter, *, token: str, names: frozenset[str], mcp: bool
) -> FastAPI:
    """The application, offering what is registered in this process.

    Args:
        host: runs the calls.
        meter: counts them.
        token: the bearer token to ask for; none if empty.
        names: under which the server may be addressed; empty allows all.
        mcp: also serve the Model Context Protocol, at /mcp.
    """
    door = _mcp_door(host) if mcp else None
    # The guard has looked at the token before: this is for the document.
    secured = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))] if token else []

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(host.reap())
        async with door.running() if door else contextlib.nullcontext():
            yield
        reaper.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await host.aclose()
        await sandbox.release()

    def has_route(scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)

    def said(answer: type | None, *refusals: int, anybody: bool = False) -> dict[str, Any]:
        """The arguments of a route that say what it answers, refusals included."""
        always = (403,) if anybody else (401, 403)
        return {
            "response_model": answer,
            "response_description": answer.__doc__ if answer else "Text",
            "dependencies": [] if anybody else secured,
            "responses": {
                status: {"model": Refusal, "description": REFUSALS[status]}
                for status in sorted((*always, *refusals))
            },
        }

    app = FastAPI(title="agentrl tools", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(
        Guard,
        token=token,
        hosts=names,
        limits={"/sessions": MAX_SESSION_BODY},
        has_route=has_route,
    )

    @app.post(CALLS, **said(ToolResult, 404, 409, 421, 500, 503, *OF_BODIES))
    async def call(episode_id: EpisodeId, body: CallBody) -> ToolResult:
        messages = _MESSAGES.validate_python(body.messages) if body.messages else ()
        session = host.session(episode_id)
        return await session.call(body.turn, body.call_index, body.name, body.arguments, messages)

    @app.post("/sessions", **said(Opened, 404, 409, 421, 500, 503, *OF_BODIES))
    async def open_session(body: OpenBody) -> Response:
        sample = _SAMPLE.validate_python({"id": "", "prompt": (), **body.sample})
        await host.open(body.episode_id, sample, body.create_kwargs)
        return _answer({})

    @app.delete("/sessions/{episode_id:path}", **said(Closed, 404, 421, 422, 500, 503))
    async def close_session(episode_id: EpisodeId) -> Response:
        return _answer({"reward": await host.close(episode_id)})

    @app.get("/tools", **said(Offered))
    async def offered() -> Response:
        offers = [tools.get(n).offer for n in tools.names()]
        return _answer({"tools": offers, "workers": host.place.ports})

    @app.get("/health", **said(Health, anybody=True))
    async def health() -> Response:
        status = "draining" if host.draining else "ok"
        return _answer({"status": status, "sessions": len(host), "calls": host.calls_in_flight})

    page = said(None)
    page["responses"][200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", **page, response_class=Response)
    async def metrics() -> Response:
        return Response(meter.page(host), media_type="text/plain; version=0.0.4; charset=utf-8")

    # The routes that take bodies are described above and run here: orjson reads the body, and the
    # way of a call is without FastAPI's dependencies.

    async def read_and_call(request: Request) -> Response:
        host.enter()
        name, outcome = "", "BadRequest"
        try:
            sent = await request.body()
            body = CallBody.model_validate(orjson.loads(sent))
            result = refused(sent, body.arguments)
            result = result or await call(request.path_params["episode_id"], body)
            outcome = result.error or "ok"
            name = "" if outcome == "unknown_tool" else body.name
            return _answer(result)
        except AgentRLError as e:
            outcome = type(e).__name__
            raise
        finally:
            host.leave()
            meter.answered(name, outcome)

    async def read_and_open(request: Request) -> Response:
        return await open_session(OpenBody.model_validate(orjson.loads(await request.body())))

    app.router.routes[:0] = [
        Route(CALLS, read_and_call, methods=["POST"]),
        Route("/sessions", read_and_open, methods=["POST"]),
    ]
    if door:
        app.router.routes.append(Route(door.path, door.app))

    @app.exception_handler(AgentRLError)
    async def failed(_: Request, e: AgentRLError) -> Response:
        later = {"retry-after": str(RETRY_AFTER_SECONDS)} if isinstance(e, Busy) else None
        return refusal(_status(e), type(e).__name__, str(e), later)

    @app.exception_handler(ValidationError)
    async def misshapen(_: Request, e: ValidationError) -> Response:
        first = e.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return refusal(422, "BadRequest", f"{where}: {first['msg']}")

    @app.exception_handler(orjson.JSONDecodeError)
    async def not_json(_: Request, e: orjson.JSONDecodeError) -> Response:
        return refusal(400, "BadRequest", f"the body is not JSON: {e}")

    @app.exception_handler(HTTPException)
    async def no_such_thing(_: Request, e: HTTPException) -> Response:
        return refusal(e.status_code, REFUSED, str(e.detail), e.headers)

    return app


def _mcp_door(host: ToolHost) -> Any:
    try:
        from agentrl.tools.mcp.served import Served
    except ImportError as e:
        raise UserError(f'--mcp needs the extra: pip install "agentrl[mcp]" ({e})') from None
    return Served(host)


def _answer(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _status(error: AgentRLError) -> int:
    if isinstance(error, UserError):
        return 422
    if isinstance(error, UserCodeError):
        return 500
    statuses = {UnknownEpisode: 404, CallConflict: 409, SessionConflict: 409, WrongWorker: 421}
    return statuses.get(type(error), 503)
