"""The tool server: the same `ToolHost` as in process, behind HTTP.

    POST   /sessions                  {episode_id, sample, create_kwargs}       open an episode
    POST   /sessions/{episode}/calls  {turn, call_index, name, arguments}       run one call
    DELETE /sessions/{episode}        close it -> {"reward": sum of its class tools' rewards}
    GET    /tools                     what is offered
    GET    /health                    alive, and how many sessions are open

Anything may be sent twice: (episode, turn, call_index) is what makes a call the same call. A call's
answer is a `ToolResult` with status 200, also where it tells the model of a mistake. Other statuses
carry `{"error": class, "message": text}`: 4xx the request's fault, 503 the server's.

Tools run code, so nobody else may reach them: see `Guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.routing import Route

from agentrl.errors import AgentRLError, UserCodeError, UserError
from agentrl.registry import tools
from agentrl.tools.guard import LOOPBACK, Guard, refusal
from agentrl.tools.session import IDLE_SECONDS, CallConflict, ToolHost, UnknownEpisode
from agentrl.trajectory import Sample

MAX_SESSION_BODY = 2**24
"""Rows may hold whole documents."""
CALLS = "/sessions/{episode_id:path}/calls"


class OpenBody(BaseModel):
    """POST /sessions."""

    model_config = ConfigDict(extra="forbid")
    episode_id: str = Field(min_length=1, max_length=256)
    sample: dict[str, Any]
    """A dataset row's fields, see `agentrl.Sample`; at least `tools`."""
    create_kwargs: dict[str, dict[str, Any]] = {}


class CallBody(BaseModel):
    """POST /sessions/{episode_id}/calls."""

    model_config = ConfigDict(extra="forbid")
    turn: int = Field(ge=0)
    call_index: int = Field(ge=0)
    name: str
    arguments: dict[str, Any]


_SAMPLE = TypeAdapter(Sample)


def create_app(
    *, token: str = "", hosts: frozenset[str] = LOOPBACK, idle_seconds: float = IDLE_SECONDS
) -> FastAPI:
    """The application, offering what is registered in this process.

    Args:
        token: the bearer token to ask for; none if empty.
        hosts: names under which the server may be addressed; empty allows all.
        idle_seconds: sessions nobody used for so long are closed.
    """
    tool_host = ToolHost(idle_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(tool_host.reap())
        yield
        reaper.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await tool_host.aclose()

    app = FastAPI(title="agentrl tools", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, token=token, hosts=hosts, limits={"/sessions": MAX_SESSION_BODY})

    @app.post(CALLS, openapi_extra=_takes(CallBody))
    async def call(request: Request) -> Response:
        body = CallBody.model_validate(await _json(request))
        result = await tool_host.call(
            request.path_params["episode_id"],
            body.turn,
            body.call_index,
            body.name,
            body.arguments,
        )
        return _answer(result)

    # The hot path: the same function as a plain route, without FastAPI's dependencies, found first.
    app.router.routes.insert(0, Route(CALLS, call, methods=["POST"]))

    @app.post("/sessions", openapi_extra=_takes(OpenBody))
    async def open_session(request: Request) -> Response:
        body = OpenBody.model_validate(await _json(request))
        sample = _SAMPLE.validate_python({"id": "", "prompt": (), **body.sample})
        await tool_host.open(body.episode_id, sample, body.create_kwargs)
        return _answer({})

    @app.delete("/sessions/{episode_id:path}")
    async def close_session(episode_id: str) -> Response:
        return _answer({"reward": await tool_host.close(episode_id)})

    @app.get("/tools")
    async def offered() -> Response:
        return _answer({"tools": [tools.get(n).offer for n in tools.names()]})

    @app.get("/health")
    async def health() -> Response:
        return _answer({"status": "ok", "sessions": len(tool_host)})

    @app.exception_handler(AgentRLError)
    async def failed(_: Request, e: AgentRLError) -> Response:
        return refusal(_status(e), type(e).__name__, str(e))

    @app.exception_handler(ValidationError)
    async def misshapen(_: Request, e: ValidationError) -> Response:
        first = e.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return refusal(422, "BadRequest", f"{where}: {first['msg']}")

    @app.exception_handler(orjson.JSONDecodeError)
    async def not_json(_: Request, e: orjson.JSONDecodeError) -> Response:
        return refusal(400, "BadRequest", f"the body is not JSON: {e}")

    return app


async def _json(request: Request) -> Any:
    return orjson.loads(await request.body())


def _answer(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _status(error: AgentRLError) -> int:
    if isinstance(error, UserError):
        return 422
    if isinstance(error, UserCodeError):
        return 500
    return {UnknownEpisode: 404, CallConflict: 409}.get(type(error), 503)


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of an endpoint that reads its request itself."""
    schema = {"schema": body.model_json_schema()}
    described: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": schema}}
    }
    if body is CallBody:
        episode = {"name": "episode_id", "in": "path", "required": True}
        described["parameters"] = [{**episode, "schema": {"type": "string"}}]
    return described


class ToolServer(uvicorn.Server):
    """The application on a socket of its own, bound from the start: `url` is final.

    Args:
        host: address to bind.
        port: 0 lets the system choose.
        token: bearer token; an address that others can reach needs one.
        ready: called once requests are answered.

    Raises:
        UserError: no token where one is needed, or an address that cannot be bound.
    """

    def __init__(self, host: str, port: int, token: str, ready: Callable[[], None]):
        try:
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise UserError(f"--host {host}: an IP address is needed, such as 127.0.0.1") from None
        if not address.is_loopback and not token:
            raise UserError(
                f"--host {host} lets other machines run your tools: that needs a token. Put one in"
                " the environment variable that --token-env names."
            )
        name = f"[{address}]" if address.version == 6 else str(address)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        try:
            self._socket = socket.create_server((str(address), port), family=family, backlog=2048)
        except OSError as e:
            raise UserError(
                f"cannot serve on {name}:{port}: {e.strerror or e}. Choose another --port"
                " (0 takes a free one)."
            ) from None
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._ready = ready
        # Any name may lead to an address like 0.0.0.0; there the token alone decides.
        hosts = frozenset() if address.is_unspecified else LOOPBACK | {name}
        super().__init__(
            uvicorn.Config(
                create_app(token=token, hosts=hosts),
                http="httptools",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=120,  # longer than clients keep connections, so they hang up
                timeout_graceful_shutdown=5,
            )
        )

    def serve_forever(self) -> None:
        """Serve until a signal, or `should_exit`."""
        self.run(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        # What is loaded by now stays, so the collector need not go through it with every batch of
        # calls (a fifth of a call's time at 512 in flight).
        gc.collect()
        gc.freeze()
        if self.started:
            self._ready()
