"""Causal attention over packed rows, so that no row attends to another one.

    flat row     P1 A B | P2 C            a prompt is stored once before all its responses

There are two implementations with the same result. The first calls attention once per response,
together with its prompt. It works on every device, and on a CPU it gives the same bits every time.
The second is one call of a kernel for sequences of different lengths, on a GPU in half precision.
The queries stay where they are, as separate sequences; keys and values are copied, so that each
response has its prompt in front:

    queries      P1 | A    | B    | P2 C
    keys         P1 | P1 A | P1 B | P2 C

The indices for this (`Varlen`) are computed once per flat row, not in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "agentrl_packed"
"""The name under which transformers finds `packed_attention`."""
HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
"""The largest head size of flash-attention's kernels."""
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The backends that torch may use per response. cuDNN's gradients were wrong for pieces of one
length whose incoming gradients had different strides (torch 2.11, an H200, bfloat16)."""


Kernel = Callable[..., Tensor]
"""(q, k, v, cu_q, cu_k, max_q, max_k, scale, window) -> out.

q and out are (L, heads, d), k and v are (K, key-value heads, d). Sequence i has the queries cu_q[i]
to cu_q[i + 1] and the keys cu_k[i] to cu_k[i + 1]; both are (sequences + 1,) int32. The last query
of a sequence attends to its last key, and every earlier query to one key less. No query attends to
more than `window` keys back; -1: no limit."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Maps K keys to L tokens, S of which are in prompts of several responses."""

    source: Tensor
    """(K,) the token of each key."""
    first_key: Tensor
    """(L,) one key of each token."""
    shared: Tensor
    """(S,) the tokens with several keys."""
    copies: Tensor
    """(S, C) all keys of these tokens, padded with 0."""
    present: Tensor
    """(S, C) bool: False for padding."""


@dataclass(frozen=True, slots=True)
class Varlen:
    """The arguments of a kernel for one layout."""

    kernel: Kernel
    dtypes: tuple[torch.dtype, ...]
    """The data types that the kernel supports."""
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    """At least the length of the longest sequence. Powers of two, so that few programs are
    compiled."""
    sharing: SharedPrompts | None
    """None: the keys are the tokens in their order."""

    def supports(self, query: Tensor) -> bool:
        """Return whether the kernel supports this query."""
        d = query.shape[-1]
        return query.dtype in self.dtypes and d % 8 == 0 and d <= MAX_HEAD_SIZE


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of prompts and responses in the flat row."""

    pieces: list[int]
    """The lengths, in tokens, of a prompt, its responses, the next prompt, its responses, ..."""
    responses: list[int]
    """The number of responses of each prompt."""
    varlen: Varlen | None = None
    """The arguments of the kernel, if there is one."""

    def to(self, device: torch.device) -> Layout:
        """Return a copy for a model on the device."""
        kernel = kernel_for(device)
        if kernel is None:
            return replace(self, varlen=None)
        return replace(self, varlen=varlen(self, device, kernel))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention of every response with its prompt.

    transformers calls this function in every layer.

    Args:
        module: the attention layer.
        query: (1, heads, L, d).
        key: (1, key-value heads, L, d).
        value: the same shape as `key`.
        attention_mask: None; the layout replaces it.
        layout: the layout of the L tokens.
        scaling: the factor of the scores.
        sliding_window: how many tokens back a token attends, itself included; None: all.
        softcap: not supported.
        s_aux: not supported.

    Returns:
        (1, L, heads, d), and None in place of the scores.

    Raises:
        NotImplementedError: the layer uses a soft cap or attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a soft cap or with sinks is not supported")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast converts matrix products only, so rotary embeddings return float32.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if layout.varlen is not None and layout.varlen.supports(query):
        return _attend_varlen(query, key, value, layout.varlen, scaling, sliding_window), None
    return _attend_per_response(query, key, value, layout, scaling, sliding_window), None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, at: Varlen, scale: float | None, window: int | None
) -> Tensor:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    if at.sharing is not None:
        s = at.sharing
        k = _Gather.apply(k, s.source, s.first_key, s.shared, s.copies, s.present)
        v = _Gather.apply(v, s.source, s.first_key, s.shared, s.copies, s.present)
    back = -1 if window is None else window - 1
    return at.kernel(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, scale, back)[None]


class _Gather(torch.autograd.Function):
    """Select rows by `SharedPrompts.source`. The gradient is a gather, too.

    torch's own gradient of indexing adds bfloat16 numbers in the order in which threads arrive.
    This gradient sums the copies of a row in float32, in a fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        first_key: Tensor,
        shared: Tensor,
        copies: Tensor,
        present: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(first_key, shared, copies, present)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        first_key, shared, copies, present = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        several = grad[copies] * present[:, :, None, None]
        total = several.sum(1, dtype=wide).to(grad.dtype)
        summed = grad.index_select(0, first_key).index_copy(0, shared, total)
        return summed, None, None, None, None, None


