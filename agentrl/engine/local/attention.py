"""Attention of single queries, as decoding needs it on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "agentrl_grouped"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For one query a row: two small matrix products on the key/value heads as they are.

    Anything else goes to `sdpa`, which repeats keys and values for every query head first; decoding
    128 rows of 200 tokens on two cores takes 4.0 ms a step here and 5.1 there (tiny Qwen2 shape).

    Args:
        module: the attention layer.
        query: (N, heads, T, head_dim).
        key: (N, kv_heads, L, head_dim).
        value: (N, kv_heads, L, head_dim).
        attention_mask: (N, 1, T, L), added to the scores; None is causal.
        scaling: of the scores.
        **kwargs: for `sdpa`.

    Returns:
        (N, T, heads, head_dim), and no weights.
    """
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    n, heads, _, head_dim = query.shape
    grouped = (query * scaling).view(n, key.shape[1], -1, head_dim)
    weights = (grouped @ key.transpose(2, 3)).add_(attention_mask).softmax(-1)
    return (weights @ value).view(n, 1, heads, head_dim), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
