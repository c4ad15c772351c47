"""The HTTP server of the gateway: APIs of OpenAI's and Anthropic's kind whose model is the policy.

    POST /v1/chat/completions       the policy's next message
    POST /v1/responses              the same, in OpenAI's Responses API
    POST /v1/messages               the same, in Anthropic's API
    POST /v1/messages/count_tokens  the number of tokens of the prompt
    GET  /v1/models                 the policy's name as a model
    POST /v1/reward                 {"reward": number}: the outcome reward of the episode
    POST /v1/feedback               {"id": text, "score": number}: the score of a recorded answer

The key of a request (`Authorization: Bearer KEY`, or `x-api-key`) names its session, so one server
serves all episodes. It listens on loopback, unless an agent in a container needs another address.
It runs on the event loop of the episodes, and exists as long as there are sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentrl.data.recorded import MAX_SCORE
from agentrl.errors import UserCodeError
from agentrl.gateway.dialects import DIALECTS, ChatCompletions, Dialect, Messages
from agentrl.gateway.requests import MODEL, Answer, ChatRequest, Refusal
from agentrl.gateway.session import Session
from agentrl.gateway.stateless import StatelessSession
from agentrl.http_server.bind import bind
from agentrl.http_server.guard import (
    MAX_LONG_BODY,
    HttpRefused,
    discard_body,
    json_response,
    read_body,
    refuse_web_pages,
)
from agentrl.http_server.server import EmbeddedServer

log = logging.getLogger("agentrl")

FIRST_WAIT_SECONDS = 2.0
"""The time that a streaming request waits for its answer before the response begins. An error
within this time has its own HTTP status."""
PING_SECONDS = 10.0
"""The time between two pings of a stream that waits for its answer. They keep proxies and clients
from closing the connection."""
NO_RETRY = {"x-should-retry": "false"}
"""The header that keeps OpenAI's and Anthropic's clients from sending a refused request again."""

AnySession = Session | StatelessSession
SessionOf = Callable[[str], AnySession | None]


ANSWER_ID = re.compile(r"(?:chatcmpl-|resp_|msg_)([0-9a-f]{16})[-_](\d{1,9})")
"""The id of an answer in each API."""


async def _set_outcome(session: AnySession, content: bytes) -> None:
    """Give a session the reward of a request's body; raises `Refusal` if there is none."""
    try:
        session.set_outcome(orjson.loads(content)["reward"])
    except (orjson.JSONDecodeError, TypeError, KeyError, UserCodeError) as e:
        sent = content[:100].decode(errors="replace")
        why = f'send {{"reward": NUMBER}}, not {sent} ({type(e).__name__}: {e})'
        raise Refusal(400, "reward", why, "reward") from None


async def _give_feedback(session: AnySession, content: bytes) -> None:
    """Give a session the score of a request's body; raises `Refusal` if there is none."""
    try:
        data = orjson.loads(content)
        id, score = str(data["id"]), data["score"]
        if type(score) not in (int, float) or not abs(score) <= MAX_SCORE:
            raise TypeError(f"score must be a number from -{MAX_SCORE:g} to {MAX_SCORE:g}")
    except (orjson.JSONDecodeError, TypeError, KeyError) as e:
        sent = content[:100].decode(errors="replace")
        why = f'send {{"id": ID, "score": NUMBER}}, not {sent} ({type(e).__name__}: {e})'
        raise Refusal(400, "feedback", why, "score") from None
    if match := ANSWER_ID.fullmatch(id):
        id = f"chatcmpl-{match[1]}-{match[2]}"
    if not isinstance(session, StatelessSession):
        raise Refusal(404, "no_record", "this server records nothing (agentrl serve --record)")
    await session.give_feedback(id, float(score))


