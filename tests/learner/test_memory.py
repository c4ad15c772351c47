"""The estimate of a GPU's memory: terms by hand, autograd's saved tensors, measured peaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.forked_python import run_python
from support.needs import needs_newest_models
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    ViTConfig,
)

from agentrl.config import Config, load_config
from agentrl.engine.local.load import quiet_peft
from agentrl.errors import ConfigError
from agentrl.learner import memory
from agentrl.learner.attention import PACKED, Layout
from agentrl.learner.memory import (
    CONTEXT_BYTES,
    GIB,
    MemoryEstimate,
    estimate_cpu_memory,
    estimate_memory,
    read_shape,
    smaller_settings,
)

H200 = int(139.7 * GIB)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# q with bias, k and v with bias, output, three matrices of the MLP, two norms
LAYER = 64 * 65 + 2 * 32 * 65 + 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 512 * 64 + 2 * LAYER + 64
ADAPTER = 8 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
# per token, not compiled: two norms, queries and output, keys and values, log-sum-exp, MLP
KEPT = 2 * 8 * 64 + 2 * 2 * 64 + 2 * 2 * 32 + 4 * 4 + 8 * 128
HEAD = 2 * 512 + 8 * 64
"""Logits of a token, its state, and the gradient of its state."""


def config_of(**sections: Any) -> Config:
    """Return a config without an engine on the learner's GPU."""
    elsewhere = {"name": "sglang", "urls": ["http://127.0.0.1:1"]}
    return Config.model_validate({"rollout": elsewhere, **sections})


def estimate(config: Config, ranks: int = 1, tokens: int = 1000, **kwargs: Any) -> MemoryEstimate:
    kwargs = {"row_tokens": 1, "pass_tokens": tokens, "shares_keys": True, **kwargs}
    config = config.with_values("trainer", n_gpus_per_node=ranks)
    return estimate_memory(read_shape(Qwen2Config(**SMALL)), config, **kwargs)


def test_all_weights_by_hand():
    result = estimate(config_of())
    assert read_shape(Qwen2Config(**SMALL)).parameters == PARAMETERS
    assert result.part == "update"
    assert result.terms == {
        "CUDA": 2**30,
        "activations": 1000 * (2 * KEPT + 6 * 64),
        "logits and buffers": 1000 * HEAD + 2 * 512 * 64,
        "optimizer": 8 * PARAMETERS,
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "gathered weights": 2 * PARAMETERS,
    }
    assert result.total == sum(result.terms.values())
    assert list(result.terms.values()) == sorted(result.terms.values(), reverse=True)


