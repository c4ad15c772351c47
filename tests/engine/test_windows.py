"""Models whose attention has windows: packed rows and cached ones say what the model says, or the
model is refused, however long a window is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.engine.local.load import UNLIMITED, max_row_length
from agentrl.engine.local.windows import SHORT, find_windows, small_copy
from agentrl.errors import ConfigError, UserError
from agentrl.learner.attention import PACKED, Layout
from agentrl.learner.modes import hidden_states, prove_mode
from agentrl.learner.packing import Mode, PackedRows
from agentrl.learner.sft import SFTLearner, make_sft_config

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = ["sliding_attention", "full_attention"] * 2
KINDS: dict[str, Callable[[int], dict]] = {
    "mistral": lambda n: {"sliding_window": n},
    "mixtral": lambda n: {"sliding_window": n, "num_local_experts": 4},
    "phi3": lambda n: {"sliding_window": n},
    "starcoder2": lambda n: {"sliding_window": n},
    "qwen2": lambda n: {"use_sliding_window": True, "sliding_window": n, "layer_types": MIXED},
    "qwen3": lambda n: {"use_sliding_window": True, "sliding_window": n, "layer_types": MIXED},
    "gemma3_text": lambda n: {"sliding_window": n, "layer_types": MIXED, "head_dim": 8},
    "olmo3": lambda n: {"sliding_window": n, "layer_types": MIXED},
    "exaone4": lambda n: {"sliding_window": n, "layer_types": MIXED},
    "qwen2_moe": lambda n: {
        "use_sliding_window": True, "sliding_window": n, "layer_types": MIXED,
        "shared_expert_intermediate_size": 16, **EXPERTS,
    },
    "phimoe": lambda n: {"sliding_window": n, "num_local_experts": 4},
}  # fmt: skip
"""The config of each kind, given the length of its windows."""


def config_of(kind: str, window: int) -> PretrainedConfig:
    return CONFIG_MAPPING[kind](**SHAPE, **KINDS[kind](window))


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """With weights so wide that each token changes what the next ones say."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def packed_error(model: PreTrainedModel, half: int = 40) -> float:
    """The largest difference, in nats, between packed rows and one row after the other."""
    torch.manual_seed(1)
    a = torch.randint(0, 64, (2 * half,))
    b = torch.cat([a[:half], torch.randint(0, 64, (half,))])
    plain = [model(input_ids=row[None], use_cache=False).logits[0, half:] for row in (a, b)]
    model.set_attn_implementation(PACKED)
    at = torch.arange(2 * half)
    packed = PackedRows(
        input_ids=torch.cat([a, b[half:]])[None],
        position_ids=torch.cat([at, at[half:]])[None],
        layout=Layout([half, half, half], [2]),
        states=torch.arange(half, 3 * half),
        tokens=a,
    )
    logits = model.lm_head(hidden_states(model, packed))  # type: ignore[operator]
    return (torch.cat(plain).log_softmax(-1) - logits.log_softmax(-1)).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_exactly_where_this_is_right_beyond_a_models_window(kind):
    """The windows of 16 tokens are run; those of 4,096, which no test could run, are proved."""
    right = packed_error(random_model(config_of(kind, 16))) < 1e-3
    mode, reason = prove_mode(random_model(config_of(kind, 4096)))
    if right:
        assert (mode, reason) == (Mode.PACKED, "")
    else:
        assert mode is Mode.PADDED
        assert re.search(r"window\w*=4096\), and for longer rows packed logits differ", reason)
    assert right == (kind != "phimoe")


def test_a_model_whose_masks_depend_on_the_number_of_later_tokens_is_refused():
    config = CONFIG_MAPPING["doge"](**SHAPE, keep_window_size=4096)
    later = (
        "for longer rows the logits of a token depend on the|a token changes the logits of earlier"
    )
    with pytest.raises(ConfigError, match=later):
        prove_mode(random_model(config))


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_engine_refuses_every_window_that_has_an_effect(kind):
    limits = r"limits which tokens a token sees \(.*window\w*=4096\), and the test with .* failed"
    with pytest.raises(UserError, match=limits) as caught:
        Decoder(random_model(config_of(kind, 4096)))
    assert str(caught.value).count("Use rollout.name=sglang") == 1


