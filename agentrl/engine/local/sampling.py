"""From logits to tokens: pure functions, vectorised over rows.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, token index); there is no generator and no state.

    The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014) over the seed, then over the seed's stream at the index.

    Args:
        seeds: uint64 (N).
        indices: the sampled token's position in its row (N).

    Returns:
        float64 (N), multiples of 2^-40: so that `u * total < total` also after rounding.
    """
    stream = _mix(seeds.astype(np.uint64)) + GOLDEN * (indices.astype(np.uint64) + np.uint64(1))
    return (_mix(stream) >> np.uint64(24)) * 2.0**-40


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    u: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token a row by inverting the cumulative distribution at `u`.

    top_k cuts first; top_p then keeps the fewest likeliest tokens that hold that share of what is
    left. Both narrow only what may be drawn: the logprob stays that of the full vocabulary.

    Args:
        logits: (N, V).
        temperature: float32 (N); 0 takes the likeliest token, with its logprob at temperature 1.
        top_k: (N); 0 keeps all.
        top_p: (N).
        u: float64 (N) in [0, 1).

    Returns:
        Token ids int32 (N) and logprobs float32 (N), NaN in rows whose logits are broken.
    """
    greedy = temperature <= 0
    scaled = logits.float()
    if (temperature != 1).any():
        scaled = scaled / _column(np.where(greedy, 1, temperature).astype(np.float32), logits)
    logprobs = scaled.log_softmax(-1)
    target = _column(u, logits)
    tokens = _sample_full(logprobs.exp().double().cumsum(-1), target)
    if greedy.any():
        at = _rows(greedy, logits)
        tokens[at] = logprobs[at].argmax(-1, keepdim=True)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    if cut.any():
        at = _rows(cut, logits)
        tokens[at] = _sample_truncated(
            logprobs[at], _column(top_k[cut], logits), _column(top_p[cut], logits), target[at]
        )
    drawn = logprobs.gather(-1, tokens)
    # One transfer for both: on an accelerator each costs a wait for the device. 24 bits of mantissa
    # would not hold every token id, so they travel as doubles.
    both = torch.cat((tokens.double(), drawn.double()), -1).cpu().numpy()
    return both[:, 0].astype(np.int32), both[:, 1].astype(np.float32)


def _sample_full(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative mass exceeds `target` of the total: never a token of mass 0."""
    goal = target * cumulative[:, -1:]
    # A row of NaN finds no index; its logprob tells the caller.
    return torch.searchsorted(cumulative, goal, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _sample_truncated(
    logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """As `_sample_full`, among the tokens that top_k and top_p keep: a prefix in order of likelihood."""
    ordered, order = torch.sort(logprobs, stable=True, dim=-1, descending=True)
    mass = ordered.exp().double()
    cumulative = mass.cumsum(-1)
    size = cumulative.shape[-1]
    last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
    share = cumulative.gather(-1, last) * top_p
    nucleus = (cumulative - mass < share).sum(-1, keepdim=True) - 1
    last = torch.minimum(last, nucleus).clamp(min=0)
    goal = target * cumulative.gather(-1, last)
    drawn = torch.searchsorted(cumulative, goal, right=True)
    return order.gather(-1, torch.minimum(drawn, last))


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _rows(mask: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(like.device)
