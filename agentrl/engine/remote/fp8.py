"""Weights of 8 bits for servers: `rollout.quantization=fp8`.

Each square of 128 x 128 weights has one scale, as in the files of DeepSeek-V3 (arXiv:2412.19437,
section 3.3). A server that quantizes while it loads cannot take new weights into its tensors of 8
bits. So it starts as if its files had this format, without reading them, and the learner quantizes
what it sends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The section `quantization_config` of a model whose files have such weights."""
ROUNDING = 16
"""How much coarser e4m3 rounds than bfloat16: it has 3 bits after the point instead of 7."""
NOT_QUANTIZED = ("gate.weight", "router.weight")
"""The ends of the names of routers of experts."""


def launch_flags(base_is_sent: bool) -> list[str]:
    """Return the arguments of an SGLang server.

    Args:
        base_is_sent: True if the learner sends all weights; False if it sends adapters, and the
            server quantizes the base of its files.
    """
    if not base_is_sent:
        return ["--quantization", "fp8"]
    overrides = json.dumps({"quantization_config": FORMAT})
    return ["--load-format", "dummy", "--json-model-override-args", overrides]


def quantize(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, and instead of each matrix of a layer one of 8 bits and its scales.

    Args:
        weights: the tensors by their names in the model's files.
    """
    for name, weight in weights:
        if weight.dim() != 2 or ".layers." not in name or name.endswith(NOT_QUANTIZED):
            yield name, weight
            continue
        quantized, scales = quantize_matrix(weight)
        yield name, quantized
        yield f"{name}_scale_inv", scales


@torch.no_grad()
def quantize_matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, M) float8_e4m3fn, and (ceil(N / 128), ceil(M / 128)) float32 scales of the blocks.

    A block's largest absolute value becomes the largest number of the format, 448.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    rows, columns = weight.shape
    blocks = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / largest
    quantized = (blocks / scales).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    return quantized[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()
