"""`agentrl serve`: serve a policy at an OpenAI-style URL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import ConfigFile, Model, Overrides
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import Config


def serve(
    overrides: Overrides = None,
    model: Model = None,
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="The IP address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    token_env: Annotated[
        str, typer.Option(help="The environment variable with the API key that clients must send.")
    ] = "",
    check: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            help="Serve to this process alone: compare the answers with `agentrl eval` on the first"
            " rows of data.val, greedily.",
            min=1,
        ),
    ] = None,
) -> None:
    """Serve a policy at an OpenAI-style URL, with the engine, template and tool parser of a run.

    Clients decide temperature, top_p, top_k, stop and max_tokens. Without --token-env, any API key
    is accepted, and the server is reachable from this machine only. If
    --model is the folder of a run, its config.yaml is used without --config, and the files that it
    names are loaded.

    With --check, rows are played greedily, and their conversations are sent to the API turn by
    turn. Exit code 0 if all answers are equal, else 1; the first difference of each row is shown.

    Examples:
        agentrl serve --model runs/a

        agentrl serve -c runs/a/config.yaml --model runs/a --port 9000

        agentrl serve --model runs/a --check 32
    """
    from secrets import compare_digest

    from transformers.utils import logging

    from agentrl.agent_loops.attempt import Runtime, load_template
    from agentrl.cli.options import (
        read_config,
        rows_to_play,
        with_model_folder,
    )
    from agentrl.engine.open import open_engine
    from agentrl.errors import ConfigError, UserError
    from agentrl.gateway.requests import MODEL
    from agentrl.gateway.serve import create_app
    from agentrl.gateway.stateless import StatelessSession, without_budgets
    from agentrl.http_server.bind import bind, host_names_of
    from agentrl.http_server.server import HttpServer
    from agentrl.tools import LocalToolbox

    settings = read_config(config, overrides, model=model, needs_rows=False, uses_run_config=True)
    if check:
        if not settings.data.val and not settings.data.train:
            raise ConfigError(f"--check {check} needs rows: add data.val=FILE, .parquet or .jsonl")
        raise typer.Exit(_check(rows_to_play(settings), check))
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise UserError(f"--token-env {token_env}: this environment variable is empty or not set")
    settings = with_model_folder(without_budgets(settings))
    logging.disable_progress_bar()
    bound = bind(host, port, token, allows="use your policy")
    template = load_template(settings)
    engine = open_engine(settings, template.tokenizer)
    try:
        runtime = Runtime(engine, template, LocalToolbox(), settings)
        session = StatelessSession(runtime, settings.rollout.temperature)
        expected = token.encode()
        app = create_app(
            lambda key: session if not token or compare_digest(key.encode(), expected) else None,
            hosts=frozenset() if token else host_names_of(bound),
        )
        server = HttpServer(app, bound)
        url = f"{server.url}/v1"
        echo(f"serving {settings.model.path} as {MODEL!r} at {url}\n")
        key = f"${token_env}" if token_env else "any"
        echo(f"  export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}")
        echo(f"  export ANTHROPIC_BASE_URL={server.url} ANTHROPIC_API_KEY={key}")
        echo(
            f"  curl {url}/chat/completions -H 'content-type: application/json'"
            + (f' -H "authorization: Bearer {key}"' if token_env else "")
            + ' -d \'{"messages": [{"role": "user", "content": "Hi"}]}\''
        )
        server.serve_forever()
    finally:
        engine.close()


def _check(settings: Config, n: int) -> int:
    """Compare served answers with an evaluation; return the exit code."""
    from itertools import islice

    from agentrl.cli.session import open_session
    from agentrl.config import file_names
    from agentrl.engine.base import Sampling
    from agentrl.gateway.served import compare_served

    with open_session(settings) as (plan, rollouts):
        rows, greedy = [*islice(plan.train, n)], Sampling(temperature=0.0)
        files = file_names(settings.data.train)
        echo(f"{files}: the first {len(rows)} of {len(plan.train)} rows, greedy")
        groups = rollouts.collect(rows, n=1, sampling=greedy, step=0, tag="greedy")
        trajectories = [s.trajectory for group in groups for s in group.scored]
        comparison = rollouts.run(compare_served(rollouts.runtime, trajectories))
    for line in comparison.lines():
        echo(line)
    return 0 if comparison.is_equal else 1
