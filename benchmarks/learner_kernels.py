"""Measure the learner's two kernels alone: the loss head, and attention over packed rows.

    python benchmarks/learner_kernels.py                    # a GPU: some minutes
    python benchmarks/learner_kernels.py --parts head       # some of: head attention prompts layer
    python benchmarks/learner_kernels.py --tiny             # any CPU: checks that it runs

Every line is a JSON object: name, value, unit, context. Times are medians of the forward and
backward pass together. On a CPU, sequences of different lengths run one by one.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM
from workload import updates
from workload.timing import print_figure
from workload.updates import GPU, finish

from agentrl.learner import attention
from agentrl.learner.attention import PACKED, Layout, kernel_for, packed_attention, varlen
from agentrl.learner.head import Head, chosen_logprobs

DEVICE = torch.device(updates.DEVICE)
DTYPE = torch.bfloat16 if GPU else torch.float32
HEADS = {"0.5b": (14, 2, 64), "1.5b": (12, 2, 128), "7b": (28, 4, 128)}
NAMES = "out", "query", "key", "value"


def seconds(f: Callable[[], object], repetitions: int) -> float:
    for _ in range(2):
        finish(f)
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        finish(f)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak(f: Callable[[], object]) -> int | None:
    """Return the peak memory in bytes, minus the memory before."""
    if not GPU:
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    finish(f)
    return torch.cuda.max_memory_allocated() - before


def bare(hidden: Tensor, weight: Tensor) -> None:
    logits = hidden @ weight.t()
    _ = logits @ weight, logits.t() @ hidden


def head_step(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    upstream: Tensor,
    block: int | None,
    fused: bool,
    entropy: bool,
    frozen: bool,
) -> None:
    weight, learns = (weight.detach(), (hidden,)) if frozen else (weight, (hidden, weight))
    outputs = chosen_logprobs(
        hidden, Head(weight), tokens, 0.9, entropy, block_bytes=block, fused=fused
    )
    total = sum((upstream * x).sum() for x in outputs if x.requires_grad)
    assert isinstance(total, Tensor)
    torch.autograd.grad(total, learns)


def heads(tiny: bool, repetitions: int) -> None:
    """Compare the loss head with the three matrix products of its forward and backward pass."""
    n, vocabulary, widths = (64, 500, (16,)) if tiny else (32768, 151936, (896, 3584))
    for width in widths:
        torch.manual_seed(0)
        hidden = torch.randn(n, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
        weight = torch.randn(vocabulary, width, device=DEVICE, dtype=DTYPE) / width**0.5
        weight.requires_grad_()
        tokens = torch.randint(vocabulary, (n,), device=DEVICE)
        upstream = torch.randn(n, device=DEVICE)
        context = {"tokens": n, "vocabulary": vocabulary, "hidden": width}

        limit = seconds(partial(bare, hidden.detach(), weight.detach()), repetitions)
        print_figure("head_bare_products", limit * 1e3, "ms", **context)
        block = 4 * n * vocabulary // 3 if tiny else None
        ours = (hidden, weight, tokens, upstream, block)
        for fused in (True, False):
            for entropy, frozen in ((False, False), (True, False), (False, True)):
                how = {**context, "compiled": fused, "entropy_gradient": entropy, "frozen": frozen}
                step = partial(head_step, *ours, fused, entropy, frozen)
                taken = seconds(step, repetitions)
                print_figure("head_time", taken * 1e3, "ms", **how)
                print_figure("head_time_over_bare_products", taken / limit, "x", **how)
                memory = peak(step)
                if memory is not None:
                    memory -= 0 if frozen else weight.nbytes
                    print_figure(
                        "head_memory_over_weights_and_inputs", memory / 2**30, "GiB", **how
                    )
        few = slice(0, min(n, 1024))
        exact = (hidden[few].float() @ weight.float().t() / 0.9).log_softmax(-1)
        expected = exact.gather(1, tokens[few, None])[:, 0]
        logprobs = chosen_logprobs(hidden[few], Head(weight), tokens[few], 0.9)[0]
        print_figure(
            "head_logprob_error", (logprobs - expected).abs().max().item(), "nat", **context
        )
        grads, expected = (torch.autograd.grad(x.sum(), weight)[0] for x in (logprobs, expected))
        error = ((grads.float() - expected).norm() / expected.norm()).item()
        print_figure("head_weight_gradient_error", error, "relative", **context)


def by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: int,
) -> Tensor:
    """A kernel for devices without one; it has no windows."""
    out = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        at = torch.arange(d - c - (b - a), d - c, device=q.device)
        mask = at[:, None] >= torch.arange(d - c, device=q.device)
        x, y, z = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        y = scaled_dot_product_attention(x, y, z, attn_mask=mask, scale=scale, enable_gqa=True)
        out.append(y[0].transpose(0, 1))
    return torch.cat(out)


def to_compare() -> dict[str, Any]:
    """Return the kernels to compare; torch's kernel also with shared keys."""
    if not GPU:
        return {"by_sequence": by_sequence}
    own = kernel_for(DEVICE)
    assert own is not None
    kernels: dict[str, Any] = {"torch": attention.torch_kernel}
    if own is not attention.torch_kernel:
        kernels["flash_attention"] = own
    if not attention.HAS_GQA:

        def shares(*arguments: Any) -> Any:
            *sequences, scale, window = arguments
            return attention.varlen_attn(*sequences, scale=scale, window_size=(window, 0))

        kernels["torch_sharing_keys"] = shares
    return kernels


