"""Keys and values of all rows, written in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache


class RowCache(Cache):
    """A transformers cache whose rows have lengths of their own.

    Each layer has two tensors (R, kv_heads, C, head_dim), made when the layer first writes. Before
    a forward pass, `feed_front` or `feed_rows` says which rows and positions its tokens are. The
    attention mask hides what lies past a row's end.
    """

    def __init__(self):
        super().__init__(layers=[])
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._shape = (0, 0)
        self._place: tuple[Any, ...] = ()
        self._source: Any = slice(None)
        self._view: Any = None

    def feed_front(self, positions: torch.Tensor, length: int) -> None:
        """The next pass feeds one token to each of the first N rows.

        Args:
            positions: (N) where each row's token goes.
            length: how many positions attention shall see.
        """
        n = positions.shape[0]
        self._place = (torch.arange(n, device=positions.device), slice(None), positions)
        self._source = (slice(None), slice(None), 0)
        self._view = (slice(n), slice(None), slice(length))

    def feed_rows(
        self, rows: torch.Tensor, positions: torch.Tensor, real: torch.Tensor, length: int
    ) -> None:
        """The next pass feeds T tokens, right-padded, to each of M rows anywhere.

        Args:
            rows: (M).
            positions: (M, T).
            real: (M, T), False where padded: nothing is written there.
            length: how many positions attention shall see; 0 if the rows hold nothing yet, so that
                it need only see the new ones.
        """
        self._place = (rows[:, None].expand_as(positions)[real], slice(None), positions[real])
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
        """Called by each attention layer: store the new keys and values, return those to see."""
        if layer_idx == len(self._tensors):
            # Zeros, since a masked position must hold something finite: 0 * NaN is NaN.
            self._tensors.append((self._room_like(key_states), self._room_like(value_states)))
        seen = []
        for held, new in zip(self._tensors[layer_idx], (key_states, value_states), strict=True):
            if isinstance(self._source, torch.Tensor):
                held[self._place] = new.transpose(1, 2)[self._source]
            else:
                held[self._place] = new[self._source]
            seen.append(new if self._view is None else held[self._view])
        return seen[0], seen[1]

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for so many rows and positions."""
        self._shape = (rows, capacity)
        for i, layer in enumerate(self._tensors):
            grown = self._room_like(layer[0]), self._room_like(layer[1])
            for new, old in zip(grown, layer, strict=True):
                new[: old.shape[0], :, : old.shape[2]] = old
            self._tensors[i] = grown

    def copy(self, moves: list[tuple[int, int]], length: int) -> None:
        """Copy the first positions of rows to rows, (from, to), all at the same time."""
        source, target = [s for s, _ in moves], [t for _, t in moves]
        for tensor in self._all():
            tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, row: int) -> None:
        """Forget a row whose numbers are broken."""
        for tensor in self._all():
            tensor[row] = 0

    def _all(self) -> list[torch.Tensor]:
        return [tensor for layer in self._tensors for tensor in layer]

    def _room_like(self, states: torch.Tensor) -> torch.Tensor:
        rows, capacity = self._shape
        return states.new_zeros(rows, states.shape[1], capacity, states.shape[3])
