"""`rollout.router_replay` on a GPU: the gap of both engines to the learner, in bfloat16.

`AGENTRL_SGLANG_PYTHON` names the Python that has SGLang; without it, it is this one. With `-s`, the
figures are printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gaps import batch_of, describe, gaps, random_prompts, small_tokenizer
from support.moe import turns
from support.trainer_fixtures import targets_of
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.config import Config
from agentrl.engine.local import LocalEngine
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.learner.batch import Batch
from agentrl.learner.learner import Learner
from agentrl.learner.packing import has_new_prompt, make_micro_batch
from agentrl.trajectory import Generation

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no GPU")]
os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")

VOCABULARY, TOP_K, LAYERS = 32_000, 8, 10
PROMPTS, N, PROMPT_TOKENS, TOKENS = 16, 4, 64, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Qwen3-MoE with 1.1 billion random weights, in bfloat16: 10 layers with 8 of 64 experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=64,
        num_experts_per_tok=TOP_K, moe_intermediate_size=512, norm_topk_prob=True,
        max_position_embeddings=2048, initializer_range=0.04, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("moe") / "model"
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion weights")
    model.save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path


def prompts() -> list[list[int]]:
    return random_prompts(VOCABULARY, PROMPTS, PROMPT_TOKENS, N)


def learner_of(folder: Path, replay: bool, **model: Any) -> Learner:
    settings: dict[str, Any] = {
        "trainer": {"device": "cuda"}, "rollout": {"router_replay": replay},
        "model": {"path": str(folder), **model}, "optim": {"micro_batch_tokens": 4096},
    }  # fmt: skip
    return Learner(str(folder), Config.model_validate(settings), total_steps=1)


@torch.no_grad()
def different_experts(learner: Learner, batch: Batch) -> Tensor:
    """Return which choices of the learner's own routers are not the engine's: (tokens, layers)."""
    policy = learner.rank.policy
    routers, found = policy.packed_model.routers, []
    for part in torch.arange(len(batch.response_ids)).split(8):
        packed = make_micro_batch(batch, part, batch.response_mask, {}, learner.mode).packed
        theirs = packed.experts[0]
        with torch.compiler.set_stance("force_eager"), routers.recording() as recorded:
            policy.logprobs(replace(packed, experts=None).to(learner.rank.device))
        own = routers.join(recorded).cpu()[theirs[:, 0] >= 0]
        theirs = theirs[theirs[:, 0] >= 0]
        sets = [x.view(len(x), LAYERS, TOP_K).sort(-1).values for x in (own, theirs)]
        found.append((sets[0] != sets[1]).any(-1))
    return torch.cat(found)


def compare(folder: Path, answers: Sequence[Generation], engine: str) -> None:
    """Compare the gaps without and with the engine's experts, and make a pass with gradients."""
    batch = batch_of(prompts(), answers, N)
    before = gaps(learner_of(folder, False), batch)
    torch.cuda.empty_cache()
    learner = learner_of(folder, True)
    start = time.perf_counter()
    after = gaps(learner, batch)
    seconds = time.perf_counter() - start
    other = different_experts(learner, batch)
    shared = len(batch.response_ids) - int(has_new_prompt(batch, torch.arange(PROMPTS * N)).sum())
    print(
        f"\n{torch.cuda.get_device_name()}, {engine}, {len(after)} tokens, first pass"
        f" {seconds:.1f} s\n"
        f"gap in nats without replay: {describe(before)}\n"
        f"gap in nats with replay:    {describe(after)}\n"
        f"choices of a layer that differ: {other.float().mean():.3%}; tokens with one:"
        f" {other.any(-1).float().mean():.2%}\n"
        f"rows that share the prompt of the row before: {shared} of {PROMPTS * (N - 1)}"
    )
    assert other.any() and other.float().mean() < 0.2
    assert after.mean() < before.mean() and after.quantile(0.99) < before.quantile(0.99)
    metrics, _ = learner.update(batch, targets_of(learner, batch), 1)
    assert 0 < metrics["actor/grad_norm"] < float("inf")


def test_sglang(folder):
    launch = SGLangLaunch(
        str(folder), python=os.environ.get("AGENTRL_SGLANG_PYTHON", ""), dtype="bfloat16",
        gpus=[0], memory=0.3, returns_experts=True,
        arguments=[
            "--attention-backend", "triton", "--sampling-backend", "pytorch",
            "--grammar-backend", "none",
        ],
    )  # fmt: skip
    server = launch.start()
    try:
        engine = SGLangEngine(
            server.url, vocabulary=VOCABULARY, key=server.token, admin_key=server.admin_token,
            returns_experts=True,
        )  # fmt: skip
        answers = turns(engine, prompts(), n=TOKENS)
        cached = turns(engine, prompts()[:1], n=TOKENS)[0]
    finally:
        server.stop()
    assert cached.cached_tokens and len(cached.experts) == len(answers[0].experts)
    compare(folder, answers, "SGLang")


def test_the_local_engine(folder):
    engine = LocalEngine.load(str(folder), small_tokenizer(), device="cuda", returns_experts=True)
    with closing(engine):
        answers = turns(engine, prompts(), n=TOKENS)
    del engine
    torch.cuda.empty_cache()
    compare(folder, answers, "local engine")


def test_an_adapter_of_experts_learns(folder):
    """On sharded weights, compiled but for the experts, in bfloat16."""
    engine = LocalEngine.load(str(folder), small_tokenizer(), device="cuda", returns_experts=True)
    with closing(engine):
        batch = batch_of(prompts(), turns(engine, prompts(), n=32), N)
    targets = ["experts.gate_up_proj", "experts.down_proj", "o_proj"]
    learner = learner_of(folder, True, lora_rank=8, lora_target_modules=targets)
    first = gaps(learner, batch)
    torch.cuda.reset_peak_memory_stats()
    targets, seconds = targets_of(learner, batch), []
    for _ in range(2):  # The first one compiles.
        start = time.perf_counter()
        metrics, _ = learner.update(batch, targets, 1)
        seconds.append(round(time.perf_counter() - start, 1))
    print(
        f"\nupdates of {int(batch.response_mask.sum())} tokens: {seconds} s,"
        f" {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, grad_norm"
        f" {metrics['actor/grad_norm']:.4f}"
    )
    assert 0 < metrics["actor/grad_norm"] < float("inf")
    assert not torch.equal(gaps(learner, batch), first)
    names = [name for name, _ in learner.rank.policy.adapted()]
    assert sum("experts" in name for name in names) == 2 * LAYERS