def ways(layout: Layout) -> dict[str, Layout]:
    """Return the layout for each kernel, and for attention piece by piece."""
    every = (torch.bfloat16, torch.float32)
    made = {
        n: replace(layout, varlen=varlen(layout, DEVICE, k, every)) for n, k in to_compare().items()
    }
    return {"piece_by_piece": layout, **made}


def layer_step(layout: Layout, shape: tuple[int, int, int], dtype: torch.dtype = DTYPE):
    """Return a step of one attention layer, which returns its output and gradients."""
    q_heads, kv_heads, d = shape
    length = sum(layout.pieces)
    g = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(1, length, h, d, generator=g).to(DEVICE, DTYPE).to(dtype).transpose(1, 2)
        for h in (q_heads, kv_heads, kv_heads, q_heads)
    )
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = packed_attention(torch.nn.Identity(), *qkv, None, layout=layout)[0]
        total = (out * upstream.transpose(1, 2)).sum()
        return [out.detach(), *torch.autograd.grad(total, qkv)]

    return step


def compare(name: str, layout: Layout, shape: tuple[int, int, int], repetitions: int, **context):
    """Report the time of each kernel, and its error relative to float32."""
    exact = layer_step(layout, shape, torch.float32)()
    for way, made in ways(layout).items():
        context = {**context, "way": way, "tokens": sum(layout.pieces), "heads": shape}
        try:
            step = layer_step(made, shape)
            print_figure(name, seconds(step, repetitions) * 1e3, "ms", **context)
            errors = [
                ((x.float() - y).norm() / y.norm()).item()
                for x, y in zip(step(), exact, strict=True)
            ]
            of = {n: float(f"{e:.2g}") for n, e in zip(NAMES, errors, strict=True)}
            print_figure(f"{name}_error", max(errors), "relative", of=of, **context)
        except (RuntimeError, ValueError, TypeError) as e:
            print_figure(f"{name}_refused", None, "", why=str(e)[:200], **context)


