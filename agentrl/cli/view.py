"""`agentrl view`: pages of recorded runs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UserError
from agentrl.terminal import echo


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    token_env: str = "AGENTRL_VIEW_TOKEN",
    export: Path | None = None,
    query: str = "",
) -> None:
    """Show recorded runs in a browser: curves, findings, steps, episodes, tokens.

    Prints the address, which contains a token: only who has it can read the runs. Runs may still be
    training. Several runs are shown side by side. Ctrl-C ends it.

    With --export it starts no server. It writes the page with the episodes that --query finds into
    a file, which everybody who gets the file can read.

    Args:
        runs: The folders of runs.
        host: Address to bind.
        port: 0 chooses a free port.
        token_env: Environment variable with the token; if empty, one is made.
        export: Write one HTML file instead; it opens without a server.
        query: The episodes to export, as in `agentrl show`; by default all, if there are at most
            2,000.

    Examples:
        agentrl view runs/demo

        agentrl view runs/a runs/b --port 8899

        agentrl view runs/demo --export run.html --query 'step>=50 reward<0.5'
    """
    if query and export is None:
        raise UserError(f"--query {query!r} chooses what --export FILE writes; add --export FILE")
    runs = [*{run.resolve(): run for run in runs}.values()]
    if export is not None:
        _write(export, runs, query)
        return
    from agentrl.view.app import ViewServer, describe_tunnel

    token = os.environ.get(token_env) or secrets.token_urlsafe(16)
    server = ViewServer(runs, host, port, token)
    if tunnel := describe_tunnel(server.port):
        echo(f"on your machine: {tunnel}")
    echo(f"open {server.address}")
    server.serve_forever()


def _write(file: Path, runs: list[Path], query: str) -> None:
    from agentrl.view.export import export_page

    page = export_page(runs, query).encode()
    try:
        file.write_bytes(page)
    except OSError as e:
        raise UserError(f"cannot write {file}: {e.strerror}") from e
    echo(f"wrote {file} ({len(page) / 1e6:.1f} MB); open it in a browser")
