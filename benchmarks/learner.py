"""The learner's update beside a hand-packed torch loop on the same rows.

    python benchmarks/learner.py                       # a tiny model: 128 rows of about 180 tokens
    python benchmarks/learner.py --shape small --rows 16 --prompt 100 --mean 400
    python benchmarks/learner.py --shape 0.5b --rows 64 --prompt 400 --mean 1500   # a GPU

Half of the response tokens are tool results, and all groups have signal unless `--live` says less.
The hand-packed loop writes the transformer out, packs rows without padding and takes logits at
chosen tokens only; it is a bound for what a general learner may reach, not a learner. (It runs a
shared prompt once per row, the learner once per group.) Times are the fastest of some repetitions,
with CPU seconds beside them: on a busy machine compare those.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config import Config
from agentrl.trainer.algorithms import ALGORITHMS
from agentrl.trainer.batch import Batch, collate
from agentrl.trainer.learner import Learner
from agentrl.trajectory import (
    Group,
    Sample,
    Scored,
    Segment,
    Trajectory,
    float_array,
    token_array,
)

SHAPES = {  # hidden, MLP, layers, heads, KV heads, vocabulary
    "tiny": (128, 384, 2, 4, 2, 576),
    "small": (256, 768, 4, 4, 2, 8192),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}
SAMPLED, OBSERVED = 20, 20
Update = Callable[[], object]


def qwen(shape: str) -> Qwen2Config:
    hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        initializer_range=0.08 if shape == "tiny" else 0.02,
    )


def rollouts(rows: int, n: int, prompt: int, mean: float, vocabulary: int, live: float) -> Batch:
    """Groups that share a prompt; log-normal response lengths; a share of groups with signal."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    groups = []
    for g in range(rows // n):
        prompt_ids, members = tokens(prompt), []
        for i in range(n):
            length = max(8, min(int(6 * mean), int(rng.lognormvariate(math.log(mean) - 0.08, 0.4))))
            mask = [int(t % (SAMPLED + OBSERVED) < SAMPLED) for t in range(length)]
            segment = Segment(
                token_array(prompt_ids),
                token_array(tokens(length)),
                token_array(mask),
                float_array([-math.log(vocabulary)] * length),
                token_array([0] * length),
            )
            trajectory = Trajectory(Sample("s", ()), "e", i, (segment,), (), (), {}, "done")
            reward = float(i % 2) if g < live * rows / n else 0.0
            members.append(Scored(trajectory, {"outcome": reward}, reward))
        groups.append(Group(Sample("s", ()), tuple(members)))
    return collate(groups, 0)


def agentrl_update(folder: Path, batch: Batch, args: argparse.Namespace) -> Update:
    config = Config.model_validate(
        {
            "algorithm": {"ppo_epochs": args.epochs, "tis_cap": 0.0},
            "optim": {"micro_batch_tokens": args.tokens},
        }
    )
    learner = Learner(folder, config, total_steps=1000)
    algorithm = ALGORITHMS["grpo"]

    def update() -> None:
        targets = algorithm.targets(
            batch, config.algorithm, learner.old_logprobs(batch), None, None
        )
        learner.update(batch, targets, 1)

    return update


class Block(nn.Module):
    """A Qwen2 layer over one flat row of packed sequences."""

    def __init__(self, c: Qwen2Config):
        super().__init__()
        self.heads, self.kv = c.num_attention_heads, c.num_key_value_heads
        h, self.d = c.hidden_size, c.hidden_size // c.num_attention_heads
        self.n1, self.n2 = nn.RMSNorm(h, 1e-6), nn.RMSNorm(h, 1e-6)
        self.qkv = nn.Linear(h, h + 2 * self.kv * self.d)
        self.o = nn.Linear(h, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cuts: list[int], cu: Tensor) -> Tensor:
        split = [self.heads * self.d, self.kv * self.d, self.kv * self.d]
        q, k, v = self.qkv(self.n1(x)).split(split, -1)
        q, k, v = (t.unflatten(-1, (-1, self.d)) for t in (q, k, v))
        half = self.d // 2
        q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
        if x.is_cuda:
            from torch.nn.attention.varlen import varlen_attn

            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
            longest = max(b - a for a, b in pairwise(cuts))
            y = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0)).flatten(1)
        else:
            pieces = [
                F.scaled_dot_product_attention(
                    *(t[a:b].transpose(0, 1)[None] for t in (q, k, v)),
                    is_causal=True,
                    enable_gqa=True,
                )[0].transpose(0, 1)
                for a, b in pairwise(cuts)
            ]
            y = torch.cat(pieces).flatten(1)
        x = x + self.o(y)
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def hand_update(batch: Batch, config: Qwen2Config, args: argparse.Namespace) -> Update:
    """Pack rows that have signal, longest first, under the budget of tokens."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    targets = ALGORITHMS["grpo"].targets(batch, Config().algorithm, None, None, None)
    live = (targets.advantages != 0).any(1)
    lengths = batch.prompt_lengths + batch.response_lengths
    order = [r for r in lengths.argsort(descending=True).tolist() if live[r]]
    bins: list[list[int]] = []
    for r in order:
        for b in bins:
            if sum(int(lengths[i]) for i in [*b, r]) <= args.tokens:
                b.append(r)
                break
        else:
            bins.append([r])
    packs = []
    for b in bins:
        ids, positions, at, cuts = [], [], [], [0]
        for r in b:
            p, n = int(batch.prompt_lengths[r]), int(batch.response_lengths[r])
            ids += [batch.prompt_ids[r, -p:], batch.response_ids[r, :n]]
            positions.append(torch.arange(p + n))
            at.append(cuts[-1] + p - 1 + batch.response_mask[r].nonzero()[:, 0])
            cuts.append(cuts[-1] + p + n)
        m = batch.response_mask[b]
        flat = (
            torch.cat(ids),
            torch.cat(positions),
            torch.cat(at),
            batch.response_ids[b][m],
            targets.advantages[b][m],
            targets.weights[b][m],
            torch.tensor(cuts, dtype=torch.int32),
        )
        packs.append((cuts, *(t.to(device) for t in flat)))

    torch.manual_seed(0)
    embed = nn.Embedding(config.vocab_size, config.hidden_size).to(device, dtype)
    nn.init.normal_(embed.weight, std=0.02)
    blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)).to(device, dtype)
    norm = nn.RMSNorm(config.hidden_size, 1e-6).to(device, dtype)
    parameters = [*embed.parameters(), *blocks.parameters(), *norm.parameters()]
    adam = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    d = config.hidden_size // config.num_attention_heads
    frequency = 1e6 ** (-torch.arange(0, d, 2, device=device) / d)
    old: dict[int, Tensor] = {}

    def update() -> None:
        for epoch in range(args.epochs):
            for k, (cuts, ids, positions, at, tokens, advantages, weights, cu) in enumerate(packs):
                angle = (positions[:, None] * frequency).repeat(1, 2)[:, None]
                cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
                x = embed(ids)
                for block in blocks:
                    x = block(x, cos, sin, cuts, cu)
                logits = F.linear(norm(x)[at], embed.weight).float()
                logprobs = -F.cross_entropy(logits, tokens, reduction="none")
                if epoch == 0:
                    old[k] = logprobs.detach()
                r = (logprobs - old[k]).exp()
                loss = -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)
                (weights * loss).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
            adam.zero_grad(set_to_none=True)

    return update


def measure(update: Update, repetitions: int) -> dict[str, float]:
    update()
    wall, cpu = [], []
    for _ in range(repetitions):
        start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    return {"seconds": round(min(wall), 3), "cpu_seconds": round(min(cpu), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--n", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--mean", type=float, default=80, help="response tokens")
    parser.add_argument("--live", type=float, default=1.0, help="share of groups with signal")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--arm", choices=("agentrl", "hand", "both"), default="both")
    args = parser.parse_args()

    config = qwen(args.shape)
    batch = rollouts(args.rows, args.n, args.prompt, args.mean, config.vocab_size, args.live)
    tokens = int((batch.prompt_lengths + batch.response_lengths).sum()) * args.epochs
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
        arms: dict[str, Callable[[], Update]] = {
            "agentrl": lambda: agentrl_update(Path(folder), batch, args),
            "hand": lambda: hand_update(batch, config, args),
        }
        for name, make in arms.items():
            if args.arm in (name, "both"):
                found = measure(make(), args.repetitions)
                rate = round(tokens / found["seconds"])
                print(json.dumps({"arm": name, "tokens": tokens, **found, "tokens/s": rate}))


if __name__ == "__main__":
    main()
