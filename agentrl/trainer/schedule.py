"""Which rank runs which rows, in which micro-batches: pure functions of a batch's lengths.

The rows of an optimizer step are given. How they are dealt out changes memory and time, and no
result: the loss is a sum, and every row is run once. All ranks run equally many micro-batches,
since they gather weights and sum gradients together; one that has no row left runs an empty one.
Each waits for the slowest in every micro-batch, so those are as even as rows allow.

Rows of one prompt stay neighbours on one rank where they can: there the prompt is run once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agentrl.trainer.batch import Rows
from agentrl.trainer.packing import starts_prompt

UNEVEN = 1.03
"""A share may have so many times the tokens of the mean before a prompt is run in two."""


def deal(batch: Rows, rows: Tensor, ranks: int, budget: int) -> list[list[Tensor]]:
    """Micro-batches for each rank, equally many for all.

    Args:
        batch: the batch.
        rows: (b,) int64, ascending: those to run.
        ranks: how many.
        budget: tokens of a micro-batch, a prompt counted once for neighbours that share it. A row
            longer than that goes alone.

    Returns:
        rows of each micro-batch, ascending, by rank; nothing for no rows.
    """
    if not len(rows):
        return [[] for _ in range(ranks)]
    sizes = _Sizes(batch, rows)
    if ranks == 1:  # nobody waits for it
        dealt = [sizes.cut(sizes.rows, budget)]
    else:
        owned = _shared_out(sizes, sizes.rows, ranks)
        count = max(len(sizes.cut(mine, budget)) for mine in owned)
        dealt = [_in_pieces(sizes, mine, count, budget) for mine in owned]
    return [[torch.tensor(piece, dtype=torch.int64) for piece in mine] for mine in dealt]


class _Sizes:
    """What rows cost that are run side by side, in tokens."""

    def __init__(self, batch: Rows, rows: Tensor):
        self.rows: list[int] = rows.tolist()
        number = starts_prompt(batch, rows).cumsum(0).tolist()
        self._family = dict(zip(self.rows, number, strict=True))
        self._prompts = batch.prompt_lengths.tolist()
        self._responses = batch.response_lengths.tolist()

    def of(self, rows: Sequence[int]) -> int:
        """All of them together, ascending."""
        return sum(need for _, _, need in self._needs(rows))

    def families(self, rows: Sequence[int]) -> list[list[int]]:
        """Neighbours that share a prompt."""
        found: list[list[int]] = []
        for row, new, _ in self._needs(rows):
            if new:
                found.append([])
            found[-1].append(row)
        return found

    def cut(self, rows: Sequence[int], most: int) -> list[list[int]]:
        """Neighbours in pieces of at most `most` tokens; what is longer goes alone."""
        pieces: list[list[int]] = []
        room = 0
        for row, _, need in self._needs(rows):
            if need > room or not pieces:
                pieces.append([])
                need, room = self._prompts[row] + self._responses[row], most
            pieces[-1].append(row)
            room -= need
        return pieces

    def _needs(self, rows: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
        """Each row, whether its prompt is new, and the tokens that it adds."""
        last = 0
        for row in rows:
            new = self._family[row] != last
            last = self._family[row]
            yield row, new, self._responses[row] + (self._prompts[row] if new else 0)


def _shared_out(sizes: _Sizes, rows: Sequence[int], shares: int) -> list[list[int]]:
    """Rows for each rank, or each pass of one, about equally many tokens for all.

    Families stay whole where that is even enough. Else the smallest one of the busiest is halved,
    again and again; of all these ways the evenest is taken, for a prompt that two run costs twice.
    """
    units = [(sizes.of(family), family) for family in sizes.families(rows)]
    ways = []
    while True:
        owned = _spread(units, shares)
        loads = [sizes.of(mine) for mine in owned]
        ways.append((max(loads), owned))
        busiest = set(owned[loads.index(max(loads))])
        several = [unit for unit in units if len(unit[1]) > 1 and unit[1][0] in busiest]
        if max(loads) * shares <= UNEVEN * sum(loads) or not several:
            return min(ways, key=lambda way: way[0])[1]
        units.remove(smallest := min(several))
        unit, half = smallest[1], len(smallest[1]) // 2
        units += [(sizes.of(part), part) for part in (unit[:half], unit[half:])]


def _spread(units: list[tuple[int, list[int]]], shares: int) -> list[list[int]]:
    """Units of (tokens, rows): the largest first, each to who has least (Graham, 1969)."""
    loads = [(0, share) for share in range(shares)]
    owned: list[list[int]] = [[] for _ in range(shares)]
    for tokens, unit in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        load, share = heapq.heappop(loads)
        owned[share] += unit
        heapq.heappush(loads, (load + tokens, share))
    return [sorted(mine) for mine in owned]


def _in_pieces(sizes: _Sizes, rows: list[int], count: int, budget: int) -> list[list[int]]:
    """Just so many, the longest first; what cannot be cut so often is joined by empty ones.

    About equally long, unless that breaks the budget: then neighbours until it is full, and the
    longest are halved.
    """
    pieces = _shared_out(sizes, rows, count)
    if any(sizes.of(piece) > budget and len(piece) > 1 for piece in pieces):
        pieces = sizes.cut(rows, budget)
    while len(pieces) < count:
        widest = max(
            (k for k, piece in enumerate(pieces) if len(piece) > 1),
            key=lambda k: sizes.of(pieces[k]),
            default=None,
        )
        if widest is None:
            pieces += [[] for _ in range(count - len(pieces))]
            break
        half = len(pieces[widest]) // 2
        pieces[widest : widest + 1] = [pieces[widest][:half], pieces[widest][half:]]
    return sorted(pieces, key=sizes.of, reverse=True)
