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
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.learner.batch import KeptTokens

BLOCK_BYTES = 3 * 2**28
"""Bytes of logits held at a time on a GPU: products of such blocks still use all of it."""
CPU_BLOCK_BYTES = 2**28
TILE = 128
CPU_TILE = 2**17
"""The number of logits processed at a time on a CPU."""
LEAST = -1e30
"""The product of a token that was not kept. Its probability is exactly 0. With -inf, its share of
the entropy would be NaN."""
MAX_PROGRAMS = 32
"""The largest number of widths of blocks that a function is compiled for. A run needs few, but more
than torch's limit of 8."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a model: its logits are `logits_of(hidden @ weight.T + bias)`."""

    weight: Tensor
    """(V, H)."""
    bias: Tensor | None = None
    """(V,)."""
    scale: float = 1.0
    """Multiplies the logits (Granite, Cohere)."""
    softcap: float | None = None
    """Limits the logits to +- `softcap` (Gemma 2), after the scale."""

    def logits_of(self, products: Tensor) -> Tensor:
        """Return softcap * tanh(scale * products / softcap), or scale * products without a cap."""
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * (scaled / self.softcap).tanh()


def chosen_logprobs(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    *,
    kept: KeptTokens | None = None,
    block_bytes: int | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) at the chosen tokens, and the entropy.

    The products are computed in the precision of `hidden`, the rest in float32 or wider.

    Args:
        hidden: (N, H), the states that predict the tokens.
        head: the output layer; its weight and bias get a gradient if they require one.
        tokens: (N,) the chosen tokens.
        temperature: divides the logits, as in the engine. Dividing logprobs would be something
            else.
        entropy_gradient: True if the entropy has a gradient.
        kept: the tokens to which each softmax is restricted, with counts of (N,); a count of 0: all
            tokens. None: all tokens everywhere.
        block_bytes: bytes of logits held at a time; None: the device's default.
        fused: True if the operations between the products are compiled; None: True on a GPU.

    Returns:
        Logprobs and entropies, (N,) each.
    """
    on_gpu = hidden.is_cuda
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if on_gpu else CPU_BLOCK_BYTES
    parameters = [head.weight] if head.bias is None else [head.weight, head.bias]
    needs_grad = any(x.requires_grad for x in (hidden, *parameters))
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _Head.apply(
            hidden,
            head.weight.to(hidden.dtype),
            None if head.bias is None else head.bias.to(hidden.dtype),
            tokens,
            # One division: without a soft cap, logits are scaled and divided at once.
            (temperature / head.scale, head.softcap and head.softcap / head.scale),
            block_bytes // hidden.element_size(),
            on_gpu if fused is None else fused,
            torch.is_grad_enabled() and needs_grad,
            kept,
        )
    return logprobs, entropy if entropy_gradient else entropy.detach()


Shape = tuple[float, float | None]
"""The shape of the function from products to logits / temperature: a divisor, temperature / scale,
and a soft cap of the products, softcap / scale, or None."""


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        shape: Shape,
        block_size: int,
        fused: bool,
        keep: bool,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        n, vocabulary = len(hidden), len(weight)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, lse = (hidden.new_empty(n, dtype=wide) for _ in range(3))
        ctx.logits = None
        ctx.kept = kept
        for rows in _blocks(n, block_size // vocabulary):
            logits = _multiply(hidden[rows], weight, bias)
            _restrict(logits, kept, rows, slice(0, vocabulary))
            results = _apply(_score_logits, fused, logits, (tokens[rows],), shape)
            logprobs[rows], entropy[rows], lse[rows] = results
            if keep and rows == slice(0, n):
                ctx.logits = logits
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy, lse)
        ctx.shape, ctx.block_size, ctx.fused = shape, block_size, fused
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, entropy, lse = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(lse)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        n, vocabulary = len(hidden), len(weight)
        width = ctx.block_size // max(1, n) if ctx.logits is None else vocabulary
        columns = _blocks(vocabulary, width)
        # One block gives the whole gradient. The products of several blocks are added in float32.
        wide = hidden.dtype if len(columns) == 1 else lse.dtype
        d_hidden = hidden.new_zeros(hidden.shape, dtype=wide) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        d_bias = torch.empty_like(bias) if to_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for block in columns:
                # The logits are overwritten, so a second backward pass computes them again.
                logits, ctx.logits = ctx.logits, None
                if logits is None:
                    logits = _multiply(hidden, weight[block], None if bias is None else bias[block])
                    _restrict(logits, ctx.kept, slice(0, n), block)
                places = tokens - block.start
                rows = places, lse, entropy, of_logprobs, of_entropy
                _apply(_write_gradient, ctx.fused, logits, rows, ctx.shape)
                if d_hidden is not None:
                    d_hidden += logits @ weight[block]
                if d_weight is not None:
                    torch.mm(logits.t(), hidden, out=d_weight[block])
                if d_bias is not None:
                    d_bias[block] = logits.sum(0, dtype=lse.dtype)
                del logits
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden @ weight.T + bias, (N, v)."""
    return hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())


