"""The order of the training rows: a pure function of the position in the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows: each row once per epoch, in an order that depends on seed and epoch only.

    The position of a run in its data is one integer: the number of rows that the run has taken.
    """

    n_rows: int
    seed: int
    shuffle: bool = True

    def take(self, position: int, count: int) -> list[int]:
        """Return the rows at [position, position + count) of the endless sequence of epochs.

        A batch may begin in one epoch and end in the next.
        """
        positions = (divmod(number, self.n_rows) for number in range(position, position + count))
        if not self.shuffle:
            return [index for _, index in positions]
        return [_permutation(self.n_rows, self.seed, epoch)[index] for epoch, index in positions]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # Python guarantees that `random()` returns the same numbers in all versions, but not `shuffle`.
    rng = random.Random(f"{seed} {epoch}")
    return tuple(sorted(range(n), key=lambda _: rng.random()))
