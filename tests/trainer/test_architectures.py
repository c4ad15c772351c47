"""Each architecture of the table in docs/models.md: a step, a checkpoint, an export, the engine."""

from __future__ import annotations

import pytest
import torch
from support.architectures import ARCHITECTURES, SHAPE, architecture
from support.trainer_fixtures import as_sampled_by, config, plain_logprobs, random_groups
from transformers import AutoModelForCausalLM, Gemma3Config

from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.trainer.algorithms import make_targets
from agentrl.trainer.batch import collate
from agentrl.trainer.learner import Learner
from agentrl.trainer.policy import find_adaptable_modules

QUICK = ("Qwen3", "Qwen3-MoE", "Qwen3.5", "gpt-oss", "Gemma 3", "Nemotron-H")
"""The others run in `make test-all`."""
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES
]
DECODED = ("Qwen2.5", "Qwen3", "Qwen3-MoE", "Llama 3", "Phi-4", "SmolLM3", "GLM-4.5")
"""The architectures that the local engine runs."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@pytest.mark.parametrize("lora", [0, 4], ids=["full", "LoRA"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_saved_resumed_and_exported(name, lora, folder, tmp_path):
    model = architecture(name)
    model.save_pretrained(folder)
    batch = as_sampled_by(model, collate(random_groups(3, groups=2, n=3), 31))
    cfg = config(optim__lr=1e-2, optim__micro_batch_tokens=90, model__lora_rank=lora)
    learner = Learner(folder, cfg, total_steps=4)
    before = learner.logprobs(batch)
    torch.testing.assert_close(before, batch.rollout_logprobs, atol=1e-4, rtol=1e-4)

    step(learner, batch, 1)
    after = learner.logprobs(batch)
    assert (after - before)[batch.response_mask].abs().max() > 1e-3
    learner.rank.policy.save_whole(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    torch.testing.assert_close(plain_logprobs(whole, batch), after, atol=1e-4, rtol=1e-4)

    (tmp_path / "state").mkdir()
    learner.ranks.save(tmp_path / "state")
    other = Learner(folder, cfg, total_steps=4)
    other.ranks.load(tmp_path / "state")
    metrics = [step(one, batch, 2) for one in (learner, other)]
    assert metrics[0] == metrics[1]
    assert torch.equal(learner.logprobs(batch), other.logprobs(batch))


def step(learner, batch, number):
    targets = make_targets(batch, learner.config, learner.old_logprobs(batch), None, None)
    return learner.update(batch, targets, number)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_local_engine_runs_it_or_says_why_not(name):
    model = architecture(name)
    if name in DECODED:
        Decoder(model)  # compares its logprobs with those of plain forward passes
    else:
        with pytest.raises(CannotDecode, match=f"cannot run {type(model).__name__}: .*sglang"):
            Decoder(model)


@pytest.mark.parametrize("lora", [0, 4], ids=["full", "LoRA"])
def test_only_the_text_part_of_a_model_for_images_learns(lora, folder):
    text = {**SHAPE, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = AutoModelForCausalLM.from_config(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    model.save_pretrained(folder)
    batch = as_sampled_by(model, collate(random_groups(3, groups=2, n=3), 31))
    learner = Learner(folder, config(optim__lr=1e-2, model__lora_rank=lora), total_steps=1)
    step(learner, batch, 1)
    before = dict(model.named_parameters())
    changed = {name for name, x in learner.export() if not torch.equal(x, before[name])}
    assert len(changed) > 10
    assert all("language_model" in name for name in [*changed, *find_adaptable_modules(model)])
