"""Export a part of the runs as one HTML file, which opens without a server.

It is the page of `agentrl view` with the answers to its requests: style, scripts and data are in
the file, and its Content-Security-Policy allows these scripts by their hashes and no request.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import httpx
import orjson

from agentrl.errors import UserError
from agentrl.report.run import load_run
from agentrl.view.app import PAGE, create_app
from agentrl.view.curves import Part
from agentrl.view.query import find_episodes, parse_query

MAX_EXPORT = 32_000_000
"""The most bytes of data in a file. Browsers open a larger one slowly."""
MAX_EPISODES = 2000
"""The most episodes in a file, so that a query that finds too many is refused at once."""
LIST = 100
"""The episodes on one page of the list; the default of the server."""
CHUNK = 500
"""The tokens of one request; CHUNK in `page/tokens.js`."""
_FEWER = "Choose fewer episodes, for example --query 'step=12' or --query 'step>=100 reward<0.5'"


@dataclass
class _Bundle:
    """The server's responses, by the keys that `bundleKey` in `page/dom.js` makes."""

    client: httpx.AsyncClient
    answers: dict[str, bytes] = field(default_factory=dict)
    size: int = 0

    async def add(self, path: str, **parameters: Any) -> Any:
        """Request a path of the application, keep the response and return its content.

        Raises:
            UserError: the answers have more than `MAX_EXPORT` bytes.
        """
        answer = await self.client.get(path, params=parameters)
        if answer.is_error:
            raise UserError(answer.json()["message"])
        self.put(path, parameters, answer.content)
        return orjson.loads(answer.content)

    def put(self, path: str, parameters: dict[str, Any], content: bytes) -> None:
        # An episode has one answer, whether or not the request names its step.
        named = {n: v for n, v in parameters.items() if n != "step" or "id" not in parameters}
        key = f"{path}?{'&'.join(sorted(f'{name}={value}' for name, value in named.items()))}"
        self.size += len(content)
        if self.size > MAX_EXPORT:
            raise UserError(
                f"the page would have more than {MAX_EXPORT / 1e6:g} MB of data. {_FEWER}"
            )
        self.answers[key] = content


def export_page(folders: Sequence[Path], query: str) -> str:
    """Return a page of runs with the episodes that a query finds.

    Args:
        folders: the folders of the runs.
        query: the query, as in `parse_query`; "" for all episodes.

    Raises:
        DataError: a folder is not that of a run, or a file is damaged.
        UserError: the query has a mistake or finds nothing, or the page would be too large.
    """
    return _to_html(asyncio.run(_collect(folders, query)))


async def _collect(folders: Sequence[Path], query: str) -> dict[str, bytes]:
    app = create_app(folders, "", frozenset())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://view") as client:
        bundle = _Bundle(client)
        runs = (await client.get("/api/runs")).json()
        for r, folder in enumerate(folders):
            rows = find_episodes(load_run(folder), parse_query(query)).rows.to_pylist()
            if query and not rows:
                raise UserError(f"no episode of {folder} matches {query!r}, so nothing is exported")
            if len(rows) > MAX_EPISODES:
                raise UserError(
                    f"the page would have {len(rows)} episodes of {folder}, more than"
                    f" {MAX_EPISODES}. {_FEWER}"
                )
            await _add_run(bundle, f"/api/runs/{r}", rows)
            runs[r]["steps"] = sorted({row["step"] for row in rows})
        bundle.put("/api/runs", {}, orjson.dumps(runs))
        return bundle.answers


async def _add_run(bundle: _Bundle, run: str, rows: Sequence[dict[str, Any]]) -> None:
    """Add the responses that the page requests: for the run, the list, each step, each episode."""
    for name in ("metrics", "findings"):
        await bundle.add(f"{run}/{name}")
    for part in get_args(Part):
        await bundle.add(f"{run}/curves", by=part)
    for after in range(0, max(1, len(rows)), LIST):
        shown = {"rows": rows[after : after + LIST], "total": len(rows), "limit": LIST}
        lines = [shown, {"total": len(rows), "choices": {}}]
        bundle.put(f"{run}/episodes", {"q": "", "after": after}, orjson.dumps(lines))
    for step in sorted({row["step"] for row in rows}):
        await bundle.add(f"{run}/step", step=step)
        await bundle.add(f"{run}/gaps", step=step)
    for row in rows:
        at = {"id": row["episode"], "step": row["step"]}
        episode = await bundle.add(f"{run}/episode", **at)
        for key in {i["key"] for message in episode["messages"] for i in message["images"]}:
            if f"{run}/image?key={key}" not in bundle.answers:
                await bundle.add(f"{run}/image", key=key)
        for segment, tokens in enumerate(episode["segments"]):
            for start in range(0, tokens["response"], CHUNK):
                chunk = {"segment": segment, "from": start, "to": start + CHUNK}
                await bundle.add(f"{run}/tokens", **at, **chunk)


def _to_html(answers: dict[str, bytes]) -> str:
    """Return the page with its files and the answers inside."""
    style = (PAGE / "view.css").read_text()
    page = (PAGE / "index.html").read_text()
    before, *tags = page.split('<script defer src="')
    names = [tag.partition('"')[0] for tag in tags]
    after = tags[-1].partition("</script>\n")[2]
    # Deferred scripts run when the page is parsed; scripts in the file are at its end instead.
    head, _, rest = after.partition("</body>")
    scripts = [(PAGE / name).read_text() for name in names]
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes([style])};"
        f" script-src {_hashes(scripts)}; base-uri 'none'; form-action 'none'"
    )
    before = before.replace(
        '<link rel="stylesheet" href="view.css">\n', f"<style>{style}</style>\n"
    ).replace(
        '<meta charset="utf-8">\n',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
    )
    data = b"{%b}" % b",".join(orjson.dumps(k) + b":" + v for k, v in answers.items())
    # In JSON `<` occurs in strings only, and `</script>` must not end the element.
    block = data.decode().replace("<", "\\u003c")
    parts = [before, head, f'<script type="application/json" id="bundle">{block}</script>\n']
    parts += [f"<script>{script}</script>\n" for script in scripts]
    return "".join([*parts, "</body>", rest])


def _hashes(texts: Iterable[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
