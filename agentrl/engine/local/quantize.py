"""Linear layers in 4 bits, for the frozen base below LoRA adapters (QLoRA, arXiv:2305.14314).

A weight is one of the 16 numbers of NF4, times the scale of its block of 64 weights: 4.5 bits in
total. Each product makes the weights in full and drops them, so the numbers are exactly those of a
model that holds these rounded weights. That model is the one that learns, and the one that engines
and exports get.

bitsandbytes has the kernels. Its own layer is not used: without a gradient it calls other kernels,
whose products differ.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.errors import ConfigError
from agentrl.installation import install_command

BLOCK = 64
"""The weights that share a scale."""
BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK
"""Bytes of a weight and its part of a scale, a float32."""


class Linear4bit(nn.Module):
    """A frozen linear layer in 4 bits."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device | str):
        """Quantize a layer.

        Args:
            layer: its weight is read, its bias is used.
            device: where the quantized weight is kept.

        Raises:
            ConfigError: bitsandbytes is not installed.
        """
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias, self.dtype = layer.bias, layer.weight.dtype
        packed, scales = quantize(layer.weight.detach().to(device))
        # Buffers that are not saved: neither sharded nor trained, and made again from the files.
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rounded weight, (out, in), in the precision that it had."""
        shape = self.out_features, self.in_features
        return dequantize(self.packed, self.scales, shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, (..., out)."""
        shape = self.out_features, self.in_features
        return _Product.apply(x, self.packed, self.scales, shape, self.bias)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """A linear layer that keeps no full weight for the backward pass, which makes it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        shape: tuple[int, int],
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return functional.linear(x, dequantize(packed, scales, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        packed, scales = ctx.saved_tensors
        return grad @ dequantize(packed, scales, ctx.shape, grad.dtype), None, None, None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the NF4 numbers of a weight, two in a byte, and the scales of its blocks, float32.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    # It warns that kernels for other products are not installed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401  # registers kernels
    except ImportError:
        raise ConfigError(
            f"model.quantization=nf4 needs bitsandbytes: {install_command('4bit')}"
        ) from None
    return torch.ops.bitsandbytes.quantize_4bit(
        weight.float().contiguous(), BLOCK, "nf4", torch.uint8
    )


def dequantize(
    packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight that `quantize` rounded."""
    made = torch.float32 if dtype is torch.float64 else dtype  # There are no wider kernels.
    # As one row: for rows of other lengths than whole blocks, the kernel for CPUs (0.50.2) takes
    # the scales of other blocks.
    row = 1, math.prod(shape)
    weight = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, BLOCK, "nf4", row, made)
    return weight.view(shape).to(dtype)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight as `Linear4bit` has it, in the same precision."""
    rows, columns = weight.shape
    return dequantize(*quantize(weight), (rows, columns), weight.dtype)
