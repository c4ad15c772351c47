"""A small mixture of experts in which rounding sends some tokens to other experts."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from support.architectures import ARCHITECTURES, make_model
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engine.base import Sampler, Sampling
from agentrl.trajectory import Generation

VOCABULARY = 264


def moe_model(name: str = "Qwen3-MoE", **changes: Any) -> PreTrainedModel:
    """Return a model with 16 experts, of which a token has 4."""
    kind, values = ARCHITECTURES[name]
    experts = {"num_experts": 16, "n_routed_experts": 16, "num_local_experts": 16}
    few = {"num_experts_per_tok": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    own = {k: v for k, v in experts.items() if k in values}
    return make_model(kind, values | own | few | changes).float().eval()


def own_experts(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the experts of each token of a row, (T, layers x 4), by the model's own routers."""
    chosen: list[Tensor] = []
    handles = [
        m.register_forward_hook(lambda _, __, out: chosen.append(out[-1]))
        for n, m in model.named_modules()
        if n.endswith((".mlp.gate", ".mlp.router"))
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.cat(chosen, -1)


def experts_of(generation: Generation) -> Tensor:
    """Return the experts of a turn, (tokens, width)."""
    return torch.tensor(generation.experts).view(-1, generation.experts_width)


async def turn(
    engine: Sampler, prompt: Sequence[int], episode: str, *, start: int | None = 0, n: int = 12,
    seed: int = 0,
) -> Generation:  # fmt: skip
    sampling = Sampling(max_tokens=n, experts_from=start)
    return await engine.generate(
        array("i", prompt), sampling, episode_id=episode, seed=seed, deadline=time.monotonic() + 60
    )


def turns(engine: Sampler, prompts: Sequence[Sequence[int]], n: int = 12) -> list[Generation]:
    """Return a turn after each prompt, sampled at the same time."""

    async def run() -> list[Generation]:
        names = [f"e{i}" for i in range(len(prompts))]
        for name in names:
            engine.begin(name)
        calls = [
            turn(engine, p, e, n=n, seed=i)
            for i, (p, e) in enumerate(zip(prompts, names, strict=True))
        ]
        results = await asyncio.gather(*calls)
        for name in names:
            engine.end(name)
        return results

    return asyncio.run(run())
