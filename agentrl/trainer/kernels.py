"""Kernels for attention over sequences of different lengths, on a GPU in half precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Kernel = Callable[..., Tensor]
"""(q, k, v, cu_q, cu_k, max_q, max_k, scale, window) -> out.

q and out are (L, heads, d), k and v (K, key-value heads, d). Sequence i has the queries cu_q[i] to
cu_q[i + 1] and the keys cu_k[i] to cu_k[i + 1], both (sequences + 1,) int32. Its last query sees
its last key, every query before that one key less; none sees more than `window` keys back, -1 for
no such limit.
"""


@cache
def kernel_for(device: torch.device) -> Kernel | None:
    """The fastest kernel that is there: flash-attention if it is installed, or torch's own.

    All versions that are used (flash-attention since 2.1; torch's varlen is one of these) align a
    mask at the last key, as `Kernel` says; `prove_packing` refuses what would not.
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


GROUPED = "enable_gqa" in signature(varlen_attn).parameters
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
        if GROUPED:
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
