"""A rank in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from support.trainer_fixtures import (
    in_float64,
)
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.remote import senders
from agentrl.learner.dispatch import BROADCAST, SPLIT, dispatch
from agentrl.learner.policy import ACTOR
from agentrl.learner.rank import Rank
from agentrl.learner.sharding import full_tensor, shard
from agentrl.registry import policy_loss, policy_losses

EXACT = 1e-10


class ExactRank(Rank):
    """A rank in float64. `begin` initializes it again, so that tests can share its process."""

    def __init__(self, folder):
        self.folder = folder

    @dispatch(BROADCAST)
    def begin(self, cfg):
        super().__init__(self.folder, cfg, dtype=torch.float64)
        scorers = {owner.packed_model for owner in (self.policy, self.critic) if owner is not None}
        for scorer in scorers:
            in_float64(scorer.model)
        with torch.no_grad():  # else half of an adapter's first gradient is zero
            for name, p in self.optimizers["actor"].parameters.items():
                if "lora_B" in name:
                    p.add_(0.05)

    @dispatch(BROADCAST)
    def move(self, by):
        """Change all weights."""
        with torch.no_grad():
            for p in self.policy.packed_model.parameters():
                p.mul_(1 + by)

    @dispatch(BROADCAST)
    def set_deadline(self, seconds):
        """Set the seconds within which a server must take a small bucket."""
        senders.BASE_SECONDS = seconds

    @dispatch(BROADCAST)
    def fail_after_a_bucket(self, route, rank):
        """Send buckets of one tensor; a rank fails before the third, which all gather together."""

        def gather():
            yield "a", torch.zeros(8)
            yield "b", torch.zeros(8)
            if dist.get_rank() == rank:
                raise RuntimeError("the gather failed")
            dist.barrier()
            yield "c", torch.zeros(8)

        return self._weights_sender.send(gather(), replace(route, bucket_bytes=1))

    @dispatch(BROADCAST)
    def register(self, loss):
        """Register the user's loss if it is not registered yet."""
        if loss not in policy_losses:
            policy_loss(loss)(loss_of_nonempty_rows)

    @dispatch(BROADCAST)
    def sharded_parameters(self):
        """Return the number of sharded parameters and the number of all."""
        parameters = list(self.policy.packed_model.parameters())
        return sum(isinstance(p, DTensor) for p in parameters), len(parameters)

    @dispatch(BROADCAST)
    def gradients(self):
        """Return the gradients of the last pass before they are clipped."""
        return {
            f"{kind}.{name}": full_tensor(p.grad)
            for kind, optimizer in self.optimizers.items()
            for name, p in optimizer.parameters.items()
            if p.grad is not None
        }

    @dispatch(BROADCAST)
    def weights(self):
        return {
            f"{kind}.{name}": full_tensor(p.detach())
            for kind, optimizer in self.optimizers.items()
            for name, p in optimizer.parameters.items()
        }


class AnyRank(ExactRank):
    """A rank that opens another model for each test, in float32 or float64."""

    def __init__(self):
        pass

    @dispatch(BROADCAST)
    def open(self, folder, cfg, dtype):
        Rank.__init__(self, folder, cfg, dtype=dtype, load=load)

    @dispatch(BROADCAST)
    def tensors(self, model):
        """Return all parameters, by all their names, and all buffers of policy or reference."""
        policy = self.policy if model == "policy" else self._load_frozen("")
        named = policy.model.named_parameters(remove_duplicate=False)
        weights = {name: full_tensor(p.detach()).clone() for name, p in named}
        return weights | {name: b.clone() for name, b in policy.model.named_buffers()}

    @dispatch(SPLIT)
    def bytes_while_loading(self, _, mapped):
        """Load and shard the policy again.

        Args:
            mapped: the size of the file of weights, whose mapping is not counted.

        Returns:
            The most bytes that tensors had at once, and the bytes of this rank's shards.
        """
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            policy = self._load_policy()
            if self.config.model.lora_rank:
                self.policy = policy
                self._add_adapter(ACTOR)
            packed = policy.packed_model
            offloads = self.config.optim.offload == "all"
            shard(packed, packed.layers(), None, self._mesh, self._compute, offloads)
        events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        sizes = accumulate(size for _, size in changes if abs(size) != mapped)
        own: list[Any] = [*policy.model.parameters()]
        return max(sizes), sum(p.to_local().numel() * p.element_size() for p in own)

    @dispatch(BROADCAST)
    def first_gradients(self):
        """Return the gradients of the first update, up to a factor: AdamW's first moments."""
        moments = self.optimizers["actor"]._moments()
        named = {n.removeprefix("exp_avg."): t for n, t in moments.items() if "exp_avg." in n}
        return {name: full_tensor(tensor) for name, tensor in named.items()}

    @dispatch(BROADCAST)
    def parameter_names(self):
        return {name for name, _ in self.policy.model.named_parameters()}


def load(path, dtype, device="cpu") -> PreTrainedModel:
    model = load_causal_lm(path, dtype, device)
    if dtype is torch.float64:  # which grouped products do not support
        model.set_experts_implementation("eager")
    return model


def loss_of_nonempty_rows(logprobs, old_logprobs, advantages, mask, config):
    """Return the policy gradient loss of each token. Fails if a row has no sampled token."""
    largest = torch.where(mask, advantages.abs(), 0.0).max(1, keepdim=True).values
    assert mask.any(1).all()
    return torch.where(mask, -advantages * logprobs, 0.0), {"largest": largest.expand(mask.shape)}
