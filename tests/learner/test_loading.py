"""Ranks that read their shards have the weights of one that reads the whole model, bit for bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import architecture, make_model
from support.exact_rank import AnyRank
from support.processes import Processes
from support.trainer_fixtures import config

from agentrl.engine.remote.senders import Route
from agentrl.learner.rank import LocalRankGroup

PPO = {"algorithm__name": "ppo"}
LORA = {"model__lora_rank": 4}


@pytest.fixture(scope="module")
def groups():
    """One rank, two and four, which open another model for each test."""
    two, four = (Processes(n, AnyRank) for n in (2, 4))
    with closing(two), closing(four):
        yield {1: LocalRankGroup(AnyRank()), 2: two, 4: four}


def remove_output_layer(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "keys", "ranks"),
    [
        ("Qwen2.5", {}, (2, 4)),  # tied weights
        ("Llama 3", PPO, (2,)),
        ("Qwen3-MoE", {}, (2,)),  # transformers stacks the experts
        ("gpt-oss", LORA, (2,)),
        ("GLM-4.5", {}, (2,)),  # a buffer that is in the files
        # convolutions and experts
        pytest.param("Nemotron-H", {}, (2,), marks=pytest.mark.slow),
        # a buffer for each kind of layer
        pytest.param("Gemma 3", {}, (2,), marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_ranks_hold_what_the_files_hold(groups, tmp_path, name, keys, ranks):
    architecture(name).bfloat16().save_pretrained(tmp_path)
    check(groups, tmp_path, config(**keys), ranks, torch.float32)


def test_adapters_start_alike(groups, tmp_path):
    architecture("Qwen3").bfloat16().save_pretrained(tmp_path)
    check(groups, tmp_path, config(**LORA, **PPO), (2,), torch.bfloat16)


def test_weights_that_the_files_lack_are_the_same_on_all_ranks(groups, tmp_path):
    architecture("Llama 3").save_pretrained(tmp_path)
    remove_output_layer(tmp_path)
    check(groups, tmp_path, config(), (2,), torch.float32)


def test_rows_that_ranks_cannot_share_evenly(groups, tmp_path):
    """Matrices of 50 rows, and norms of 2 weights, of which ranks have none."""
    values = {"intermediate_size": 50, "head_dim": 2}
    make_model("qwen3", values).save_pretrained(tmp_path)
    check(groups, tmp_path, config(), (4,), torch.float32)


def test_a_reference_in_half_precision_keeps_its_buffers(tmp_path):
    """Positions computed from frequencies in bfloat16 would be those of other tokens."""
    architecture("Llama 3").save_pretrained(tmp_path)
    rank = AnyRank()
    rank.open(tmp_path, config(), torch.float32)
    rank._compute = torch.bfloat16
    reference = rank._load_frozen("").model
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in reference.buffers()} == {torch.float32}


def test_an_adapter_is_merged_before_its_base_is_sharded(groups, tmp_path):
    architecture("Qwen3").save_pretrained(tmp_path / "base")
    one = groups[1]
    one.open(tmp_path / "base", config(**LORA), torch.float32)
    one.perturb_adapter(0)
    (tmp_path / "adapter").mkdir()
    one.send_weights(Route(1, adapter_folder=tmp_path / "adapter"))
    check(groups, tmp_path / "adapter", config(), (2,), torch.float32)


def check(groups, folder, cfg, ranks, dtype) -> None:
    expected = {}
    for group in [groups[1], *(groups[n] for n in ranks)]:
        group.open(folder, cfg, dtype)
        for model in ("policy", "reference"):
            found = group.tensors(model)
            for name, tensor in expected.setdefault(model, found).items():
                assert torch.equal(found[name], tensor), name
            assert found.keys() == expected[model].keys()
        spread, count = group.sharded_parameters()
        assert spread == (0 if group is groups[1] else count)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "keys"), [(2, LORA), (4, {})], ids=["lora", "all weights"])
def test_a_rank_never_holds_more_than_its_shard_and_a_layer(groups, tmp_path, ranks, keys):
    shape = {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": 256,
        "num_key_value_heads": 4,
    }  # fmt: skip
    model = make_model("llama", shape)
    layer = sum(p.numel() * 4 for n, p in model.named_parameters() if ".layers.0." in n)
    model.save_pretrained(tmp_path)
    group = groups[ranks]
    group.open(tmp_path, config(**keys), torch.float32)
    size = (tmp_path / "model.safetensors").stat().st_size
    for peak, own in group.bytes_while_loading([None] * ranks, size):
        assert own < 1.1 * size / ranks
        assert peak <= own + layer
