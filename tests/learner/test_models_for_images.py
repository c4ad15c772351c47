"""Models for text and images: only the text part learns, and an export is the whole model."""

from __future__ import annotations

import pytest
import torch
from support.architectures import SHAPE, architecture
from support.trainer_fixtures import as_sampled_by, config, plain_logprobs, random_groups
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen3_5Config,
)

from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.policy import find_adaptable_modules


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def learn(folder, batch, lora):
    """Return the learner after one step on the batch."""
    learner = Learner(folder, config(optim__lr=1e-2, model__lora_rank=lora), total_steps=1)
    targets = make_targets(batch, learner.config, learner.old_logprobs(batch), None, None)
    learner.update(batch, targets, 1)
    return learner


@pytest.mark.parametrize("lora", [0, 4], ids=["full", "LoRA"])
def test_only_the_text_part_learns(lora, folder):
    """transformers loads Gemma 3 for images with its layers for images."""
    text = {**SHAPE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = AutoModelForCausalLM.from_config(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    model.save_pretrained(folder)
    batch = as_sampled_by(model, collate(random_groups(3, groups=2, n=3), 31))
    before = dict(model.named_parameters())
    exported = learn(folder, batch, lora).export()
    changed = {name for name, weight in exported if not torch.equal(weight, before[name])}
    assert len(changed) > 10
    assert all("language_model" in name for name in [*changed, *find_adaptable_modules(model)])


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "several files"])
@pytest.mark.parametrize("lora", [0, 4], ids=["full", "LoRA"])
def test_an_export_has_the_other_parts_of_its_base(lora, sharded, folder, tmp_path):
    """transformers loads the text part alone of Qwen3.5."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": SHAPE["hidden_size"], "num_position_embeddings": 16}
    text = architecture("Qwen3.5").config.to_dict()
    base = AutoModelForImageTextToText.from_config(
        Qwen3_5Config(text_config=text, vision_config=vision)
    ).eval()
    base.save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    batch = collate(random_groups(3, groups=2, n=3), 31)
    learner = learn(folder, batch, lora)
    learner.rank.policy.save_whole(tmp_path / "whole")

    as_text = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    logprobs = learner.logprobs(batch)
    torch.testing.assert_close(plain_logprobs(as_text, batch), logprobs, atol=1e-4, rtol=1e-4)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    assert type(whole) is type(base)
    before, after = base.state_dict(), whole.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same >= {name for name in before if "visual" in name} != set()
    assert len(before) - len(same) > 10
    for file in ("preprocessor_config.json", "config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (folder / file).read_bytes()
