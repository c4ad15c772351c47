"""The rows of the engine: `CachedRows`, a struct of arrays, and `RowCache`, keys and values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np
import torch
from transformers import Cache

from agentrl.engine.base import Sampling
from agentrl.images import RowImage
from agentrl.trajectory import Generation

GROWTH = 128
"""The capacity of rows is a multiple of this number of tokens."""


@dataclass(frozen=True)
class ImagePart:
    """The part of a row up to the end of its last image.

    Attributes:
        images: the images of the row.
        starts: where the placeholder tokens of each image begin.
        positions: (3, T) the rotary positions of the tokens of this part.
    """

    images: tuple[RowImage, ...]
    starts: tuple[int, ...]
    positions: np.ndarray

    @property
    def end(self) -> int:
        """The number of tokens of this part."""
        return self.positions.shape[1]

    @property
    def shift(self) -> int:
        """The rotary position of a token after this part, less its index."""
        return int(self.positions.max()) + 1 - self.end


def _first_difference(a: ImagePart | None, b: ImagePart | None, end: int) -> int:
    """Return where the first image begins that differs in two rows; `end` if none does.

    Placeholder tokens are equal, whatever the image.
    """
    rows = [list(zip(p.images, p.starts, strict=True)) if p else [] for p in (a, b)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*rows, strict=False)))
    return min([row[same][1] for row in rows if len(row) > same], default=end)


class CachedRows:
    """R rows of up to C tokens. The first axis of every attribute is the row.

    The keys and values of the first `cached` tokens of a row are in the cache. Decoding feeds the
    last token, so a row can decode if `cached == length - 1`.
    """

    def __init__(self, experts_width: int = 0):
        """Start without rows; each token has `experts_width` experts."""
        self.ids = np.zeros((0, 0), np.int32)
        """(R, C) all tokens: the prompt and the response so far."""
        self.logprobs = np.zeros((0, 0), np.float32)
        """(R, C) logprobs of the sampled tokens."""
        self.versions = np.zeros((0, 0), np.int32)
        """(R, C) versions of the policy that sampled the tokens."""
        self.kept = np.zeros((0, 0), object)
        """(R, C) the ids that top_p and top_k keep for the sampled tokens, in rows of
        `returns_kept`."""
        self.experts = np.zeros((0, 0), np.dtype((np.void, 2 * experts_width)))
        """(R, C) the int16 numbers of the experts of each token; without `Routers` of 0 bytes."""
        self.experts_from = np.zeros(0, np.int64)
        """The first token whose experts the current turn returns; -1: it returns none."""
        self.recorded = np.zeros(0, np.int64)
        """The number of tokens whose experts stay as they are in the current turn, also if new
        weights process them again: the tokens after them were sampled with these."""
        self.stop_ids = np.zeros((0, 1), np.int32)
        """(R, S), padded with -1."""
        self.image_part = np.zeros(0, object)
        """The `ImagePart` of rows with images; 0 or None for others."""
        self.image_end = np.zeros(0, np.int64)
        """The number of tokens up to the end of the last image."""
        self.shift = np.zeros(0, np.int64)
        """The rotary position of a token after the images, less its index."""
        self.length = np.zeros(0, np.int64)
        self.cached = np.zeros(0, np.int64)
        self.prefilled = np.zeros(0, np.int64)
        """How many prompt tokens of the current turn a prefill pass computed for this row."""
        self.start = np.zeros(0, np.int64)
        """The position of the first token of the current turn."""
        self.limit = np.zeros(0, np.int64)
        """The length at which the current turn is cut."""
        self.seed = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.returns_kept = np.zeros(0, np.bool_)
        self.has_stop_text = np.zeros(0, np.bool_)
        self.alive = np.zeros(0, np.bool_)
        """True if the row samples tokens. A row that has just finished stays until the next
        packing."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return R and C."""
        return self.ids.shape[0], self.ids.shape[1]

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for at least `rows` rows and `capacity` tokens per row, plus a reserve.

        The number of rows is a power of two: `Decoder.decode` rounds up to one for its graphs.
        """
        old_rows, old_capacity = self.shape
        if rows > old_rows:
            rows = 1 << (rows - 1).bit_length()
        if capacity > old_capacity:
            capacity = -(-max(capacity, old_capacity * 3 // 2) // GROWTH) * GROWTH
        rows, capacity = max(rows, old_rows), max(capacity, old_capacity)
        for name, array_ in vars(self).items():
            width = (capacity,) if array_.ndim == 2 and name != "stop_ids" else array_.shape[1:]
            grown = np.zeros((rows, *width), array_.dtype)
            grown[tuple(slice(n) for n in array_.shape)] = array_
            setattr(self, name, grown)

    def swap(self, a: list[int], b: list[int]) -> None:
        """Exchange rows `a` with rows `b`."""
        for array_ in vars(self).values():
            array_[a], array_[b] = array_[b], array_[a]

    def begin_turn(
        self,
        row: int,
        prompt: np.ndarray,
        sampling: Sampling,
        seed: int,
        max_length: int,
        image_part: ImagePart | None = None,
    ) -> None:
        """Write the whole prompt of a turn and its sampling parameters into its row.

        The cache stays valid as far as the prompt repeats the cached tokens and images. The last
        token is never counted as cached, because decoding feeds it.
        """
        cached = min(int(self.cached[row]), len(prompt) - 1)
        same = self.ids[row, :cached] == prompt[:cached]
        cached = cached if same.all() else int(same.argmin())
        cached = min(cached, _first_difference(self.image_part[row] or None, image_part, cached))
        self.cached[row] = cached
        self.image_part[row] = image_part
        self.image_end[row] = image_part.end if image_part else 0
        self.shift[row] = image_part.shift if image_part else 0
        self.ids[row, : len(prompt)] = prompt
        self.length[row] = self.start[row] = len(prompt)
        self.limit[row] = min(len(prompt) + sampling.max_tokens, max_length)
        self.prefilled[row] = 0
        self.seed[row] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.returns_kept[row] = sampling.returns_kept
        self.experts_from[row] = -1 if sampling.experts_from is None else sampling.experts_from
        self.recorded[row] = cached
        self.has_stop_text[row] = bool(sampling.stop)
        missing = len(sampling.stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        self.alive[row] = True

    def record(self, rows: np.ndarray, positions: np.ndarray, experts: np.ndarray) -> None:
        """Record the experts of tokens, (N, width) int16, except of those before `recorded`.

        Args:
            rows: (N).
            positions: (N), those of a row in sequence.
            experts: (N, width) int16.
        """
        new = positions >= self.recorded[rows]
        at = rows[new], positions[new]
        self.experts[at] = np.ascontiguousarray(experts[new]).view(self.experts.dtype)[:, 0]
        np.maximum.at(self.recorded, at[0], at[1] + 1)

    def copy_experts(self, source: int, target: int, end: int) -> None:
        """Record the experts of the first `end` tokens of a row for an equal prefix of another."""
        if not self.experts.itemsize:
            return
        positions = np.arange(end)
        experts = self.experts[source, :end].view(np.int16).reshape(end, -1)
        self.record(np.full(end, target), positions, experts)

    def append(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        kept: np.ndarray | None,
    ) -> None:
        """Append the next token to each of `rows`, whose previous last token is now cached."""
        end = self.length[rows]
        self.ids[rows, end] = tokens
        self.logprobs[rows, end] = logprobs
        self.versions[rows, end] = version
        if kept is not None:
            self.kept[rows, end] = kept
        self.cached[rows] = end
        self.length[rows] = end + 1

    def turn_tokens(self, row: int) -> np.ndarray:
        """Return the tokens that the current turn has sampled so far."""
        return self.ids[row, self.start[row] : self.length[row]]

    def generation(self, row: int, finish_reason: Literal["stop", "length"]) -> Generation:
        """Return the current turn: its tokens, logprobs, versions and kept tokens."""
        turn = slice(self.start[row], self.length[row])
        prompt_tokens = int(self.start[row])
        kept = [*self.kept[row, turn]] if self.returns_kept[row] else []
        start = int(self.experts_from[row])
        experts = self.experts[row, start : self.length[row] - 1] if start >= 0 else b""
        return Generation(
            token_ids=array("i", self.ids[row, turn].tobytes()),
            logprobs=array("f", self.logprobs[row, turn].tobytes()),
            versions=array("i", self.versions[row, turn].tobytes()),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=max(0, prompt_tokens - 1 - int(self.prefilled[row])),
            kept_ids=array("i", b"".join(ids.tobytes() for ids in kept)),
            kept_counts=array("i", map(len, kept)),
            experts=array("h", bytes(experts)),
            experts_width=self.experts.itemsize // 2,
        )


class RowCache(Cache):
    """A transformers cache whose rows have different lengths.

    Each layer has two tensors (R, kv_heads, C, head_dim), created when the layer writes for the
    first time. Before a forward pass, `feed_front` or `feed_rows` sets the rows and positions of
    its tokens. The attention mask hides the positions after the end of a row.
    """

    def __init__(self):
        super().__init__(layers=[])
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._shape = (0, 0)
        self._target: tuple[Any, ...] = ()
        self._source: Any = slice(None)
        self._view: Any = None

    def feed_front(self, positions: torch.Tensor, length: int) -> None:
        """Prepare a pass that feeds one token to each of the first N rows.

        Args:
            positions: (N) the position of each row's token.
            length: the number of positions that attention sees.
        """
        n = positions.shape[0]
        self._target = (torch.arange(n, device=positions.device), slice(None), positions)
        self._source = (slice(None), slice(None), 0)
        self._view = (slice(n), slice(None), slice(length))

    def feed_rows(
        self, rows: torch.Tensor, positions: torch.Tensor, real: torch.Tensor, length: int
    ) -> None:
        """Prepare a pass that feeds T tokens, right-padded, to each of M rows.

        Args:
            rows: (M).
            positions: (M, T).
            real: (M, T), False for padding, which is not written.
            length: the number of positions that attention sees; 0 if the rows are empty, so that it
                needs to see only the new ones.
        """
        self._target = (rows[:, None].expand_as(positions)[real], slice(None), positions[real])
        self._source = real
        self._view = (rows, slice(None), slice(length)) if length else None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of a layer; return those that its attention sees.

        Each attention layer calls it.
        """
        if layer_idx == len(self._tensors):
            # Zeros, because a masked position must be finite: 0 * NaN is NaN.
            self._tensors.append((self._zeros_like(key_states), self._zeros_like(value_states)))
        visible = []
        for cached, new in zip(self._tensors[layer_idx], (key_states, value_states), strict=True):
            if isinstance(self._source, torch.Tensor):
                cached[self._target] = new.transpose(1, 2)[self._source]
            else:
                cached[self._target] = new[self._source]
            visible.append(new if self._view is None else cached[self._view])
        return visible[0], visible[1]

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows and `capacity` positions."""
        self._shape = (rows, capacity)
        for i, layer in enumerate(self._tensors):
            grown = self._zeros_like(layer[0]), self._zeros_like(layer[1])
            for new, old in zip(grown, layer, strict=True):
                new[: old.shape[0], :, : old.shape[2]] = old
            self._tensors[i] = grown

    def copy(self, moves: list[tuple[int, int]], length: int) -> None:
        """Copy the first positions of rows to other rows, (from, to), all at the same time."""
        source, target = [s for s, _ in moves], [t for _, t in moves]
        for tensor in self._tensors_of_all_layers():
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, row: int) -> None:
        """Set a row to zeros, because its values are NaN."""
        for tensor in self._tensors_of_all_layers():
            tensor[row] = 0

    def _tensors_of_all_layers(self) -> list[torch.Tensor]:
        return [tensor for layer in self._tensors for tensor in layer]

    def _zeros_like(self, states: torch.Tensor) -> torch.Tensor:
        rows, capacity = self._shape
        return states.new_zeros(rows, states.shape[1], capacity, states.shape[3])
