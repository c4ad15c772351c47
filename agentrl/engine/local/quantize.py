"""Linear layers in 4 bits, for the frozen base below LoRA adapters (QLoRA, arXiv:2305.14314).

A weight is one of the 16 numbers of NF4, times the scale of its block of 64 weights: 4.5 bits in
total. Each product makes the weights in full and drops them, so the numbers are exactly those of a
model that holds these rounded weights. That model is the one that learns, and the one that engines
and exports get.

The numbers are those of bitsandbytes, whose kernels are not used. Those of its layers differ with
and without a gradient, and those for CPUs (0.50) take wrong scales for rows of other lengths than
whole blocks. torch.compile makes one kernel of `dequantize` on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of 4 bits: quantiles of a normal distribution (appendix E of the paper)."""
BLOCK = 64
"""The weights that share a scale."""
BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK
"""Bytes of a weight and its part of a scale, a float32."""


class Linear4bit(nn.Module):
    """A frozen linear layer in 4 bits."""

    packed: Tensor
    scales: Tensor
    pairs: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device | str):
        """Quantize a layer.

        Args:
            layer: its weight is read, its bias is used.
            device: where the quantized weight is kept.
        """
        super().__init__()
        self.shape = layer.out_features, layer.in_features
        self.bias, self.dtype = layer.bias, layer.weight.dtype
        packed, scales = quantize(layer.weight.detach().to(device))
        # Buffers that are not saved: neither sharded nor trained, and made again from the files.
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("pairs", pairs_of_levels(device), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rounded weight, (out, in), in the precision that it had."""
        return dequantize(self.packed, self.scales, self.pairs, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, (..., out)."""
        weight = self.packed, self.scales, self.pairs, self.shape
        return _Product.apply(x, *weight, self.bias)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """A linear layer that keeps no full weight for the backward pass, which makes it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        pairs: Tensor,
        shape: tuple[int, int],
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, pairs)
        ctx.shape = shape
        return functional.linear(x, dequantize(packed, scales, pairs, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        packed, scales, pairs = ctx.saved_tensors
        weight = dequantize(packed, scales, pairs, ctx.shape, grad.dtype)
        return grad @ weight, None, None, None, None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the NF4 numbers of a weight, two in a byte, and the scales of its blocks, float32."""
    flat = weight.float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(NF4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    relative = blocks / scales.clamp_min(torch.finfo(scales.dtype).tiny)[:, None]
    numbers = torch.bucketize(relative, middles, right=True).to(torch.uint8).view(-1, 2)
    return numbers[:, 0] << 4 | numbers[:, 1], scales


def pairs_of_levels(device: torch.device | str) -> Tensor:
    """Return the two numbers that each byte stands for, (256, 2)."""
    levels = torch.tensor(NF4, device=device)
    return torch.cartesian_prod(levels, levels)


def dequantize(
    packed: Tensor, scales: Tensor, pairs: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight that `quantize` rounded."""
    blocks = functional.embedding(packed.int(), pairs).view(-1, BLOCK) * scales[:, None]
    return blocks.flatten()[: math.prod(shape)].view(shape).to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight as `Linear4bit` has it, in the same precision."""
    rows, columns = weight.shape
    pairs = pairs_of_levels(weight.device)
    return dequantize(*quantize(weight), pairs, (rows, columns), weight.dtype)
