"""Weights in buckets: many tensors in one allocation, and the pickle that an SGLang server reads.

A pickle contains names, shapes and a handle of the memory. It is the only format that the server
supports. A pickle can run code of its writer, so pickles are sent in one direction only: agentrl
writes them for servers that it started with its own admin key, and never reads one.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

BUCKET_BYTES = 2**30 // 3
"""The most bytes of a bucket, except if a single tensor is larger. Three are in memory: one is
sent, one is packed, and the tensors of one are still separate."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Named tensors of one dtype, one after the other, without gaps."""

    flat: Tensor
    """All tensors, (N,)."""
    names: list[str]
    shapes: list[torch.Size]
    last: bool
    """True if it is the last bucket of the update."""

    @property
    def bytes(self) -> Tensor:
        """Return the same memory as uint8."""
        return self.flat.view(torch.uint8)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name, as views of `flat`."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)


def make_buckets(
    weights: Iterable[tuple[str, Tensor]], *, limit: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Copy named tensors into buckets, in their order.

    A bucket has one dtype, because a view of another dtype would need aligned bytes. It is on the
    device of its tensors. References to tensors are kept only until their bucket is full.

    Args:
        weights: at least one named tensor.
        limit: the most bytes of a bucket; a larger tensor gets its own bucket.
    """
    pending: list[tuple[str, Tensor]] = []
    kind, size = None, 0
    for name, tensor in weights:
        if pending and (size + tensor.nbytes > limit or kind != (tensor.dtype, tensor.device)):
            yield _pack(pending, last=False)
            size = 0
        pending.append((name, tensor))
        kind, size = (tensor.dtype, tensor.device), size + tensor.nbytes
    assert pending, "no weights"
    yield _pack(pending, last=True)


@torch.no_grad()
def _pack(pending: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    """Return a bucket of the pending tensors, and clear the list."""
    names, tensors = map(list, zip(*pending, strict=True))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    pending.clear()
    return Bucket(flat, names, [t.shape for t in tensors], last)


def serialize(bucket: Bucket) -> bytes:
    """Return a pickle from which one process of a server reads a bucket.

    It has a handle of the memory, and the names and ranges of the tensors. The process must read it
    exactly once, and the bucket must exist until then.
    """
    sizes = (shape.numel() * bucket.flat.itemsize for shape in bucket.shapes)
    ranges = pairwise(accumulate(sizes, initial=0))
    metadata = [
        # SGLang's own class is not importable here. SGLang reads only these fields.
        SimpleNamespace(
            name=name,
            shape=shape,
            dtype=bucket.flat.dtype,
            start_idx=start,
            end_idx=end,
            numel=end - start,
        )
        for name, shape, (start, end) in zip(bucket.names, bucket.shapes, ranges, strict=True)
    ]
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _reduce  # type: ignore[attr-defined]
    with _shared_by_name():
        pickler.dump({"flattened_tensor": bucket.bytes, "metadata": metadata})
    return buffer.getvalue()


_DEVICE = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name a GPU by its UUID.

    The server may count GPUs differently, and can read the UUID. torch keeps shared memory until it
    is released, and makes the reader wait for writes that were pending at the time of pickling.
    """
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by name within the block.

    The alternative, file descriptors, can only be passed to child processes of this process.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
