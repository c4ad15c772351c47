"""Which rows are run side by side: micro-batches for each rank, and each of them as one flat row.

    batch       P1 A     one flat row       P1 A B | P2 C
                P1 B                         positions 0 1 .. at every P, going on at A, B and C
                P2 C

There is no padding, and a prompt is run once for all the responses that follow it. Linear layers do
not care that tokens of several rows stand side by side. Attention does: it is taken piece by piece,
each response together with its prompt, so that no row sees another. Where prompts are as long as
responses, as in many groups of tool users, that is half of the work.

The rows of an optimizer step are given. How they are dealt out changes memory and time, and no
result: the loss is a sum, and every row is run once. All ranks run equally many micro-batches,
since they gather weights and sum gradients together; one that has no row left runs an empty one.
Each waits for the slowest in every micro-batch, so those are as even as rows allow. Rows of one
prompt stay neighbours on one rank where they can.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.trainer.attention import Layout
from agentrl.trainer.batch import TokenRows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What a model is run on, and which of its tokens are asked about; L tokens in all."""

    input_ids: Tensor
    """(1, L)."""
    position_ids: Tensor
    """(1, L)."""
    layout: Layout
    states: Tensor
    """(N,) where each chosen token is predicted: one before its own place."""
    tokens: Tensor
    """(N,) the chosen tokens, row by row."""

    def to(self, device: torch.device) -> PackedRows:
        """The same there."""
        at = {"device": device, "non_blocking": True}
        return PackedRows(
            input_ids=self.input_ids.to(**at),
            position_ids=self.position_ids.to(**at),
            layout=self.layout.to(device),
            states=self.states.to(**at),
            tokens=self.tokens.to(**at),
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one pass of a model is made on: rows, and numbers for each of their chosen tokens."""

    packed: PackedRows
    mask: Tensor
    """(b, A) bool: how the N chosen tokens lie in rows when nothing else is kept of these, each
    row's moved to its beginning; A is the most that a row has."""
    columns: dict[str, Tensor]
    """(N,) each, by name."""

    def rows(self, flat: Tensor) -> Tensor:
        """(b, A): (N,) laid out by `mask`, 0 off it; the gradient flows back."""
        mask = self.mask.to(flat.device)
        return flat.new_zeros(mask.shape).masked_scatter(mask, flat)

    def to(self, device: torch.device) -> MicroBatch:
        """The same there."""
        columns = {n: x.to(device, non_blocking=True) for n, x in self.columns.items()}
        return MicroBatch(self.packed.to(device), self.mask.to(device, non_blocking=True), columns)


def make_micro_batch(
    batch: TokenRows, rows: Tensor, mask: Tensor, columns: Mapping[str, Tensor]
) -> MicroBatch:
    """Lay rows out for a pass.

    No rows at all make a pass in which nothing is asked. A rank needs it to keep step with the
    others.

    Args:
        batch: the batch.
        rows: (b,) which of its rows, ascending.
        mask: (B, T) bool, the tokens that are asked about.
        columns: (B, T) each.
    """
    if not len(rows):
        empty_pass = replace(pack_row([0, 0]), states=rows, tokens=rows)
        nothing = {name: x.new_zeros(0) for name, x in columns.items()}
        return MicroBatch(empty_pass, torch.zeros(1, 0, dtype=torch.bool), nothing)
    chosen = mask[rows]
    counts = chosen.sum(1)
    here = torch.arange(int(counts.max())) < counts[:, None]
    return MicroBatch(
        pack(batch, rows, chosen), here, {name: x[rows][chosen] for name, x in columns.items()}
    )


def pack(batch: TokenRows, rows: Tensor, mask: Tensor) -> PackedRows:
    """Lay rows out side by side.

    Args:
        batch: the batch.
        rows: (b,) which of its rows, ascending.
        mask: (b, T) bool, the tokens of these rows that are asked about.
    """
    ids, positions, states = [], [], []
    pieces: list[int] = []
    responses: list[int] = []
    start = prompt_end = 0
    is_new = has_new_prompt(batch, rows).tolist()
    for row, new, chosen in zip(rows.tolist(), is_new, mask, strict=True):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        if new:
            ids.append(batch.prompt_ids[row, batch.prompt_ids.shape[1] - prompt :])
            positions.append(torch.arange(prompt))
            pieces.append(prompt)
            responses.append(0)
            start = prompt_end = start + prompt
        ids.append(batch.response_ids[row, :response])
        positions.append(torch.arange(prompt, prompt + response))
        pieces.append(response)
        responses[-1] += 1
        at = chosen.nonzero()[:, 0]
        states.append(torch.where(at == 0, prompt_end, start + at) - 1)
        start += response
    return PackedRows(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        layout=Layout(pieces, responses),
        states=torch.cat(states),
        tokens=batch.response_ids[rows][mask],
    )


def pack_row(token_ids: Sequence[int]) -> PackedRows:
    """One row by itself, asked about every token but the first.

    Args:
        token_ids: two at least.
    """
    ids = torch.tensor(token_ids)
    return PackedRows(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        layout=Layout(pieces=[1, len(ids) - 1], responses=[1]),
        states=torch.arange(len(ids) - 1),
        tokens=ids[1:],
    )


def has_new_prompt(batch: TokenRows, rows: Tensor) -> Tensor:
    """(b,) bool: whether a row's prompt is another one than that of the row before it in `rows`."""
    ids, lengths = batch.prompt_ids[rows], batch.prompt_lengths[rows]
    is_new = torch.ones(len(rows), dtype=torch.bool)
    is_new[1:] = (ids[1:] != ids[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    return is_new


# --- which rows a rank runs, and in which micro-batches -----------------------------------------

MAX_IMBALANCE = 1.03
"""A share may have so many times the tokens of the mean before a prompt is run in two."""


def assign_rows(batch: TokenRows, rows: Tensor, ranks: int, budget: int) -> list[list[Tensor]]:
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
    costs = _RowCosts(batch, rows)
    if ranks == 1:  # nobody waits for it
        pieces_by_rank = [costs.split(costs.rows, budget)]
    else:
        shares_of_rows = _split_evenly(costs, costs.rows, ranks)
        count = max(len(costs.split(share, budget)) for share in shares_of_rows)
        pieces_by_rank = [_split_into(costs, share, count, budget) for share in shares_of_rows]
    return [[torch.tensor(piece, dtype=torch.int64) for piece in share] for share in pieces_by_rank]


class _RowCosts:
    """What rows cost that are run side by side, in tokens."""

    def __init__(self, batch: TokenRows, rows: Tensor):
        self.rows: list[int] = rows.tolist()
        number = has_new_prompt(batch, rows).cumsum(0).tolist()
        self._family = dict(zip(self.rows, number, strict=True))
        self._prompts = batch.prompt_lengths.tolist()
        self._responses = batch.response_lengths.tolist()

    def tokens_of(self, rows: Sequence[int]) -> int:
        """All of them together, ascending."""
        return sum(need for _, _, need in self._needs(rows))

    def families(self, rows: Sequence[int]) -> list[list[int]]:
        """Neighbours that share a prompt."""
        groups: list[list[int]] = []
        for row, new, _ in self._needs(rows):
            if new:
                groups.append([])
            groups[-1].append(row)
        return groups

    def split(self, rows: Sequence[int], most: int) -> list[list[int]]:
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


def _split_evenly(costs: _RowCosts, rows: Sequence[int], shares: int) -> list[list[int]]:
    """Rows for each rank, or each pass of one, about equally many tokens for all.

    Families stay whole where that is even enough. Else the smallest one of the busiest is halved,
    again and again; of all these ways the evenest is taken, for a prompt that two run costs twice.
    """
    units = [(costs.tokens_of(family), family) for family in costs.families(rows)]
    ways = []
    while True:
        shares_of_rows = _assign_largest_first(units, shares)
        loads = [costs.tokens_of(share) for share in shares_of_rows]
        ways.append((max(loads), shares_of_rows))
        busiest = set(shares_of_rows[loads.index(max(loads))])
        several = [unit for unit in units if len(unit[1]) > 1 and unit[1][0] in busiest]
        if max(loads) * shares <= MAX_IMBALANCE * sum(loads) or not several:
            return min(ways, key=lambda way: way[0])[1]
        units.remove(smallest := min(several))
        unit, half = smallest[1], len(smallest[1]) // 2
        units += [(costs.tokens_of(part), part) for part in (unit[:half], unit[half:])]


def _assign_largest_first(units: list[tuple[int, list[int]]], shares: int) -> list[list[int]]:
    """Units of (tokens, rows): the largest first, each to who has least (Graham, 1969)."""
    loads = [(0, share) for share in range(shares)]
    shares_of_rows: list[list[int]] = [[] for _ in range(shares)]
    for tokens, unit in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        load, share = heapq.heappop(loads)
        shares_of_rows[share] += unit
        heapq.heappush(loads, (load + tokens, share))
    return [sorted(share) for share in shares_of_rows]


def _split_into(costs: _RowCosts, rows: list[int], count: int, budget: int) -> list[list[int]]:
    """Just so many, the longest first; what cannot be cut so often is joined by empty ones.

    About equally long, unless that breaks the budget: then neighbours until it is full, and the
    longest are halved.
    """
    pieces = _split_evenly(costs, rows, count)
    if any(costs.tokens_of(piece) > budget and len(piece) > 1 for piece in pieces):
        pieces = costs.split(rows, budget)
    while len(pieces) < count:
        widest = max(
            (k for k, piece in enumerate(pieces) if len(piece) > 1),
            key=lambda k: costs.tokens_of(pieces[k]),
            default=None,
        )
        if widest is None:
            pieces += [[] for _ in range(count - len(pieces))]
            break
        half = len(pieces[widest]) // 2
        pieces[widest : widest + 1] = [pieces[widest][:half], pieces[widest][half:]]
    return sorted(pieces, key=costs.tokens_of, reverse=True)
