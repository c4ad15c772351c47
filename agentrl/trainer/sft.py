"""Supervised fine-tuning: imitate the assistant in finished conversations.

A step's loss is the mean of -log p over the assistant's tokens of its batch, which are exactly the
tokens that a policy would have sampled: `ChatTemplate.trace` marks them. Rows are packed, never
padded.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from agentrl.engine.local.load import base_and_adapters, load_causal_lm
from agentrl.errors import ConfigError, RunStopped
from agentrl.trainer.conversations import Example
from agentrl.trainer.model import ACTOR, Policy
from agentrl.trainer.packing import Layout, Packed

WARMUP = 0.03
"""Share of the steps in which the learning rate rises to its peak."""
FINAL_LR = 0.1
"""The learning rate at the last step, as a share of the peak."""
BETAS = (0.9, 0.95)
"""AdamW's: a memory of 20 steps for the second moment, since runs are short."""


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches: every example once an epoch, each epoch in an order of its own."""
    rng = random.Random(seed)
    order = list(examples)
    while True:
        rng.shuffle(order)
        yield from (order[i : i + size] for i in range(0, len(order), size))


# -- what learns ----------------------------------------------------------------------------------


def open_policy(
    path: str | Path, *, lora_rank: int = 0, fresh: bool = False, seed: int = 0
) -> Policy:
    """A model that learns: all of it, or with `lora_rank` an adapter on it.

    Args:
        path: a folder in transformers' format, or a name on the hub.
        lora_rank: rank of the adapter; its alpha is twice that. 0: none.
        fresh: begin from random weights, of the model's shape.
        seed: of random weights, the adapter's too.

    Raises:
        ConfigError: no such model, or one that cannot be trained here.
    """
    if fresh:
        policy = new_policy(shape_of(path), seed)
    else:
        dtype = "auto" if lora_rank and torch.cuda.is_available() else torch.float32
        policy = Policy(load_causal_lm(path, dtype, _device()), 1.0)
    if lora_rank:
        policy.add_adapter(ACTOR, lora_rank, 2 * lora_rank, "all-linear", seed)
    return policy


def shape_of(path: str | Path) -> PretrainedConfig:
    """The configuration of a model, or of the one below an adapter; no weights are read.

    Raises:
        ConfigError: no such model.
    """
    base, _ = base_and_adapters(path)
    try:
        return AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no model at {base!r}: {str(e).splitlines()[0]}") from e


def new_policy(shape: PretrainedConfig, seed: int) -> Policy:
    """A model of that shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # A copy, since the policy changes its model's configuration.
        model = AutoModelForCausalLM.from_config(deepcopy(shape), dtype=torch.float32)
    model.name_or_path = ""  # these weights lie in no folder, whoever's shape they have
    return Policy(model.eval().to(_device()), 1.0)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- training -----------------------------------------------------------------------------------


def fit(
    policy: Policy,
    source: Iterator[Sequence[Example]],
    *,
    steps: int,
    lr: float,
    max_grad_norm: float = 1.0,
    micro_batch_tokens: int = 16384,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on `steps` batches with AdamW; the learning rate warms up, then falls linearly.

    Args:
        policy: what learns: all weights that require gradients.
        source: batches; each makes one optimizer step.
        steps: how many.
        lr: the peak learning rate.
        max_grad_norm: gradients are clipped to this norm.
        micro_batch_tokens: most tokens of one forward pass; the loss does not depend on it.
        report: called after each step with its number, from 1, and its loss.

    Raises:
        RunStopped: the loss is not finite.
    """
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(1, steps + 1):
        batch = next(source)
        count = sum(sum(e.mask) for e in batch)
        loss = 0.0
        for some in _micro_batches(batch, micro_batch_tokens):
            share = -logprobs(policy, some).sum() / count
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(weights, max_grad_norm)
        if not math.isfinite(loss):
            raise RunStopped(f"the loss is {loss} at step {step}. Lower the learning rate ({lr:g})")
        for group in optimizer.param_groups:
            group["lr"] = lr * _schedule(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss)


def logprobs(policy: Policy, examples: Sequence[Example]) -> Tensor:
    """Log p of every token to imitate, (N,), example by example."""
    device = policy.model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return policy.logprobs(_pack(examples, device))[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread of the processor.

    For models of half a million weights: a second thread saves a fifth of the time where cores are
    idle, and doubles it where they are shared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def score(policy: Policy, examples: Sequence[Example]) -> Tensor:
    """`logprobs`, without a gradient."""
    return logprobs(policy, examples)


class Progress:
    """A `report` for `fit`: a line of text every few seconds, and one at the end."""

    def __init__(self, steps: int, say: Callable[[str], None], every_s: float = 5.0):
        self._steps = steps
        self._say = say
        self._every_s = every_s
        self._started = self._said = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        if now - self._said >= self._every_s or step == self._steps:
            self._said = now
            self._say(f"  step {step}/{self._steps}  loss {loss:.3f}  {now - self._started:.0f} s")


def _schedule(step: int, steps: int) -> float:
    """The learning rate of a step, from 1, as a share of its peak."""
    warmup = max(1, round(WARMUP * steps))
    return min(step / warmup, 1 - (1 - FINAL_LR) * (step - warmup) / max(1, steps - warmup))


def _micro_batches(batch: Sequence[Example], budget: int) -> Iterator[list[Example]]:
    """Neighbours of at most `budget` tokens together; a longer example goes alone."""
    some: list[Example] = []
    room = budget
    for example in batch:
        if some and len(example.ids) > room:
            yield some
            some, room = [], budget
        some.append(example)
        room -= len(example.ids)
    yield some


def _pack(examples: Sequence[Example], device: torch.device) -> Packed:
    pieces, states = [], []
    start = 0
    for e in examples:
        prompt = e.mask.index(1)
        pieces += [prompt, len(e.ids) - prompt]
        states += [start + i - 1 for i, own in enumerate(e.mask) if own]
        start += len(e.ids)
    flat = torch.tensor([i for e in examples for i in e.ids])
    at = torch.tensor(states)
    return Packed(
        input_ids=flat[None].to(device),
        position_ids=torch.cat([torch.arange(len(e.ids)) for e in examples])[None].to(device),
        layout=Layout(pieces, [1] * len(examples)),
        states=at.to(device),
        tokens=flat[at + 1].to(device),
    )