def create_app(session_of: SessionOf, hosts: frozenset[str] = frozenset()) -> Starlette:
    """Create the application.

    Args:
        session_of: returns the session of a key; None if there is none.
        hosts: for a server without keys, its host names: requests that a web page in a browser on
            this machine sends are refused. Empty: there are keys.
    """
    find_session = partial(_find_session, session_of, hosts)

    def make_endpoint(
        dialect: Dialect, counts: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = None
            try:
                session = find_session(request)
                chat = dialect.read(await _body(request), request.headers, session.memory)
                if counts:
                    counted = dialect.write_count(session.count_tokens(chat))
                    return Response(counted, media_type="application/json")
                answering = asyncio.create_task(session.answer(chat))
                await _wait(request, answering, FIRST_WAIT_SECONDS if chat.stream else None)
                if chat.stream:
                    return _stream(dialect, chat, session, answering)
                answer = answering.result()
                return Response(dialect.write(answer, chat), media_type="application/json")
            except Exception as e:
                refusal = _refusal_of(e)
                if session is not None and not counts:
                    session.refusals.append(refusal)
                return _error(dialect, refusal)

        return endpoint

    async def list_models(request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentrl"}
        return json_response({"object": "list", "data": [model]})

    def make_report(
        report: Callable[[AnySession, bytes], Awaitable[None]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = None
            try:
                session = find_session(request)
                await report(session, await _body(request))
            except Exception as e:
                refusal = _refusal_of(e)
                if session is not None and report is _set_outcome:
                    session.refusals.append(refusal)
                is_anthropic = "anthropic-version" in request.headers
                return _error(Messages() if is_anthropic else ChatCompletions(), refusal)
            return json_response({})

        return endpoint

    routes = []
    for prefix in ("/v1", ""):
        for d in DIALECTS:
            routes.append(Route(prefix + d.path, make_endpoint(d), methods=["POST"]))
            if d.count_path:
                counter = make_endpoint(d, counts=True)
                routes.append(Route(prefix + d.count_path, counter, methods=["POST"]))
        routes.append(Route(f"{prefix}/models", list_models, methods=["GET"]))
        for path, report in (("reward", _set_outcome), ("feedback", _give_feedback)):
            routes.append(Route(f"{prefix}/{path}", make_report(report), methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={404: _refuse_path, 405: _refuse_path})


def _refusal_of(error: Exception) -> Refusal:
    """Return an error as the answer to its request; a bug is logged."""
    if isinstance(error, Refusal):
        return error
    log.error("a request failed because of a bug", exc_info=error)
    return Refusal(500, "bug", f"{type(error).__name__}: {error}")


def _find_session(session_of: SessionOf, hosts: frozenset[str], request: Request) -> AnySession:
    """Return the session of a request's key; raises `Refusal` if there is none."""
    try:
        if hosts:
            refuse_web_pages(dict(request.scope["headers"]), hosts)
    except HttpRefused as e:
        why = f"{e}: a server that web pages or other machines use needs a key (--token-env)"
        raise Refusal(403, "forbidden", why) from None
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    session = session_of(key or request.headers.get("x-api-key", ""))
    if session is None:
        why = (
            "unknown API key. An agent sends OPENAI_API_KEY or ANTHROPIC_API_KEY of its process, a"
            " client of `agentrl serve` a key of --token-env"
        )
        raise Refusal(401, "unknown_key", why)
    return session


async def _refuse_path(request: Request, _: Exception) -> Response:
    path = request.url.path
    known = ", ".join(f"POST /v1{dialect.path}" for dialect in DIALECTS)
    why = f"there is no {request.method} {path}: this API has {known} and GET /v1/models"
    dialect = next((d for d in DIALECTS if path.startswith((f"/v1{d.path}", d.path))), DIALECTS[0])
    return _error(dialect, Refusal(404, "not_found", why))


class Gateway:
    """The server for all sessions of an event loop. It runs while there is a session.

    Args:
        address: the address of this machine at which it listens.
    """

    def __init__(self, address: str = "127.0.0.1"):
        self._address = address
        self._sessions: dict[str, AnySession] = {}
        self.unknown_keys = 0
        """How many requests had no session's key."""
        self._users = 0
        self._lock = asyncio.Lock()
        self._server: EmbeddedServer | None = None

    @contextlib.asynccontextmanager
    async def session(self, session: AnySession) -> AsyncIterator[tuple[str, str]]:
        """Serve a session within this block; yield the base URL and its key."""
        key = secrets.token_urlsafe(24)
        async with self._lock:
            if not self._server:
                self._server = await self._start()
            url = self._server.url
            self._users += 1
        self._sessions[key] = session
        try:
            yield f"{url}/v1", key
        finally:
            del self._sessions[key]
            async with self._lock:
                self._users -= 1
                if not self._users:
                    server, self._server = self._server, None
                    await server.stop()

    async def _start(self) -> EmbeddedServer:
        bound = bind(self._address, 0, "sessions have keys")
        app = create_app(self._find)
        server = EmbeddedServer(app, bound, log_level="error", timeout_graceful_shutdown=1)
        await server.start()
        return server

    def _find(self, key: str) -> AnySession | None:
        session = self._sessions.get(key)
        self.unknown_keys += session is None
        return session


def _stream(
    dialect: Dialect, chat: ChatRequest, session: AnySession, answering: asyncio.Task[Answer]
) -> Response:
    """Return a streaming response."""

    async def events() -> AsyncIterator[bytes]:
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=PING_SECONDS)
                if not answering.done():
                    yield dialect.ping
            for event in dialect.events(answering.result(), chat):
                yield event
        except Exception as e:
            session.refusals.append(_refusal_of(e))
            yield dialect.error_event(session.refusals[-1])
        finally:
            answering.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers=NO_CACHE)


NO_CACHE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _wait(request: Request, answering: asyncio.Task[Answer], seconds: float | None) -> None:
    """Wait for an answer, at most `seconds`; stop waiting for it if the client disconnects.

    Raises:
        Refusal: the request was refused, or the client disconnected.
    """
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait(
            [answering, leaving], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if answering.done():
            answering.result()
        elif leaving.done():
            answering.cancel()
            raise Refusal(499, "disconnected", "the client has closed the connection")
    finally:
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Return the body of a request, whose length and duration are limited."""
    try:
        return await read_body(request.receive, dict(request.scope["headers"]), MAX_LONG_BODY)
    except HttpRefused as e:
        if e.status == 413:
            await discard_body(request.receive)
        code = {400: "disconnected", 408: "too_slow", 413: "too_long"}[e.status]
        raise Refusal(e.status, code, str(e)) from None


def _error(dialect: Dialect, refusal: Refusal) -> Response:
    # The rest of a body that was not read must not keep the connection open.
    headers = NO_RETRY | ({"connection": "close"} if refusal.status in (408, 413) else {})
    return Response(
        dialect.error(refusal), refusal.status, headers=headers, media_type="application/json"
    )
