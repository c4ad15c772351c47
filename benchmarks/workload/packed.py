"""A hand-written update for one architecture, as an upper bound for the learner's speed.

Qwen2 in plain torch over rows packed without padding; matrices with the same input are fused. On a
GPU all linear parts and the loss head are compiled, and weights and AdamW's moments are bfloat16.
The loss is GRPO's with truncated importance weights, so the gradient equals the learner's. A prompt
runs once for each of its responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from agentrl.learner.batch import Batch, Targets
from workload.rows import bins

CHUNK = 4096
"""The number of tokens whose logits exist at the same time."""
CLIP, CAP = 0.2, 2.0


class Linear(nn.Module):
    """Several matrices with the same input as one; with LoRA, frozen, with an adapter each."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=not rank)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=not rank) if biases else None
        self.rank = rank
        if rank:
            inner = weights[0].shape[1]
            down = weights[0].new_empty(rank * len(weights), inner).uniform_(-1, 1) / inner**0.5
            self.down = nn.Parameter(down)
            self.up = nn.ParameterList(w.new_zeros(len(w), rank) for w in weights)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.rank:
            return y
        down = F.linear(x, self.down).split(self.rank, -1)
        added = [F.linear(d, up) for d, up in zip(down, self.up, strict=True)]
        return y + torch.cat(added, -1) * (16 / self.rank)


class Block(nn.Module):
    """A decoder layer over one row of packed sequences."""

    def __init__(self, config: Any, weights: dict[str, Tensor], rank: int):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.d, self.eps = config.hidden_size // self.heads, config.rms_norm_eps

        def linear(*names: str) -> Linear:
            biases = [weights[f"{n}.bias"] for n in names if f"{n}.bias" in weights]
            return Linear([weights[f"{n}.weight"] for n in names], biases, rank)

        def norm(name: str) -> nn.Parameter:
            return nn.Parameter(weights[f"{name}.weight"], requires_grad=not rank)

        self.n1, self.n2 = norm("input_layernorm"), norm("post_attention_layernorm")
        self.qkv = linear(*(f"self_attn.{x}_proj" for x in "qkv"))
        self.out = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values with rotary embeddings."""
        sizes = [self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.d]
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:], self.n1, self.eps)).split(sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.d)) for t in qkv)
        half = self.d // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        return q, k, v

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output of attention, and apply the MLP."""
        x = x + self.out(y)
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.n2, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pack: Pack) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        return self.after(x, _attention(q, k, v, pack).flatten(1))


@dataclass(frozen=True, slots=True)
class Pack:
    """Packed rows with L tokens, N of them sampled."""

    cuts: list[int]
    """The start of each row, and L."""
    cu: Tensor
    """The start of each row, and L, as an int32 tensor."""
    ids: Tensor
    """(L,)."""
    positions: Tensor
    """(L,)."""
    states: Tensor
    """(N,) the index at which each sampled token is predicted."""
    tokens: Tensor
    """(N,)."""
    advantages: Tensor
    weights: Tensor
    rollout: Tensor


class Packed:
    """The training loop; `update()` is one optimizer step on all rows."""

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        targets: Targets,
        budget: int,
        *,
        device: str,
        compiled: bool,
        recompute: bool,
        rank: int,
    ):
        """Load the model and pack the rows.

        Args:
            folder: the folder of a Qwen2 model.
            batch: the rows.
            targets: the targets of the algorithm for these rows.
            budget: the most tokens of a pack.
            device: the device of the model.
            compiled: whether linear parts and loss head are compiled.
            recompute: whether the activations within a block are recomputed.
            rank: the rank of LoRA; 0 trains all weights.
        """
        self.config: Any = AutoConfig.from_pretrained(folder)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= {n: t.to(device, self.dtype) for n, t in load_file(file).items()}
        learns = not rank
        self.embed = nn.Parameter(weights["model.embed_tokens.weight"], requires_grad=learns)
        self.norm = nn.Parameter(weights["model.norm.weight"], requires_grad=learns)
        tied = self.config.tie_word_embeddings
        self.head = self.embed if tied else nn.Parameter(weights["lm_head.weight"], learns)
        self.blocks = nn.ModuleList()
        for k in range(self.config.num_hidden_layers):
            start = f"model.layers.{k}."
            own = {n[len(start) :]: t for n, t in weights.items() if n.startswith(start)}
            self.blocks.append(Block(self.config, own, rank))
        del weights
        self._scores: Callable[[Tensor, Tensor, Tensor], Tensor] = _scores
        if compiled:
            self._scores = torch.compile(_scores, dynamic=True)
            block: Any
            for block in self.blocks:
                block.before = torch.compile(block.before, dynamic=True)
                block.after = torch.compile(block.after, dynamic=True)
        everything = {self.embed, self.head, self.norm, *self.blocks.parameters()}
        self.learns = [p for p in everything if p.requires_grad]
        self.adam = torch.optim.AdamW(self.learns, lr=1e-6, weight_decay=0.0, fused=True)
        self.recompute = recompute
        self.packs = _packs(batch, targets, budget, device)
        d = self.config.hidden_size // self.config.num_attention_heads
        theta = self.config.rope_parameters["rope_theta"]
        self.frequency = theta ** (-torch.arange(0, d, 2, device=device) / d)

    def update(self) -> float:
        """Run one step, and return the norm of the gradient before clipping."""
        for pack in self.packs:
            self._loss(pack).backward()
        norm = nn.utils.clip_grad_norm_(self.learns, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norm.item()

    def _loss(self, pack: Pack) -> Tensor:
        angle = (pack.positions[:, None] * self.frequency).repeat(1, 2)[:, None]
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = self.embed[pack.ids]
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, pack, use_reentrant=False)
            else:
                x = block(x, cos, sin, pack)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.config.rms_norm_eps)[pack.states]
        parts = [
            checkpoint(self._scores, hidden, self.head, tokens, use_reentrant=False)
            for hidden, tokens in zip(x.split(CHUNK), pack.tokens.split(CHUNK), strict=True)
        ]
        logprobs = torch.cat(parts)
        old = logprobs.detach()
        ratio, advantages = (logprobs - old).exp(), pack.advantages
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return (pack.weights * (old - pack.rollout).exp().clamp(max=CAP) * loss).sum()


def _attention(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        longest = max(b - a for a, b in pairwise(pack.cuts))
        out = varlen_attn(q, k, v, pack.cu, pack.cu, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out
    pieces = []
    for a, b in pairwise(pack.cuts):
        x, y, z = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def _scores(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _packs(batch: Batch, targets: Targets, budget: int, device: str) -> list[Pack]:
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    packs = []
    for rows in bins([p + r for p, r in zip(prompts, responses, strict=True)], budget):
        ids, positions, states, cuts = [], [], [], [0]
        for row in rows:
            p, r = prompts[row], responses[row]
            ids += [batch.prompt_ids[row, -p:], batch.response_ids[row, :r]]
            positions.append(torch.arange(p + r))
            states.append(cuts[-1] + p - 1 + batch.response_mask[row].nonzero()[:, 0])
            cuts.append(cuts[-1] + p + r)
        mask = batch.response_mask[rows]
        flat = [
            torch.tensor(cuts, dtype=torch.int32),
            torch.cat(ids),
            torch.cat(positions),
            torch.cat(states),
            batch.response_ids[rows][mask],
            targets.advantages[rows][mask],
            targets.weights[rows][mask],
            batch.rollout_logprobs[rows][mask],
        ]
        packs.append(Pack(cuts, *(t.to(device) for t in flat)))
    return packs