def test_ranks_divide_weights_gradients_and_moments_only():
    one, four = estimate(config_of()).terms, estimate(config_of(), 4).terms
    divided = {"optimizer", "weights", "gradients"}
    assert four == {n: size // 4 if n in divided else size for n, size in one.items()}


def test_large_models_gather_some_layers_at_a_time():
    deep = Qwen2Config(**{**SMALL, "num_hidden_layers": 8})
    whole, some = 2 * (512 * 64 + 64 + 8 * LAYER), 2 * (512 * 64 + 64 + 3 * LAYER)
    for ranks, gpu_bytes, gathered_bytes in (
        (2, 4 * whole + 4, whole),
        (2, 4 * whole, some),
        (1, 4 * whole, whole),
    ):
        result = estimate_memory(
            read_shape(deep),
            config_of(trainer={"n_gpus_per_node": ranks}),
            row_tokens=1,
            pass_tokens=1000,
            gpu_bytes=gpu_bytes,
        )
        assert result.terms["gathered weights"] == gathered_bytes


def test_recompute_keeps_the_inputs_of_layers_and_one_layer():
    result = estimate(config_of(optim={"recompute": True}))
    assert result.terms["activations"] == 1000 * (2 * 2 * 64 + KEPT + 6 * 64)


def test_lora_by_hand():
    terms = estimate(config_of(model={"lora_rank": 8})).terms
    # Frozen norms keep no normalised input; each of seven modules keeps 8 numbers.
    kept = KEPT - 2 * 2 * 64 + 2 * 8 * 7
    assert terms["optimizer"] == 8 * ADAPTER and terms["gradients"] == 4 * ADAPTER
    assert terms["weights"] == 2 * PARAMETERS + 4 * ADAPTER
    assert terms["gathered weights"] == 2 * (PARAMETERS + ADAPTER)
    assert terms["activations"] == 1000 * (2 * kept + 4 * 64)
    assert terms["logits and buffers"] == 1000 * HEAD
    some = config_of(model={"lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]})
    assert estimate(some).terms["gradients"] == 4 * 8 * 2 * (64 + 64 + 64 + 32)


def test_offload_and_8_bit_moments():
    assert "optimizer" not in estimate(config_of(optim={"offload": "optimizer"})).terms
    terms = estimate(config_of(optim={"offload": "all"})).terms
    assert not {"optimizer", "weights", "gradients"} & {*terms}
    terms = estimate(config_of(optim={"name": "adamw_8bit"})).terms
    assert terms["optimizer"] == 2 * PARAMETERS


def test_critic_and_reference():
    terms = estimate(config_of(algorithm={"name": "ppo", "kl_loss_coef": 0.1})).terms
    assert terms["critic"] == 4 * PARAMETERS and terms["optimizer"] == 16 * PARAMETERS
    assert terms["reference"] == 2 * PARAMETERS


def test_passes_are_as_long_as_the_budget_the_longest_row_or_the_step():
    def tokens(row: int, ranks: int = 1, **optim: int) -> int:
        config = config_of(data={"batch_size": 4}, optim=optim)
        return estimate(config, ranks, row_tokens=row, pass_tokens=None).pass_tokens

    assert tokens(2000) == 16384  # of 4 x 8 x 2000
    assert tokens(2000, micro_batch_tokens=1000) == 2000
    assert tokens(100) == 3200 and tokens(100, 4) == 800


def test_the_end_of_the_backward_pass_may_need_most_and_loading_never_does():
    few = estimate(config_of(), tokens=1)
    assert few.part == "optimizer step"
    assert few.terms["buffers"] == 16 * (512 * 64 + 64)
    many = estimate(config_of(), ranks=64, tokens=1)
    assert many.part == "update" and many.terms["weights"] == 4 * PARAMETERS // 64


@pytest.mark.parametrize(
    ("rollout", "gpus", "engine"),
    [
        ({"name": "sglang"}, 0, 20 * GIB),
        ({"name": "sglang"}, 1, 20 * GIB),
        ({"name": "sglang"}, 2, 0),
        ({"name": "sglang", "sleep": "kv_cache"}, 1, 2 * PARAMETERS),
        ({"name": "sglang", "urls": ["http://127.0.0.1:1"]}, 1, 0),
        # Two layers of keys and values in bfloat16, for 16 x 8 rows of 50 tokens.
        ({"name": "local"}, 1, 2 * PARAMETERS + 2 * 2 * 32 * 2 * 128 * 50),
    ],
)
def test_engine(rollout, gpus, engine):
    config = config_of(rollout=rollout)
    # So many tokens that the update needs more than generation.
    result = estimate(config, tokens=2**23, row_tokens=50, gpus=gpus, gpu_bytes=40 * GIB)
    assert result.part == "update" and result.terms.get("engine", 0) == engine


def test_a_sleeping_engine_counts_while_it_generates():
    result = estimate(config_of(rollout={"name": "sglang", "sleep": "all"}), gpu_bytes=40 * GIB)
    assert result.part == "generation" and result.terms["engine"] == 20 * GIB


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MixtralConfig(**SMALL, num_local_experts=2), "MixtralForCausalLM is a mixture of experts"),
        (MambaConfig(num_hidden_layers=1), "MambaForCausalLM has no list of layers with attention"),
        (GPT2Config(n_layer=1), "GPT2LMHeadModel has no list of layers"),
        pytest.param(
            Gemma4TextConfig(**SMALL),
            "Gemma4ForCausalLM: 'head_dim' is a per-layer attribute",
            marks=needs_newest_models,
        ),
        (ViTConfig(num_hidden_layers=1), "vit: cannot build it without weights"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.model_type,
)
def test_other_models_are_not_estimated(config, reason):
    with pytest.raises(ConfigError, match=reason):
        read_shape(config)


def test_norms_without_weights_have_no_parameters():
    shape, llama = (read_shape(kind(**SMALL)) for kind in (DiffLlamaConfig, LlamaConfig))
    assert shape.norms == llama.norms == 2 and not shape.has_head_norms


def test_one_line():
    result = MemoryEstimate("update", {"activations": 3 * GIB, "CUDA": GIB, "weights": 10}, 16384)
    assert result.describe(80 * GIB) == (
        "4.0 GiB of 80 GiB (update, passes of 16384 tokens): activations 3.0, CUDA 1.0"
    )


# --- properties -----------------------------------------------------------------------------------


sections = st.fixed_dictionaries(
    {
        "optim": st.fixed_dictionaries(
            {
                "offload": st.sampled_from(["none", "optimizer", "all"]),
                "name": st.sampled_from(["adamw", "adamw_8bit"]),
                "micro_batch_tokens": st.sampled_from([1, 4096, 65536]),
            }
        ),
        "algorithm": st.fixed_dictionaries({"name": st.sampled_from(["ppo", "grpo"])}),
        "model": st.fixed_dictionaries({"lora_rank": st.sampled_from([0, 8])}),
        "rollout": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["local", "sglang"]),
                "sleep": st.sampled_from(["none", "all"]),
            }
        ),
    }
)


