"""The order in which rows are trained on: a pure function of the position in the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Every row once per epoch, in an order that depends on the seed and the epoch only.

    The position of a run in its data is one integer: the number of rows that it has used.
    """

    n_rows: int
    seed: int
    shuffle: bool = True

    def take(self, position: int, count: int) -> list[int]:
        """Return the rows at [position, position + count) of the endless sequence of epochs.

        A batch may begin in one epoch and end in the next.
        """
        places = (divmod(place, self.n_rows) for place in range(position, position + count))
        if not self.shuffle:
            return [index for _, index in places]
        return [_permutation(self.n_rows, self.seed, epoch)[index] for epoch, index in places]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # Python guarantees that `random()` returns the same numbers in all versions, but not `shuffle`.
    rng = random.Random(f"{seed} {epoch}")
    return tuple(sorted(range(n), key=lambda _: rng.random()))