def _restrict(logits: Tensor, kept: KeptTokens | None, rows: slice, columns: slice) -> None:
    """Set a block of products to `LEAST`, except those of kept tokens, in rows that have any.

    Args:
        logits: the products of `rows` and `columns`.
        kept: the kept tokens of all rows; None: restrict no row.
        rows: the rows of the block.
        columns: the tokens of the block.
    """
    if kept is None:
        return
    row, token = kept.places()
    is_in = (row >= rows.start) & (row < rows.stop)
    is_in &= (token >= columns.start) & (token < columns.stop)
    places = row[is_in] - rows.start, token[is_in] - columns.start
    products = logits[places]
    logits.masked_fill_(kept.counts[rows, None] > 0, LEAST)
    logits[places] = products


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


def _score_logits(logits: Tensor, tokens: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """Return the logprobs of tokens, entropies and log-sum-exps of (N, V) products, (N,) each."""
    z, _ = _to_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), shape)
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
    shape: Shape,
) -> tuple[Tensor, ...]:
    """Overwrite a block of products by their gradient.

    With z = logits / temperature, p = exp(z - lse) and H = -sum p log p:
    d logp(a) / dz = [a] - p and dH / dz = -p (log p + H).

    Args:
        logits: (N, v), the products of states and weights.
        places: (N,) the chosen tokens as columns of the block; most are outside of it.
        lse: (N,).
        entropy: (N,).
        of_logprobs: (N,) the incoming gradient of the logprobs.
        of_entropy: (N,) the incoming gradient of the entropies, or None.
        shape: how products become logits.
    """
    z, tanh = _to_logits(logits.to(lse.dtype), shape)
    log_p = z - lse[:, None]
    p = log_p.exp()
    is_chosen = torch.arange(logits.shape[1], device=logits.device) == places[:, None]
    # Before rounding: in bfloat16 1 - p of a likely token would be 0.
    slope = (is_chosen.to(p.dtype) - p) * of_logprobs[:, None]
    if of_entropy is not None:
        slope = slope - of_entropy[:, None] * p * (log_p + entropy[:, None])
    if tanh is not None:
        slope = slope * (1 - tanh * tanh)
    logits.copy_(slope / shape[0] if shape[0] != 1.0 else slope)
    return ()


def _to_logits(products: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
    """Return logits / temperature of products, and their tanh if there is a soft cap."""
    divisor, softcap = shape
    tanh = None
    if softcap is not None:
        tanh = (products / softcap).tanh()
        products = torch.where(products > LEAST / 2, softcap * tanh, products)
    return (products / divisor if divisor != 1.0 else products), tanh


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _apply(
    function: Callable[..., Any],
    fused: bool,
    logits: Tensor,
    rows: tuple[Tensor | None, ...],
    shape: Shape,
) -> tuple[Tensor, ...]:
    """Call a function of (N, v) logits and (N,) numbers of their rows, and return its (N,) results.

    If `fused`, the function is compiled to one kernel for any N; the width is static, which gives
    aligned loads and fast divisions. Otherwise, on a CPU, the function gets some rows at a time, so
    that intermediate results stay in the cache.
    """
    if fused:
        torch._dynamo.mark_static(logits, 1)
        with torch._dynamo.config.patch(recompile_limit=MAX_PROGRAMS):
            return _compiled(function)(logits, *rows, shape)
    n, width = logits.shape
    step = max(1, CPU_TILE // width) if logits.device.type == "cpu" else max(1, n)
    results = []
    for i in range(0, n, step):
        part = slice(i, i + step)
        results.append(function(logits[part], *(x if x is None else x[part] for x in rows), shape))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
