"""`agentrl view`: pages of recorded runs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 chooses a free port.", min=0, max=65535)] = 0,
    token_env: Annotated[
        str,
        typer.Option(help="Environment variable with the token; if empty, one is made."),
    ] = "AGENTRL_VIEW_TOKEN",
) -> None:
    """Show recorded runs in a browser: curves, findings, steps, episodes, tokens.

    Prints the address, which contains a token: only who has it can read the runs. Runs may still be
    training. Several runs are shown side by side. Ctrl-C ends it.

    Examples:
        agentrl view runs/demo

        agentrl view runs/a runs/b --port 8899
    """
    from agentrl.view.app import ViewServer, describe_tunnel

    token = os.environ.get(token_env) or secrets.token_urlsafe(16)
    server = ViewServer(runs, host, port, token)
    if tunnel := describe_tunnel(server.port):
        typer.echo(f"on your machine: {tunnel}")
    typer.echo(f"open {server.address}")
    server.serve_forever()
