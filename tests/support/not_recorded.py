"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


class NotRecorded:
    """In place of `DecodeGraphs`: it runs the pass at once, for as many rows as a graph."""

    def __init__(self, run: Callable[..., torch.Tensor], failures: int = 0):
        self.run, self.shapes, self.failures = run, set(), failures

    def clear(self) -> None:
        pass

    def __call__(self, ids: torch.Tensor, *positions_and_length) -> torch.Tensor:
        self.shapes.add((len(ids), positions_and_length[-1]))
        if self.failures and len(self.shapes) == self.failures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.run(ids, *positions_and_length)
