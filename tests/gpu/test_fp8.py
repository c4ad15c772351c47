"""`rollout.quantization=fp8`: what a server holds after an update is what a new one would load."""

import asyncio
import json
import os
from contextlib import closing
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.engine.remote import fp8
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import Delivery, Route, WeightsSender
from agentrl.engine.remote.sglang import SGLangEngine
from gpu.test_sglang_sync import BF16, ROW, keys, scores, tiny_qwen, weights
from gpu.test_sglang_sync import folder as folder

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPUS < 1 or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with 8-bit products"
    ),
]


def launch(path, **options):
    flags = ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    return SGLangLaunch(
        str(path),
        python=os.environ.get("AGENTRL_SGLANG_PYTHON", ""),
        dtype="bfloat16",
        gpus=[0],
        memory=0.1,
        arguments=[*flags, "--disable-cuda-graph"],
        **options,
    ).start()


def scores_of(engine):
    return torch.tensor(asyncio.run(engine.score(ROW)))[1:]


def quantized_files(folder, policy, target):
    """The model as DeepSeek publishes its own: 8 bits in the files."""
    target.mkdir()
    tensors = dict(fp8.quantize(weights(policy, 0)))
    save_file({n: t.cpu() for n, t in tensors.items()}, target / "model.safetensors")
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.jinja"):
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fp8.FORMAT
    config["dtype"] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_an_update_equals_a_server_that_loads_the_same_weights(folder, tmp_path):
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    policies = [tiny_qwen(seed, vocabulary) for seed in (1, 2)]
    server = launch(folder, fp8=True)
    open_engine = partial(SGLangEngine, vocabulary=vocabulary, dtype=BF16)
    try:
        engine = open_engine(
            server.url,
            process=server,
            delivery=Delivery("memory", ranks=(0,), fp8=True),
            **keys(server),
        )
        updated = []
        with closing(WeightsSender()) as sender:
            for version, policy in enumerate((0, 1, 0, 1), 1):
                route = Route(version, (engine.target,), dtype=BF16, fp8=True)
                engine.begin_update()
                sent = sender.send(weights(policies[policy], 0), route)
                assert not sent.errors
                engine.finish_update(route, sent)
                updated.append(scores_of(engine))
    finally:
        server.stop()
    fresh = launch(quantized_files(folder, policies[1], tmp_path / "quantized"))
    try:
        loaded = scores_of(
            open_engine(
                fresh.url, process=fresh, delivery=Delivery("memory", ranks=(0,)), **keys(fresh)
            )
        )
    finally:
        fresh.stop()
    assert torch.equal(updated[0], updated[2])
    assert torch.equal(updated[1], updated[3])
    assert torch.equal(updated[1], loaded)
    exact = scores(policies[1])
    print("nats from bfloat16:", (loaded - exact).abs().mean().item())
    assert 0.005 < (loaded - exact).abs().mean() < 0.5
    assert (loaded - scores(policies[0])).abs().mean() > 0.5, "a control: the policies differ"
