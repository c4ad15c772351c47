"""Many rows as one: no padding, and a prompt is run once for all the responses that follow it.

    batch       P1 A     one flat row       P1 A B | P2 C
                P1 B                         positions 0 1 .. at every P, going on at A, B and C
                P2 C

Linear layers do not care that tokens of several rows stand side by side. Attention does: it is
taken piece by piece, each response together with its prompt, so that no row sees another. Where
prompts are as long as responses, as in many groups of tool users, that is half of the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.trainer.attention import PACKED as PACKED
from agentrl.trainer.attention import Layout
from agentrl.trainer.batch import Rows


@dataclass(frozen=True, slots=True)
class Packed:
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

    def to(self, device: torch.device) -> Packed:
        """The same there."""
        at = {"device": device, "non_blocking": True}
        return Packed(
            input_ids=self.input_ids.to(**at),
            position_ids=self.position_ids.to(**at),
            layout=self.layout.to(device),
            states=self.states.to(**at),
            tokens=self.tokens.to(**at),
        )


@dataclass(frozen=True, slots=True)
class Micro:
    """What one pass of a model is made on: rows, and numbers for each of their chosen tokens."""

    packed: Packed
    mask: Tensor
    """(b, A) bool: how the N chosen tokens lie in rows when nothing else is kept of these, each
    row's moved to its beginning; A is the most that a row has."""
    columns: dict[str, Tensor]
    """(N,) each, by name."""

    def rows(self, flat: Tensor) -> Tensor:
        """(b, A): (N,) laid out by `mask`, 0 off it; the gradient flows back."""
        mask = self.mask.to(flat.device)
        return flat.new_zeros(mask.shape).masked_scatter(mask, flat)

    def to(self, device: torch.device) -> Micro:
        """The same there."""
        columns = {n: x.to(device, non_blocking=True) for n, x in self.columns.items()}
        return Micro(self.packed.to(device), self.mask.to(device, non_blocking=True), columns)


def micro(batch: Rows, rows: Tensor, mask: Tensor, columns: Mapping[str, Tensor]) -> Micro:
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
        nobody = replace(pack_row([0, 0]), states=rows, tokens=rows)
        nothing = {name: x.new_zeros(0) for name, x in columns.items()}
        return Micro(nobody, torch.zeros(1, 0, dtype=torch.bool), nothing)
    chosen = mask[rows]
    counts = chosen.sum(1)
    here = torch.arange(int(counts.max())) < counts[:, None]
    return Micro(
        pack(batch, rows, chosen), here, {name: x[rows][chosen] for name, x in columns.items()}
    )


def pack(batch: Rows, rows: Tensor, mask: Tensor) -> Packed:
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
    fresh = starts_prompt(batch, rows).tolist()
    for row, new, chosen in zip(rows.tolist(), fresh, mask, strict=True):
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
    return Packed(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        layout=Layout(pieces, responses),
        states=torch.cat(states),
        tokens=batch.response_ids[rows][mask],
    )


def pack_row(token_ids: Sequence[int]) -> Packed:
    """One row by itself, asked about every token but the first.

    Args:
        token_ids: two at least.
    """
    ids = torch.tensor(token_ids)
    return Packed(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        layout=Layout(pieces=[1, len(ids) - 1], responses=[1]),
        states=torch.arange(len(ids) - 1),
        tokens=ids[1:],
    )


def starts_prompt(batch: Rows, rows: Tensor) -> Tensor:
    """(b,) bool: whether a row's prompt is another one than that of the row before it in `rows`."""
    ids, lengths = batch.prompt_ids[rows], batch.prompt_lengths[rows]
    fresh = torch.ones(len(rows), dtype=torch.bool)
    fresh[1:] = (ids[1:] != ids[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    return fresh
