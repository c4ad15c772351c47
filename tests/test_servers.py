"""The servers that a config names are asked whether they answer."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from support.small_server import serving

from agentrl.config import Config
from agentrl.preflight import Plan, ask_servers, configured_servers
from agentrl.trajectory import Sample


def plan(interactions: tuple[str, ...] = (), **sections: Any) -> Plan:
    rows = [Sample(f"{i}", (), interaction=name) for i, name in enumerate(interactions)]
    # The scorer is not used: a config may name judges that cannot be built here.
    return Plan(Config.model_validate(sections), rows, [], cast(Any, SimpleNamespace()))


def judge(url: str, **kwargs: Any) -> dict[str, Any]:
    return {"function": "judge", "kwargs": {"url": url, **kwargs}}


def ask(url: str, **kwargs: Any) -> tuple[str, bool]:
    [report] = ask_servers(plan(reward=judge(url, **kwargs)), timeout_s=0.5)
    assert report.server.key == "reward.kwargs.url"
    return report.text, report.is_usable


app = FastAPI()


@app.get("/up/v1/models")
def models():
    return {"object": "list", "data": [{"id": "small"}, {"id": "large"}]}


@app.get("/up/health")
def health():
    return Response()


@app.get("/slow/v1/models")
def slow():
    time.sleep(1.5)
    return {}


@app.get("/locked/v1/models")
def locked(request: Request):
    sent = request.headers.get("authorization")
    return JSONResponse(models(), 200 if sent == "Bearer right" else 401)


@app.get("/ill/v1/models")
def ill():
    return JSONResponse({}, 503)


@app.get("/moved/v1/models")
def moved():
    return RedirectResponse("/up/v1/models")


@app.get("/list/v1/models")
def not_openai():
    return ["a", "b"]


@pytest.fixture(scope="module")
def base():
    with serving(app) as url:
        yield url


def test_a_server_that_answers(base):
    assert ask(f"{base}/up/v1") == ("answers; models: small, large", True)
    assert ask(f"{base}/up/v1/", model="large")[1]
    assert ask(f"{base}/up/v1", model="default")[1], "SGLang accepts any name"
    assert ask(f"{base}/list/v1") == ("answers", True)


def test_a_model_that_the_server_does_not_have(base):
    text, is_usable = ask(f"{base}/up/v1", model="huge")
    assert text == "has no model 'huge'. Its models: small, large" and not is_usable


def test_a_server_that_is_down():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    text, is_usable = ask(url)
    assert text.startswith(f"does not answer (GET {url}/models: ConnectError: ")
    assert not is_usable


def test_a_slow_server_is_not_waited_for(base):
    began = time.monotonic()
    text, is_usable = ask(f"{base}/slow/v1")
    assert text.startswith("does not answer (GET ") and not is_usable
    # httpx's own limit (ReadTimeout) and ours are equal: either may be first.
    assert "Timeout" in text or "no complete response within 0.5 s" in text
    assert time.monotonic() - began < 1.4


def test_a_server_that_refuses_the_token(base, monkeypatch):
    url = f"{base}/locked/v1"
    assert ask(url) == (
        "refuses a request without a token (status 401). Set reward.kwargs.token_env to the name of"
        " the environment variable with its token",
        False,
    )
    monkeypatch.setenv("JUDGE_TOKEN", "wrong")
    assert ask(url, token_env="JUDGE_TOKEN") == (
        "refuses the token in JUDGE_TOKEN (status 401)",
        False,
    )
    monkeypatch.setenv("JUDGE_TOKEN", "right")
    assert ask(url, token_env="JUDGE_TOKEN")[1]


def test_other_statuses(base):
    assert ask(f"{base}/ill/v1") == ("answers, but /models with status 503", False)
    assert ask(f"{base}/elsewhere") == ("answers, but /models with status 404", True)
    text, is_usable = ask(f"{base}/moved/v1")
    assert text.startswith("answers, but /models with status 307") and not is_usable


def test_the_servers_of_a_config(monkeypatch):
    found = configured_servers(
        plan(
            ("simulated_user", "", "simulated_user"),
            reward={
                "functions": {"judge": 1.0, "reward_model": 1.0, "exact": 1.0},
                "kwargs": {
                    "judge": {"url": "http://a/v1", "model": "m", "token_env": "A"},
                    "reward_model": {"path": "p", "url": "http://b"},
                },
            },
            interaction={
                "kwargs": {
                    "simulated_user": {"url": "http://c/v1", "model": "u"},
                    "no_row_has_this": {"url": "http://d/v1"},
                }
            },
            rollout={"name": "vllm", "urls": ["http://e:1"]},
        )
    )
    assert [tuple(server) for server in found] == [
        ("reward.kwargs.judge.url", "http://a/v1", "/models", "A", "m"),
        ("reward.kwargs.reward_model.url", "http://b", "/health", "", ""),
        ("interaction.kwargs.simulated_user.url", "http://c/v1", "/models", "", "u"),
        ("rollout.urls[0]", "http://e:1", "/health", "AGENTRL_ENGINE_TOKEN", ""),
    ]
    assert configured_servers(plan()) == [] and ask_servers(plan()) == []


def test_engines_are_asked_for_their_health(base):
    rollout = {"name": "sglang", "urls": [f"{base}/up", f"{base}/locked"]}
    up, locked = ask_servers(plan(rollout=rollout))
    assert (up.text, up.is_usable) == ("answers", True)
    assert locked.text == "answers, but /health with status 404"
