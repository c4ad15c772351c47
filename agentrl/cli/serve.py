"""`agentrl serve`: serve a policy at an OpenAI-style URL."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from agentrl.cli.options import ConfigFile, Model, Overrides

UNLIMITED = {"max_turn_tokens": 2**20, "max_trajectory_tokens": 2**24, "timeout_s": 3600.0}
"""The budgets of an answer: only the model's context and the request's `max_tokens` limit it."""


def serve(
    overrides: Overrides = None,
    model: Model = None,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="The IP address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    token_env: Annotated[
        str, typer.Option(help="The environment variable with the API key that clients must send.")
    ] = "",
) -> None:
    """Serve a policy at an OpenAI-style URL, with the engine, template and tool parser of a run.

    Clients decide temperature, top_p, top_k, stop and max_tokens. Without --token-env, any API key
    is accepted, and the server is reachable from this machine only.

    Examples:
        agentrl serve --model runs/a

        agentrl serve -c runs/a/config.yaml --model runs/a --port 9000
    """
    from secrets import compare_digest

    from transformers.utils import logging

    from agentrl.agent_loops.attempt import Runtime, load_template
    from agentrl.cli.options import read_config, with_model_folder
    from agentrl.engine.open import open_engine
    from agentrl.errors import UserError
    from agentrl.gateway.requests import MODEL
    from agentrl.gateway.serve import create_app, serve_forever
    from agentrl.gateway.stateless import StatelessSession
    from agentrl.tools import LocalToolbox
    from agentrl.tools.serving.bind import bind, url_of

    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise UserError(f"--token-env {token_env}: this environment variable is empty or not set")
    settings = with_model_folder(read_config(config, overrides, model=model, needs_rows=False))
    rollout = settings.rollout.model_copy(update=UNLIMITED)
    settings = settings.model_copy(update={"rollout": rollout})
    logging.disable_progress_bar()
    bound = bind(host, port, token)
    template = load_template(settings)
    engine = open_engine(settings, template.tokenizer)
    try:
        runtime = Runtime(engine, template, LocalToolbox(), settings)
        session = StatelessSession(runtime, settings.rollout.temperature)
        app = create_app(lambda key: session if not token or compare_digest(key, token) else None)
        url = f"{url_of(bound)}/v1"
        typer.echo(f"serving {settings.model.path} as {MODEL!r} at {url}\n")
        key = f"${token_env}" if token_env else "any"
        typer.echo(f"  export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}")
        typer.echo(
            f"  curl {url}/chat/completions -H 'content-type: application/json'"
            + (f' -H "authorization: Bearer {key}"' if token_env else "")
            + ' -d \'{"messages": [{"role": "user", "content": "Hi"}]}\''
        )
        serve_forever(app, bound)
    finally:
        engine.close()