def test_the_local_engine_refuses_rotary_positions_that_depend_on_the_length_of_the_row():
    """The keys in the cache have the positions of a row that was shorter."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = random_model(CONFIG_MAPPING["llama"](**SHAPE, rope_parameters=rope))
    with torch.no_grad():
        ids = torch.arange(1, 49)[None]
        cache = model(input_ids=ids[:, :20], use_cache=True).past_key_values
        cached = model(input_ids=ids[:, 20:], past_key_values=cache).logits[0, -1]
        assert (cached - model(input_ids=ids).logits[0, -1]).abs().max() > 0.01
    with pytest.raises(UserError, match=r"positions \(longrope\) depend on the length of the row"):
        Decoder(model)


def test_a_window_that_no_layer_has_is_no_reason_to_refuse():
    """Configs keep the value also where all their layers see everything."""
    config = config_of("qwen3", 4096)
    config.layer_types = ["full_attention"] * 4
    assert find_windows(config) == {"sliding_window": 4096}
    Decoder(random_model(config))
    assert prove_mode(random_model(config))[0] is Mode.PACKED


def test_windows_are_found_anywhere_in_a_config():
    config = CONFIG_MAPPING["llama4"]()
    config.text_config.attention_chunk_size = 8192
    config.text_config.more = {"index_topk": 2048, "windows": [512, 3, None], "window_layers": 99}
    windows = find_windows(config)
    assert {k.removeprefix("text_config."): v for k, v in windows.items()} == {
        "attention_chunk_size": 8192,
        "more.index_topk": 2048,
        "more.windows.0": 512,
    }
    assert not find_windows(CONFIG_MAPPING["qwen2"]())


def test_the_copy_is_small_and_does_not_change_the_model_or_the_random_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # their random state is not read
    model = random_model(config_of("qwen2", 4096))
    before, state = model.config.to_dict(), torch.get_rng_state()
    copy = small_copy(model)
    assert model.config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert copy.config.sliding_window == SHORT
    assert copy.config.layer_types == MIXED[:2]
    assert not find_windows(copy.config)


def test_the_copy_has_one_layer_of_each_kind_where_a_list_numbers_the_layers():
    kinds = ["conv", "conv", "full_attention"] * 6
    config = CONFIG_MAPPING["lfm2"](**SHAPE | {"num_hidden_layers": 18, "layer_types": kinds})
    config.full_attn_idxs = list(range(18))
    copy = small_copy(random_model(config))
    assert copy.config.layer_types == ["conv", "full_attention"]
    assert len(copy.model.layers) == 2


def test_the_copy_has_a_layer_with_experts():
    """Also where the first layers, from which it takes some, have none."""
    values = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 3}
    config = CONFIG_MAPPING["glm4_moe"](**SHAPE | EXPERTS | values, head_dim=8)
    names = [n for n, _ in small_copy(random_model(config)).named_parameters() if "experts" in n]
    assert names and all(".layers.1." in n for n in names)


@pytest.mark.parametrize("kind", ["mamba2", "granitemoehybrid"])
def test_steps_of_computation_are_short_in_the_copy_and_are_no_windows(kind):
    mamba = {"num_heads": 4, "head_dim": 16, "state_size": 8, "chunk_size": 256}
    hybrid = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 256}
    config = CONFIG_MAPPING[kind](**SHAPE | (mamba if kind == "mamba2" else hybrid))
    assert not find_windows(config)
    copy = small_copy(random_model(config)).config
    assert {getattr(copy, k, SHORT) for k in ("chunk_size", "mamba_chunk_size")} == {SHORT}


def test_without_a_copy_nothing_is_packed_that_has_windows(monkeypatch):
    model = random_model(config_of("mistral", 4096))

    def broken(*_, **__):
        raise RuntimeError("no such shape")

    monkeypatch.setattr(type(model), "_from_config", broken)
    cause = r"sliding_window=4096.*cannot build the small copy .*\(RuntimeError: no such shape\)"
    monkeypatch.setattr("agentrl.learner.modes._results", {})
    mode, reason = prove_mode(model)
    assert mode is Mode.ALONE and re.search(cause, reason)
    with pytest.raises(UserError, match=cause):
        Decoder(model)


def test_sft_pads_the_rows_of_such_a_model(tmp_path):
    random_model(config_of("phimoe", 4096)).save_pretrained(tmp_path)
    learner = SFTLearner(make_sft_config(tmp_path, steps=1, overrides=["trainer.device=cpu"]))
    assert learner.mode is Mode.PADDED


@pytest.mark.timing
def test_the_check_takes_no_longer_for_a_longer_window():
    def seconds(window: int) -> float:
        model = random_model(config_of("mistral", window))
        start = time.thread_time()
        prove_mode(model)
        return time.thread_time() - start

    seconds(64)
    assert min(seconds(32_768) for _ in range(3)) < 3 * max(seconds(64) for _ in range(3)) + 0.05


def test_the_length_of_a_row_is_known_of_every_causal_model_of_transformers():
    configs = {kind: CONFIG_MAPPING[kind]() for kind in ("bloom", "mpt", "mamba", "mamba2")}
    lengths = {kind: max_row_length(config) for kind, config in configs.items()}
    assert lengths == {"bloom": UNLIMITED, "mpt": 2048, "mamba": UNLIMITED, "mamba2": UNLIMITED}
    assert max_row_length(CONFIG_MAPPING["qwen3"](max_position_embeddings=4096)) == 4096


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("mamba", {"num_hidden_layers": 2, "state_size": 8}),
    ],
)
def test_a_model_without_a_length_that_the_local_engine_cannot_run_is_refused(kind, shape):
    config = CONFIG_MAPPING[kind](vocab_size=64, hidden_size=32, pad_token_id=0, **shape)
    with pytest.raises(CannotDecode, match="this engine's cache"):
        Decoder(AutoModelForCausalLM.from_config(config))
