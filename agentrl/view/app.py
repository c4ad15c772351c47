"""The HTTP server of `agentrl view`: pages of recorded runs, and the JSON that they show.

    GET /api/runs                                       the runs
    GET /api/state                                      changes when a run gets new files
    GET /api/runs/{r}/metrics, /findings                of one run
    GET /api/runs/{r}/episodes?q=&after=&limit=         what `find_episodes` returns
    GET /api/runs/{r}/gaps?step=                        the largest gaps between trainer and engine
    GET /api/runs/{r}/episode?id=&step=                 an episode without tokens
    GET /api/runs/{r}/message?id=&step=&index=          the whole text of one message
    GET /api/runs/{r}/tokens?id=&step=&segment=&from=&to=

The folder of a run is readable by its owner alone, so all data needs the bearer token; the page
gets it in the fragment of its address, which browsers do not send. The page itself has no data.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import orjson
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from starlette.routing import Match
from starlette.types import Scope

from agentrl.errors import DataError, UserError
from agentrl.record import METRICS
from agentrl.report.run import Run, load_run
from agentrl.tools.serving.bind import bind, host_names_of, url_of
from agentrl.tools.serving.guard import Guard, error_response
from agentrl.view.episode import EpisodeView, largest_gaps
from agentrl.view.query import find_episodes, parse_query

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/view.css": ("view.css", "text/css"),
    "/view.js": ("view.js", "text/javascript"),
}
MAX_LIMIT = 2000
"""The most episodes or tokens of one answer."""
MAX_TEXT = 2**16
"""The characters of a message that an episode contains; /message returns the rest."""
GAPS = 5
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT)]
Index = Annotated[int, Query(ge=0, lt=2**31)]
Step = Annotated[int | None, Query(ge=0, lt=2**31)]


def create_app(folders: Sequence[Path], token: str, names: frozenset[str]) -> FastAPI:
    """Create the application.

    Args:
        folders: the folders of the runs.
        token: the bearer token of all paths below /api.
        names: the host names of the server; an empty set allows all.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        Guard,
        token=token,
        hosts=names,
        limits={},
        has_route=lambda scope: _has_route(app, scope),
        public=frozenset(FILES),
    )

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Callable[..., Any]) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(UserError)
    async def answer_mistake(request: Request, error: UserError) -> Response:
        return error_response(400, type(error).__name__, str(error))

    def open_run(r: int) -> Run:
        if not 0 <= r < len(folders):
            raise DataError(f"there is no run {r}; there are {len(folders)}, counted from 0")
        return load_run(folders[r])  # each time anew, because it may still be training

    @lru_cache(4)
    def cached_view(r: int, episode: str, step: int | None, version: object) -> EpisodeView:
        return EpisodeView(open_run(r), episode, step)

    def open_view(r: int, episode: str, step: int | None) -> EpisodeView:
        return cached_view(r, episode, step, _version(folders[r]) if r < len(folders) else None)

    for path, (name, kind) in FILES.items():
        content = (PAGE / name).read_bytes()
        app.add_api_route(path, lambda c=content, k=kind: Response(c, media_type=k))

    @app.get("/api/runs")
    def list_runs() -> Response:
        runs = [load_run(folder) for folder in folders]
        return _json(
            [{"name": run.folder.resolve().name, "steps": run.store.all_steps()} for run in runs]
        )

    @app.get("/api/state")
    def state() -> Response:
        return _json([_version(folder) for folder in folders])

    @app.get("/api/runs/{r}/metrics")
    def metrics(r: int) -> Response:
        return _json(open_run(r).metrics.to_pydict())

    @app.get("/api/runs/{r}/findings")
    def findings(r: int) -> Response:
        return _json(open_run(r).findings.to_pylist())

    @app.get("/api/runs/{r}/episodes")
    def episodes(r: int, q: str = "", after: Index = 0, limit: Limit = 100) -> Response:
        found = find_episodes(open_run(r), parse_query(q), after, limit)
        content = {"rows": found.rows.to_pylist(), "total": found.total, "limit": limit}
        return _json(content | {"choices": {k: v[:50] for k, v in found.choices.items()}})

    @app.get("/api/runs/{r}/gaps")
    def gaps(r: int, step: Index) -> Response:
        return _json(largest_gaps(open_run(r), step, GAPS))

    @app.get("/api/runs/{r}/episode")
    def episode(r: int, id: str, step: Step = None) -> Response:
        data = open_view(r, id, step).describe()
        for message in data["messages"]:
            message["length"] = len(message["content"])
            message["content"] = message["content"][:MAX_TEXT]
        return _json(data)

    @app.get("/api/runs/{r}/message")
    def message(r: int, id: str, index: Index, step: Step = None) -> Response:
        messages = open_view(r, id, step).trajectory.messages
        if index >= len(messages):
            raise DataError(f"episode {id!r} has {len(messages)} messages, counted from 0")
        return _json({"content": messages[index].content})

    @app.get("/api/runs/{r}/tokens")
    def tokens(
        r: int,
        id: str,
        start: Annotated[int, Query(alias="from", ge=0)] = 0,
        to: Annotated[int, Query(ge=0)] = MAX_LIMIT,
        segment: Index = 0,
        step: Step = None,
    ) -> Response:
        rows = open_view(r, id, step).tokens(segment, start, min(to, start + MAX_LIMIT))
        return _json(rows)

    return app


class ViewServer(uvicorn.Server):
    """The application on its own socket. The socket is bound at once, so `address` is known.

    Args:
        folders: the folders of the runs.
        host: the IP address to bind.
        port: the port to bind; 0 takes a free one.
        token: the bearer token: letters, digits, `-` and `_`.

    Raises:
        DataError: a folder is not that of a run.
        UserError: the token has other characters, or the address cannot be bound.
    """

    def __init__(self, folders: Sequence[Path], host: str, port: int, token: str):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", token):
            raise UserError(
                "the token is part of an address, so it must have letters, digits, - and _ only"
            )
        for folder in folders:
            load_run(folder)
        self._socket = bind(host, port, token)
        self.address = f"{url_of(self._socket)}/#token={token}"
        self.port = self._socket.getsockname()[1]
        app = create_app(folders, token, host_names_of(self._socket))
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        super().__init__(config)

    def serve_forever(self) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        self.run(sockets=[self._socket])


def describe_tunnel(port: int) -> str:
    """Return the command that forwards the port to the user's machine; "" without SSH."""
    if not os.environ.get("SSH_CONNECTION"):
        return ""
    user = os.environ.get("USER", "USER")
    return f"ssh -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}"


def _has_route(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)


def _version(folder: Path) -> tuple[int, int, int]:
    """Return numbers that change when a run has new metrics, episodes or learned numbers."""
    metrics = folder / METRICS
    size = metrics.stat().st_size if metrics.exists() else 0
    counts = (len(list((folder / n).glob("*.parquet"))) for n in ("trajectories", "learned"))
    return (size, *counts)  # type: ignore[return-value]


def _json(content: Any) -> Response:
    """Return data as JSON, in which a number that is not finite is null."""
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, media_type="application/json")
