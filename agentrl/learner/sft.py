"""Supervised fine-tuning (SFT) on the assistant's tokens of finished conversations.

The loss of a step is the mean of -log p over the assistant's tokens of its batch. These are exactly
the tokens that a policy would have sampled: `ChatTemplate.trace` marks them. Packing,
micro-batches, LoRA, ranks and the optimizer are the learner's. A conversation is a row whose prompt
ends before its first trained token.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agentrl.config import FIELDS, Config, load_config
from agentrl.engine.local.load import auto_class, load_causal_lm, load_model_config
from agentrl.errors import ConfigError
from agentrl.images import RowImage
from agentrl.learner.batch import TokenRows, check_images, row_images
from agentrl.learner.dispatch import Placement, check_single_controller
from agentrl.learner.learner import Learner
from agentrl.learner.rank import start_ranks
from agentrl.registry import did_you_mean

WARMUP = 0.03
"""The share of steps in which the learning rate rises to its peak."""
FINAL_LR = 0.1
"""The learning rate at the last step, as a share of the peak."""
FULL_LR, LORA_LR = 1e-5, 2e-4
"""The default peak learning rates of full and of LoRA training."""
BETAS = (0.9, 0.95)
"""AdamW's decay rates. The second moment is averaged over 20 steps, since runs are short."""
SFT_KEYS = (
    "model.freeze_vision_tower", "model.lora_alpha", "model.lora_target_modules", "optim.name",
    "optim.lr_warmup_steps", "optim.lr_final", "optim.weight_decay", "optim.max_grad_norm", "optim.recompute",
    "optim.compile", "optim.offload", "trainer.device", "trainer.nnodes",
    "trainer.n_gpus_per_node", "trainer.context_parallel_size", "trainer.ray_address",
)  # fmt: skip
"""The config keys of a run that apply to SFT."""
FLAG_OF_KEY = {
    "optim.lr": "--lr", "optim.micro_batch_tokens": "--micro-batch-tokens", "model.path": "--model",
    "model.lora_rank": "--lora-rank", "data.train": "--dataset", "data.prompt_key": "--prompt-key",
    "data.batch_size": "--batch-size", "trainer.total_steps": "--steps", "trainer.seed": "--seed",
    "trainer.output": "--output", "files": "--file",
}  # fmt: skip
"""Flags of `agentrl sft` by the config key that they set."""


