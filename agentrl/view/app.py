"""The HTTP server of `agentrl view`: pages of recorded runs, and the JSON that they show.

    GET /api/runs                                       the runs
    GET /api/state                                      numbers that change when a run has new data
    GET /api/runs/{r}/metrics, /findings                of one run
    GET /api/runs/{r}/curves?by=                        the result of `rollout_curves`
    GET /api/runs/{r}/episodes?q=&after=&limit=         the episodes of a query, as lines of JSON
    GET /api/runs/{r}/step?step=                        the result of `describe_step`
    GET /api/runs/{r}/gaps?step=                        the largest gaps between trainer and engine
    GET /api/runs/{r}/episode?id=&step=                 an episode without tokens
    GET /api/runs/{r}/message?id=&step=&index=          the whole text of one message
    GET /api/runs/{r}/image?key=                        an image of a message, as a data URL
    GET /api/runs/{r}/tokens?id=&step=&segment=&from=&to=

A search sends the episodes of each file as soon as it has searched the file. It stops when the
client closes the connection.

The folder of a run is readable by its owner alone, so all data needs the bearer token; the page
gets it in the fragment of its address, which browsers do not send. The page itself has no data.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import anyio
import orjson
from fastapi import FastAPI, Request, Response
from fastapi import Query as Parameter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import DataError, UserError
from agentrl.http_server.bind import bind, host_names_of
from agentrl.http_server.guard import Guard, error_response
from agentrl.http_server.server import HttpServer
from agentrl.images import data_url
from agentrl.record import METRICS
from agentrl.report.run import Run, load_run
from agentrl.view.curves import Part, rollout_curves
from agentrl.view.episode import EpisodeView, largest_gaps
from agentrl.view.query import Query, find_choices, parse_query, search_files
from agentrl.view.step import describe_step

PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {"/" if f.name == "index.html" else f"/{f.name}": f for f in sorted(PAGE.iterdir())}
"""The files of the page by their path."""
MAX_LIMIT = 2000
"""The most episodes or tokens of one answer."""
MAX_TEXT = 2**16
"""The characters of a message that an episode contains; /message returns the rest."""
GAPS = 5
"""The number of tokens that /gaps returns."""
PROGRESS_SECONDS = 0.2
"""How often a search that finds nothing reports its progress."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}

Limit = Annotated[int, Parameter(ge=1, le=MAX_LIMIT)]
Index = Annotated[int, Parameter(ge=0, lt=2**31)]
Step = Annotated[int | None, Parameter(ge=0, lt=2**31)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ from each other."""
    paths = [folder.resolve().parts for folder in folders]
    length = 1
    while len({path[-length:] for path in paths}) < len({*paths}):
        length += 1
    return [str(Path(*path[-length:])) for path in paths]


def create_app(folders: Sequence[Path], token: str, names: frozenset[str]) -> FastAPI:
    """Create the application.

    Args:
        folders: the folders of the runs.
        token: the bearer token of all paths below /api.
        names: the host names of the server; an empty set allows all.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, hosts=names, limits={}, public=frozenset(FILES))
    app.add_middleware(_Headers)

    @app.exception_handler(UserError)
    async def answer_mistake(request: Request, error: UserError) -> Response:
        return error_response(400, type(error).__name__, str(error))

    for path, file in FILES.items():
        content, kind = file.read_bytes(), _KINDS[file.suffix]
        app.add_api_route(path, lambda c=content, k=kind: Response(c, media_type=k))

    runs = _Runs(folders)
    _add_runs(app, runs)
    _add_episodes(app, runs)
    return app


