"""A base of 4 bits is the model with rounded weights, in every pass and for every engine."""

import copy
from typing import Any

import pytest
import torch
from peft import PeftConfig
from peft.tuners.lora import LoraLayer
from support.trainer_fixtures import config, tiny_folder, tiny_model
from torch import nn
from torch.nn.functional import linear

from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.local.quantize import BLOCK, Linear4bit, rounded
from agentrl.errors import ConfigError
from agentrl.learner.packing import pack_row
from agentrl.learner.policy import ACTOR, Policy

ROW = [*range(3, 30), *range(3, 30, 2)]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "height"), [(64, 48), (48, 7), (96, 4)])
def test_a_layer_is_the_layer_with_the_rounded_weight(dtype, width, height):
    torch.manual_seed(0)
    layer = nn.Linear(width, height, dtype=dtype).requires_grad_(False)
    quantized = Linear4bit(layer, "cpu")
    x = torch.randn(2, 9, width, dtype=dtype, requires_grad=True)
    y = quantized(x)
    expected = linear(x, quantized.weight, layer.bias)
    assert torch.equal(y, expected)
    up = torch.randn_like(y)
    (mine,), (theirs,) = (torch.autograd.grad(out, x, up) for out in (y, expected))
    torch.testing.assert_close(
        mine, theirs, atol=1e-6, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6
    )
    with torch.no_grad():
        assert torch.equal(quantized(x), expected)


def test_a_weight_is_one_of_16_numbers_times_the_largest_of_its_block():
    torch.manual_seed(1)
    weight = torch.randn(32, 96)
    blocks, made = weight.flatten().split(BLOCK), rounded(weight).flatten().split(BLOCK)
    numbers = [m / b.abs().max() for b, m in zip(blocks, made, strict=True)]
    assert len(torch.cat(numbers).mul(1e4).round().unique()) == 16
    error = (rounded(weight) - weight).norm() / weight.norm()
    assert 0.08 < error < 0.1  # for normal numbers
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model")


def adapted(folder, quantize: bool, targets="all-linear") -> Policy:
    policy = Policy(load_causal_lm(folder, torch.float32), 1.0)
    policy.add_adapter(ACTOR, 4, 8, targets, seed=0)
    if quantize:
        policy.quantize("cpu")
    generator = torch.Generator().manual_seed(2)
    for p in policy.parameters(ACTOR).values():
        p.data = 0.2 * torch.randn(p.shape, generator=generator)
    return policy


def logprobs(policy: Policy) -> torch.Tensor:
    return policy.logprobs(pack_row(ROW, policy.packed_model.mode))[0]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_a_policy_learns_over_the_rounded_base(folder, targets):
    policy, other = adapted(folder, True, targets), adapted(folder, False, targets)
    before = logprobs(other).detach()
    for layer in other.model.modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            base.weight.data = rounded(base.weight.data)
    mine, theirs = logprobs(policy), logprobs(other)
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert (mine - before).abs().mean() > 1e-3, "the base is not rounded"
    mine.sum().backward()
    theirs.sum().backward()
    expected = other.parameters(ACTOR)
    for name, p in policy.parameters(ACTOR).items():
        torch.testing.assert_close(p.grad, expected[name].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_engines_and_files_get_the_policy_that_learns(folder, tmp_path, targets):
    policy = adapted(folder, True, targets)
    expected = logprobs(policy).detach()
    engine = load_causal_lm(folder, torch.float32)
    with torch.no_grad():
        for name, weight in policy.export():
            engine.get_parameter(name).copy_(weight)
    policy.save_pretrained(tmp_path / "adapter")
    policy.save_whole(tmp_path / "whole")
    PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    for model in (
        engine,
        load_causal_lm(tmp_path / "whole", torch.float32),
        load_causal_lm(tmp_path / "adapter", torch.float32),
    ):
        torch.testing.assert_close(logprobs(Policy(model, 1.0)), expected, atol=1e-5, rtol=0)


def test_the_first_policy_is_the_rounded_base(folder):
    policy = adapted(folder, True)
    with policy.adapter(None):
        initial = logprobs(policy)
    base = load_causal_lm(folder, torch.float32)
    for name, p in base.named_parameters():
        if name.rpartition(".")[0].rpartition(".")[2] in MODULES and p.dim() == 2:
            p.data = rounded(p.data)
    torch.testing.assert_close(initial, logprobs(Policy(base, 1.0)), atol=1e-6, rtol=0)


def test_a_canary_sees_an_engine_with_the_base_of_the_files(folder):
    """With `rollout.lora=adapter`, the engine would add the adapter to weights of the files."""
    policy, other = adapted(folder, True), adapted(folder, False)
    assert (logprobs(policy) - logprobs(other)).abs().mean() > 1e-3


def test_only_linear_layers_can_be_quantized(folder):
    policy = Policy(copy.deepcopy(tiny_model()), 1.0)
    policy.add_adapter(ACTOR, 4, 8, ["q_proj"], seed=0)
    layer = next(m for m in policy.model.modules() if isinstance(m, LoraLayer))
    layer.base_layer = nn.Identity()
    with pytest.raises(ConfigError, match=r"q_proj is a Identity, not a\s+torch.nn.Linear"):
        policy.quantize("cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__lora_rank": 0}, "weights of 4 bits cannot learn. Set model.lora_rank"),
        ({"rollout__lora": "adapter"}, "is another policy .* Set rollout.lora=merge"),
        ({"rollout__name": "vllm"}, "is another policy .* Set rollout.name=sglang"),
        ({"optim__offload": "all"}, "4-bit weights stay on the GPU"),
    ],
)
def test_contradictions_are_refused(changes, message):
    keys = {"model__quantization": "nf4", "model__lora_rank": 4, **changes}
    with pytest.raises((ConfigError, ValueError), match=message):
        config(**keys)
