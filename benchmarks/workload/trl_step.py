"""An update of the same rows with TRL's GRPO loss, in padded micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from agentrl.learner.batch import Batch, Targets
from datasets import Dataset


def trl_update(
    folder: Path, batch: Batch, targets: Targets, rows: int, *, device: str, recompute: bool
) -> Callable[[], float]:
    """Return a function that runs one optimizer step and returns the norm of the gradient.

    Args:
        folder: the folder of a Qwen2 model.
        batch: the rows.
        targets: the targets of the algorithm for these rows.
        rows: the number of rows of a micro-batch.
        device: the device of the model.
        recompute: whether TRL uses gradient checkpointing.
    """
    cuda = device == "cuda"
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    dtype = torch.bfloat16 if cuda else torch.float32
    model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).to(device)  # type: ignore
    trainer: Any = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 16),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to=[],
            per_device_train_batch_size=8,
            num_generations=8,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=recompute,
            beta=0.0,
            loss_type="dapo",
        ),
    )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    trainer.current_gradient_accumulation_steps = 1
    inputs = [
        _inputs(batch, targets, slice(k, k + rows), device)
        for k in range(0, len(batch.prompt_ids), rows)
    ]

    def update() -> float:
        for micro_batch in inputs:
            trainer.compute_loss(model, micro_batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        for kept in trainer._metrics.values():
            kept.clear()
        return norm.item()

    return update


def _inputs(batch: Batch, targets: Targets, rows: slice, device: str) -> dict[str, Any]:
    prompts, responses = batch.prompt_lengths[rows], batch.response_lengths[rows]
    p, r = int(prompts.max()), int(responses.max())
    wide, mask = batch.prompt_ids.shape[1], batch.response_mask
    rollout = batch.rollout_logprobs[rows, :r]
    first = mask[rows].long().argmax(1, keepdim=True)
    made = {
        "prompt_ids": batch.prompt_ids[rows, wide - p :],
        "prompt_mask": (torch.arange(p - 1, -1, -1) < prompts[:, None]).long(),
        "completion_ids": batch.response_ids[rows, :r],
        "completion_mask": (torch.arange(r) < responses[:, None]).long(),
        "tool_mask": mask[rows, :r].long(),
        "advantages": targets.advantages[rows].gather(1, first)[:, 0],
        "num_items_in_batch": torch.tensor(float(mask.sum())),
        "old_per_token_logps": rollout.clone(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}
