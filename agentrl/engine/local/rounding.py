"""The rounding of a model: how much its logprobs depend on the kernels that compute them.

Two kernels of one precision round differently. What a difference of rounding does to a logprob
depends on the model: one that is certain of its tokens has large logits and rounds more. So limits
of such differences are multiples of what the model's own passes show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MAX_ROUNDINGS = 3.0
"""The largest difference that rounding explains, as a multiple of the change that `rounded_again`
makes. Two kernels of one precision differ by less than one such change."""


@contextmanager
def rounded_again(model: nn.Module, seed: int) -> Iterator[None]:
    """Add a random rounding error to the results of all layers and functions, within the block.

    The error is as large as the rounding in the precision of the result.

    Args:
        model: the model; its passes within the block are not compiled.
        seed: another seed gives other errors.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(_module: nn.Module, _inputs: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        device = result.device
        random = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
        error = torch.empty(result.shape, device=device).uniform_(-1, 1, generator=random)
        return result + (result * error * (torch.finfo(result.dtype).eps / 2)).to(result.dtype)

    # Compiled layers would ignore the hooks, or keep them.
    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(perturb).remove)
        yield
