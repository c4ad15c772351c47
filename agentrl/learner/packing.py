"""Packing: the micro-batches of each rank, and each micro-batch as the input of a model.

    batch       P1 A     one flat row       P1 A B | P2 C
                P1 B                         positions 0 1 .. at every P, continued at A, B and C
                P2 C

There is no padding, and a prompt is run once for all responses that follow it. Linear layers do not
mix tokens, so packed rows do not matter to them. Attention does mix tokens: each response attends
to itself and its own prompt only (`attention.py`). If prompts are as long as responses, as in many
groups with tools, this saves half of the work.

Layers with a state or a convolution mix tokens, too. Models with such layers need rows that are
whole (`Mode`).

The rows of an optimizer step are fixed. How they are assigned to ranks and micro-batches changes
memory and time, but no result: the loss is a sum, and every row is run once. All ranks run the same
number of micro-batches, since they gather weights and sum gradients together; a rank without rows
runs an empty micro-batch. In every micro-batch each rank waits for the slowest one, so the
micro-batches are balanced. Rows with the same prompt stay together on one rank if possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from agentrl.images import RowImage
from agentrl.learner.attention import Layout
from agentrl.learner.batch import KeptTokens, TokenRows, placeholders_of
from agentrl.learner.context_parallel import ContextGroup


class Mode(Enum):
    """How rows become the input of a model. `modes.prove_mode` finds the first that is exact."""

    PACKED = "packed"
    """One flat row; rows share their prompts."""
    WHOLE = "packed whole"
    """One flat row in which each row has a prompt of its own. The model's kernels separate them."""
    PADDED = "rows padded"
    """Rows of like length, padded on the right, which no token of a causal model sees."""
    ALONE = "rows alone"
    """One row at a time."""

    @property
    def is_flat(self) -> bool:
        """True if the input is one flat row."""
        return self in (Mode.PACKED, Mode.WHOLE)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The input of a model with the tokens to score: a flat row of L tokens, or b padded rows."""

    input_ids: Tensor
    """(1, L); padded: (b, L)."""
    position_ids: Tensor
    """(1, L); padded: (b, L)."""
    layout: Layout | None
    """The rows in the flat row; None: rows are padded, and the model needs no layout."""
    states: Tensor
    """(N,) the positions that predict the chosen tokens, one before each token, in `input_ids` as
    one row."""
    tokens: Tensor
    """(N,) the chosen tokens, row by row."""
    kept: KeptTokens | None = None
    """The tokens to which the softmax of each chosen token is restricted; None: all."""
    experts: Tensor | None = None
    """(1, L, width) int16, padded (b, L, width): the experts of each token, -1 for none; None: the
    model chooses all (`agentrl.engine.local.routers`)."""
    is_own: Tensor | None = None
    """(M,) bool, if ranks share the rows: which of the M chosen tokens of all ranks are in this
    part."""
    images: tuple[RowImage, ...] | None = None
    """The images of the row, which is then the only one; None: no row of the batch has images."""
    is_image: Tensor | None = None
    """(1, L) bool: the placeholders of the images."""
    pixels: dict[str, Tensor] = field(default_factory=dict)
    """The images as arguments of the model; empty until `Rank` reads them."""

    def part(self, context: ContextGroup | None) -> PackedRows:
        """Return the part of a flat row that this rank runs; None: the whole row.

        Tokens that belong to no row are added, so that all parts have the same length.
        """
        if context is None:
            return self
        layout, size, rank = self.layout, context.size, context.rank
        assert layout is not None
        own = self.states % size == rank
        added = -self.input_ids.shape[1] % size
        more = ([added, 0], [1]) if added else ([], [])
        experts = self.experts
        if experts is not None:
            experts = pad(experts, (0, 0, 0, added), value=-1)[:, rank::size]
        return PackedRows(
            input_ids=pad(self.input_ids, (0, added))[:, rank::size],
            position_ids=pad(self.position_ids, (0, added))[:, rank::size],
            layout=Layout(layout.pieces + more[0], layout.responses + more[1], context=context),
            states=self.states[own] // size,
            tokens=self.tokens[own],
            kept=None if self.kept is None else self.kept.of(own.nonzero()[:, 0], own[own]),
            experts=experts,
            is_own=own,
        )

    def join(self, numbers: Tensor) -> Tensor:
        """Return a number of each chosen token: those of other ranks, too, if they share rows.

        Args:
            numbers: (N,) of this part.
        """
        if self.is_own is None:
            return numbers
        assert self.layout and self.layout.context
        return self.layout.context.join(numbers, self.is_own)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model."""
        if self.layout is None:  # Every model numbers the positions of padded rows itself.
            return {"input_ids": self.input_ids}
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "layout": self.layout,
        }
        if self.layout.whole:
            arguments |= self.layout.sequences(self.input_ids.device)
        return arguments

    def to(self, device: torch.device) -> PackedRows:
        """Return a copy on the device."""
        at = {"device": device, "non_blocking": True}
        return PackedRows(
            input_ids=self.input_ids.to(**at),
            position_ids=self.position_ids.to(**at),
            layout=None if self.layout is None else self.layout.to(device),
            states=self.states.to(**at),
            tokens=self.tokens.to(**at),
            kept=None if self.kept is None else self.kept.to(device),
            experts=None if self.experts is None else self.experts.to(**at),
            is_own=None if self.is_own is None else self.is_own.to(**at),
            images=self.images,
            is_image=None if self.is_image is None else self.is_image.to(**at),
            pixels={name: x.to(**at) for name, x in self.pixels.items()},
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: rows, and numbers for each of their chosen tokens."""

    packed: PackedRows
    mask: Tensor
    """(b, A) bool: the layout of the N chosen tokens in left-aligned rows without other tokens. A
    is the largest number of chosen tokens of a row."""
    columns: dict[str, Tensor]
    """(N,) each, by name."""

    def rows(self, flat: Tensor) -> Tensor:
        """Return the (N,) values as (b, A), laid out by `mask`, 0 elsewhere; differentiable."""
        mask = self.mask.to(flat.device)
        return flat.new_zeros(mask.shape).masked_scatter(mask, flat)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on the device."""
        columns = {n: x.to(device, non_blocking=True) for n, x in self.columns.items()}
        return MicroBatch(self.packed.to(device), self.mask.to(device, non_blocking=True), columns)


def make_micro_batch(
    batch: TokenRows,
    rows: Tensor,
    mask: Tensor,
    columns: Mapping[str, Tensor],
    mode: Mode = Mode.PACKED,
) -> MicroBatch:
    """Make the input of one forward pass from rows of a batch.

    Without rows, the pass scores no token. A rank without rows runs such a pass to stay in step
    with the other ranks.

    Args:
        batch: the batch.
        rows: (b,) row numbers, ascending.
        mask: (B, T) bool, the tokens to score.
        columns: numbers for each token, by name, (B, T) each.
        mode: how rows become the input of the model.
    """
    if not len(rows):
        images = None if batch.images is None else ()
        empty_pass = replace(pack_row([0, 0], mode), states=rows, tokens=rows, images=images)
        nothing = {name: x.new_zeros(0) for name, x in columns.items()}
        return MicroBatch(empty_pass, torch.zeros(1, 0, dtype=torch.bool), nothing)
    chosen = mask[rows]
    counts = chosen.sum(1)
    layout_mask = torch.arange(int(counts.max())) < counts[:, None]
    packed = pack(batch, rows, chosen, mode)
    if batch.images is not None:
        (row,) = rows.tolist()
        packed = replace(
            packed, images=batch.images[row], is_image=placeholders_of(batch, row)[None]
        )
    return MicroBatch(
        packed,
        layout_mask,
        {name: x[rows][chosen] for name, x in columns.items()},
    )


def pack(batch: TokenRows, rows: Tensor, mask: Tensor, mode: Mode = Mode.PACKED) -> PackedRows:
    """Pack rows into the input of a model.

    Args:
        batch: the batch.
        rows: (b,) row numbers, ascending.
        mask: (b, T) bool, the tokens of these rows to score.
        mode: how rows become the input.
    """
    if not mode.is_flat:
        return _pad(batch, rows, mask)
    ids, positions, states, experts = [], [], [], []
    pieces: list[int] = []
    responses: list[int] = []
    start = prompt_end = 0
    is_new = has_new_prompt(batch, rows).tolist()
    for row, new, chosen in zip(rows.tolist(), is_new, mask, strict=True):
        new = new or mode is Mode.WHOLE
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        if new:
            ids.append(batch.prompt_ids[row, batch.prompt_ids.shape[1] - prompt :])
            experts.append(_experts_of(batch, row)[:prompt])
            positions.append(torch.arange(prompt))
            pieces.append(prompt)
            responses.append(0)
            start = prompt_end = start + prompt
        ids.append(batch.response_ids[row, :response])
        experts.append(_experts_of(batch, row)[prompt:])
        positions.append(torch.arange(prompt, prompt + response))
        pieces.append(response)
        responses[-1] += 1
        at = chosen.nonzero()[:, 0]
        states.append(torch.where(at == 0, prompt_end, start + at) - 1)
        start += response
    return PackedRows(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        layout=Layout(pieces, responses, whole=mode is Mode.WHOLE),
        states=torch.cat(states),
        tokens=batch.response_ids[rows][mask],
        kept=None if batch.kept is None else batch.kept.of(rows, mask),
        experts=None if batch.experts is None else torch.cat(experts)[None],
    )


def _experts_of(batch: TokenRows, row: int) -> Tensor:
    """Return the experts of all tokens of a row, (tokens, width): none (-1) of the last."""
    if batch.experts is None:
        return torch.empty(0)
    return pad(batch.experts[row], (0, 0, 0, 1), value=-1)


def _pad(batch: TokenRows, rows: Tensor, mask: Tensor) -> PackedRows:
    """Put rows below each other; see `pack`."""
    prompts, responses = batch.prompt_lengths[rows], batch.response_lengths[rows]
    width = int((prompts + responses).max())
    ids = torch.zeros(len(rows), width, dtype=batch.response_ids.dtype)
    states = []
    experts = [_experts_of(batch, row) for row in rows.tolist()]
    for i, row in enumerate(rows.tolist()):
        prompt, response = int(prompts[i]), int(responses[i])
        ids[i, :prompt] = batch.prompt_ids[row, batch.prompt_ids.shape[1] - prompt :]
        ids[i, prompt : prompt + response] = batch.response_ids[row, :response]
        states.append(i * width + prompt + mask[i].nonzero()[:, 0] - 1)
    return PackedRows(
        input_ids=ids,
        position_ids=torch.arange(width).expand(len(rows), width),
        layout=None,
        states=torch.cat(states),
        tokens=batch.response_ids[rows][mask],
        kept=None if batch.kept is None else batch.kept.of(rows, mask),
        experts=pad_sequence(experts, True, -1) if batch.experts else None,
    )


def pack_row(token_ids: Sequence[int], mode: Mode = Mode.PACKED) -> PackedRows:
    """Pack a single row, in which every token but the first is scored.

    Args:
        token_ids: the ids of the row, at least two.
        mode: how rows become the input.
    """
    ids = torch.tensor(token_ids)
    layout = Layout(pieces=[1, len(ids) - 1], responses=[1], whole=mode is Mode.WHOLE)
    return PackedRows(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        layout=layout if mode.is_flat else None,
        states=torch.arange(len(ids) - 1),
        tokens=ids[1:],
    )


def has_new_prompt(batch: TokenRows, rows: Tensor) -> Tensor:
    """Return (b,) bool: True if a row's prompt differs from that of the row before it in `rows`.

    Equal tokens with other experts are another prompt.
    """
    ids, lengths = batch.prompt_ids[rows], batch.prompt_lengths[rows]
    is_new = torch.ones(len(rows), dtype=torch.bool)
    is_new[1:] = (ids[1:] != ids[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    if batch.experts is not None:
        of_prompts = [batch.experts[r][: batch.prompt_lengths[r]] for r in rows.tolist()]
        differs = [not torch.equal(*two) for two in pairwise(of_prompts)]
        is_new[1:] |= torch.tensor(differs, dtype=torch.bool)
    return is_new


# --- assigning rows to ranks and micro-batches ---------------------------------------------------

MAX_IMBALANCE = 1.03
"""A rank may have this many times the mean number of tokens before a prompt is run on two ranks."""


def assign_rows(
    batch: TokenRows, rows: Tensor, ranks: int, budget: int, mode: Mode = Mode.PACKED
) -> list[list[Tensor]]:
    """Assign rows to ranks and micro-batches; all ranks get the same number of micro-batches.

    Args:
        batch: the batch.
        rows: (b,) int64, ascending: the rows to run.
        ranks: the number of ranks.
        budget: the tokens of a micro-batch, padding included. A prompt counts once for adjacent
            rows that share it. A longer row gets a micro-batch of its own.
        mode: how rows become the input of the model.

    Returns:
        For each rank the rows of each micro-batch, ascending; empty lists for no rows.
    """
    if not len(rows):
        return [[] for _ in range(ranks)]
    costs = _RowCosts(batch, rows, mode)
    if ranks == 1:  # no other rank waits for it
        pieces_by_rank = [costs.split(costs.rows, budget)]
    else:
        shares_of_rows = _split_evenly(costs, costs.rows, ranks)
        count = max(len(costs.split(share, budget)) for share in shares_of_rows)
        pieces_by_rank = [_split_into(costs, share, count, budget) for share in shares_of_rows]
    return [[torch.tensor(piece, dtype=torch.int64) for piece in share] for share in pieces_by_rank]


class _RowCosts:
    """The costs of rows that are run together, in tokens."""

    def __init__(self, batch: TokenRows, rows: Tensor, mode: Mode):
        self.mode = mode
        self.rows: list[int] = rows.tolist()
        shares_prompts = mode is Mode.PACKED
        is_new = has_new_prompt(batch, rows) if shares_prompts else torch.ones_like(rows)
        number = is_new.cumsum(0).tolist()
        self._family = dict(zip(self.rows, number, strict=True))
        self._prompts = batch.prompt_lengths.tolist()
        self._responses = batch.response_lengths.tolist()

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of rows, which are ascending, without padding."""
        return sum(need for _, _, need in self._needs(rows))

    def families(self, rows: Sequence[int]) -> list[list[int]]:
        """Group adjacent rows that share a prompt."""
        groups: list[list[int]] = []
        for row, new, _ in self._needs(rows):
            if new:
                groups.append([])
            groups[-1].append(row)
        return groups

    def split(self, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Split rows into pieces of at most `max_tokens`; a longer row is one piece.

        The rows of a piece are adjacent, or, if they are padded, of like length.
        """
        if not self.mode.is_flat:
            return self._split_by_length(rows, max_tokens)
        pieces: list[list[int]] = []
        remaining = 0
        for row, _, need in self._needs(rows):
            if need > remaining or not pieces:
                pieces.append([])
                need, remaining = self._prompts[row] + self._responses[row], max_tokens
            pieces[-1].append(row)
            remaining -= need
        return pieces

    def _split_by_length(self, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        pieces: list[list[int]] = []
        width = 0
        lengths = {row: self._prompts[row] + self._responses[row] for row in rows}
        for row in sorted(rows, key=lambda row: -lengths[row]):
            is_full = not pieces or (len(pieces[-1]) + 1) * width > max_tokens
            if is_full or 2 * lengths[row] < width or self.mode is Mode.ALONE:
                pieces.append([])
                width = lengths[row]
            pieces[-1].append(row)
        return [sorted(piece) for piece in pieces]

    def _needs(self, rows: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
        """Yield each row, whether its prompt is new, and the number of tokens that it adds."""
        last = 0
        for row in rows:
            new = self._family[row] != last
            last = self._family[row]
            yield row, new, self._responses[row] + (self._prompts[row] if new else 0)


def _split_evenly(costs: _RowCosts, rows: Sequence[int], shares: int) -> list[list[int]]:
    """Split rows into shares with about the same number of tokens.

    Rows with the same prompt (a family) stay together if the shares are even enough. Otherwise the
    smallest family of the largest share is halved, again and again, and the most even of all these
    splits is returned. A prompt in two shares is run twice.
    """
    units = [(costs.tokens_of(family), family) for family in costs.families(rows)]
    candidates = []
    while True:
        shares_of_rows = _assign_largest_first(units, shares)
        loads = [costs.tokens_of(share) for share in shares_of_rows]
        candidates.append((max(loads), shares_of_rows))
        busiest = set(shares_of_rows[loads.index(max(loads))])
        several = [unit for unit in units if len(unit[1]) > 1 and unit[1][0] in busiest]
        if max(loads) * shares <= MAX_IMBALANCE * sum(loads) or not several:
            return min(candidates, key=lambda candidate: candidate[0])[1]
        units.remove(smallest := min(several))
        unit, half = smallest[1], len(smallest[1]) // 2
        units += [(costs.tokens_of(part), part) for part in (unit[:half], unit[half:])]


def _assign_largest_first(units: list[tuple[int, list[int]]], shares: int) -> list[list[int]]:
    """Assign units of (tokens, rows), the largest first, each to the share with the fewest tokens.

    This is the LPT rule (Graham, 1969).
    """
    loads = [(0, share) for share in range(shares)]
    shares_of_rows: list[list[int]] = [[] for _ in range(shares)]
    for tokens, unit in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        load, share = heapq.heappop(loads)
        shares_of_rows[share] += unit
        heapq.heappush(loads, (load + tokens, share))
    return [sorted(share) for share in shares_of_rows]


def _split_into(costs: _RowCosts, rows: list[int], count: int, budget: int) -> list[list[int]]:
    """Split rows into exactly `count` pieces, the longest first; surplus pieces are empty.

    The pieces have about the same length, unless one of them would exceed the budget. Then adjacent
    rows fill the pieces up to the budget, and the longest pieces are halved. So it is with padded
    rows: those of like length stay together.
    """
    pieces = _split_evenly(costs, rows, count)
    is_too_long = any(costs.tokens_of(piece) > budget and len(piece) > 1 for piece in pieces)
    if is_too_long or not costs.mode.is_flat:
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
