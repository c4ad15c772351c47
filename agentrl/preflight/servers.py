"""Ask the servers that run already whether they answer: judges, simulated users, reward models.

A server that is down is found here in seconds. In a run, it is found after the model was loaded and
the first episodes were played.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from agentrl.config.teacher import is_url
from agentrl.errors import AgentRLError
from agentrl.http import fetch
from agentrl.preflight.plan import Plan

TIMEOUT_SECONDS = 5.0
"""The time limit of an answer. All servers are asked at the same time."""


class ConfiguredServer(NamedTuple):
    """A server that the config names by its URL."""

    key: str
    """The config key of the URL."""
    url: str
    path: str
    """The path below the URL that is requested: `/models` of an OpenAI-compatible server, or
    `/health`."""
    token_env: str
    """The environment variable with the server's token, or ""."""
    model: str = ""
    """The model that the run will ask for; empty: any."""


class ServerReport(NamedTuple):
    """What a server answered."""

    server: ConfiguredServer
    text: str
    is_usable: bool


def configured_servers(plan: Plan) -> list[ConfiguredServer]:
    """Return the servers of rewards, interactions, engines and teachers that run already.

    A server of a reward or an interaction is an argument `url` in the config. Interactions that no
    row has are left out. Tool servers and sandboxes have their own checks.
    """
    return list(dict.fromkeys(_servers(plan)))


def _servers(plan: Plan) -> Iterator[ConfiguredServer]:
    config, reward = plan.config, plan.config.reward
    if reward.functions:
        for name in reward.functions:
            yield from _server(f"reward.kwargs.{name}", name, reward.kwargs.get(name))
    else:
        yield from _server("reward.kwargs", reward.function, reward.kwargs)
    for name in sorted({kind.sample.interaction for kind in plan.kinds}):
        yield from _server(f"interaction.kwargs.{name}", name, config.interaction.kwargs.get(name))
    if config.rollout.name != "local":
        for i, url in enumerate(config.rollout.urls):
            yield ConfiguredServer(f"rollout.urls[{i}]", url, "/health", "AGENTRL_ENGINE_TOKEN")
    for url in filter(is_url, config.teacher.names):
        yield ConfiguredServer("teacher.model", url, "/health", "AGENTRL_TEACHER_TOKEN")


def _server(key: str, name: str, kwargs: Mapping[str, Any] | None) -> Iterator[ConfiguredServer]:
    """Yield the server of a reward or an interaction, if its arguments contain a URL."""
    kwargs = kwargs or {}
    url = kwargs.get("url")
    if not isinstance(url, str) or not url:
        return
    model, token_env = str(kwargs.get("model", "")), str(kwargs.get("token_env", ""))
    if name == "reward_model":  # Its server classifies; only vLLM's has names of models.
        yield ConfiguredServer(f"{key}.url", url, "/health", token_env)
    else:
        # SGLang accepts any name; `default` is the name that judges have unless it is set.
        model = "" if model == "default" else model
        yield ConfiguredServer(f"{key}.url", url, "/models", token_env, model)


def ask_servers(plan: Plan, timeout_s: float = TIMEOUT_SECONDS) -> list[ServerReport]:
    """Ask all configured servers at once; return one report for each, in the order of the config.

    Args:
        plan: the run.
        timeout_s: the time limit of an answer, in seconds.
    """
    servers = configured_servers(plan)
    if not servers:
        return []
    with ThreadPoolExecutor(len(servers)) as threads:
        return list(threads.map(lambda server: _ask(server, timeout_s), servers))


def _ask(server: ConfiguredServer, timeout_s: float) -> ServerReport:
    token = os.environ.get(server.token_env, "")
    try:
        status, answer = fetch(server.url, server.path, token=token, timeout=timeout_s)
    except AgentRLError as e:
        return ServerReport(server, f"does not answer ({e})", False)
    if status in (401, 403):
        sent = f"the token in {server.token_env}" if token else "a request without a token"
        return ServerReport(server, f"refuses {sent} (status {status}){_advice(server)}", False)
    if status != 200:
        # The paths of a server may differ from OpenAI's API. Redirects are not followed.
        text = f"answers, but {server.path} with status {status}"
        return ServerReport(server, text, 400 <= status < 500)
    models = _models(answer) if server.path == "/models" else []
    if not models:
        return ServerReport(server, "answers", True)
    if server.model and server.model not in models:
        text = f"has no model {server.model!r}. Its models: {', '.join(models)}"
        return ServerReport(server, text, False)
    return ServerReport(server, f"answers; models: {', '.join(models)}", True)


def _advice(server: ConfiguredServer) -> str:
    if server.key.startswith(("rollout.", "teacher.")):
        return f". Set {server.token_env} to its API key"
    if server.token_env in os.environ:
        return ""
    owner = server.key.removesuffix(".url")
    return f". Set {owner}.token_env to the name of the environment variable with its token"


def _models(answer: bytes) -> list[str]:
    """Return the names in the answer to `/models`; empty if it is not OpenAI's list."""
    try:
        listed = json.loads(answer)["data"]
        return [str(model["id"]) for model in listed]
    except (ValueError, TypeError, LookupError):
        return []