class _Runs:
    """The runs of the page. A run is read again for each request, because it may be training."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders

    def open(self, r: int) -> Run:
        """Return the run with a number.

        Raises:
            DataError: there is no such run.
        """
        if not 0 <= r < len(self.folders):
            raise DataError(f"there is no run {r}; there are {len(self.folders)}, counted from 0")
        return load_run(self.folders[r])

    def view(self, r: int, episode: str, step: int | None) -> EpisodeView:
        """Return an episode of a run."""
        folder = self.open(r).folder
        return _view(folder, _version(folder), episode, step)

    def findings(self, r: int) -> list[dict[str, Any]]:
        """Return the findings of a run."""
        folder = self.open(r).folder
        return _findings(folder, _version(folder))


@lru_cache(4)
def _view(folder: Path, version: object, episode: str, step: int | None) -> EpisodeView:
    return EpisodeView(load_run(folder), episode, step)


@lru_cache(4)
def _findings(folder: Path, version: object) -> list[dict[str, Any]]:
    return load_run(folder).findings.to_pylist()


def _add_runs(app: FastAPI, runs: _Runs) -> None:
    """Add the routes of whole runs and of their steps."""

    @app.get("/api/runs")
    def list_runs() -> Response:
        loaded = [load_run(folder) for folder in runs.folders]
        return _json(
            [
                {"name": name, "steps": run.store.all_steps()}
                for run, name in zip(loaded, names_of(runs.folders), strict=True)
            ]
        )

    @app.get("/api/state")
    def state() -> Response:
        return _json([_version(folder) for folder in runs.folders])

    @app.get("/api/runs/{r}/metrics")
    def metrics(r: int) -> Response:
        return _json(runs.open(r).metrics.to_pydict())

    @app.get("/api/runs/{r}/findings")
    def findings(r: int) -> Response:
        return _json(runs.findings(r))

    @app.get("/api/runs/{r}/curves")
    def curves(r: int, by: Part = "all") -> Response:
        return _json(rollout_curves(runs.open(r), by))

    @app.get("/api/runs/{r}/episodes")
    def episodes(r: int, q: str = "", after: Index = 0, limit: Limit = 100) -> Response:
        lines = _search(runs.open(r), parse_query(q), after, limit)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.get("/api/runs/{r}/step")
    def step(r: int, step: Index) -> Response:
        return _json(describe_step(runs.open(r), step))

    @app.get("/api/runs/{r}/gaps")
    def gaps(r: int, step: Index) -> Response:
        return _json(largest_gaps(runs.open(r), step, GAPS))


def _add_episodes(app: FastAPI, runs: _Runs) -> None:
    """Add the routes of one episode."""

    @app.get("/api/runs/{r}/episode")
    def episode(r: int, id: str, step: Step = None) -> Response:
        data = runs.view(r, id, step).describe()
        for message in data["messages"]:
            message["length"] = len(message["content"])
            message["content"] = message["content"][:MAX_TEXT]
        return _json(data)

    @app.get("/api/runs/{r}/message")
    def message(r: int, id: str, index: Index, step: Step = None) -> Response:
        messages = runs.view(r, id, step).trajectory.messages
        if index >= len(messages):
            raise DataError(f"episode {id!r} has {len(messages)} messages, counted from 0")
        return _json({"content": messages[index].content})

    @app.get("/api/runs/{r}/image")
    def image(r: int, key: str) -> Response:
        # A data URL in JSON needs no other policy than the page has, and also works in an export.
        return _json({"url": data_url(runs.open(r).store.read_image(key))})

    @app.get("/api/runs/{r}/tokens")
    def tokens(
        r: int,
        id: str,
        start: Annotated[int, Parameter(alias="from", ge=0)] = 0,
        to: Annotated[int, Parameter(ge=0)] = MAX_LIMIT,
        segment: Index = 0,
        step: Step = None,
    ) -> Response:
        rows = runs.view(r, id, step).tokens(segment, start, min(to, start + MAX_LIMIT))
        return _json(rows)


class ViewServer(HttpServer):
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
        bound = bind(host, port, token, allows="see your runs")
        super().__init__(create_app(folders, token, host_names_of(bound)), bound)
        self.address = f"{self.url}/#token={token}"
        self.port = bound.getsockname()[1]


def describe_tunnel(port: int) -> str:
    """Return the command that forwards the port to the user's machine; "" without SSH."""
    if not os.environ.get("SSH_CONNECTION"):
        return ""
    user = os.environ.get("USER", "USER")
    return f"ssh -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}"


async def _search(run: Run, query: Query, after: int, limit: int) -> AsyncIterator[bytes]:
    """Yield lines of JSON: the matching rows of each file, and the number of files searched so far.

    The last line has `choices` and no rows, or the `message` of an error. If the client closes the
    connection, this generator is cancelled, and the files that follow are not read.
    """
    search = search_files(run, query, after, limit)
    total, sent = 0, 0.0
    try:
        while (progress := await run_in_threadpool(next, search, None)) is not None:
            total = progress.total
            if len(progress.rows) or time.monotonic() - sent > PROGRESS_SECONDS:
                sent = time.monotonic()
                numbers = {"searched": progress.searched, "files": progress.files, "limit": limit}
                yield _line({"rows": progress.rows.to_pylist(), "total": total} | numbers)
        choices = {} if total else await run_in_threadpool(find_choices, run, query)
        yield _line({"total": total, "choices": {k: v[:50] for k, v in choices.items()}})
    except UserError as e:  # the status is sent already
        yield _line({"message": str(e)})
    finally:
        with anyio.CancelScope(shield=True):
            await run_in_threadpool(search.close)


class _Headers:
    """ASGI middleware that adds `HEADERS` to each response.

    Starlette's `BaseHTTPMiddleware` would hide from a response that its client disconnected.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS.items()]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


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


def _line(content: Any) -> bytes:
    return orjson.dumps(content) + b"\n"
