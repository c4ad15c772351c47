"""In which order rows are trained on: a pure function of the position in the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Every row once an epoch, in an order that (seed, epoch) determine.

    A run's whole place in its data is one integer: how many rows it has taken.
    """

    n_rows: int
    seed: int
    shuffle: bool = True

    def take(self, position: int, count: int) -> list[int]:
        """The rows at [position, position + count) of the endless sequence of epochs.

        A batch may begin in one epoch and end in the next.
        """
        places = (divmod(place, self.n_rows) for place in range(position, position + count))
        if not self.shuffle:
            return [index for _, index in places]
        return [_permutation(self.n_rows, self.seed, epoch)[index] for epoch, index in places]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    # `random()` is promised to give the same numbers in every version of Python; `shuffle` is not.
    rng = random.Random(f"{seed} {epoch}")
    return tuple(sorted(range(n), key=lambda _: rng.random()))