@examples(25)
@given(sections, st.integers(1, 8), st.integers(1, 8), st.integers(1, 3000))
def test_more_ranks_recompute_and_lora_need_no_more(values, ranks, more, row):
    if values["rollout"]["name"] == "local":
        values["rollout"].pop("sleep", None)

    def estimate_with(ranks: int = ranks, **optim: Any) -> MemoryEstimate:
        config = Config.model_validate({**values, "optim": {**values["optim"], **optim}})
        return estimate(config, ranks, row_tokens=row, pass_tokens=None)

    assert estimate_with(ranks + more).total <= estimate_with().total
    assert estimate_with(recompute=True).total <= estimate_with(recompute=False).total
    with_lora = Config.model_validate({**values, "model": {"lora_rank": 8}})
    without = Config.model_validate({**values, "model": {"lora_rank": 0}})
    of_moments = [
        estimate(c, ranks, tokens=2**20).terms.get("optimizer", 0) for c in (with_lora, without)
    ]
    assert of_moments[0] < of_moments[1] or of_moments == [0, 0]


def test_smaller_settings_need_less():
    """Those of one GPU first, an adapter after them, then more GPUs. Each is named once."""
    config = config_of(rollout={"name": "sglang"})
    before = estimate(config, tokens=2**20, gpu_bytes=GIB).total
    found = list(smaller_settings(config))
    for keys, smaller in found:
        t, tokens = smaller.trainer, smaller.optim.micro_batch_tokens * 64
        ranks, tokens = t.n_gpus_per_node, tokens // t.context_parallel_size
        after = estimate(smaller, ranks, tokens=tokens, gpu_bytes=GIB).total
        assert after < before or ("model.lora_rank=32" in keys and "recompute" not in keys), keys
    one = [
        "optim.micro_batch_tokens=8192",
        "optim.recompute=true",
        "optim.recompute=true rollout.sleep=all",
        "optim.recompute=true optim.offload=optimizer",
        "optim.recompute=true rollout.sleep=all optim.offload=optimizer",
        "optim.micro_batch_tokens=4096 optim.recompute=true rollout.sleep=all",
        "optim.micro_batch_tokens=4096 optim.recompute=true rollout.sleep=all"
        " optim.offload=optimizer",
        "optim.recompute=true optim.offload=all",
        "optim.recompute=true rollout.sleep=all optim.offload=all",
        "optim.micro_batch_tokens=4096 optim.recompute=true rollout.sleep=all optim.offload=all",
    ]
    names = [keys for keys, _ in found]
    assert names[:12] == [*one, "model.lora_rank=32", f"{one[0]} model.lora_rank=32"]
    assert names[21] == "trainer.n_gpus_per_node=2" and len(set(names)) == len(names)
    shared = "trainer.n_gpus_per_node=8 trainer.context_parallel_size=8"
    assert names[-1] == f"{one[-1]} model.lora_rank=32 {shared}"
    apart = config_of(rollout={"urls": ["http://a:1"], "name": "sglang"}, optim={"offload": "all"})
    names = [keys for keys, _ in smaller_settings(apart)]
    assert names[:3] == [one[0], one[1], f"optim.micro_batch_tokens=4096 {one[1]}"]
    assert not any("sleep" in keys or "offload" in keys for keys in names)


