"""Parsing vLLM's responses without a server: spans of versions, errors."""

import copy
import runpy
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.updates import sent_of

from agentrl.config import load_config
from agentrl.engine.base import Sampling
from agentrl.engine.remote import guard
from agentrl.engine.remote.admin import refusal
from agentrl.engine.remote.client import PolicyVersion
from agentrl.engine.remote.launch import VLLMLaunch
from agentrl.engine.remote.open import vllm_delivery
from agentrl.engine.remote.senders import Delivery, Route
from agentrl.engine.remote.vllm import (
    VLLMEngine,
    read_generation,
    read_scores,
)
from agentrl.errors import (
    ConfigError,
    EngineError,
    EngineOverloaded,
    InvalidEngineResponse,
    PromptTooLong,
    RequestRefused,
)

USAGE = {
    "prompt_tokens": 5,
    "total_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}
ANSWER = {
    "request_id": "a1",
    "model": "tuned",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 9,
            "token_ids": [3, 9],
            "weight_versions": [{"version": "7", "start": 0, "end": 2}],
            "logprobs": {
                "content": [
                    {"token_id": 3, "logprob": -0.5, "rank": 2, "top_logprobs": []},
                    {"token_id": 9, "logprob": 0.0, "rank": 1, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": USAGE,
    "prompt_logprobs": None,
}
SEVEN = PolicyVersion("7", 7, {"model": "tuned"})


def read(answer, *, limit=2, stamp=SEVEN):
    return read_generation(answer, limit, stamp, "here")


def answer(*, choice=None, **changes):
    changed = copy.deepcopy(ANSWER) | changes
    changed["choices"][0] |= choice or {}
    return changed


def test_a_turn():
    generation = read(ANSWER)
    assert generation.token_ids == array("i", [3, 9])
    assert generation.logprobs == array("f", [-0.5, 0.0])
    assert generation.versions == array("i", [7, 7])
    assert (generation.finish_reason, generation.prompt_tokens, generation.cached_tokens) == (
        "stop",
        5,
        4,
    )


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def test_versions_by_token():
    spans = {"weight_versions": [span("7", 0, 1), span("8", 1, 2)]}
    assert read(answer(choice=spans)).versions == array("i", [7, 8])
    # An adapter's version is the name's; the weights under it have one of their own.
    base = {"weight_versions": [span("default", 0, 2)]}
    generation = read(answer(choice=base), stamp=PolicyVersion("default", 3, {"model": "tuned"}))
    assert generation.versions == array("i", [3, 3])


def test_versions_are_never_guessed():
    with pytest.raises(InvalidEngineResponse):
        read(answer(choice={"weight_versions": None}))


def logprobs_answer(*logprobs, ids=(3, 9)):
    content = [{"token_id": i, "logprob": x} for i, x in zip(ids, logprobs, strict=True)]
    return {"logprobs": {"content": content}}


@pytest.mark.parametrize(
    "choice",
    [
        logprobs_answer(-0.5, -9999.0),  # vLLM's word for NaN
        logprobs_answer(-0.5, float("nan")),
        logprobs_answer(-0.5, None),
        logprobs_answer(-0.5, float("-inf")),
        logprobs_answer(-0.5, 0.0, ids=(3, 8)),
        logprobs_answer(-0.5, ids=(3,)),
        {"logprobs": None},
        {"token_ids": None},
        {"token_ids": [3, 2**40]},
        {"finish_reason": "repetition"},
        {"finish_reason": None},
        {"weight_versions": [span("7", 0, 1)]},
        {"weight_versions": [span("7", 0, 1), span("8", 0, 2)]},
        {"weight_versions": [span("default", 0, 2)]},
    ],
)
def test_malformed_answers_are_refused(choice):
    with pytest.raises(InvalidEngineResponse, match="here: not a valid answer of vLLM"):
        read(answer(choice=choice))


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": []},
        {"usage": None},
        {"usage": USAGE | {"completion_tokens": 3}},
        {"model": "another adapter"},
    ],
)
def test_an_answer_to_something_else(changes):
    with pytest.raises(InvalidEngineResponse, match="here: not a valid answer of vLLM"):
        read(ANSWER | changes)
    with pytest.raises(InvalidEngineResponse, match="2 tokens, where at most 1"):
        read(ANSWER, limit=1)


def test_logprobs_of_fewer_tokens():
    short = {"token_ids": [3, 9, 4]}
    with pytest.raises(InvalidEngineResponse):
        read(answer(choice=short, usage=USAGE | {"completion_tokens": 3}), limit=3)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_turn_is_an_error(reason):
    with pytest.raises(EngineError, match=f"aborted the turn .{reason}") as e:
        read(answer(choice={"finish_reason": reason}))
    assert not isinstance(e.value, InvalidEngineResponse)


@pytest.mark.parametrize("nonsense", [None, [], "text", {}, {"choices": None}])
def test_another_servers_answer(nonsense):
    with pytest.raises(InvalidEngineResponse):
        read(nonsense)
    with pytest.raises(InvalidEngineResponse):
        read_scores(nonsense, [1], 9, "here")


def scores(*pairs):
    logprobs = [None, *({str(token): {"logprob": x, "rank": 1}} for token, x in pairs)]
    return {"prompt_logprobs": logprobs}


def test_scores():
    body = scores((6, -0.5), (4, -0.25))
    assert read_scores(body, [5, 6, 4], 9, "here") == array("f", [0.0, -0.5, -0.25])
    for row in ([5, 6, 3], [5, 6], [5, 6, 4, 4]):
        with pytest.raises(InvalidEngineResponse):
            read_scores(body, row, 9, "here")


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "This model's maximum context length is 2048 tokens. However, ...", PromptTooLong),
        (400, "The decoder prompt (length 5000) is longer than the maximum model length of 2048.",
         PromptTooLong),
        (400, "temperature must be in [0, 2], got 3.0.", RequestRefused),
        (404, "The model `nope` does not exist.", EngineError),
        (503, "overloaded", EngineOverloaded),
        (500, "EngineCore encountered an issue.", EngineError),
    ],
)  # fmt: skip
def test_refusals_have_types(status, message, kind):
    error = refusal(status, {"error": {"message": message, "code": status}}, "here")
    assert type(error) is kind and f"status {status}: {message[:20]}" in str(error)


