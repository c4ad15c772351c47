"""`agentrl serve`: serve a policy at an OpenAI-style URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import ConfigFile, Model, Overrides
from agentrl.registry import YAML
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.chat import ChatTemplate
    from agentrl.config import Config
    from agentrl.data.recorded import Recorder


def serve(
    overrides: Overrides = None,
    model: Model = None,
    config: ConfigFile = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str = "",
    record: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    check: Annotated[int | None, typer.Option(metavar="ROWS", min=1)] = None,
) -> None:
    """Serve a policy at an OpenAI-style URL, with the engine, template and tool parser of a run.

    `agentrl serve RUN` is `agentrl serve --model RUN`. Clients decide temperature, top_p, top_k,
    stop and max_tokens. Without --token-env, any API key is accepted, and the server is reachable
    from this machine only. If --model is the folder of a run, its config.yaml is used without
    --config, and the files that it names are loaded.

    With --check, rows are played greedily, and their conversations are sent to the API turn by
    turn. Exit code 0 if all answers are equal, else 1; the first difference of each row is shown.

    Args:
        host: The IP address to bind.
        port: The port; 0 takes a free one.
        token_env: The environment variable with the API key that clients must send; several keys,
            one for each user, are separated by commas.
        record: Store the answers and the scores of their users, for `agentrl train --from DIR`.
            Needs --token-env.
        check: Serve to this process alone: compare the answers with `agentrl eval` on the first
            rows of data.val, greedily.

    Examples:
        agentrl serve runs/a

        agentrl serve runs/a --record served --token-env SERVE_KEYS

        agentrl serve -c runs/a/config.yaml --model runs/a --port 9000

        agentrl serve --model runs/a --check 32
    """
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
    from agentrl.gateway.stateless import sessions_of_keys, without_budgets
    from agentrl.http_server.bind import bind, host_names_of
    from agentrl.http_server.server import HttpServer
    from agentrl.tools import LocalToolbox

    if overrides and not model and "=" not in overrides[0] and not overrides[0].endswith(YAML):
        model, *overrides = overrides
    settings = read_config(config, overrides, model=model, needs_rows=False, uses_run_config=True)
    if check:
        if not settings.data.val and not settings.data.train:
            raise ConfigError(f"--check {check} needs rows: add data.val=FILE, .parquet or .jsonl")
        raise typer.Exit(_check(rows_to_play(settings), check))
    token = os.environ.get(token_env, "").strip(", ") if token_env else ""
    if token_env and not token:
        raise UserError(f"--token-env {token_env}: this environment variable is empty or not set")
    if record and not token:
        raise UserError(
            f"--record {record} needs --token-env NAME: whoever may send a score decides what the"
            " policy learns. Put a key for each user into that environment variable"
        )
    model = settings.model.path
    settings = with_model_folder(without_budgets(settings))
    logging.disable_progress_bar()
    bound = bind(host, port, token, allows="use your policy")
    template = load_template(settings)
    recorder = _open_recorder(record, model, settings, template) if record else None
    engine = open_engine(settings, template.tokenizer)
    try:
        runtime = Runtime(engine, template, LocalToolbox(), settings)
        session_of = sessions_of_keys(token, runtime, settings.rollout.temperature, recorder)
        app = create_app(session_of, hosts=frozenset() if token else host_names_of(bound))
        server = HttpServer(app, bound)
        url = f"{server.url}/v1"
        echo(f"serving {settings.model.path} as {MODEL!r} at {url}\n")
        key = f"${{{token_env}%%,*}}" if token_env else "any"  # the first one
        echo(f"  export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}")
        echo(f"  export ANTHROPIC_BASE_URL={server.url} ANTHROPIC_API_KEY={key}")
        echo(
            f"  curl {url}/chat/completions -H 'content-type: application/json'"
            + (f' -H "authorization: Bearer {key}"' if token_env else "")
            + ' -d \'{"messages": [{"role": "user", "content": "Hi"}]}\''
        )
        if recorder:
            echo(
                f"\nrecording answers of step {recorder.step} in {record}, and their scores:"
                f' POST {url}/feedback {{"id": ID, "score": NUMBER}}'
            )
        server.serve_forever()
    finally:
        engine.close()
        if recorder:
            recorder.close()


def _open_recorder(folder: Path, model: str, settings: Config, template: ChatTemplate) -> Recorder:
    """Open the folder of `--record`."""
    from agentrl.chat.tokenizer import hash_vocabulary
    from agentrl.data.recorded import Recorder
    from agentrl.trainer.export import source_of_export

    run, step = source_of_export(settings.model.path)
    vocabulary = hash_vocabulary(template.tokenizer.backend_tokenizer.to_str())
    path = str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model
    policy = {"model": path, "run": run, "step": step, "vocabulary": vocabulary}
    return Recorder(folder, policy)


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
