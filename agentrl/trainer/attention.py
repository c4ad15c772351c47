"""Causal attention over rows packed side by side, so that none sees another.

    flat row     P1 A B | P2 C            a prompt stands once before all responses to it

Two ways lead to the same numbers. *Piece by piece*: every response is asked together with its
prompt, one call each; right everywhere, and the same bits every time on a CPU. *One call* of a
kernel that knows sequences of different lengths, on a GPU in half precision: the queries stay where
they are, cut into sequences, and keys and values are copied so that each response's prompt stands
before it:

    queries      P1 | A    | B    | P2 C
    keys         P1 | P1 A | P1 B | P2 C

What that takes (`Varlen`) is made once for a pack, not in every layer.
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
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
"""What the kernels of flash-attention take."""
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What torch may take piece by piece. cuDNN's gradients were found wrong where pieces of one length
have gradients of different strides coming in (torch 2.11, an H200, bfloat16)."""


Kernel = Callable[..., Tensor]
"""(q, k, v, cu_q, cu_k, max_q, max_k, scale, window) -> out.

q and out are (L, heads, d), k and v (K, key-value heads, d). Sequence i has the queries cu_q[i] to
cu_q[i + 1] and the keys cu_k[i] to cu_k[i + 1], both (sequences + 1,) int32. Its last query sees
its last key, every query before that one key less; none sees more than `window` keys back, -1 for
no such limit.
"""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Where K keys come from, of L tokens, S of which stand in prompts of several responses."""

    source: Tensor
    """(K,) the token of each key."""
    first_key: Tensor
    """(L,) one key made from each token."""
    shared: Tensor
    """(S,) the tokens of which there are several keys."""
    copies: Tensor
    """(S, C) all their keys, filled up with 0."""
    present: Tensor
    """(S, C) bool: what is no filling."""


@dataclass(frozen=True, slots=True)
class Varlen:
    """A layout as a kernel wants it."""

    kernel: Kernel
    dtypes: tuple[torch.dtype, ...]
    """What the kernel takes."""
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    """Not below the longest sequence; powers of two, that few programs are compiled."""
    sharing: SharedPrompts | None
    """None: the keys are the tokens as they stand."""

    def supports(self, query: Tensor) -> bool:
        """Whether the kernel can do it."""
        d = query.shape[-1]
        return query.dtype in self.dtypes and d % 8 == 0 and d <= MAX_HEAD_SIZE


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of the flat row are which piece."""

    pieces: list[int]
    """Their lengths: a prompt, the responses to it, the next prompt, ..."""
    responses: list[int]
    """How many follow each prompt."""
    varlen: Varlen | None = None
    """What one call needs, where there is a kernel for it."""

    def to(self, device: torch.device) -> Layout:
        """The same, ready for a model on that device."""
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
    """Causal attention of every response with its prompt; transformers calls it in every layer.

    Args:
        module: the attention layer.
        query: (1, heads, L, d).
        key: (1, key-value heads, L, d).
        value: the same.
        attention_mask: None; the layout says it all.
        layout: of the L tokens.
        scaling: of the scores.
        sliding_window: how far back a token sees, itself included; None for all the way.
        softcap: refused.
        s_aux: refused.

    Returns:
        (1, L, heads, d), and None in place of the scores.

    Raises:
        NotImplementedError: the layer wants more than causal attention.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a soft cap or with sinks")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Rotary embeddings leave float32 behind where only matrix products are cast.
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
    """Rows by index, `SharedPrompts.source`; its gradient is a gather too.

    The gradient of torch's own indexing adds into bfloat16 in whatever order threads arrive. Here
    the copies of a row are summed in float32, in one order.
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
        return (
            grad.index_select(0, first_key).index_copy(0, shared, total),
            None,
            None,
            None,
            None,
            None,
        )


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
            # The prompt's queries are asked again with every response: that keeps the square form
            # that fast kernels know, and costs attention only.
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
    """The mask of a window that does not reach over the whole piece."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return (back >= 0) & (back < window)


def varlen(
    layout: Layout,
    device: torch.device,
    kernel: Kernel,
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES,
) -> Varlen:
    """What one call of `kernel` needs for a layout, on the device.

    A prompt and its only response are one sequence, copied nowhere.
    """
    queries, keys = [], []
    source, first_key, shared, copies = [], [], [], []
    piece = token = key = 0  # where the next ones begin
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
    """The next one; not too small, as kernels treat a single query as something else."""
    return max(128, 1 << (n - 1).bit_length())


# --- kernels for sequences of different lengths --------------------------------------------------


@cache
def kernel_for(device: torch.device) -> Kernel | None:
    """The fastest kernel that is there: flash-attention if it is installed, or torch's own.

    All versions that are used (flash-attention since 2.1; torch's varlen is one of these) align a
    mask at the last key, as `Kernel` says; `verify_packing` refuses what would not.
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
"""Whether torch's own kernel shares keys between query heads by itself."""


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
    """`Kernel` by `torch.nn.attention.varlen`."""
    more: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if HAS_GQA:
            more["enable_gqa"] = True
        else:
            each = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    more |= {"scale": scale, "window_size": (window, 0)}
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **more)  # type: ignore[return-value]


def _flash(function: Callable[..., Any]) -> Kernel:
    """`Kernel` by a function of flash-attention 2 or 3, which share these arguments."""

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
