"""The engine's rows: what each holds besides keys and values, as a struct of arrays."""

from __future__ import annotations

from array import array
from typing import Literal

import numpy as np

from agentrl.engine.base import Sampling
from agentrl.trajectory import Generation

CHUNK = 128
"""Rows grow by this many tokens at least."""


class Rows:
    """R rows of up to C tokens; every attribute is an array whose first axis is the row.

    A row's first `cached` tokens have their keys and values in the cache. Decoding feeds the last
    token, so a row may decode once `cached == length - 1`.
    """

    def __init__(self):
        self.ids = np.zeros((0, 0), np.int32)
        """(R, C) all tokens: prompt and response so far."""
        self.logprobs = np.zeros((0, 0), np.float32)
        """(R, C) of the sampled tokens."""
        self.versions = np.zeros((0, 0), np.int32)
        """(R, C) of the policy that sampled them."""
        self.stop_ids = np.zeros((0, 1), np.int32)
        """(R, S) padded with -1."""
        self.length = np.zeros(0, np.int64)
        self.cached = np.zeros(0, np.int64)
        self.fed = np.zeros(0, np.int64)
        """How many of the present turn's prompt tokens a prefill pass computed for this row."""
        self.start = np.zeros(0, np.int64)
        """Where the present turn begins."""
        self.limit = np.zeros(0, np.int64)
        """The length at which the present turn is cut."""
        self.seed = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.has_stop_text = np.zeros(0, np.bool_)
        self.alive = np.zeros(0, np.bool_)
        """Samples tokens; a row that has just finished keeps its place until the next packing."""

    @property
    def shape(self) -> tuple[int, int]:
        """R and C."""
        return self.ids.shape[0], self.ids.shape[1]

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for at least so many rows and tokens, with some to spare."""
        old_rows, old_capacity = self.shape
        if rows > old_rows:
            rows = max(rows, old_rows * 2)
        if capacity > old_capacity:
            capacity = -(-max(capacity, old_capacity * 3 // 2) // CHUNK) * CHUNK
        rows, capacity = max(rows, old_rows), max(capacity, old_capacity)
        for name, held in vars(self).items():
            width = (capacity,) if name in ("ids", "logprobs", "versions") else held.shape[1:]
            grown = np.zeros((rows, *width), held.dtype)
            grown[tuple(slice(n) for n in held.shape)] = held
            setattr(self, name, grown)

    def swap(self, a: list[int], b: list[int]) -> None:
        """Exchange rows `a` with rows `b`."""
        for held in vars(self).values():
            held[a], held[b] = held[b], held[a]

    def begin_turn(
        self, row: int, prompt: np.ndarray, sampling: Sampling, seed: int, max_length: int
    ) -> None:
        """Put a turn's whole prompt into its row, and how to go on from there.

        What is cached counts as far as the prompt repeats it. The last token never does: decoding
        feeds it.
        """
        known = min(int(self.cached[row]), len(prompt) - 1)
        same = self.ids[row, :known] == prompt[:known]
        self.cached[row] = known if same.all() else same.argmin()
        self.ids[row, : len(prompt)] = prompt
        self.length[row] = self.start[row] = len(prompt)
        self.limit[row] = min(len(prompt) + sampling.max_tokens, max_length)
        self.fed[row] = 0
        self.seed[row] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.has_stop_text[row] = bool(sampling.stop)
        missing = len(sampling.stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        self.alive[row] = True

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """Each of `rows` gets the token that followed from its last one, which is cached now."""
        end = self.length[rows]
        self.ids[rows, end] = tokens
        self.logprobs[rows, end] = logprobs
        self.versions[rows, end] = version
        self.cached[rows] = end
        self.length[rows] = end + 1

    def sampled(self, row: int) -> np.ndarray:
        """The present turn's tokens so far."""
        return self.ids[row, self.start[row] : self.length[row]]

    def generation(self, row: int, finish_reason: Literal["stop", "length"]) -> Generation:
        """What the present turn has sampled."""
        turn = slice(self.start[row], self.length[row])
        prompt_tokens = int(self.start[row])
        return Generation(
            token_ids=array("i", self.ids[row, turn].tobytes()),
            logprobs=array("f", self.logprobs[row, turn].tobytes()),
            versions=array("i", self.versions[row, turn].tobytes()),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=max(0, prompt_tokens - 1 - int(self.fed[row])),
        )
