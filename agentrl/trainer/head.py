"""The output layer fused with the loss head: logprobs of chosen tokens from hidden states.

With a vocabulary of 152 k, the logits of one token take 0.3 MB in bfloat16, and the plain
implementation holds them four times, twice in float32. This one holds only a block of logits:

    forward     blocks of tokens        logits -> logprob, entropy, log of the sum of exponentials
    backward    blocks of vocabulary    logits again -> their gradient in place -> two products

In the backward pass each block computes its own rows of the weight's gradient in one product over
all tokens, so nothing is accumulated in bfloat16. If all logits fit into one block, they are kept
instead of computed again.

liger-kernel's fused loss is not used: no version of it returns the entropy, and many scale the
gradients of all tokens by that of the first one (its pull request 1298).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 3 * 2**28
"""Bytes of logits held at a time on a GPU: products of such blocks still use all of it."""
CPU_BLOCK_BYTES = 2**28
TILE = 128
CPU_TILE = 2**17
"""The number of logits processed at a time on a CPU."""
MAX_PROGRAMS = 32
"""The largest number of widths of blocks that a function is compiled for. A run needs few, but more
than torch's limit of 8."""


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    *,
    block_bytes: int | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log_softmax(hidden @ weight.T / temperature) at the chosen tokens, and the entropy.

    The products are computed in the precision of `hidden`, the rest in float32 or wider. Output
    layers with a bias are not supported.

    Args:
        hidden: (N, H), the states that predict the tokens.
        weight: (V, H) of the output layer; it gets a gradient if it requires one.
        tokens: (N,) the chosen tokens.
        temperature: divides the logits, as in the engine. Dividing logprobs would be something
            else.
        entropy_gradient: True if the entropy has a gradient.
        block_bytes: bytes of logits held at a time; None: the device's default.
        fused: True if the operations between the products are compiled; None: True on a GPU.

    Returns:
        Logprobs and entropies, (N,) each.
    """
    on_gpu = hidden.is_cuda
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if on_gpu else CPU_BLOCK_BYTES
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _Head.apply(
            hidden,
            weight.to(hidden.dtype),
            tokens,
            temperature,
            block_bytes // hidden.element_size(),
            on_gpu if fused is None else fused,
            keep,
        )
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        block_size: int,
        fused: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        n, vocabulary = len(hidden), len(weight)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, lse = (hidden.new_empty(n, dtype=wide) for _ in range(3))
        ctx.logits = None
        for rows in _blocks(n, block_size // vocabulary):
            logits = hidden[rows] @ weight.t()
            results = _apply(_score_logits, fused, logits, (tokens[rows],), temperature)
            logprobs[rows], entropy[rows], lse[rows] = results
            if keep and rows == slice(0, n):
                ctx.logits = logits
        ctx.save_for_backward(hidden, weight, tokens, entropy, lse)
        ctx.temperature, ctx.block_size, ctx.fused = temperature, block_size, fused
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, entropy, lse = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(lse)
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        n, vocabulary = len(hidden), len(weight)
        width = ctx.block_size // max(1, n) if ctx.logits is None else vocabulary
        columns = _blocks(vocabulary, width)
        # One block gives the whole gradient. The products of several blocks are added in float32.
        wide = hidden.dtype if len(columns) == 1 else lse.dtype
        d_hidden = hidden.new_zeros(hidden.shape, dtype=wide) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for block in columns:
                # The logits are overwritten, so a second backward pass computes them again.
                logits, ctx.logits = ctx.logits, None
                if logits is None:
                    logits = hidden @ weight[block].t()
                places = tokens - block.start
                rows = places, lse, entropy, of_logprobs, of_entropy
                _apply(_write_gradient, ctx.fused, logits, rows, ctx.temperature)
                if d_hidden is not None:
                    d_hidden += logits @ weight[block]
                if d_weight is not None:
                    torch.mm(logits.t(), hidden, out=d_weight[block])
                del logits
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _blocks(n: int, max_size: int) -> list[slice]:
    """Split 0 to n into slices of about the same size, of at most `max_size` and at least 1.

    n is halved until it fits: few different widths mean few compiled programs. Wide slices are
    rounded up to whole tiles of a product, so they may exceed `max_size` by less than one tile.
    """
    size = n
    while size > max(1, max_size):
        size = -(-size // 2)
    if TILE < size < n:
        size = -(-size // TILE) * TILE
    return [slice(i, min(n, i + size)) for i in range(0, n, size)] if n else []


def _score_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Return the logprobs of tokens, entropies and log-sum-exps of (N, V) logits, (N,) each."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        z = z / temperature
    top = z.amax(-1, keepdim=True)
    z = z - top
    e = z.exp()
    total = e.sum(-1)
    log_total = total.log()
    chosen = z.gather(1, tokens[:, None])[:, 0]
    return chosen - log_total, log_total - (e * z).sum(-1) / total, log_total + top[:, 0]


def _write_gradient(
    logits: Tensor,
    places: Tensor,
    lse: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> tuple[Tensor, ...]:
    """Overwrite a block of logits by their gradient.

    With z = logits / temperature, p = exp(z - lse) and H = -sum p log p:
    d logp(a) / dz = [a] - p and dH / dz = -p (log p + H).

    Args:
        logits: (N, v).
        places: (N,) the chosen tokens as columns of the block; most are outside of it.
        lse: (N,).
        entropy: (N,).
        of_logprobs: (N,) the incoming gradient of the logprobs.
        of_entropy: (N,) the incoming gradient of the entropies, or None.
        temperature: divides the logits.
    """
    z = logits.to(lse.dtype)
    if temperature != 1.0:
        z = z / temperature
    log_p = z - lse[:, None]
    p = log_p.exp()
    is_chosen = torch.arange(logits.shape[1], device=logits.device) == places[:, None]
    # Before rounding: in bfloat16 1 - p of a likely token would be 0.
    slope = (is_chosen.to(p.dtype) - p) * of_logprobs[:, None]
    if of_entropy is not None:
        slope = slope - of_entropy[:, None] * p * (log_p + entropy[:, None])
    logits.copy_(slope / temperature if temperature != 1.0 else slope)
    return ()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _apply(
    function: Callable[..., Any],
    fused: bool,
    logits: Tensor,
    rows: tuple[Tensor | None, ...],
    temperature: float,
) -> tuple[Tensor, ...]:
    """Call a function of (N, v) logits and (N,) numbers of their rows, and return its (N,) results.

    If `fused`, the function is compiled to one kernel for any N; the width is static, which gives
    aligned loads and fast divisions. Otherwise, on a CPU, the function gets some rows at a time, so
    that intermediate results stay in the cache.
    """
    if fused:
        torch._dynamo.mark_static(logits, 1)
        with torch._dynamo.config.patch(recompile_limit=MAX_PROGRAMS):
            return _compiled(function)(logits, *rows, temperature)
    n, width = logits.shape
    step = max(1, CPU_TILE // width) if logits.device.type == "cpu" else max(1, n)
    results = []
    for i in range(0, n, step):
        part = slice(i, i + step)
        results.append(
            function(logits[part], *(x if x is None else x[part] for x in rows), temperature)
        )
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
