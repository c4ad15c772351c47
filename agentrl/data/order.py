"""The order of the training rows: a pure function of the position in the run."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows: each row once per epoch, in an order that depends on seed and epoch only.

    The position of a run in its data is one integer: the number of rows that the run has taken.

    With weights, an epoch has `weight` copies of each file. Of a fraction, an epoch takes the next
    rows of an endless sequence of the file's epochs: each row once before any row twice. For
    example, with a weight of 2.5 an epoch has all rows twice, and half of them once more; the next
    epoch takes the other half.
    """

    n_rows: int
    seed: int
    shuffle: bool = True
    weights: tuple[tuple[int, float], ...] = ()
    """The rows and the weight of each file, in order; (): one file of weight 1."""

    @property
    def epoch_rows(self) -> int:
        """The number of rows in an epoch, copies included."""
        copies = (n * int(weight) + _fraction(n, weight) for n, weight in self.weights)
        return sum(copies) if self.weights else self.n_rows

    def take(self, position: int, count: int) -> list[int]:
        """Return the rows at [position, position + count) of the endless sequence of epochs.

        A batch may begin in one epoch and end in the next.
        """
        size = self.epoch_rows
        positions = (divmod(number, size) for number in range(position, position + count))
        if not self.weights:
            if not self.shuffle:
                return [index for _, index in positions]
            return [_permutation(size, self.seed, epoch)[index] for epoch, index in positions]
        return [_weighted_epoch(self, epoch)[index] for epoch, index in positions]


def _fraction(n: int, weight: float) -> int:
    """Return how many of n rows an epoch takes for the fraction of a weight: at least 1."""
    fraction = weight - int(weight)
    return max(1, round(fraction * n)) if fraction else 0


@lru_cache(maxsize=4)
def _weighted_epoch(order: RowOrder, epoch: int) -> Sequence[int]:
    rows, first = array("q"), 0
    for file, (n, weight) in enumerate(order.weights):
        rows.extend(list(range(first, first + n)) * int(weight))
        if count := _fraction(n, weight):
            seed = f"{order.seed} file {file}"
            drawn = [
                _permutation(n, seed, turn)[index]
                for turn, index in (divmod(epoch * count + i, n) for i in range(count))
            ]
            rows.extend(first + row for row in sorted(drawn))
        first += n
    if not order.shuffle:
        return rows
    return array("q", [rows[i] for i in _permutation(len(rows), order.seed, epoch)])


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int | str, epoch: int) -> Sequence[int]:
    # Python guarantees that `random()` returns the same numbers in all versions, but not `shuffle`.
    rng = random.Random(f"{seed} {epoch}")
    return array("q", sorted(range(n), key=lambda _: rng.random()))
