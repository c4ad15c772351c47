"""The order of the training rows: a pure function of the position in the run."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows: each row once per epoch, in an order that depends on seed and epoch only.

    The position of a run in its data is one integer: the number of rows that the run has taken.

    With weights, an epoch has `weight` copies of each file. For the fraction of a weight, an epoch
    takes the next rows of an endless sequence, which has each row once before any row twice. For
    example, with a weight of 2.5 an epoch has all rows twice, and half of them once more; the next
    epoch takes the other half. If a fraction is no whole number of rows, some epochs take one row
    more than others, so that the number of copies is the weight in the long run.
    """

    n_rows: int
    seed: int
    shuffle: bool = True
    weights: tuple[tuple[int, float], ...] = ()
    """The rows and the weight of each file, in order; (): one file of weight 1."""

    @property
    def epoch_rows(self) -> int:
        """The number of rows in an epoch, copies included; with weights, the rounded mean."""
        return max(1, round(_mean_rows(self.weights))) if self.weights else self.n_rows

    def take(self, position: int, count: int) -> list[int]:
        """Return the rows at [position, position + count) of the endless sequence of epochs.

        A batch may begin in one epoch and end in the next.
        """
        positions = range(position, position + count)
        if self.weights:
            rows: list[int] = []
            while len(rows) < count:
                epoch, index = self._find(position + len(rows))
                rows += _weighted_epoch(self, epoch)[index : index + count - len(rows)]
            return rows
        if not self.shuffle:
            return [number % self.n_rows for number in positions]
        pairs = (divmod(number, self.n_rows) for number in positions)
        return [_permutation(self.n_rows, self.seed, epoch)[index] for epoch, index in pairs]

    def _find(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the index in that epoch."""
        mean = _mean_rows(self.weights)
        # Each file's fraction is rounded down, so an epoch begins at most one row per file before
        # epoch * mean.
        limits = range(int(position / mean), int((position + len(self.weights)) / mean) + 2)
        epoch = limits[bisect_right(limits, position, key=self.first) - 1]
        return epoch, position - self.first(epoch)

    def first(self, epoch: int) -> int:
        """Return the position at which an epoch begins: the number of rows of the epochs before."""
        files = self.weights or ((self.n_rows, 1.0),)
        return sum(epoch * n * int(w) + _taken(n, w, epoch) for n, w in files)


@lru_cache(maxsize=4)
def _mean_rows(weights: tuple[tuple[int, float], ...]) -> Fraction:
    """Return the mean number of rows in an epoch."""
    return sum((n * _exact(weight) for n, weight in weights), Fraction())


def _taken(n: int, weight: float, epochs: int) -> int:
    """Return the number of rows that the first epochs take for the fraction of a weight."""
    return int(epochs * n * (_exact(weight) % 1))


@lru_cache(maxsize=256)
def _exact(weight: float) -> Fraction:
    """Return the decimal number of a weight: exactly 1/10 for 0.1, which no float equals."""
    return Fraction(str(weight))


@lru_cache(maxsize=4)
def _weighted_epoch(order: RowOrder, epoch: int) -> Sequence[int]:
    rows, first = array("q"), 0
    for file, (n, weight) in enumerate(order.weights):
        rows.extend(list(range(first, first + n)) * int(weight))
        seed = f"{order.seed} file {file}"
        drawn = [
            _permutation(n, seed, turn)[index]
            for turn, index in (
                divmod(i, n) for i in range(_taken(n, weight, epoch), _taken(n, weight, epoch + 1))
            )
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
