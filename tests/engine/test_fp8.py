"""`rollout.quantization=fp8` without a GPU: what is sent, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.engine.remote import fp8
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import make_buckets
from agentrl.errors import ConfigError

LAYER = "model.layers.0.mlp"


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from((1e-6, 0.02, 50.0)))
def test_a_matrix_is_as_close_as_three_bits_allow(rows, columns, size):
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    quantized, scales = fp8.quantize_matrix(weight)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == weight.shape
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (quantized.float() * wide - weight).abs()
    # Half of the last of 3 bits; below 2 ** -6 of the scale the steps stay those of 2 ** -9.
    assert (error <= weight.abs() / 16 * 1.0001 + wide * 2**-10).all()


def test_a_block_of_zeros_stays_zero():
    quantized, scales = fp8.quantize_matrix(torch.zeros(128, 256))
    assert not quantized.float().any() and scales.isfinite().all()


def test_only_matrices_of_layers_are_quantized():
    names = {
        "model.embed_tokens.weight": (8, 4),
        f"{LAYER}.up_proj.weight": (8, 4),
        f"{LAYER}.gate.weight": (2, 4),
        f"{LAYER}.up_proj.bias": (8,),
        "model.layers.0.conv.weight": (8, 1, 4),
        "lm_head.weight": (8, 4),
    }
    sent = dict(fp8.quantize((n, torch.ones(s)) for n, s in names.items()))
    assert sent.keys() - names.keys() == {f"{LAYER}.up_proj.weight_scale_inv"}
    small = {n for n, t in sent.items() if t.dtype == torch.float8_e4m3fn}
    assert small == {f"{LAYER}.up_proj.weight"}


def test_tensors_of_two_types_fill_a_bucket_each():
    weights = [(f"model.layers.{i}.a.weight", torch.ones(4, 4)) for i in range(20)]
    buckets = list(make_buckets(fp8.quantize(weights), limit=1000))
    assert [b.flat.dtype for b in buckets] == [torch.float8_e4m3fn, torch.float32]
    assert [b.last for b in buckets] == [False, True]
    assert sorted(n for b in buckets for n in b.names) == sorted(dict(fp8.quantize(weights)))


def test_the_flags_of_a_server():
    flags = SGLangLaunch("model", dtype="bfloat16", gpus=[0], memory=0.5, fp8=True).flags()
    assert flags[flags.index("--load-format") + 1] == "dummy"
    assert '"weight_block_size": [128, 128]' in flags[flags.index("--json-model-override-args") + 1]
    adapters = SGLangLaunch(
        "model", dtype="bfloat16", gpus=[0], memory=0.5, fp8=True, lora_targets=["all"], lora_rank=8
    )
    assert adapters.flags()[adapters.flags().index("--quantization") + 1] == "fp8"


@pytest.mark.parametrize(
    "keys, message",
    [
        (["algorithm.tis_cap=0"], "algorithm.tis_cap=0 with rollout.quantization=fp8"),
        (["rollout.name=local"], "rollout.quantization=fp8 with rollout.name=local"),
        (["rollout.urls=[http://x:1]"], "rollout.quantization=fp8 with rollout.urls"),
        (["model.lora_rank=8", "rollout.lora=merge"], "with rollout.lora=merge"),
        (["rollout.sync=disk"], "with rollout.sync=disk"),
        (["model.lora_rank=8", "model.quantization=nf4"], "with model.quantization=nf4"),
    ],
)
def test_what_it_does_not_work_with(keys, message):
    with pytest.raises(ConfigError, match=message.replace("[", "\\[")):
        load_config(None, ["rollout.name=sglang", "rollout.quantization=fp8", *keys], {})
