"""The tokens and logprobs that an engine must return, computed by transformers."""

from __future__ import annotations

import copy
import time
from array import array

import torch


async def ask(engine, prompt, sampling, tag="e", seconds=120.0, seed=1):
    """Return the engine's turn after a prompt."""
    return await engine.generate(
        prompt, sampling, episode_id=tag, seed=seed, deadline=time.monotonic() + seconds
    )


@torch.inference_mode()
def logprobs_of(model, prompt, sampled, temperature=1.0):
    """Return the logprobs (N) of the tokens that were sampled after a prompt, in float64."""
    ids = torch.tensor([[*prompt, *sampled]])
    exact = copy.deepcopy(model).double()
    logits = exact(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@torch.inference_mode()
def greedy_of(model, prompt, n):
    """Return the most likely tokens after a prompt, at most n, up to the end of the turn."""
    ids = [*prompt]
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return array("i", ids[len(prompt) :])
