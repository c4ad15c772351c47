"""All weights in parts, each in one allocation: few things are sent, and little memory is held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 512 * 2**20
"""Most bytes of a bucket, but for a tensor that is larger alone."""
FLATTENED = "flattened_bucket"
"""The server's name for what comes as one tensor of bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Copies of named tensors one after the other, without gaps."""

    flat: Tensor
    """All of them, of one dtype, (N,)."""
    names: list[str]
    shapes: list[torch.Size]
    last: bool
    """Whether no other comes after it."""

    @property
    def bytes(self) -> Tensor:
        """The same memory as uint8."""
        return self.flat.view(torch.uint8)


def cut(
    weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None, limit: int
) -> Iterator[Bucket]:
    """Copy named tensors into buckets, in their order.

    A bucket has one dtype, since a view of another would need its bytes aligned, and lies where its
    tensors do. Tensors are held until their bucket is full, and no longer.

    Args:
        weights: at least one.
        dtype: what floating-point tensors are cast to; None keeps theirs.
        limit: most bytes of a bucket; a larger tensor gets one of its own.
    """
    held: list[tuple[str, Tensor]] = []
    kind, size = None, 0
    for name, tensor in weights:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        bytes_ = tensor.numel() * target.itemsize
        if held and (size + bytes_ > limit or kind != (target, tensor.device)):
            yield _pack(held, kind, last=False)
            size = 0
        held.append((name, tensor))
        kind, size = (target, tensor.device), size + bytes_
    assert kind is not None, "no weights"
    yield _pack(held, kind, last=True)


@torch.no_grad()
def _pack(
    held: list[tuple[str, Tensor]], kind: tuple[torch.dtype, torch.device] | None, *, last: bool
) -> Bucket:
    """A bucket of what is held; then nothing is."""
    assert kind is not None
    names, tensors = map(list, zip(*held, strict=True))
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=kind[0], device=kind[1])
    parts = flat.split([t.numel() for t in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)
    held.clear()
    return Bucket(flat, names, [t.shape for t in tensors], last)