def make_sft_config(
    path: str | Path,
    *,
    steps: int,
    lr: float = 0.0,
    lora_rank: int = 0,
    micro_batch_tokens: int = 16384,
    seed: int = 0,
    files: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Config:
    """Return the config of an `SFTLearner`. Its learning rate rises, then falls linearly.

    Args:
        path: a model or a PEFT adapter: a folder, or a name on the hub.
        steps: the length of the run.
        lr: the peak learning rate; 0: `FULL_LR` or `LORA_LR`.
        lora_rank: the rank of an adapter, whose alpha is twice the rank. 0: all weights learn.
        micro_batch_tokens: most tokens of one forward pass; the loss does not depend on it.
        seed: the seed of random weights, including an adapter's.
        files: the user's files, for ranks in other processes.
        overrides: texts such as `optim.weight_decay=0.1`, for keys in `SFT_KEYS`.

    Raises:
        ConfigError: a key does not apply to SFT, or a value is wrong.
    """
    for override in overrides:
        if (key := override.partition("=")[0].strip().removeprefix("+")) not in SFT_KEYS:
            raise ConfigError(_describe_bad_key(key))
    preset: dict[str, Any] = {
        "rollout.temperature": 1.0,
        "optim.lr_warmup_steps": max(1, round(WARMUP * steps)) - 1,
        "optim.lr_final": FINAL_LR,
    }
    if lora_rank:
        preset["model.lora_alpha"] = 2 * lora_rank
    flags = {
        "files": list(files),
        "model.path": str(path),
        "model.lora_rank": lora_rank,
        "optim.lr": lr or (LORA_LR if lora_rank else FULL_LR),
        "optim.micro_batch_tokens": micro_batch_tokens,
        "trainer.total_steps": steps,
        "trainer.seed": seed,
    }
    return load_config(None, overrides, flags, preset)


def _describe_bad_key(key: str) -> str:
    if flag := FLAG_OF_KEY.get(key):
        return f"{key} is set by the flag {flag}"
    hint = "" if key in FIELDS else did_you_mean(key, (*SFT_KEYS, *FLAG_OF_KEY))
    return f"{key} does not apply to SFT.{hint} Choose from {', '.join(SFT_KEYS)}"


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation as tokens; `mask` is 1 for trained tokens, and never for the first token.

    Example: `Example(P + A, [0] * len(P) + [1] * len(A))` for a prompt P and an answer A.
    """

    ids: array[int]
    mask: array[int]
    images: tuple[RowImage, ...] = ()
    """The images of the conversation, in order; their tokens are not trained."""


class SFTLearner(Learner):
    """A learner for supervised fine-tuning."""

    def __init__(self, config: Config, *, fresh: bool = False, placement: Placement | None = None):
        """Load the model.

        Args:
            config: from `make_sft_config`.
            fresh: start from random weights, in the model's architecture.
            placement: where the ranks run; None: one rank in this process.

        Raises:
            ConfigError: there is no such model, it cannot be trained here, or the config wants
                several ranks and there is no placement.
        """
        check_single_controller(config, placement)
        path, t = config.model.path, config.trainer
        load = partial(init_causal_lm, seed=t.seed) if fresh else load_causal_lm
        group = start_ranks(placement, path, config, betas=BETAS, load=load)
        super().__init__(path, config, total_steps=t.total_steps, group=group)

    def train_step(self, examples: Sequence[Example], step: int) -> float:
        """Run one optimizer step.

        Args:
            examples: the batch.
            step: the number of the step, from 1; it determines the learning rate.

        Returns:
            The loss before the step: the mean of -log p over the trained tokens of the batch.

        Raises:
            RunStopped: the loss or the gradient is not finite. The weights have not changed.
        """
        rows = make_rows(examples)
        mask = rows.response_mask
        weights = mask.double() / mask.sum()
        _, passes = self._forward_backward("sft", rows, mask.any(1), mask, {"weights": weights})
        return self._optimizer_step("actor", step, passes)["loss"]

    def _explain_failure(self, name: str, step: int) -> str:
        return f"A lower learning rate (now {self._lr(name, step):g}) usually helps."

    def fit(
        self,
        source: Iterator[Sequence[Example]],
        report: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Run all steps.

        Args:
            source: batches; one per optimizer step.
            report: called after each step with its number, from 1, and its loss.

        Raises:
            RunStopped: a loss or gradient is not finite.
        """
        for step in range(1, self.config.trainer.total_steps + 1):
            report(step, self.train_step(next(source), step))


def make_rows(examples: Sequence[Example]) -> TokenRows:
    """Return rows whose scored tokens are the trained ones, at least one in each example."""
    ids = [torch.tensor(e.ids) for e in examples]
    masks = [torch.tensor(e.mask, dtype=torch.bool) for e in examples]
    starts = [e.mask.index(1) for e in examples]
    split = list(zip(ids, starts, strict=True))
    rows = TokenRows(
        prompt_ids=pad_sequence([x[:k] for x, k in split], True, padding_side="left").long(),
        prompt_lengths=torch.tensor(starts),
        response_ids=pad_sequence([x[k:] for x, k in split], True).long(),
        response_lengths=torch.tensor([len(x) - k for x, k in split]),
        response_mask=pad_sequence([m[k:] for m, k in zip(masks, starts, strict=True)], True),
        images=row_images([e.images for e in examples]),
    )
    check_images(rows, [f"conversation {i} of the batch" for i in range(len(examples))])
    return rows


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches without end: each epoch has every example once, in a new random order."""
    rng = random.Random(seed)
    order = list(examples)
    while True:
        rng.shuffle(order)
        yield from (order[i : i + size] for i in range(0, len(order), size))


# -- models ---------------------------------------------------------------------------------------


def init_causal_lm(
    path: str | Path,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    *,
    seed: int,
) -> PreTrainedModel:
    """Make a model with random weights, which depend on architecture and seed alone.

    The arguments are those of `load_causal_lm`.

    Args:
        path: the model whose architecture is used.
        dtype: the data type of the weights; "auto": float32.
        device: the device of the model.
        seed: the seed of the weights.

    Raises:
        ConfigError: there is no such model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        config = load_model_config(path)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    model.name_or_path = ""  # no folder holds these weights
    model.to(device, torch.float32 if dtype == "auto" else dtype)
    return model.eval()


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the block with torch on one CPU thread.

    For models of half a million weights, a second thread saves a fifth of the time if the cores are
    idle, and doubles the time if other processes use them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