def test_stop_texts_alone_need_the_text():
    engine = VLLMEngine.__new__(VLLMEngine)
    for stop in ((), ("x",)):
        body = engine._body([1], Sampling(stop=stop), 1)
        assert body["sampling_params"]["detokenize"] == bool(stop)


# -- how it is started ---------------------------------------------------------------------------


def test_flags():
    flags = VLLMLaunch("m", gpus=[2, 3], memory=0.4, lora_rank=12).flags()
    values = dict(pairwise(flags))
    assert values["--logprobs-mode"] == "processed_logprobs"
    assert (values["--tensor-parallel-size"], values["--gpu-memory-utilization"]) == ("2", "0.4")
    assert values["--max-lora-rank"] == "16"  # vLLM has room for certain ranks alone
    assert "--enforce-eager" not in flags
    plain = VLLMLaunch("m").flags()
    assert "--enforce-eager" in plain and "--enable-lora" not in plain


def test_lora_goes_as_an_adapter(random_model):
    def config(*overrides):
        return load_config(
            None,
            ["rollout.name=vllm", *overrides],
            {"data.train": "rows.parquet", "model.path": str(random_model)},
        )

    base = str(random_model)
    settings = config("model.lora_rank=4", "trainer.max_staleness=2")
    [delivery] = vllm_delivery(settings, base, cpu=True).values()
    assert delivery == Delivery("adapter", adapters=4)
    with pytest.raises(ConfigError, match=r"rollout\.lora=adapter"):
        vllm_delivery(config("model.lora_rank=4", "rollout.lora=merge"), base, cpu=True)
    whole = vllm_delivery(config(), base, cpu=False)
    assert "model.layers.0.self_attn.q_proj.weight" in whole["names"] and not whole["stale_head"]
    assert vllm_delivery(config(), base, cpu=True)["stale_head"]


# -- the guard ---------------------------------------------------------------------------------


async def status_of(app, kind="http", path="/collective_rpc", headers=()):
    """Return the status that a caller gets, or "in" if the request reached the server."""
    seen = []

    async def send(event):
        seen.append(event.get("status") or event.get("code"))

    await app({"type": kind, "path": path, "headers": headers}, None, send)
    return seen[0]


async def server(scope, receive, send):
    await send({"status": "in"})


def guarded(tmp_path, key="secret"):
    (tmp_path / "copied.py").write_text(Path(guard.__file__).read_text())
    (tmp_path / guard.KEY_FILE).write_text(key)
    return runpy.run_path(str(tmp_path / "copied.py"))["KeyGuard"](server)


def bearer(key):
    return (b"authorization", f"Bearer {key}".encode())


async def test_the_guard_asks_for_the_key_everywhere(tmp_path):
    app = guarded(tmp_path)
    for path in ("/collective_rpc", "/v1/models", "/pause", "/", "/health/", "/healthy"):
        assert await status_of(app, path=path) == 401
        assert await status_of(app, path=path, headers=[bearer("secret")]) == "in"
    for headers in (
        [bearer("Secret")],
        [bearer("")],
        [(b"authorization", b"secret")],
        [(b"x-authorization", b"Bearer secret")],
        [bearer("wrong"), bearer("secret")],
    ):
        assert await status_of(app, headers=headers) == 401
    assert await status_of(app, kind="websocket", path="/v1/realtime") == 1008
    assert await status_of(app, kind="something new") == 1008
    assert await status_of(app, path="/health") == "in"
    assert await status_of(app, kind="lifespan") == "in"


def test_a_guard_without_a_key_does_not_start(tmp_path):
    with pytest.raises(ValueError, match="key file is empty"):
        guarded(tmp_path, key="")


def test_a_server_whose_weights_cannot_be_checked_is_logged_once(caplog, tmp_path):
    class Admin:
        url = "http://server"

        def manage(self, path, body, *, seconds):
            assert path == "/collective_rpc"

        def send(self, path, body):
            return 404, b""

    engine = VLLMEngine.__new__(VLLMEngine)
    engine.url, engine.admin, engine._names = Admin.url, Admin(), frozenset({"model.norm.weight"})
    engine._checks_norms = True
    for version in (1, 2):
        sent = sent_of([("model.norm.weight", torch.ones(4))])
        engine.load(Route(version, folder=tmp_path), sent)
    assert caplog.text.count("http://server has no checksums of its weights") == 1
