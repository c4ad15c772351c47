"""One process's share of the learner: the weights it holds, and passes over what it is given.

What all ranks do together (gathering weights, summing gradients) happens within these methods, so
each is called on all ranks at once, with equally many micro-batches (`schedule.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from agentrl.config import Config
from agentrl.engine.local.load import load_causal_lm
from agentrl.engine.remote.files import check_folder_visible, write_weights
from agentrl.trainer.dispatch import BROADCAST, SPLIT, Placement, RankGroup, dispatch
from agentrl.trainer.losses import (
    ESTIMATORS,
    importance_ratios,
    importance_weights,
    token_losses,
    value_loss,
)
from agentrl.trainer.optimizer import BETAS, Optimizer
from agentrl.trainer.packing import MicroBatch, pack_row
from agentrl.trainer.policy import ACTOR, CRITIC, Critic, PackedModel, Policy
from agentrl.trainer.sharding import is_rank_zero, open_accelerator, reshard, shard

ModelName = Literal["policy", "reference", "critic"]
LossName = Literal["actor", "critic", "sft"]
ADAPTER_FOLDER = "adapter"
"""Of what is saved: the folder with the policy's LoRA adapter, as PEFT loads it. It is not there
where the base has no name, being an adapter merged at loading: no folder could say it."""


@dataclass(slots=True)
class PassResult:
    """What a rank found on its way through forward and backward."""

    counts: dict[str, float] = field(default_factory=dict)
    """Sums over its micro-batches; `tokens` and `loss` among them."""
    logprobs: list[Tensor] = field(default_factory=list)
    """(N,) of each micro-batch, as they were, where the old ones were not known yet."""


class LocalRankGroup:
    """A group of one rank, in this process."""

    size = 1

    def __init__(self, rank: Any):
        """Use the rank."""
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.rank, name, None)
        how = getattr(method, "dispatch", None)
        if method is None or how is None:
            raise AttributeError(f"{type(self.rank).__name__}.{name} is not dispatched")
        if how is SPLIT:
            return lambda shares, *args, **kwargs: [method(shares[0], *args, **kwargs)]
        return method

    def close(self) -> None:
        """Nothing to end."""


class Rank:
    """Owns the weights that learn, or its piece of them."""

    def __init__(
        self,
        model_path: str | Path,
        config: Config,
        *,
        dtype: torch.dtype | None = None,
        betas: tuple[float, float] = BETAS,
        load: Callable[..., PreTrainedModel] = load_causal_lm,
    ):
        """Load the model; nothing else is read.

        Args:
            model_path: a model's or a PEFT adapter's: see `load_causal_lm`.
            config: the run's.
            dtype: of weights and passes, in place of what the device is good for.
            betas: AdamW's.
            load: what makes a model of path, dtype and device; the same on all ranks.

        Raises:
            ConfigError: no such model, no such device, nothing for LoRA to adapt.
        """
        logging.disable_progress_bar()  # a bar per model folder says nothing here
        self.config = config
        self._path, self._load = model_path, load
        self.accelerator, self._mesh = open_accelerator(config.trainer.device)
        self.device = self.accelerator.device
        cuda = self.device.type == "cuda"
        # On a GPU passes are made in bfloat16; what learns is float32, what does not stays as it
        # was published.
        self._compute = torch.bfloat16 if cuda and dtype is None else None
        self._dtype = dtype or ("auto" if cuda else torch.float32)
        self.policy = self._load_policy()
        self.critic: Critic | None = None
        self._reference: Policy | None = None
        lora = config.model.lora_rank > 0
        if lora:
            self._add_adapter(ACTOR)
        if config.algorithm.critic:
            if lora:
                self._add_adapter(CRITIC)
            self.critic = Critic(
                self.policy.packed_model if lora else self._load_policy().packed_model
            )
        self._shard(self.policy.packed_model)
        if self.critic is not None and not lora:
            self._shard(self.critic.packed_model)
        trainable = {"actor": self.policy.parameters(ACTOR)}
        if self.critic is not None:
            trainable["critic"] = (
                self.policy.parameters(CRITIC) if lora else self.critic.decoder_parameters()
            )
            trainable["critic"] |= {f"head.{n}": p for n, p in self.critic.head.named_parameters()}
        self.optimizers = {
            name: Optimizer(name, parameters, config.optim, self.accelerator, betas)
            for name, parameters in trainable.items()
        }

    def _load_policy(self) -> Policy:
        model = self._load(self._path, self._dtype, self.device)
        return Policy(model, self.config.rollout.temperature, self._compute)

    def _add_adapter(self, name: str) -> None:
        m = self.config.model
        # Each adapter draws from a seed of its own: two that start alike would be no harm, but a
        # seed that depends on what was drawn before would be.
        seed = self.config.trainer.seed + (name == CRITIC)
        self.policy.add_adapter(name, m.lora_rank, m.lora_alpha, m.lora_target_modules, seed)

    def _shard(self, packed_model: PackedModel) -> None:
        layers, head = packed_model.layers(), packed_model.value_head
        shard(packed_model, layers, head, self._mesh, self._compute, self.config.optim)

    # --- without learning ----------------------------------------------------------------------

    @dispatch(BROADCAST)
    def vocabulary(self) -> int:
        """How many tokens the model has embeddings of."""
        return self.policy.model.get_input_embeddings().num_embeddings  # type: ignore[return-value]

    @dispatch(SPLIT)
    @torch.no_grad()
    def forward(self, share: Sequence[MicroBatch], model: ModelName) -> list[Tensor]:
        """(N,) float32 or wider of each micro-batch: logprobs of policy or reference, or values."""
        target: Policy | Critic = self.policy
        if model == "critic":
            assert self.critic is not None
            target = self.critic
        elif model == "reference" and self.policy.peft is None:
            target = self._reference = self._reference or self._load_reference()
        with self._use_adapter_of(model):
            results = [
                (
                    target.values(row) if isinstance(target, Critic) else target.logprobs(row)[0]
                ).cpu()
                for row in (micro.packed.to(self.device) for micro in share)
            ]
        reshard(target.packed_model)  # its weights may change now
        return results

    @dispatch(BROADCAST)
    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """(T - 1,) float32: the policy's logprob, at temperature 1, of each token but the first."""
        row = pack_row(token_ids).to(self.device)
        logprobs, _ = self.policy.logprobs(row, temperature=1.0)
        reshard(self.policy.packed_model)
        return logprobs.float().cpu()

    def _use_adapter_of(self, model: ModelName | LossName) -> AbstractContextManager[None]:
        """Within it the base that all share with LoRA has the adapter of `model`, or none."""
        if self.policy.peft is None or model not in ("critic", "reference"):
            return nullcontext()
        return self.policy.adapter(CRITIC if model == "critic" else None)

    def _load_reference(self) -> Policy:
        """The policy as it was at first: it rounds as the policy does, and holds no more."""
        frozen = self._load_policy()
        frozen.model.requires_grad_(False)
        if self._compute is not None:
            frozen.model.to(self._compute)  # type: ignore[arg-type]
        self._shard(frozen.packed_model)
        return frozen

    # --- learning ------------------------------------------------------------------------------

    @dispatch(SPLIT)
    def forward_backward(self, share: Sequence[MicroBatch], loss_name: LossName) -> PassResult:
        """Add the gradient of some micro-batches' losses to what is there.

        Args:
            share: the micro-batches. If they have no column `old`, the policy is still that of the
                step's beginning: its logprobs are the old ones, and come back.
            learns: whose loss: the policy's, the critic's, or that of imitation.
        """
        losses: dict[LossName, Callable[[MicroBatch], tuple[Any, ...]]] = {
            "actor": self._actor_loss, "critic": self._critic_loss, "sft": self._sft_loss
        }  # fmt: skip
        sums: dict[str, Tensor] = {}
        result = PassResult()
        with self._use_adapter_of(loss_name):
            for micro in share:
                loss, loss_sums, *logprobs = losses[loss_name](micro.to(self.device))
                if "old" not in micro.columns:
                    result.logprobs += logprobs
                # Not `accelerator.backward`: it divides by process-wide state.
                loss.backward()
                for key, value in {"loss": loss.detach(), **loss_sums}.items():
                    sums[key] = sums[key] + value if key in sums else value
        if sums:
            numbers = torch.stack([value.double() for value in sums.values()])
            result.counts = dict(zip(sums, numbers.tolist(), strict=True))
        result.logprobs = [logprobs.cpu() for logprobs in result.logprobs]
        return result

    @dispatch(BROADCAST)
    def optimizer_step(self, name: str, lr: float) -> float:
        """Take the optimizer's step on the gradient that is there.

        Returns:
            the gradient's norm before it was clipped. If it is not finite, nothing moved.
        """
        return self.optimizers[name].step(lr)

    @dispatch(BROADCAST)
    def zero_grad(self) -> None:
        """Drop what gradient there is: what a step that was stopped has left."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _actor_loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The share of the policy's loss that some rows have; and the logprobs as they are."""
        a, columns = self.config.algorithm, micro.columns
        logprobs, entropy = self.policy.logprobs(micro.packed, entropy_gradient=a.entropy_coef > 0)
        old = columns.get("old", logprobs.detach())
        advantages = columns["advantages"].to(logprobs.dtype)
        weights = columns["weights"].to(logprobs.dtype)
        rows, mask = micro.rows, micro.mask
        loss, counts = token_losses(rows(logprobs), rows(old), rows(advantages), mask, a)
        loss = loss[mask]
        loss_sums = {
            "tokens": torch.ones_like(entropy).sum(),
            "entropy": entropy.detach().sum(),
            "ppo_kl": (old - logprobs.detach()).sum(),
            **{name: count[mask].sum() for name, count in counts.items()},
        }
        if a.tis_cap:
            ratios = importance_ratios(rows(old), rows(columns["rollout"]), mask, a.tis_level)[mask]
            loss = loss * importance_weights(ratios, a.tis_cap, a.tis_mode)
        loss_sums["pg_loss"] = (weights * loss).detach().sum()
        if a.kl_loss_coef:
            kl = ESTIMATORS[a.kl_type](logprobs, columns["reference"])
            if a.tis_cap:  # it is an expectation over what the policy samples now (`ESTIMATORS`)
                ratios = importance_ratios(
                    rows(logprobs.detach()), rows(columns["rollout"]), mask, "token"
                )
                kl = kl * importance_weights(ratios[mask], a.tis_cap, "truncate")
            loss = loss + a.kl_loss_coef * kl
            loss_sums["kl_loss"] = (weights * kl).detach().sum()
        if a.entropy_coef:
            loss = loss - a.entropy_coef * entropy
        return (weights * loss).sum(), loss_sums, logprobs.detach()

    def _critic_loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of the critic's loss that some rows have."""
        assert self.critic is not None
        columns = micro.columns
        values = self.critic.values(micro.packed)
        loss, clipped = value_loss(
            values, columns["values"], columns["returns"], self.config.algorithm.value_clip
        )
        total = (columns["weights"].to(loss.dtype) * loss).sum()
        return total, {
            "tokens": torch.ones_like(values).sum(),
            "vf_loss": total.detach(),
            "vf_clipfrac": clipped.sum(),
            "vpred_mean": values.detach().sum(),
        }

    def _sft_loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of -log p that some conversations have (`sft.py`)."""
        logprobs, _ = self.policy.logprobs(micro.packed)
        return -(micro.columns["weights"] * logprobs).sum(), {
            "tokens": torch.ones_like(logprobs).sum()
        }

    # --- what comes out ------------------------------------------------------------------------

    @dispatch(BROADCAST)
    def write_weights(self, folder: Path, dtype: torch.dtype | None = None) -> int:
        """Write what an engine needs (`Policy.export`) as safetensors; how many bytes it is."""
        if is_rank_zero():
            check_folder_visible(folder)
            return write_weights(self.policy.export(), folder, dtype)
        for _ in self.policy.export():  # gathered by all
            pass
        return 0

    @dispatch(BROADCAST)
    def save_adapter(self, folder: Path) -> None:
        """See `Policy.save_adapter`."""
        if is_rank_zero():
            check_folder_visible(folder)
        self.policy.save_adapter(folder)

    @dispatch(BROADCAST)
    def save_pretrained(self, folder: Path) -> None:
        """See `Policy.save_pretrained`."""
        self.policy.save_pretrained(folder)

    @dispatch(BROADCAST)
    def save(self, folder: Path) -> None:
        """Write all that `load` needs into an existing folder; with LoRA, `ADAPTER_FOLDER` for PEFT, too.

        Raises:
            RunStopped: a rank cannot write there.
        """
        for optimizer in self.optimizers.values():
            optimizer.save(folder)
        if self.policy.peft is not None and self.policy.model.name_or_path:
            self.policy.save_adapter(folder / ADAPTER_FOLDER)

    @dispatch(BROADCAST)
    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, bit for bit, whatever the number of ranks was.

        Raises:
            ConfigError: it is of another model or algorithm.
        """
        for optimizer in self.optimizers.values():
            optimizer.load(folder)
        reshard(self.policy.packed_model)
        if self.critic is not None:
            reshard(self.critic.packed_model)

    @dispatch(BROADCAST)
    def perturb_adapter(self, seed: int) -> None:
        """Make the LoRA adapter another one until `restore_adapter`: see `Policy.perturbed_adapter`."""
        self._perturbation = self.policy.perturbed_adapter(seed)
        self._perturbation.__enter__()

    @dispatch(BROADCAST)
    def restore_adapter(self) -> None:
        """Undo `perturb_adapter`."""
        self._perturbation.__exit__(None, None, None)


def start_ranks(placement: Placement | None, *args: Any, **kwargs: Any) -> RankGroup:
    """The ranks of a site; None: one, in this process. The arguments are those of `Rank`."""
    return (
        placement.start_ranks(Rank, *args, **kwargs)
        if placement
        else LocalRankGroup(Rank(*args, **kwargs))
    )
