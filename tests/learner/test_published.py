"""Weights reach servers by the names and in the shapes of the files that the servers load."""

from __future__ import annotations

import asyncio
import json
from array import array
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.architectures import ARCHITECTURES, NAMES, architecture, make_model
from support.needs import needs_newest_models
from support.trainer_fixtures import tensors_in
from support.updates import publish, update_from
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engine.local.load import add_other_parts
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import Delivery
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.learner.packing import pack_row
from agentrl.learner.policy import ACTOR, Policy

NEMOTRON = pytest.param("Nemotron-H", marks=needs_newest_models)
CONVERTED = (
    "Qwen3-MoE", "Qwen3.5-MoE", "GLM-4.5", "DeepSeek-V3", "Granite 4 hybrid", "Nemotron-H",
)  # fmt: skip
"""The architectures whose tensors have other names or shapes in files: experts are stacked, or
tensors are renamed."""
WITH_CONSTANTS = ("DeepSeek-V3", "GLM-4.5", "Nemotron-H")
"""The architectures whose routers have biases."""
CONSTANT = "e_score_correction_bias"
"""The end of the names of a router's biases, which no gradient changes."""
IDS = torch.arange(1, 12)[None]


def reload(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def published(policy: Policy) -> dict[str, Tensor]:
    pairs = list(policy.export(published=True))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def are_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("name", [NEMOTRON if name == "Nemotron-H" else name for name in NAMES])
def test_published_tensors_are_those_of_the_saved_files(name, tmp_path):
    model = architecture(name)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(CONSTANT):
            buffer.copy_(torch.randn(buffer.shape))
    expected = logits(model)
    model.save_pretrained(tmp_path / "whole")
    files = tensors_in(tmp_path / "whole")
    constant = {n for n in files if n.endswith(CONSTANT)}
    assert bool(constant) == (name in WITH_CONSTANTS)
    learnt = {n: t for n, t in files.items() if n not in constant}
    for policy in (Policy(model, 1.0), Policy(reload(tmp_path / "whole"), 1.0)):
        are_equal(published(policy), learnt)
        names = {n for n, _ in policy.model.named_parameters()}
        assert {n for n, _ in policy.export()} == names
        assert (names == learnt.keys()) == (name not in CONVERTED)
    policy.save_whole(tmp_path / "saved")
    are_equal(tensors_in(tmp_path / "saved"), files)
    torch.testing.assert_close(logits(reload(tmp_path / "saved")), expected)


def test_a_saved_config_has_the_keys_of_its_base(tmp_path):
    """transformers leaves out `full_attention_interval`, without which SGLang serves no Qwen3.5."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    architecture("Qwen3.5").save_pretrained(base)
    own = json.loads((base / "config.json").read_text())
    published_keys = {
        **{"full_attention_interval": 4, "rope_theta": 5.0, "vocab_size": own["vocab_size"]},
        **{"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"},
        "audio_config": {"depth": 1},
    }
    (base / "config.json").write_text(json.dumps(own | published_keys))
    architecture("Qwen3.5").save_pretrained(saved)
    add_other_parts(saved, base)
    added = {"full_attention_interval": 4, "rope_theta": 5.0, "audio_config": {"depth": 1}}
    assert json.loads((saved / "config.json").read_text()) == own | added


@pytest.mark.parametrize("kind", ["prefix", "stacked"])
def test_names_are_those_of_the_files_that_were_loaded(kind, tmp_path):
    """A text model in the files of a larger one, and files in which experts are stacked."""
    model = architecture("Qwen3.5-MoE" if kind == "stacked" else "Qwen3.5")
    model.save_pretrained(tmp_path, save_original_format=kind != "stacked")
    if kind == "prefix":
        moved = {n.replace("model.", "model.language_model."): t for n, t in files_of(model)}
        save_file(moved, tmp_path / "model.safetensors", {"format": "pt"})
    policy = Policy(reload(tmp_path), 1.0)
    are_equal(published(policy), tensors_in(tmp_path))
    torch.testing.assert_close(logits(policy.model), logits(model), atol=1e-4, rtol=1e-4)


def files_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return [(n, t.clone()) for n, t in model.state_dict().items()]


@pytest.mark.parametrize("name", [NEMOTRON, "Qwen3-MoE"])
def test_merged_adapters_are_published(name, tmp_path):
    model = architecture(name)
    policy = Policy(model, 1.0)
    targets = ["q_proj", "o_proj", "down_proj"] if name == "Nemotron-H" else ["q_proj", "o_proj"]
    policy.add_adapter(ACTOR, 4, 8, targets, seed=0)
    with torch.no_grad():
        for n, weight in policy.parameters(ACTOR).items():
            weight.copy_(0.3 * torch.randn(weight.shape)) if "lora_B" in n else None
    adapted = published(policy)
    policy.save_whole(tmp_path)
    files = tensors_in(tmp_path)
    assert adapted and adapted.keys() < files.keys()
    are_equal(adapted, {n: files[n] for n in adapted})
    row = pack_row([0, *range(1, 12)], policy.packed_model.mode)
    with torch.no_grad():
        adapter, _ = policy.logprobs(row)
        with policy.adapter(None):
            assert (policy.logprobs(row)[0] - adapter).abs().max() > 0.1
        merged = Policy(reload(tmp_path), 1.0).logprobs(row)[0]
    torch.testing.assert_close(merged, adapter, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sglang
def test_a_real_server_takes_experts_by_published_names(sglang_python, tiny_tokenizer, tmp_path):
    """By the names of transformers, SGLang would ignore the experts without an error."""
    kind, values = ARCHITECTURES["Qwen3-MoE"]
    width = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    model = make_model(kind, values | width | {"vocab_size": len(tiny_tokenizer)})
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    policy, row = Policy(model, 1.0), array("i", range(3, 40))
    server = SGLangLaunch(str(tmp_path), python=sglang_python, dtype="float32").start()
    try:
        engine = SGLangEngine(
            server.url,
            vocabulary=len(tiny_tokenizer),
            key=server.token,
            admin_key=server.admin_token,
            process=server,
            delivery=Delivery("memory", ranks=(0,)),
        )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "experts" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
            expected, _ = policy.logprobs(pack_row(row))
        before = torch.tensor(asyncio.run(engine.score(row)))[1:]
        assert (before - expected).abs().max() > 0.1
        publish(engine, update_from(partial(policy.export, published=True), 1))
        after = torch.tensor(asyncio.run(engine.score(row)))[1:]
        torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)
    finally:
        server.stop()
