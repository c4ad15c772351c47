"""Inputs for the trainer's tests: trajectories written by hand, and a model of a few thousand
weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from agentrl.config import Config
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import Batch, Targets
from agentrl.learner.learner import Learner
from agentrl.trajectory import (
    Group,
    Sample,
    Scored,
    Segment,
    Trajectory,
    Turn,
    float_array,
    token_array,
)

VOCABULARY = 32
SAMPLE = Sample("s", ())


def segment(prompt: Sequence[int], *pieces: tuple[str, Sequence[int]]) -> Segment:
    """Return a row of sampled ("A") and observed ("E") pieces. The logprob of token k is -k / 8."""
    ids = [t for _, piece in pieces for t in piece]
    mask = [int(kind == "A") for kind, piece in pieces for _ in piece]
    return Segment(
        token_array(prompt),
        token_array(ids),
        token_array(mask),
        float_array([-t / 8 if m else 0.0 for t, m in zip(ids, mask, strict=True)]),
        token_array([0 if m else -1 for m in mask]),
    )


def scored(
    segments: Sequence[Segment], reward: float, turns: Sequence[Turn] = (), masked: bool = False
) -> Scored:
    trajectory = Trajectory(SAMPLE, "e", 0, tuple(segments), tuple(turns), (), {}, "done")
    return Scored(trajectory, {"outcome": reward}, reward, masked=masked)


def turn(segment: int, start: int, end: int, thread: int = 0, **rewards: float) -> Turn:
    return Turn(segment, start, end, "stop", rewards=rewards, thread=thread)


def targets_of(learner: Learner, batch: Batch) -> Targets:
    """Return what the update needs, from the learner's own passes."""
    return make_targets(
        batch,
        learner.config,
        learner.old_logprobs(batch),
        learner.values(batch),
        learner.reference_logprobs(batch),
    )


def step(learner: Learner, batch: Batch, number: int = 1) -> dict[str, float]:
    """Make an update, and return its metrics."""
    return learner.update(batch, targets_of(learner, batch), number)[0]


def group(*members: Scored) -> Group:
    return Group(SAMPLE, members)


def random_groups(seed: int, groups: int, n: int, *, dead: Sequence[int] = ()) -> list[Group]:
    """Return groups of rollouts of random lengths, with tool tokens between two sampled pieces.

    Rewards alternate between 0 and 1; those of the groups in `dead` are all 1.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    made = []
    for g in range(groups):
        prompt = tokens(2, 6)
        members = []
        for i in range(n):
            row = segment(
                prompt, ("A", tokens(1, 6)), ("E", tokens(0, 4)), ("A", tokens(1, 6)), ("E", [3])
            )
            members.append(scored([row], 1.0 if g in dead else float(i % 2)))
        made.append(group(*members))
    return made


def tiny_model(seed: int = 0, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).eval()


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a model to float64, also its RMS norms, which transformers computes in float32."""
    for module in model.double().modules():
        if isinstance(module, Qwen2RMSNorm):
            module.forward = partial(_norm, module)
    return model


def _norm(module: Qwen2RMSNorm, x: torch.Tensor) -> torch.Tensor:
    # Read the weight here: `fully_shard` replaces it within a forward pass.
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def tiny_folder(folder: Path, seed: int = 0) -> Path:
    tiny_model(seed).save_pretrained(folder)
    return folder


def config(**keys: Any) -> Config:
    """Return a config for the CPU. `optim__lr=1` sets the key `optim.lr`."""
    tree: dict[str, dict[str, Any]] = {"trainer": {"device": "cpu"}}
    for key, value in keys.items():
        section, leaf = key.split("__")
        tree.setdefault(section, {})[leaf] = value
    return Config.model_validate(tree)


def plain_logprobs(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Return (B, T) logprobs of the sampled tokens: one unpacked forward pass for each row."""
    out = torch.zeros_like(batch.rollout_logprobs)
    for b in range(len(out)):
        p, r = int(batch.prompt_lengths[b]), int(batch.response_lengths[b])
        prompt = batch.prompt_ids[b, batch.prompt_ids.shape[1] - p :]
        ids = torch.cat([prompt, batch.response_ids[b, :r]])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float()
        for t in range(r):
            if batch.response_mask[b, t]:
                row = torch.log_softmax(logits[p + t - 1] / temperature, -1)
                out[b, t] = row[ids[p + t]]
    return out


def as_sampled_by(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Batch:
    """Return the batch with the `rollout_logprobs` that `model` gives its tokens."""
    return replace(batch, rollout_logprobs=plain_logprobs(model, batch, temperature))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a folder, by name."""
    return {
        n: t
        for file in sorted(folder.iterdir())
        if file.suffix == ".safetensors"
        for n, t in load_file(file).items()
    }


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