def _attend_per_response(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float | None,
    window: int | None,
) -> Tensor:
    queries, keys, values = (x.split(layout.pieces, dim=2) for x in (query, key, value))
    out = []
    p = 0
    for count in layout.responses:
        for r in range(p + 1, p + 1 + count):
            # The prompt's queries are computed again with every response. This keeps the square
            # shape that fast kernels support, and costs attention only.
            q, k, v = (torch.cat([x[p], x[r]], dim=2) for x in (queries, keys, values))
            mask = _window_mask(q.shape[2], window, q.device)
            with sdpa_kernel(SDPA_BACKENDS):
                y = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
                )
            out.append(y if r == p + 1 else y[:, :, layout.pieces[p] :])
        p += 1 + count
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of a sliding window; None if the window covers the whole piece."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return (back >= 0) & (back < window)


def varlen(
    layout: Layout, device: torch.device, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF
) -> Varlen:
    """Return the arguments of `kernel` for a layout, on the device.

    A prompt with only one response forms one sequence with this response and is not copied.
    """
    queries, keys = [], []
    source, first_key, shared, copies = [], [], [], []
    piece = token = key = 0  # the offsets of the next piece, token and key
    for count in layout.responses:
        prompt, *responses = layout.pieces[piece : piece + 1 + count]
        piece += 1 + count
        if count == 1:
            prompt, responses = prompt + responses[0], []
        start, firsts = token, [key]
        for length in (prompt, *responses):
            before = prompt if token > start else 0
            queries.append(length)
            keys.append(before + length)
            source += [torch.arange(start, start + before), torch.arange(token, token + length)]
            first_key.append(torch.arange(key + before, key + before + length))
            if before:
                firsts.append(key)
            token += length
            key += before + length
        if responses:
            at = torch.arange(prompt)
            shared.append(start + at)
            copies.append(torch.tensor(firsts) + at[:, None])

    def to_device(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    sharing = None
    if shared:
        widest = max(c.shape[1] for c in copies)
        padded = [nn.functional.pad(c, (0, widest - c.shape[1]), value=-1) for c in copies]
        index = to_device(torch.cat(padded))
        sharing = SharedPrompts(
            to_device(torch.cat(source)),
            to_device(torch.cat(first_key)),
            to_device(torch.cat(shared)),
            index.clamp(min=0),
            index >= 0,
        )
    cu_q = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    cu_k = torch.tensor([0, *keys]).cumsum(0, dtype=torch.int32)
    longest = _next_power_of_two(max(queries)), _next_power_of_two(max(keys))
    return Varlen(kernel, dtypes, to_device(cu_q), to_device(cu_k), *longest, sharing)


def _next_power_of_two(n: int) -> int:
    """Return the next power of two, at least 128.

    Kernels treat a single query as a special case.
    """
    return max(128, 1 << (n - 1).bit_length())


# --- kernels for sequences of different lengths --------------------------------------------------


@cache
def kernel_for(device: torch.device) -> Kernel | None:
    """Return flash-attention's kernel if it is installed, else torch's own; None if neither fits.

    All supported versions (flash-attention since 2.1; torch's varlen is one of these) align the
    mask at the last key, as `Kernel` says. With another alignment, the logits would differ, and
    `verify_packing` would refuse the model.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if torch.cuda.get_device_capability(device)[0] == 9:
        try:
            from flash_attn_interface import flash_attn_varlen_func  # type: ignore

            return _flash(flash_attn_varlen_func)
        except ImportError:
            pass
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore

        return _flash(flash_attn_varlen_func)
    except ImportError:
        return torch_kernel


HAS_GQA = "enable_gqa" in signature(varlen_attn).parameters
"""True if torch's own kernel shares keys between query heads."""


def torch_kernel(
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
    """Run `torch.nn.attention.varlen` as a `Kernel`."""
    options: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if HAS_GQA:
            options["enable_gqa"] = True
        else:
            group_size = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    options |= {"scale": scale, "window_size": (window, 0)}
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)  # type: ignore[return-value]


def _flash(function: Callable[..., Any]) -> Kernel:
    """Wrap `flash_attn_varlen_func` of flash-attention 2 or 3 as a `Kernel`."""

    def kernel(*arguments: Any) -> Tensor:
        *sequences, scale, window = arguments
        out = function(
            *sequences,
            softmax_scale=scale,
            causal=True,
            window_size=(window, 0 if window >= 0 else -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return out[0] if isinstance(out, tuple) else out

    return kernel


AttentionInterface.register(PACKED, packed_attention)
