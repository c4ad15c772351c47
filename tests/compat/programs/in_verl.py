"""Calls functions of an installed verl. It runs in an environment that has verl, not agentrl.

Each line of the input is a call, `{"name": "MODULE:FUNCTION", "args": [...], "kwargs": {...}}`, and
each line of the output is `[what the function returned, the error]`. `{"tensor": [...]}`,
`{"array": [...]}` and `{"namespace": {...}}` stand for such objects.
"""

import contextlib
import importlib
import json
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import torch


def decode(value):
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    for name, make in (
        ("tensor", torch.tensor),
        ("array", np.array),
        ("namespace", lambda fields: SimpleNamespace(**decode(fields))),
    ):
        if name in value:
            return make(value[name])
    return {k: decode(v) for k, v in value.items()}


def encode(value):
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def first_rates(steps, count):
    """Return the first learning rates of verl's warm-up to 1, one for each step of training."""
    from verl.utils.torch_functional import get_constant_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_constant_schedule_with_warmup(optimizer, steps)
    rates = []
    for _ in range(count):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


def ppo_losses(rows, **config):
    """Return the sum of verl's `ppo_loss` over the rows of a mini-batch, each a micro-batch.

    Args:
        rows: each has the lists of its tokens: `mask`, `advantages`, `log_probs`, `old_log_probs`,
            `ref_log_prob` and `rollout_is_weights`.
        config: fields of verl's ActorConfig.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    settings = FSDPActorConfig(
        rollout_n=1, ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=1, **config
    )
    total = 0.0
    for row in rows:
        mask = torch.tensor([row["mask"]])
        prompt = torch.ones(1, 1, dtype=torch.long)
        fields = ("advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights")
        data = TensorDict(
            {
                "prompts": prompt,
                "responses": mask,
                "attention_mask": torch.cat([prompt, torch.ones_like(mask)], 1),
                "response_mask": mask,
                **{name: torch.tensor([row[name]]) for name in fields},
            },
            batch_size=1,
        )
        tokens = sum(sum(r["mask"]) for r in rows)
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows)
        )
        # A model's logprob of a token is at the position before the token.
        log_probs = [torch.tensor([*row["log_probs"], 0.0])]
        output = {"log_probs": torch.nested.nested_tensor(log_probs, layout=torch.jagged)}
        total += ppo_loss(settings, output, data)[0].item()
    return total


def policy_gradient(name, log_probs, old_log_probs, advantages, mask, **config):
    """Return the gradient of the mean over tokens of a policy loss, or None without such a loss.

    Args:
        name: `policy_loss.loss_mode`.
        log_probs: the logprobs of the tokens of each row; so are `old_log_probs`.
        advantages: of the tokens.
        mask: 1 for tokens that count.
        config: fields of verl's ActorConfig.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import FSDPActorConfig

    if name not in POLICY_LOSS_REGISTRY:
        return None
    settings = FSDPActorConfig(
        rollout_n=1, ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=1, **config
    )
    now = torch.tensor(log_probs, requires_grad=True)
    rows = [torch.tensor(x) for x in (old_log_probs, advantages, mask)]
    loss, _ = POLICY_LOSS_REGISTRY[name](rows[0], now, *rows[1:], "token-mean", settings)
    loss.backward()
    return now.grad


def compose(overrides, folder, name="ppo_trainer"):
    """Return the config of a run as Hydra stores it in `.hydra/config.yaml`."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(folder, version_base=None):
        return OmegaConf.to_yaml(compose(name, overrides))


def main():
    for line in sys.stdin:
        call = json.loads(line)
        module, _, name = call["name"].partition(":")
        # verl prints to stdout.
        try:
            with contextlib.redirect_stdout(sys.stderr):
                function = (
                    getattr(importlib.import_module(module), name) if name else globals()[module]
                )
                answer = [encode(function(*decode(call["args"]), **decode(call["kwargs"]))), ""]
        except Exception:
            answer = [None, traceback.format_exc()]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
