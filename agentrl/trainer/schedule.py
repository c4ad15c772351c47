"""Which rank runs which rows, in which micro-batches: pure functions of a batch's lengths.

The rows of an optimizer step are given. How they are dealt out changes memory and time, and no
result: the loss is a sum, and every row is run once. All ranks run equally many micro-batches,
since they gather weights together; one that has no row left runs an empty one.

Rows of one prompt stay neighbours on one rank where they can: there the prompt is run once.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from agentrl.trainer.batch import Rows
from agentrl.trainer.packing import starts_prompt

UNEVEN = 1.1
"""A rank may have so many times the tokens of the mean before a prompt is run on two."""


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
    if ranks == 1:
        return [cut(batch, rows, budget)]
    owned = _shared_out(batch, rows, ranks)
    pieces = [cut(batch, torch.tensor(mine), budget) if mine else [] for mine in owned]
    count = max(map(len, pieces))
    return [_in_pieces(batch, some, count) for some in pieces]


def cut(batch: Rows, rows: Tensor, budget: int) -> list[Tensor]:
    """Cut `rows` into pieces of at most `budget` tokens each, prompts counted once.

    The order stays: rows of one prompt are neighbours. A row longer than the budget goes alone.
    """
    pieces: list[list[int]] = []
    room = 0
    fresh = starts_prompt(batch, rows).tolist()
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    for row, new in zip(rows.tolist(), fresh, strict=True):
        need = responses[row] + (prompts[row] if new else 0)
        if need > room or not pieces:
            pieces.append([])
            need, room = prompts[row] + responses[row], budget
        pieces[-1].append(row)
        room -= need
    return [torch.tensor(piece) for piece in pieces]


def _families(batch: Rows, rows: Tensor) -> list[list[int]]:
    """Neighbours that share a prompt."""
    families: list[list[int]] = []
    for row, new in zip(rows.tolist(), starts_prompt(batch, rows).tolist(), strict=True):
        if new:
            families.append([])
        families[-1].append(row)
    return families


def _shared_out(batch: Rows, rows: Tensor, ranks: int) -> list[list[int]]:
    """Rows for each rank, about equally many tokens for all.

    Families stay whole where that is even enough. Else the smallest one of the busiest rank is
    halved, again and again; of all these ways the evenest is taken, for a prompt that two ranks run
    costs twice.
    """
    units = [(_tokens(batch, family), family) for family in _families(batch, rows)]
    ways = []
    while True:
        owned = _spread(units, ranks)
        loads = [_tokens(batch, mine) for mine in owned]
        ways.append((max(loads), owned))
        busiest = set(owned[loads.index(max(loads))])
        several = [unit for unit in units if len(unit[1]) > 1 and unit[1][0] in busiest]
        if max(loads) * ranks <= UNEVEN * sum(loads) or not several:
            return min(ways, key=lambda way: way[0])[1]
        units.remove(smallest := min(several))
        unit, half = smallest[1], len(smallest[1]) // 2
        units += [(_tokens(batch, part), part) for part in (unit[:half], unit[half:])]


def _spread(units: list[tuple[int, list[int]]], ranks: int) -> list[list[int]]:
    """Units of (tokens, rows): the largest first, each to the rank with least (Graham, 1969)."""
    loads = [(0, rank) for rank in range(ranks)]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for tokens, unit in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        load, rank = heapq.heappop(loads)
        owned[rank] += unit
        heapq.heappush(loads, (load + tokens, rank))
    return [sorted(mine) for mine in owned]


def _tokens(batch: Rows, rows: list[int]) -> int:
    """What they cost when they are run together."""
    if not rows:
        return 0
    at = torch.tensor(rows)
    prompts = batch.prompt_lengths[at] * starts_prompt(batch, at)
    return int(prompts.sum() + batch.response_lengths[at].sum())


def _in_pieces(batch: Rows, pieces: list[Tensor], count: int) -> list[Tensor]:
    """Halve the longest until there are so many; what cannot be halved is joined by empty ones."""
    pieces = list(pieces)
    while len(pieces) < count:
        widest = max(
            (k for k, piece in enumerate(pieces) if len(piece) > 1),
            key=lambda k: _tokens(batch, pieces[k].tolist()),
            default=None,
        )
        if widest is None:
            return pieces + [torch.empty(0, dtype=torch.int64)] * (count - len(pieces))
        half = len(pieces[widest]) // 2
        pieces[widest : widest + 1] = [pieces[widest][:half], pieces[widest][half:]]
    return pieces