def trajectories(tiny: bool) -> list[Layout]:
    """Return the packs of 64 rollouts in groups of 8, each of at most 32 k tokens."""
    rng = random.Random(0)
    prompt, mean, budget = (6, 10, 200) if tiny else (400, 1500, 32768)
    packs: list[Layout] = []
    room = 0
    for _ in range(8):
        lengths = [
            max(mean // 40 + 1, min(mean * 6, int(rng.lognormvariate(math.log(mean) - 0.32, 0.8))))
            for _ in range(8)
        ]
        need = prompt + sum(lengths)
        if need > room:
            packs.append(Layout([], []))
            room = budget
        packs[-1].pieces.extend([prompt, *lengths])
        packs[-1].responses.append(8)
        room -= need
    return packs


def alone(layout: Layout) -> Layout:
    """Return the same layout with a separate prompt for each response."""
    pieces = []
    at = 0
    for count in layout.responses:
        prompt, *responses = layout.pieces[at : at + 1 + count]
        at += 1 + count
        for response in responses:
            pieces += [prompt, response]
    return Layout(pieces, [1] * (len(pieces) // 2))


def packs(tiny: bool, repetitions: int) -> None:
    """Measure the attention of one layer over the first pack of the 64 trajectories."""
    first = trajectories(tiny)[0]
    for shape in [(4, 2, 8)] if tiny else [HEADS["0.5b"], HEADS["7b"]]:
        compare("attention_pack", first, shape, repetitions, shared=True)
        compare("attention_pack", alone(first), shape, repetitions, shared=False)
    start = time.perf_counter()
    first.to(DEVICE)
    print_figure("attention_indices", (time.perf_counter() - start) * 1e3, "ms")


def prompts(tiny: bool, repetitions: int) -> None:
    """Measure the attention of one layer over a group of 8 with a shared prompt of 4 k tokens."""
    prompt, response = (40, 5) if tiny else (4096, 500)
    group = Layout([prompt] + 8 * [response], [8])
    for shape in [(4, 2, 8)] if tiny else [HEADS["0.5b"], HEADS["7b"]]:
        compare("attention_prompt", group, shape, repetitions, shared=True)
        compare("attention_prompt", alone(group), shape, repetitions, shared=False)


def layer(tiny: bool, repetitions: int) -> None:
    """Measure compiled decoder layers: time, and the number of programs for all packs."""
    q_heads, kv_heads, d = (4, 2, 8) if tiny else HEADS["0.5b"]
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=q_heads * d,
        intermediate_size=32 if tiny else 4864,
        num_hidden_layers=2,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval().to(DEVICE, DTYPE)
    model.set_attn_implementation(PACKED)
    decoder = model.get_decoder()
    every = [*trajectories(tiny), alone(trajectories(tiny)[0])]
    made = [p.to(DEVICE) if GPU else ways(p)["by_sequence"] for p in every]

    def step(layout: Layout) -> Tensor:
        length = sum(layout.pieces)
        ids = (torch.arange(length, device=DEVICE) % 1000)[None]
        out = decoder(input_ids=ids, position_ids=ids, use_cache=False, layout=layout)
        out.last_hidden_state.float().square().sum().backward()
        model.zero_grad()
        return out.last_hidden_state.detach().float()

    expected = [step(p) for p in made]
    context = {"layers": 2, "packs": len(made), "tokens": sum(every[0].pieces)}
    print_figure("layers_eager", seconds(lambda: step(made[0]), repetitions) * 1e3, "ms", **context)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for block in decoder.layers:
        block.compile(dynamic=True, backend="inductor" if GPU else "eager")
    errors = [((step(p) - x).norm() / x.norm()).item() for p, x in zip(made, expected, strict=True)]
    breaks = list(counters["graph_break"])
    graphs = counters["stats"]["unique_graphs"]
    print_figure("layers_graphs", graphs, "programs", breaks=[k[:200] for k in breaks], **context)
    print_figure(
        "layers_compiled", seconds(lambda: step(made[0]), repetitions) * 1e3, "ms", **context
    )
    print_figure("layers_compiled_error", max(errors), "relative", **context)


PARTS = {"head": heads, "attention": packs, "prompts": prompts, "layer": layer}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the learner's two kernels alone.")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](args.tiny, args.repetitions)


if __name__ == "__main__":
    main()
