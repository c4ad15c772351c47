"""The local engine on a GPU: recorded passes compute what the model does, and are faster."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from engine.test_local import TOKENIZER, flood, tokens
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def speed_and_mismatch(model, graphs: bool) -> tuple[float, float]:
    """Return the seconds of 64 turns, and the largest distance of a logprob from a plain pass."""
    engine = LocalEngine(model, TOKENIZER, deterministic=False)
    if not graphs:
        engine._decoder._graphs = None
    prompts = [tokens(40 + i % 7, seed=i) for i in range(64)]
    for tag in ("first", "then"):
        start = time.monotonic()
        answers = asyncio.run(flood(engine, prompts, Sampling(max_tokens=64), tag))
        seconds = time.monotonic() - start
    assert bool(engine._decoder._graphs) == graphs
    engine.close()
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].cpu()
        worst = max(worst, (own - torch.tensor(answer.logprobs)).abs().max().item())
    return seconds, worst


def test_recorded_passes_are_right_and_faster():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to("cuda").eval()
    (fast, error), (slow, own_error) = (speed_and_mismatch(model, g) for g in (True, False))
    print(f"{fast:.3f} s with graphs, {slow:.3f} s without; errors {error:.2g}, {own_error:.2g}")
    assert error < 1e-3 and own_error < 1e-3
    assert fast < slow / 3


def test_a_model_that_cannot_be_recorded_decodes_without(caplog):
    """Which experts run depends on values."""
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen2MoeConfig(**SHAPE, **experts, experts_implementation="eager")
    model = Qwen2MoeForCausalLM(config).to("cuda").eval()
    engine = LocalEngine(model, TOKENIZER, deterministic=False)
    answers = asyncio.run(flood(engine, [tokens(40)] * 4, Sampling(max_tokens=8)))
    engine.close()
    assert [len(a.token_ids) for a in answers] == [8] * 4
    assert "without CUDA graphs" in caplog.text
    torch.rand(1, device="cuda")  # The failed capture has left the generator usable.
