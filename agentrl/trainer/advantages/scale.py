"""Rewards and advantages in units of their own spread, over the chosen tokens of a whole batch.

In float64, since a mean that rounds would make a spread of equal numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to a variance before it divides."""


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked entries to mean 0 and (unbiased) variance 1; 0 elsewhere.

    One entry alone becomes 0, and equal entries do: there is no spread to scale by.

    Args:
        x: any shape; what stands outside the mask is not read.
        mask: bool, the same shape.
    """
    chosen = x[mask].double()
    white = torch.zeros_like(x)
    if not _differ(chosen):
        return white
    centred = chosen - chosen.mean()
    return white.masked_scatter(mask, (centred / _std(centred)).to(x.dtype))


def unit_variance(x: Tensor, mask: Tensor) -> float:
    """What the masked entries are multiplied with to have (unbiased) variance 1; no shift.

    Args:
        x: any shape; what stands outside the mask is not read.
        mask: bool, the same shape.

    Returns:
        1 for one entry and for equal ones: there is no spread to scale by.
    """
    chosen = x[mask].double()
    return 1 / _std(chosen - chosen.mean()) if _differ(chosen) else 1.0


def _differ(chosen: Tensor) -> bool:
    return len(chosen) > 0 and bool(chosen.min() != chosen.max())


def _std(centred: Tensor) -> float:
    return (centred.square().sum().item() / (len(centred) - 1) + EPSILON) ** 0.5
