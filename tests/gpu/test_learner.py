"""The learner on a GPU beside the same updates on the CPU in float32.

Compiled layers, kernels for packed rows, bfloat16 passes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.trainer_fixtures import as_sampled_by, config, random_groups, step
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl.learner import sharding
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner

pytestmark = pytest.mark.gpu

CLOSE = 0.1
"""The largest distance between the two results, as a share of the distance that both moved."""


@pytest.fixture(autouse=True)
def compiled_however_small(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_COMPILED_SIZE", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough for the kernels: heads of 64."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    path = tmp_path_factory.mktemp("gpu") / "model"
    Qwen2ForCausalLM(shape).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def batch(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return as_sampled_by(model, collate(random_groups(0, groups=6, n=4, dead=[1]), 31))


def learner_on(folder, device: str, **keys) -> Learner:
    settings = {"optim__lr": 1e-4, "optim__critic_lr": 1e-4, "algorithm__kl_loss_coef": 0.1}
    return Learner(folder, config(**(settings | {"trainer__device": device} | keys)), total_steps=8)


WORLDS = {
    "full": {},
    "eager": {"optim__compile": "never"},
    "lora": {"model__lora_rank": 8, "optim__lr": 1e-3},
    "recompute": {"optim__recompute": True},
    "critic": {"algorithm__name": "ppo"},
    "shared critic, recompute": {
        "algorithm__name": "ppo",
        "model__lora_rank": 8,
        "optim__lr": 1e-3,
        "optim__recompute": True,
    },
    "offload": {"optim__offload": "all"},
    "offload moments": {"optim__offload": "optimizer"},
    "micro-batches": {"optim__micro_batch_tokens": 60},
}


@pytest.mark.parametrize("world", WORLDS)
def test_an_update_is_that_of_the_cpu(folder, batch, world):
    keys = WORLDS[world]
    gpu, cpu = (learner_on(folder, device, **keys) for device in ("cuda", "cpu"))
    mask = batch.response_mask

    def apart() -> float:
        return (gpu.logprobs(batch) - cpu.logprobs(batch))[mask].abs().mean().item()

    noise = apart()
    for number in (1, 2, 3):
        actual, expected = step(gpu, batch, number), step(cpu, batch, number)
        for name in ("actor/grad_norm", "actor/entropy", "critic/grad_norm", "critic/vf_loss"):
            if name in expected:
                assert actual[name] == pytest.approx(expected[name], rel=0.03, abs=2e-3), name
    moved = (cpu.logprobs(batch) - batch.rollout_logprobs)[mask].abs().mean().item()
    assert apart() < 2 * noise + CLOSE * moved
    assert moved > 5 * noise  # else nothing would be shown


def test_the_first_pass_has_the_old_logprobs(folder, batch):
    """Compiled or not, with a gradient or without, packed alike: the ratio is 1 to the last bit."""
    learner = learner_on(folder, "cuda", algorithm__kl_loss_coef=0.0)
    targets = replace(
        make_targets(batch, learner.config, None, None, None),
        old_logprobs=learner.logprobs(batch),
    )
    assert abs(learner.update(batch, targets, 1)[0]["actor/ppo_kl"]) < 1e-3


def test_small_steps_are_not_lost(folder, batch):
    """Weights are float32: steps of 1e-6 on weights of 0.1 are nothing in bfloat16."""
    learner = learner_on(folder, "cuda", optim__lr=1e-6)
    before = {n: w.clone() for n, w in learner.export()}
    for number in range(1, 4):
        step(learner, batch, number)
    moved = {n: (w - before[n]).abs().max().item() for n, w in learner.export()}
    assert all(5e-7 < m < 1e-5 for n, m in moved.items() if "embed" not in n), moved
    assert all(w.dtype == torch.float32 for _, w in learner.export())


def test_packed_attention_is_taken_by_a_kernel(folder, batch, monkeypatch):
    """Or all of the above would compare the slow way with itself."""
    from agentrl.learner import attention

    # Learner and reference compare modes in float32, which no kernel takes.
    learner = learner_on(folder, "cuda", optim__compile="never", algorithm__kl_loss_coef=0.0)
    taken = []
    slow = attention._attend_per_response
    monkeypatch.setattr(
        attention, "_attend_per_response", lambda *a, **k: taken.append(1) or slow(*a, **k)
    )
    assert attention.kernel_for(torch.device("cuda", 0)) is not None
    step(learner, batch, 1)
    assert not taken