def test_ranks_that_share_rows_hold_parts_of_the_longest():
    """Half of a row of 100,000 tokens each. Four ranks copy the two key-value heads of a layer."""
    estimates = {
        size: estimate(
            config_of(trainer={"n_gpus_per_node": 4, "context_parallel_size": size}),
            ranks=4,
            pass_tokens=None,
            row_tokens=100_000,
        )
        for size in (1, 2, 4)
    }
    assert [e.pass_tokens for e in estimates.values()] == [100_000, 50_000, 25_000]
    assert estimates[2].total < estimates[1].total


def test_what_is_offloaded_is_in_the_memory_of_the_cpu():
    for offload, offloaded in (("none", 0), ("optimizer", 8), ("all", 16)):
        result = estimate(config_of(optim={"offload": offload}))
        assert result.offloaded == offloaded * PARAMETERS


# --- against autograd -----------------------------------------------------------------------------


@torch.library.custom_op("agentrl_test::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for a varlen kernel, which keeps the same tensors for its gradient."""
    return q.clone(), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("agentrl_test::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.clone(), k.clone(), v.clone()


_attention.register_fake(
    lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
)
_attention_backward.register_fake(
    lambda grad, q, k, v, out, lse: tuple(map(torch.empty_like, (q, k, v)))
)
_attention.register_autograd(
    lambda ctx, grad, _: _attention_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def _packed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> Any:
    rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return _attention(*rows)[0][None], None


AttentionInterface.register("agentrl_test", _packed)


def kept_bytes(
    config: Any, *, compiled: bool, lora: int, tokens: int = 256, layout: Layout | None = None
) -> float:
    """Return the bytes per token that autograd keeps of a model's forward pass.

    With a layout, attention is that of packed rows on a CPU, in float32.
    """
    torch.manual_seed(0)
    dtype = torch.float32 if layout else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.set_attn_implementation(PACKED if layout else "agentrl_test")
    if lora:
        from peft import LoraConfig, get_peft_model

        peft = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
        with quiet_peft():
            model = get_peft_model(model, peft).base_model.model.to(dtype)
    decoder = model.get_decoder()
    if compiled:
        torch._dynamo.reset()  # Earlier programs count towards torch's limit.
        for layer in decoder.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in weights:
            kept[at] = tensor
        return tensor

    at = torch.arange(tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        more = {"layout": layout} if layout else {}
        output = decoder(input_ids=at % 9, position_ids=at, use_cache=False, **more)
        states = output.last_hidden_state
    assert states.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens


FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
COMPILED = pytest.param(True, marks=pytest.mark.slow, id="compiled")


@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager"), COMPILED])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_what_autograd_keeps(family, compiled, lora, monkeypatch):
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3}
    config = FAMILIES[family](**sizes, head_dim=64)
    monkeypatch.setattr(memory, "MIN_COMPILED_SIZE", 0 if compiled else 10**9)
    settings = config_of(model={"lora_rank": lora})
    result = estimate_memory(
        read_shape(config), settings, row_tokens=1, pass_tokens=2**20, shares_keys=True
    )
    kept = kept_bytes(config, compiled=compiled, lora=lora)
    assert result.terms["activations"] / 2**20 == pytest.approx(kept, rel=0.04)


# --- against measured peaks -----------------------------------------------------------------------

SHAPES = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "values", "peak"),
    [
        ("0.5b", 1, 30177, {}, 39.67),
        ("1.5b", 1, 30177, {}, 90.23),
        ("1.5b", 1, 30177, {"optim": {"recompute": True}}, 31.64),
        ("1.5b", 1, 32593, {}, 96),
        ("1.5b", 2, 28434, {}, 75),
        ("1.5b", 4, 25087, {}, 63),
        ("7b", 1, 16329, {"model": {"lora_rank": 32}}, 106.93),
        ("7b", 1, 32768, {"model": {"lora_rank": 32}, "optim": {"recompute": True}}, 46.73),
    ],
)
def test_measured_peaks(name, ranks, tokens, values, peak):
    """Peaks of PyTorch's allocator on H200s in GiB (torch 2.11, whose kernel shares no keys).

    The tokens are those of the largest pass of the benchmark's rows (benchmarks/README.md).
    """
    hidden, mlp, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    model = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    result = estimate_memory(
        read_shape(model),
        config_of(**values, trainer={"n_gpus_per_node": ranks}),
        row_tokens=1,
        pass_tokens=tokens,
        gpu_bytes=H200,
        shares_keys=False,
    )
    assert (result.total - CONTEXT_BYTES) / GIB == pytest.approx(peak, rel=0.08)


# --- runs on the CPU ------------------------------------------------------------------------------


def cpu_estimate(config: Config, model: Any = None, **kwargs: Any) -> MemoryEstimate:
    sizes = {"prompt_tokens": 40, "response_tokens": 24, **kwargs}
    return estimate_cpu_memory(read_shape(model or Qwen2Config(**SMALL)), config, **sizes)


def test_a_run_on_the_cpu_by_hand():
    """Two prompts of 40 tokens, four responses of 24 to each; all numbers are float32."""
    config = Config.model_validate({"data": {"batch_size": 2}, "rollout": {"n": 4}})
    tokens, in_attention = 2 * 40 + 8 * 24, 8 * (40 + 24)
    result = cpu_estimate(config, process_bytes=1000)
    # Numbers per token: two norms, MLP, input of the attention's output layer; in attention
    # queries, outputs, keys, values, log-sum-exps.
    kept = 4 * 2 * (tokens * (3 * 2 * 64 + 4 * 128 + 64) + in_attention * (4 * 64 + 4))
    kept -= 4 * 2 * in_attention * 2 * (64 - 32)  # two heads share a key
    terms = dict(result.terms)
    activations = terms.pop("activations")
    assert activations == pytest.approx(kept + tokens * 2 * 4 * 64, rel=0.01)
    assert result.pass_tokens == tokens and result.part == "update"
    assert terms == {
        "weights": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "logits and buffers": 4 * tokens * 512 + 12 * tokens * 64 + 4 * 512 * 64,
        # Eight rows of 64 tokens, rounded up to 128.
        "engine": 4 * (PARAMETERS + 8 * 128 * 2 * 2 * 32),
        "Python and packages": 1000,
    }
    # A validation plays 200 rows at once: the cache has 256.
    assert cpu_estimate(config, val_rollouts=200).terms["engine"] == 4 * (
        PARAMETERS + 256 * 128 * 2 * 2 * 32
    )


@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize(("prompt", "response", "n"), [(40, 24, 2), (40, 24, 8), (10, 100, 4)])
def test_activations_on_the_cpu_are_what_autograd_keeps(prompt, response, n, lora):
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3}
    model = LlamaConfig(**{**sizes, "dtype": "float32"}, head_dim=64)
    values = {"data": {"batch_size": 2}, "rollout": {"n": n}, "model": {"lora_rank": lora}}
    config = Config.model_validate(values)
    result = cpu_estimate(config, model, prompt_tokens=prompt, response_tokens=response)
    layout = Layout(pieces=[prompt, *[response] * n] * 2, responses=[n, n])
    kept = kept_bytes(model, compiled=False, lora=lora, tokens=result.pass_tokens, layout=layout)
    assert result.terms["activations"] / result.pass_tokens == pytest.approx(kept, rel=0.1)


SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("values", "val", "peak"),
    [
        ({"data": {"batch_size": 2}, "rollout": {"n": 4}}, 0, 3.16),
        ({"data": {"batch_size": 2}, "rollout": {"n": 4}}, 200, 4.86),
        ({"model": {"lora_rank": 32}}, 0, 4.43),
    ],
)
def test_measured_peaks_on_the_cpu(values, val, peak):
    """The peak RSS in GiB of runs of recipes/facts with SmolLM2, and that of `check`: 0.45."""
    config = Config.model_validate({"data": {"batch_size": 8}, "rollout": {"n": 8}, **values})
    process = int(0.45 * GIB)
    sizes = {"prompt_tokens": 47, "val_rollouts": val, "process_bytes": process}
    result = cpu_estimate(config, SMOLLM2, **sizes)
    assert result.total / GIB == pytest.approx(peak, rel=0.15)


@pytest.mark.slow
def test_the_peak_of_a_run_on_the_cpu(smollm2, tmp_path):
    """Two steps of recipes/facts with 8 rollouts in a process of their own."""
    words = ["data.val=null", "data.batch_size=2", "rollout.n=4", "trainer.total_steps=2"]
    words += ["trainer.device=cpu", f"trainer.output={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "agentrl", "train", "-c", "recipes/facts/run.yaml", *words]
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    root = Path(__file__).parents[2]
    run = [sys.executable, "-c", code, *command]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    config = load_config(str(root / "recipes/facts/run.yaml"), words)
    shape = read_shape(AutoConfig.from_pretrained(smollm2))
    estimated = estimate_cpu_memory(
        shape,
        config,
        prompt_tokens=47,
        response_tokens=24,
        process_bytes=int(0.45 * GIB),  # that of `check`; this process has other packages
    )
    assert estimated.total == pytest.approx(1024 * int(done.stdout.split()[-1]), rel=0.2)


def test_settings_of_a_run_on_the_cpu():
    names = [keys for keys, _ in smaller_settings(Config(), on_cpu=True)]
    small = "optim.micro_batch_tokens=512"
    whole = [small, "optim.recompute=true", f"{small} optim.recompute=true"]
    assert names == [*whole, "model.lora_rank=32", *(f"{k} model.lora_rank=32" for k in whole)]


def test_the_ram_of_a_container(tmp_path):
    machine = memory.find_ram(tmp_path)
    assert machine > GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.find_ram(tmp_path) == machine
    (tmp_path / "memory.max").write_text(f"{GIB // 2}\n")
    assert memory.find_ram(tmp_path) == GIB // 2
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{GIB // 4}\n")
    assert memory.find_ram(tmp_path) == GIB // 4


@pytest.mark.timing
def test_the_memory_of_this_process():
    """In a process of its own: here, other tests' garbage and threads free memory at any time."""
    code = """
from agentrl.process_memory import find_process_bytes
before = find_process_bytes()
block = b"1" * 2**28
print(find_process_bytes() - before, len(block))
"""
    result = run_python(["-c", code])
    assert result.returncode == 0, result.stderr
    grown, size = map(int, result.stdout.split())
    assert 0.9 * size < grown < 1.1 * size
