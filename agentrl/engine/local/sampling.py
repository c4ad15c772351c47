"""Pure functions from logits to tokens, vectorized over rows.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, token index), without a generator or a state.

    It applies the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014) to the seed, then to the stream of the seed at the index.

    Args:
        seeds: uint64 (N).
        indices: the position of the sampled token in its row (N).

    Returns:
        float64 (N), multiples of 2^-40, so that `u * total < total` also after rounding.
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
    returns_kept: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Sample one token per row by inverting the cumulative distribution at `u`.

    top_k is applied first. top_p then keeps the smallest set of the most likely tokens whose share
    of the remaining mass is at least top_p. Both only restrict which tokens can be sampled: the
    logprob is over the full vocabulary, except in rows of `returns_kept`.

    Args:
        logits: (N, V).
        temperature: float32 (N); 0 takes the most likely token, with its logprob at temperature 1.
        top_k: (N); 0 keeps all.
        top_p: (N).
        u: float64 (N) in [0, 1).
        returns_kept: bool (N), the rows whose kept tokens are returned, and whose logprobs are over
            these tokens alone; None: no row.

    Returns:
        Token ids int32 (N); logprobs float32 (N), NaN in rows whose logits are NaN; and the ids
        that are kept in each row, int32 in an array of objects (N), or None without `returns_kept`.
    """
    greedy = temperature <= 0
    scaled = logits.float()
    if (temperature != 1).any():
        scaled = scaled / _column(np.where(greedy, 1, temperature).astype(np.float32), logits)
    logprobs = scaled.log_softmax(-1)
    target = _column(u, logits)
    tokens = _sample_full(logprobs.exp().double().cumsum(-1), target)
    if greedy.any():
        at = _indices(greedy, logits)
        tokens[at] = logprobs[at].argmax(-1, keepdim=True)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    kept = None
    if cut.any():
        at = _indices(cut, logits)
        tokens[at], order, last, log_mass = _sample_truncated(
            logprobs[at], _column(top_k[cut], logits), _column(top_p[cut], logits), target[at]
        )
        if returns_kept is not None:
            kept = np.empty(len(logits), object)
            kept[cut] = _split_kept(order, last)
            log_mass = log_mass.where(_column(returns_kept[cut], logits), 0.0).float()
            logprobs[at] = (logprobs[at] - log_mass).clamp(max=0.0)  # Rounding may give 1e-8.
    sampled_logprobs = logprobs.gather(-1, tokens)
    # One transfer for ids and logprobs: on an accelerator each transfer waits for the device. A
    # float32 has a mantissa of 24 bits, too few for some token ids, so both become float64.
    packed = torch.cat((tokens.double(), sampled_logprobs.double()), -1).cpu().numpy()
    return packed[:, 0].astype(np.int32), packed[:, 1].astype(np.float32), kept


def _sample_full(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative mass exceeds `target` times the total.

    A token of mass 0 is never returned.
    """
    goal = target * cumulative[:, -1:]
    # A row of NaN has no such index. The caller sees that its logprob is NaN.
    return torch.searchsorted(cumulative, goal, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _sample_truncated(
    logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample as `_sample_full` does, from the tokens that top_k and top_p keep.

    In the order of likelihood, these tokens are a prefix.

    Returns:
        The tokens; the ids of all tokens in the order of likelihood (N, V), the index of the last
        one that is kept, and the log of their mass. All but the order are (N, 1).
    """
    ordered, order = torch.sort(logprobs, stable=True, dim=-1, descending=True)
    mass = ordered.exp().double()
    cumulative = mass.cumsum(-1)
    size = cumulative.shape[-1]
    last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
    share = cumulative.gather(-1, last) * top_p
    last_in_nucleus = (cumulative - mass < share).sum(-1, keepdim=True) - 1
    last = torch.minimum(last, last_in_nucleus).clamp(min=0)
    kept_mass = cumulative.gather(-1, last)
    index = torch.searchsorted(cumulative, target * kept_mass, right=True)
    return order.gather(-1, torch.minimum(index, last)), order, last, kept_mass.log()


def _split_kept(order: torch.Tensor, last: torch.Tensor) -> np.ndarray:
    """Return the ids up to the `last` of each row, int32, in an array of objects (N)."""
    counts = last[:, 0].cpu().numpy() + 1
    ids = order[:, : counts.max()].int().cpu().numpy()
    kept = np.empty(len(ids), object)
    for i, count in enumerate(counts):
        kept[i] = ids[i, :count].copy()
    return kept


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _indices(mask: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(like.device)
