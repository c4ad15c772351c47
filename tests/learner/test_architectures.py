"""Each architecture of benchmarks/models.md: a step, a checkpoint, an export, the engine."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from contextlib import closing

import pytest
import torch
from support.architectures import (
    ARCHITECTURES,
    LONGROPE,
    NAMES,
    PADDED,
    YARN,
    architecture,
    make_model,
    mode_of,
)
from support.exact_rank import AnyRank
from support.needs import needs_newest_models
from support.processes import Processes
from support.trainer_fixtures import as_sampled_by, config, plain_logprobs, random_groups
from transformers import AutoModelForCausalLM

from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.errors import ConfigError
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.learner.modes import check_context
from agentrl.learner.packing import Mode
from agentrl.learner.rank import LocalRankGroup
from agentrl.trajectory import Generation

DECODED = (
    "Qwen2.5", "Qwen3", "Qwen3-MoE", "Llama 3", "Phi-4", "SmolLM3", "GLM-4.5", "DeepSeek-V3",
)  # fmt: skip
"""The architectures that the local engine runs."""
REFUSALS = {
    "Phi-4-mini": r"its rotary positions \(longrope\) depend on the length of the row",
    **dict.fromkeys(PADDED, "does not run with this engine's cache, which holds keys and values"),
    **dict.fromkeys(
        ("gpt-oss", "Gemma 3", "Mistral", "OLMo 3"),
        r"its config limits which tokens a token sees \(sliding_window=5\)",
    ),
}
"""Why it refuses the others."""
REACHED = [
    *((name, {"sliding_window": 99}) for name in ("gpt-oss", "Gemma 3", "Mistral", "OLMo 3")),
    ("Gemma 3", {"query_pre_attn_scalar": 8}),
    ("DeepSeek-V3", {"rope_parameters": YARN | {"mscale_all_dim": 0.0}}),
    ("DeepSeek-V3", {"rope_parameters": YARN | {"factor": 1.0}}),
    ("Qwen3-MoE", {"norm_topk_prob": False}),
    ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}),
    ("Phi-4-mini", {"original_max_position_embeddings": 99}),
    ("Phi-4-mini", {"rope_parameters": LONGROPE | {"long_factor": [1.0, 1.1, 1.2]}}),
    ("Nemotron-H", {"routed_scaling_factor": 1.0}),
    *(
        ("Granite 4 hybrid", {key: 1.0})
        for key in (
            "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
        )
    ),
]  # fmt: skip
"""Values of the configs that must have an effect on rows of these tests."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@needs_newest_models
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


@pytest.fixture(scope="module")
def groups():
    """One rank, and two ranks that open another model for each test."""
    ranks = Processes(2, AnyRank)
    with closing(ranks):
        yield LocalRankGroup(AnyRank()), ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_have_the_numbers_of_one(groups, name, folder):
    """With 3 rows in micro-batches of one row, so that a rank runs an empty one."""
    check_two_ranks(groups, name, folder, config(optim__lr=1e-3, optim__micro_batch_tokens=1))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gpt-oss", "DeepSeek-V3") else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
        if mode_of(name) is Mode.PACKED
    ],
)
def test_two_ranks_share_the_tokens_of_each_row(groups, name, folder):
    keys = {"optim__lr": 1e-3, "optim__micro_batch_tokens": 30, "trainer__n_gpus_per_node": 2}
    check_two_ranks(groups, name, folder, config(**keys, trainer__context_parallel_size=2))


@needs_newest_models
@pytest.mark.parametrize(
    ("name", "ranks", "reason"),
    [
        ("Qwen3.5", 2, "it runs rows padded, and only packed rows can be shared"),
        ("Phi-4-mini", 2, "it runs rows alone, and only packed rows can be shared"),
        ("Qwen3", 3, "its attention has 4 heads and 2 key-value heads, which 3 ranks cannot share"),
    ],
)
def test_rows_that_cannot_be_shared(name, ranks, reason):
    with pytest.raises(ConfigError, match=f"context_parallel_size={ranks}: .*{reason}.* Set"):
        check_context(architecture(name).config, mode_of(name), ranks)


def check_two_ranks(groups, name, folder, cfg) -> None:
    model = architecture(name)
    model.save_pretrained(folder)
    batch = as_sampled_by(model, collate(random_groups(3, groups=1, n=3), 31))
    found = []
    for group in groups:
        keys = cfg if group.size > 1 else cfg.with_values("trainer", context_parallel_size=1)
        group.open(folder, keys, torch.float32)
        learner = Learner("", keys, total_steps=4, group=group)
        assert learner.mode is mode_of(name)
        old = learner.old_logprobs(batch)
        metrics, _ = learner.update(batch, make_targets(batch, keys, old, None, None), 1)
        found.append((old, metrics["actor/grad_norm"], group.first_gradients()))
    (old, norm, gradients), (old_2, norm_2, gradients_2) = found
    assert norm > 1e-3 and norm_2 == pytest.approx(norm, rel=1e-4)
    torch.testing.assert_close(old_2, old, atol=1e-4, rtol=0)
    assert gradients_2.keys() == gradients.keys() == set(dict(model.named_parameters()))
    largest = max(g.norm() for g in gradients.values())
    for key, gradient in gradients.items():
        assert (gradients_2[key] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5 * largest, key


@pytest.mark.parametrize("name", NAMES)
async def test_the_local_engine_generates_what_the_model_does_or_says_why_not(name, tiny_tokenizer):
    model = architecture(name)
    if name not in DECODED:
        with pytest.raises(CannotDecode, match=f"cannot run {type(model).__name__}: ") as caught:
            Decoder(model)
        assert re.search(REFUSALS[name], str(caught.value))
        assert "Use rollout.name=sglang" in str(caught.value)
        return
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=random) for n in (5, 12, 31)]
    sampling, deadline = Sampling(temperature=0, max_tokens=20), time.monotonic() + 60

    async def answer_to(prompt: torch.Tensor) -> Generation:
        row, name = array("i", prompt.tolist()), str(len(prompt))
        engine.begin(name)
        answer = await engine.generate(row, sampling, episode_id=name, seed=1, deadline=deadline)
        engine.end(name)
        return answer

    engine = LocalEngine(architecture(name), tiny_tokenizer, deterministic=True)
    with closing(engine):
        answers = await asyncio.gather(*map(answer_to, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(
            prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0]
        assert list(answer.token_ids) == expected[len(prompt) :].tolist()
        assert len(set(answer.token_ids)) > 1
        with torch.no_grad():
            logits = model(input_ids=expected[None], use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        logprobs = logits.log_softmax(-1).gather(1, expected[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "change"), REACHED, ids=str)
def test_the_tiny_models_reach_what_they_stand_for(name, change):
    """The same weights with another value of the config have other logits."""
    kind, values = ARCHITECTURES[name]
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits, other = (
            make_model(kind, v)(input_ids=ids, use_cache=False).logits
            for v in (values, values | change)
        )
    assert (logits - other).abs().max() > 0.01 * logits.abs().max()
