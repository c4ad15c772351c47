"""Rows with images as an engine checks and a server gets them, without a server."""

import asyncio
import base64
import socket
import time
from array import array
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from agentrl.engine.base import Sampling
from agentrl.engine.checks import image_starts
from agentrl.engine.pieces import SamplerInPieces
from agentrl.engine.remote.client import EngineView, PolicyVersion, RemoteEngine
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.engine.remote.vllm import VLLMEngine
from agentrl.engine.scripted import Scripted
from agentrl.errors import InvalidEngineResponse, RequestRefused
from agentrl.images import RowImage
from agentrl.rollout_workers.channel import Channel
from agentrl.rollout_workers.process import RunSampler
from agentrl.rollout_workers.workers import RolloutWorkers
from agentrl.testing import byte_tokenizer

PAD = 99
A, B = (RowImage(data, 2, 2, tokens, PAD, "") for data, tokens in ((b"a", 3), (b"b", 1)))


def client(engine):
    """Return a client of a server that another process owns: it sends nothing by itself."""
    view = EngineView(engine, 7, "http://127.0.0.1:1", "", "", 320, 64, False,
                      PolicyVersion("0", 0), True)  # fmt: skip
    return RemoteEngine.follow(view)


@pytest.mark.parametrize(
    ("row", "images", "starts"),
    [
        ([1, 99, 99, 99, 2, 99, 3], [A, B], [1, 5]),
        ([99, 99, 99, 99], [A, B], [0, 3]),
        ([1, 99, 2, 99, 99, 99], [B, A], [1, 3]),
        ([1, 99], [], []),  # Without images it is a token like the others.
    ],
)
def test_where_images_begin(row, images, starts):
    assert image_starts(np.array(row), images, "here") == starts


@pytest.mark.parametrize(
    "row",
    [[1, 2], [1, 99, 99, 2, 99], [99, 99, 99, 1], [1, 99, 99, 99, 2, 99, 99], [99, 1, 99, 99, 99]],
)
def test_rows_without_their_images(row):
    with pytest.raises(RequestRefused, match=r"here: 2 images with \[3, 1\] tokens, but"):
        image_starts(np.array(row), [A, B], "here")


async def test_sglang_gets_one_placeholder_for_each_image(monkeypatch):
    engine, row = client(SGLangEngine), array("i", [1, 99, 99, 99, 2, 99, 3])
    bodies = []

    async def ask(body, *_):
        bodies.append(body)
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 4, None]],
            "completion_tokens": 1,
            "prompt_tokens": 7 if len(bodies) < 3 else 6,
            "cached_tokens": 0,
            "weight_version": "0",
            "input_token_logprobs": [
                [x, t, None]
                for x, t in zip([None, -1, -2, -3, -4, -5, -6], [1, 0, 0, 0, 2, 0, 3], strict=True)
            ],
        }
        return {"meta_info": meta}

    monkeypatch.setattr(engine, "_ask", ask)
    options = {"episode_id": "e", "seed": 0, "deadline": float("inf")}
    turn = await engine.generate(row, Sampling(max_tokens=1), **options, images=[A, B])
    assert turn.prompt_tokens == 7
    assert await engine.score(row, [A, B]) == array("f", [0, 0, 0, 0, -4, 0, -6])
    for body in bodies:
        assert body["input_ids"].tolist() == [1, 99, 2, 99, 3]
        sent = [base64.b64decode(url.partition(",")[2]) for url in body["image_data"]]
        assert sent == [b"a", b"b"]
        assert body["image_data"][0].startswith("data:image/png;base64,")
    with pytest.raises(InvalidEngineResponse, match=r"read 6 tokens, but the row .* has 7"):
        await engine.generate(row, Sampling(max_tokens=1), **options, images=[A, B])
    with pytest.raises(RequestRefused, match="placeholder token"):
        await engine.score(row, [A])
    await engine.score(array("i", [1, 0, 0, 0, 2, 0, 3]))
    assert "image_data" not in bodies[-1]


async def test_vllm_gets_no_images():
    engine = client(VLLMEngine)
    options = {"episode_id": "e", "seed": 0, "deadline": float("inf")}
    with pytest.raises(RequestRefused, match=r"no images to vLLM\. Set rollout.name=sglang"):
        await engine.generate(array("i", [99]), Sampling(), **options, images=[B])


async def test_pieces_of_a_turn_have_the_images():
    tokenizer = byte_tokenizer()
    engine = Scripted(["one", "two!"], tokenizer)
    template = SimpleNamespace(
        thinking=SimpleNamespace(opening=lambda ids: ""),
        decode_turn=lambda ids: tokenizer.decode(list(ids)),
    )
    sampler = SamplerInPieces(engine, template, lambda *_: None)
    options = {"episode_id": "e", "seed": 0, "deadline": float("inf")}
    await sampler.generate(array("i", [99]), Sampling(stop_ids=(3,)), **options, images=[B])
    assert [request.images for request in engine.requests] == [(B,)]


async def test_a_worker_sends_the_images_to_the_engine_of_the_run():
    engine = Scripted(["one", "two"], byte_tokenizer())
    functions = RolloutWorkers(engine, Mock())._functions_for(Mock(number=0, begun=set()))
    ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
    run, worker = Channel(*ends[0], functions), Channel(*ends[1])
    sampler = RunSampler(worker, max_length=100, is_concurrent=False)
    sampler.begin("e")
    options = {"episode_id": "e", "seed": 0, "deadline": time.monotonic() + 60}
    for images in ([A, B], ()):
        await sampler.generate(array("i", [1]), Sampling(), **options, images=images)
    assert [request.images for request in engine.requests] == [(A, B), ()]
    run.close()
    worker.close()
