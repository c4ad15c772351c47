"""The order of the training rows by their measured success (`data.curriculum`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl.data.order import RowOrder

POOLS = ("not_played", "too_hard", "in_band", "too_easy")
"""The pools of rows: without a measured success, below the band, in it, and above it."""
FILE = "curriculum.npz"
"""The file of the state in a checkpoint."""


class Curriculum:
    """Draws rows; rows whose success is outside of a band are drawn less often.

    A row has a weight: that of its file, times `floor` if its success is outside of the band. It is
    drawn once in each interval of 1 / weight, at a random time in it:

        start             start + phase / weight              start + 1 / weight
        the interval      the row is drawn                    its next interval begins

    The row with the earliest time is drawn next. So if all rows are in the band, each is drawn once
    in each interval of length 1, in random order, as in the epochs of `RowOrder`. No row is lost.

    Only `commit` changes the success of rows. A draw depends on the success of rows at that time,
    on the seed and on the draws before it.
    """

    def __init__(self, order: RowOrder, low: float, high: float, decay: float, floor: float):
        """Begin with rows that were not played.

        Args:
            order: the order without a curriculum, which has the rows, the weights of files, the
                seed and whether rows are shuffled.
            low: the smallest success in the band.
            high: the largest success in the band.
            decay: the share of the former success of a row in its new one.
            floor: the factor of the weight of rows outside of the band.
        """
        self._order, self._low, self._high = order, low, high
        self._decay, self._floor = decay, floor
        files = order.weights or ((order.n_rows, 1.0),)
        self._of_file = np.repeat([w for _, w in files], [n for n, _ in files])
        self._weight, self._due = self._of_file.copy(), self._of_file.copy()
        n, rng = len(self._weight), random.Random(f"{order.seed} curriculum")
        self._success, self._start = np.full(n, np.nan), np.zeros(n)
        # Without shuffling, rows are drawn at the ends of their intervals, in the order of files.
        self._phase = np.array([rng.random() if order.shuffle else 1.0 for _ in range(n)])
        self._schedule(slice(None))
        self.position = 0
        """The number of rows that the committed steps have taken."""
        self._drawn: list[int] = []
        """The rows that were drawn from this position on."""

    def take(self, position: int, count: int) -> list[int]:
        """Return the rows at [position, position + count) of the draws of the run.

        Rows that were not drawn yet are drawn now.
        """
        first = position - self.position
        while len(self._drawn) < first + count:
            self._drawn.append(self._draw(self.position + len(self._drawn)))
        return self._drawn[first : first + count]

    def _draw(self, number: int) -> int:
        """Draw a row, and begin its next interval."""
        row = int(self._due.argmin())
        self._start[row] += 1 / self._weight[row]
        if self._order.shuffle:
            self._phase[row] = random.Random(f"{self._order.seed} draw {number}").random()
        self._schedule(row)
        return row

    def commit(self, position: int, successes: Sequence[tuple[int, float]]) -> None:
        """Record the success of the rows of a step.

        Args:
            position: the number of rows that the run has taken, including those of the step.
            successes: the rows that were played, each with its mean success in the step.
        """
        del self._drawn[: position - self.position]
        self.position = position
        for row, new in successes:
            old = new if np.isnan(self._success[row]) else self._success[row]
            self._success[row] = self._decay * old + (1 - self._decay) * new
            self._schedule(row)

    def metrics(self) -> dict[str, float]:
        """Return the number of rows in each of `POOLS`."""
        success = self._success[~np.isnan(self._success)]
        hard, easy = int((success < self._low).sum()), int((success > self._high).sum())
        sizes = len(self._success) - len(success), hard, len(success) - hard - easy, easy
        return {f"curriculum/{pool}": float(n) for pool, n in zip(POOLS, sizes, strict=True)}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint, with the rows that were drawn and not taken."""
        state = {"success": self._success, "start": self._start, "phase": self._phase}
        np.savez(folder / FILE, drawn=np.array(self._drawn, np.int64), **state)

    def load(self, folder: Path) -> None:
        """Continue with the state of a checkpoint, if it has one."""
        if (folder / FILE).exists():
            with np.load(folder / FILE) as state:
                self._drawn = state["drawn"].tolist()
                names = ("success", "start", "phase")
                self._success, self._start, self._phase = (state[name] for name in names)
            self._schedule(slice(None))

    def _schedule(self, rows: int | slice) -> None:
        """Compute the weights of rows, and the times at which they are drawn."""
        success = self._success[rows]
        is_outside = (success < self._low) | (success > self._high)  # False for NaN
        self._weight[rows] = self._of_file[rows] * np.where(is_outside, self._floor, 1.0)
        self._due[rows] = self._start[rows] + self._phase[rows] / self._weight[rows]
