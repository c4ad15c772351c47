"""Supervised fine-tuning: imitate the assistant's tokens of finished conversations.

The loss of a step is the mean of -log p over all assistant tokens of its batch: those that
`ChatTemplate.trace` marks with 1, which are the tokens that a policy would have sampled.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARMUP = 0.03
"""Share of the steps in which the learning rate rises to its peak."""
FINAL_LR = 0.1
"""The learning rate at the last step, as a share of the peak."""
BUCKET = 16
"""Batches are cut from this many batches' worth of examples, sorted by length."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `mask` is 1 where the loss counts."""

    ids: array[int]
    mask: array[int]


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches, epoch after epoch in a new order, each of examples of about one length."""
    order = list(examples)
    while True:
        rng.shuffle(order)
        cut: list[list[Example]] = []
        for start in range(0, len(order), size * BUCKET):
            bucket = sorted(order[start : start + size * BUCKET], key=lambda e: len(e.ids))
            cut += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        rng.shuffle(cut)
        yield from cut


def loss_of(model: Any, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss () and the share of right guesses, as counts.

    Returns:
        The sum of -log p over the batch's assistant tokens, and how many of them are the model's
        likeliest token.
    """
    ids, mask = _pad(batch, model.device)
    targets, counted = ids[:, 1:], mask[:, 1:]
    # Only positions that some row counts need logits: (B, K, V) instead of (B, T, V). Padding is on
    # the right, where causal attention keeps it from everything real: no attention mask is needed.
    kept = counted.any(dim=0).nonzero()[:, 0]
    logits = model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits.float()
    targets, counted = targets[:, kept], counted[:, kept]
    logits, targets = logits[counted], targets[counted]
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss, (logits.argmax(-1) == targets).sum()


def _pad(batch: Sequence[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) and the mask (B, T) as bool, padded on the right."""
    width = max(len(e.ids) for e in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.ids)] = torch.tensor(example.mask, dtype=torch.bool)
    return ids.to(device), mask.to(device)


def fit(
    model: Any,
    source: Iterator[Sequence[Example]],
    *,
    steps: int,
    lr: float,
    max_grad_norm: float = 1.0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train on `steps` batches with AdamW; the learning rate warms up, then falls linearly.

    Args:
        model: a causal language model; its parameters that require gradients are trained.
        source: batches; each is one optimizer step.
        steps: how many.
        lr: the peak learning rate.
        max_grad_norm: gradients are clipped to this norm.
        report: called after each step with its number and loss per token.

    Returns:
        The last step's loss per token.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    warmup = max(1, round(WARMUP * steps))

    def factor(step: int) -> float:
        fall = 1 - (1 - FINAL_LR) * step / steps
        return min(1.0, (step + 1) / warmup) * fall

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    loss = 0.0
    for step in range(steps):
        batch = next(source)
        total, _ = loss_of(model, batch)
        mean = total / sum(sum(e.mask[1:]) for e in batch)
        optimizer.zero_grad(set_to_none=True)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(weights, max_grad_norm)
        optimizer.step()
        schedule.step()
        loss = mean.item()
        report(step + 1, loss)
    model.eval()
    return loss
