"""Many rows as one: no padding, and a prompt is run once for all the responses that follow it.

    batch       P1 A     one flat row       P1 A B | P2 C
                P1 B                         positions 0 1 .. at every P, going on at A, B and C
                P2 C

Linear layers do not care that tokens of several rows stand side by side. Attention does: it is
taken piece by piece, each response together with its prompt, so that no row sees another. Where
prompts are as long as responses, as in many groups of tool users, that is half of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.trainer.batch import Batch

PACKED = "agentrl_packed"
"""The name under which transformers finds `packed_attention`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of the flat row are which piece."""

    pieces: list[int]
    """Their lengths: a prompt, the responses to it, the next prompt, ..."""
    responses: list[int]
    """How many follow each prompt."""


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


def micro_batches(batch: Batch, rows: Tensor, budget: int) -> list[Tensor]:
    """Cut `rows` into pieces of at most `budget` tokens each, prompts counted once.

    The order stays: rows of one prompt are neighbours. A row longer than the budget goes alone.

    Args:
        batch: the batch.
        rows: (b,) int64, ascending.
        budget: tokens of a piece.
    """
    pieces: list[list[int]] = []
    room = 0
    fresh = _starts_prompt(batch, rows).tolist()
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    for row, new in zip(rows.tolist(), fresh, strict=True):
        need = responses[row] + (prompts[row] if new else 0)
        if need > room or not pieces:
            pieces.append([])
            need, room = prompts[row] + responses[row], budget
        pieces[-1].append(row)
        room -= need
    return [torch.tensor(piece) for piece in pieces]


def pack(batch: Batch, rows: Tensor, mask: Tensor, device: torch.device) -> Packed:
    """Lay rows out side by side.

    Args:
        batch: the batch.
        rows: (b,) which of its rows, in an order that `micro_batches` keeps.
        mask: (b, T) bool, the tokens of these rows that are asked about.
        device: where the result goes.
    """
    ids, positions, states = [], [], []
    pieces: list[int] = []
    responses: list[int] = []
    start = prompt_end = 0
    fresh = _starts_prompt(batch, rows).tolist()
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
        input_ids=torch.cat(ids)[None].to(device),
        position_ids=torch.cat(positions)[None].to(device),
        layout=Layout(pieces, responses),
        states=torch.cat(states).to(device),
        tokens=batch.response_ids[rows][mask].to(device),
    )


def pack_row(token_ids: Sequence[int], device: torch.device) -> Packed:
    """One row by itself, asked about every token but the first.

    Args:
        token_ids: two at least.
        device: where the result goes.
    """
    ids = torch.tensor(token_ids, device=device)
    return Packed(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids), device=device)[None],
        layout=Layout(pieces=[1, len(ids) - 1], responses=[1]),
        states=torch.arange(len(ids) - 1, device=device),
        tokens=ids[1:],
    )


def _starts_prompt(batch: Batch, rows: Tensor) -> Tensor:
    """(b,) bool: whether a row's prompt is another one than that of the row before it in `rows`."""
    ids, lengths = batch.prompt_ids[rows], batch.prompt_lengths[rows]
    fresh = torch.ones(len(rows), dtype=torch.bool)
    fresh[1:] = (ids[1:] != ids[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    return fresh


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of every response with its prompt; transformers calls it in every layer.

    Args:
        module: the attention layer.
        query: (1, heads, L, d).
        key: (1, key-value heads, L, d).
        value: the same.
        attention_mask: None; the layout says it all.
        layout: of the L tokens.
        scaling: of the scores.
        sliding_window: how far back a token sees, itself included; None for all the way.
        softcap: refused.
        s_aux: refused.

    Returns:
        (1, L, heads, d), and None in place of the scores.

    Raises:
        NotImplementedError: the layer wants more than causal attention.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a soft cap or with sinks")
    queries, keys, values = (x.split(layout.pieces, dim=2) for x in (query, key, value))
    out = []
    p = 0
    for count in layout.responses:
        for r in range(p + 1, p + 1 + count):
            # The prompt's own queries are asked again with every response: that keeps the square
            # form that the fast kernels know, and costs attention only, no linear layer.
            q, k, v = (torch.cat([x[p], x[r]], dim=2) for x in (queries, keys, values))
            band = _band(q.shape[2], sliding_window, q.device)
            y = scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True
            )
            out.append(y if r == p + 1 else y[:, :, layout.pieces[p] :])
        p += 1 + count
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a window that does not reach over the whole piece."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return (back >= 0) & (back < window)


AttentionInterface.register(PACKED, packed_attention)
