"""Decode passes as CUDA graphs: one launch for a whole pass, instead of one for each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LENGTHS = 256
"""Callers round the number of visible positions up to a multiple of this, and the number of rows to
a power of two, so that few graphs are recorded."""

DecodePass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Returns the logits (N, V) of tokens (N) at positions (N) with rotary positions (N), which see the
first `length` positions."""


class DecodeGraphs:
    """The graphs of a model's decode pass, each recorded when it is first needed.

    The time of a decode pass of a small model is the time that Python needs to launch its kernels:
    66 ms for the 30 layers of SmolLM2-135M and 256 rows, of which an H100 computes for 5 ms. A
    graph repeats the kernels of the recorded pass on the same tensors. So it uses new weights if
    they are written in place, but new tensors of keys and values need new graphs (`clear`).
    """

    def __init__(self, run: DecodePass):
        """Record nothing yet; `run` is the decode pass."""
        self._run = run
        self.clear()

    def clear(self) -> None:
        """Forget all graphs."""
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()  # The memory that the graphs share.

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rotary: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return the logits (N, V), as `run` does. The next call overwrites them.

        Args:
            ids: the tokens (N).
            positions: their positions (N).
            rotary: their rotary positions (N).
            length: the number of positions that they see.

        Raises:
            RuntimeError: the pass cannot be recorded, or the graph computes other logits.
        """
        key = len(ids), length
        if key not in self._recorded:
            inputs = ids, positions, rotary
            self._recorded[key] = _Recorded(self._run, inputs, length, self._pool)
        recorded = self._recorded[key]
        for held, new in zip(recorded.inputs, (ids, positions, rotary), strict=True):
            held.copy_(new)
        recorded.graph.replay()
        return recorded.logits


class _Recorded:
    """A graph, and the tensors that it reads and writes."""

    def __init__(
        self,
        run: DecodePass,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        length: int,
        pool: Any,
    ):
        ids, positions, rotary = self.inputs = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Libraries allocate their work spaces in the first pass.
            expected = run(ids, positions, rotary, length)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[ids.device.index]
        state = generator.clone_state()
        try:
            # The learner may use the GPU in another thread at the same time.
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.logits = run(ids, positions, rotary, length)
        except Exception:
            # PyTorch leaves the generator as within a capture: dropout would fail from now on.
            generator.graphsafe_set_state(state)
            raise
        self.graph.replay()
        if not torch.allclose(self.logits, expected, rtol=0.02, atol=0.02, equal_nan=True):
            raise RuntimeError("the graph's logits differ from those of the pass itself")
