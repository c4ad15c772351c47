"""Supervised fine-tuning: imitate the assistant in finished conversations.

A step's loss is the mean of -log p over the assistant's tokens of its batch, which are exactly the
tokens that a policy would have sampled: `ChatTemplate.trace` marks them. Rows are packed, never
padded.
"""

from __future__ import annotations

import json
import math
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from agentrl import registry
from agentrl.agent_loops import AgentLoop
from agentrl.chat import ChatTemplate
from agentrl.data import load_samples
from agentrl.data.mistakes import Mistakes
from agentrl.engine.local.load import load_causal_lm
from agentrl.errors import RegistryError, RunStopped
from agentrl.tools import LocalToolbox
from agentrl.trainer.model import ACTOR, Policy
from agentrl.trainer.packing import Layout, Packed
from agentrl.trajectory import Message, Role, Sample

WARMUP = 0.03
"""Share of the steps in which the learning rate rises to its peak."""
FINAL_LR = 0.1
"""The learning rate at the last step, as a share of the peak."""
BETAS = (0.9, 0.95)
"""AdamW's: a memory of 20 steps for the second moment, since runs are short."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `mask` is 1 on those to imitate, never on the first.

    Example: `Example(P + A, [0] * len(P) + [1] * len(A))` for a prompt P and an answer A.
    """

    ids: array[int]
    mask: array[int]


# -- from a dataset -----------------------------------------------------------------------------


def load_examples(path: str, column: str, template: ChatTemplate) -> list[Example]:
    """The conversations in a column of a dataset.

    A cell is a list of `{"role", "content"}`, or such a list as JSON. One that begins with an
    assistant message goes on from the row's prompt, which is shown as the row's agent loop shows
    it; any other is the whole conversation. Tools that the row names are shown in its prompt.

    Raises:
        DataError: the file or rows cannot be read; all of them at once.
    """
    mistakes = Mistakes(path)
    examples = []
    for sample in load_samples(path):
        try:
            said = _messages(sample.extra.get(column))
            opening, schemas = _opening(sample, said)
            examples.append(Example(*template.trace([*opening, *said], schemas)))
        except RegistryError as e:
            mistakes.add(sample.row, "agent_name, tools", f"{e}. Load its file with --file")
        except ValueError as e:
            mistakes.add(sample.row, column, str(e))
    mistakes.raise_any()
    return examples


def _messages(cell: Any) -> list[Message]:
    if cell is None:
        raise ValueError("is missing: name the column that holds the conversations with --column")
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError as e:
            raise ValueError(f"is not JSON: {e}") from None
    match cell:
        case [{"role": str(), "content": str()}, *_]:
            pass
        case _:
            raise ValueError(f'must be a list of {{"role", "content"}}, not {cell!r:.60}')
    messages = []
    for i, said in enumerate(cell):
        match said:
            case {"role": role, "content": str(content)} if role in get_args(Role):
                messages.append(Message(role, content))
            case _:
                raise ValueError(f"message {i} must have a role and a text, not {said!r:.60}")
    if messages[-1].role != "assistant":
        raise ValueError("must end with an assistant message")
    return messages


def _opening(
    sample: Sample, said: Sequence[Message]
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    schemas = LocalToolbox().schemas(sample.tools)
    if said[0].role != "assistant":
        return (), schemas
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    return loop.opening(sample, schemas)


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
        fresh: begin from random weights; only the folder's config.json is read.
        seed: of random weights, the adapter's too.

    Raises:
        ConfigError: no such model, or one that cannot be trained here.
    """
    if fresh:
        policy = new_policy(AutoConfig.from_pretrained(path), seed)
    else:
        dtype = "auto" if lora_rank and torch.cuda.is_available() else torch.float32
        policy = Policy(load_causal_lm(path, dtype).to(_device()), 1.0)  # type: ignore[arg-type]
    if lora_rank:
        policy.add_adapter(ACTOR, lora_rank, 2 * lora_rank, "all-linear", seed)
    return policy


def new_policy(shape: PretrainedConfig, seed: int) -> Policy:
    """A model of that shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # A copy, since the policy changes its model's configuration.
        model = AutoModelForCausalLM.from_config(deepcopy(shape), dtype=torch.float32)
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
