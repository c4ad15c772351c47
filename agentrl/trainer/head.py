"""The output layer and the loss head as one: logprobs of chosen tokens from hidden states.

A vocabulary of 152 k makes 0.3 MB of logits for each token in bfloat16, and the plain way holds
them four times, twice in float32. Here a block of them is held at a time:

    forward     blocks of tokens        logits -> logprob, entropy, log of the sum of exponentials
    backward    blocks of vocabulary    logits again -> their gradient in place -> two products

In the backward pass each block gives its own rows of the weight's gradient in one product over all
tokens, so that nothing has to be added up there in bfloat16. Where all logits fit into a block
they are kept instead of made again.

liger-kernel's fused loss is not used: none of its versions tells the entropy, and many scale the
gradients of all tokens by that of the first (its pull request 1298).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 3 * 2**28
"""Of logits held at a time on a GPU: products of such blocks still fill it."""
CPU_BLOCK_BYTES = 2**28
TILE = 128
CPU_TILE = 2**17
"""Logits worked on at a time on a CPU."""
MAX_PROGRAMS = 32
"""Widths that are compiled for; a run meets few, but more than torch's limit of 8."""


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
    """log_softmax(hidden @ weight.T / temperature) at the chosen tokens, and the entropy.

    The products are made in the precision of `hidden`, all else in float32 or wider. A layer with
    a bias is not meant.

    Args:
        hidden: (N, H) where each token is predicted.
        weight: (V, H) of the output layer; it gets a gradient if it asks for one.
        tokens: (N,) the chosen tokens.
        temperature: the logits are divided by it, as in the engine; never the logprobs.
        entropy_gradient: whether the entropy carries a gradient.
        block_bytes: of logits held at a time.
        fused: whether everything between the products is compiled; None for on a GPU.

    Returns:
        logprobs and entropies, (N,) each.
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
        # One block's product is its sum. Several are added up in float32.
        wide = hidden.dtype if len(columns) == 1 else lse.dtype
        d_hidden = hidden.new_zeros(hidden.shape, dtype=wide) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for block in columns:
                # What was kept is written over: a second backward pass makes it again.
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


def _blocks(n: int, most: int) -> list[slice]:
    """0 to n in parts of at most `most`, and of 1 at least.

    n is halved until that holds: few different widths are few programs to compile. Wide parts are
    whole tiles of a product, which may make them wider by less than one.
    """
    size = n
    while size > max(1, most):
        size = -(-size // 2)
    if TILE < size < n:
        size = -(-size // TILE) * TILE
    return [slice(i, min(n, i + size)) for i in range(0, n, size)] if n else []


def _score_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """(N,) logprobs, entropies and logs of the sum of exponentials, of (N, V) logits."""
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
    """Write the gradient of a block of logits over it.

    With z = logits / heat, p = exp(z - lse) and H = -sum p log p:
    d logp(a) / dz = [a] - p and dH / dz = -p (log p + H).

    Args:
        logits: (N, v).
        places: (N,) the chosen tokens, counted from the block's first; mostly off it.
        lse: (N,).
        entropy: (N,).
        of_logprobs: (N,) the gradient that comes in.
        of_entropy: (N,) or None.
        heat: the temperature.
    """
    z = logits.to(lse.dtype)
    if temperature != 1.0:
        z = z / temperature
    log_p = z - lse[:, None]
    p = log_p.exp()
    is_chosen = torch.arange(logits.shape[1], device=logits.device) == places[:, None]
    # Before rounding: 1 - p of a sure token would be lost in bfloat16.
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
    """Call a function of (N, v) logits and (N,) numbers of their rows; its (N,) results.

    Compiled it is one kernel, whatever N; a width that is known makes aligned loads and quick
    divisions. Otherwise it goes some rows at a time on a CPU, so that all between stays in cache.
    """
    if fused:
        torch._dynamo.mark_static(logits, 1)
        with torch._dynamo.config.patch(recompile_limit=MAX_PROGRAMS):
            return _compiled(function)(logits, *rows, temperature)
    n, width = logits.shape
    step = max(1, CPU_TILE // width) if logits.device.type == "cpu" else max(1, n)
    results = []
    for i in range(0, n, step):
        some = slice(i, i + step)
        results.append(
            function(logits[some], *(x if x is None else x[some] for x in rows), temperature)
        )
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
