"""The learner: a policy, what it is compared with, and the optimizer steps.

Everything here works on a whole batch. An update goes through the step's mini-batches, each of
which is one optimizer step on a sum over micro-batches; since `Targets.weights` hold the
denominator already, loss and gradient do not depend on how rows are cut into micro-batches.

Three logprobs are never mixed: the engine's (`Batch.rollout_logprobs`), the trainer's at the start
of the step (`Targets.old_logprobs`), and the trainer's now. Between the first two stand the
truncated importance weights, between the last two PPO's ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from agentrl.config import Config
from agentrl.engine.local.load import load_causal_lm
from agentrl.errors import ConfigError
from agentrl.trainer.algorithms import ALGORITHMS
from agentrl.trainer.batch import Batch, Targets, check_logprobs, mini_batch_count, mini_batch_of
from agentrl.trainer.diagnostics import target_metrics
from agentrl.trainer.kl import ESTIMATORS
from agentrl.trainer.losses import importance_ratios, importance_weights, policy_loss, value_loss
from agentrl.trainer.mismatch import mismatch, weight_metrics
from agentrl.trainer.model import ACTOR, CRITIC, Critic, Policy
from agentrl.trainer.optimizer import Optimizer
from agentrl.trainer.packing import Packed, micro_batches, pack, pack_row


class Learner:
    """Owns the weights that learn."""

    def __init__(self, model_path: str | Path, config: Config, *, total_steps: int):
        """Load the model; nothing else is read.

        Args:
            model_path: a model's or a PEFT adapter's: see `load_causal_lm`.
            config: the run's.
            total_steps: of the run, for the learning rate.

        Raises:
            ConfigError: no such model, no such device, nothing for LoRA to adapt.
        """
        self.config = config
        self._path = model_path
        self.accelerator = _accelerator(config.trainer.device)
        # On a GPU weights that learn are float32 under bfloat16 autocast; a frozen base is held as
        # it was published.
        lora = config.model.lora_rank > 0
        cuda = self.accelerator.device.type == "cuda"
        self._dtype = "auto" if lora and cuda else torch.float32
        self.policy = self._load_policy()
        self.critic: Critic | None = None
        self._frozen: Policy | None = None
        actor = self._adapter(ACTOR) if lora else dict(self.policy.model.named_parameters())
        make = partial(
            Optimizer,
            config=config.optim,
            total_steps=total_steps,
            accelerator=self.accelerator,
        )
        self._actor_optimizer = make("actor", actor, config.optim.lr)
        self._critic_optimizer: Optimizer | None = None
        if ALGORITHMS[config.algorithm.name].critic:
            if lora:
                learns = self._adapter(CRITIC)
                self.critic = Critic(self.policy.model, partial(self.policy.adapter, CRITIC))
            else:
                self.critic = Critic(self._load_policy().model)
                trunk = self.critic.model.get_decoder()
                learns = {f"model.{n}": p for n, p in trunk.named_parameters()}
            learns |= {f"head.{n}": p for n, p in self.critic.head.named_parameters()}
            self._critic_optimizer = make("critic", learns, config.optim.critic_lr)

    def _load_policy(self) -> Policy:
        model = load_causal_lm(self._path, self._dtype, self.accelerator.device)
        return Policy(model, self.config.rollout.temperature)

    def _adapter(self, name: str) -> dict[str, nn.Parameter]:
        m = self.config.model
        # Each adapter draws from a seed of its own: two that start alike would be no harm, but a
        # seed that depends on what was drawn before would be.
        seed = self.config.trainer.seed + (name == CRITIC)
        return self.policy.add_adapter(name, m.lora_rank, m.lora_alpha, m.lora_target_modules, seed)

    # --- what a step needs to know before it updates -------------------------------------------

    def logprobs(self, batch: Batch) -> Tensor:
        """(B, T) float32: the policy's, of every sampled token; 0 elsewhere."""
        return self._score(batch, lambda packed: self.policy.logprobs(packed)[0])

    def old_logprobs(self, batch: Batch) -> Tensor | None:
        """(B, T) `logprobs` for `Targets`, or None where the update finds them on its way.

        That is so where the whole batch is one mini-batch, however many epochs: its first pass is
        made by the same weights. A KL in the reward needs them before.
        """
        a = self.config.algorithm
        alone = mini_batch_count(len(batch.rewards), a.mini_batch_size) == 1
        return None if alone and not a.kl_reward_coef else self.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> Tensor | None:
        """(B, T) float32: the initial policy's, of every sampled token; None where no KL is wanted.

        With LoRA that is the base with the adapter off; else a frozen copy, loaded at first use.
        """
        a = self.config.algorithm
        if not (a.kl_loss_coef or a.kl_reward_coef):
            return None
        if self.policy.peft is not None:
            with self.policy.base():
                return self.logprobs(batch)
        if self._frozen is None:
            self._frozen = self._load_policy()
            self._frozen.model.requires_grad_(False)
        frozen = self._frozen
        return self._score(batch, lambda packed: frozen.logprobs(packed)[0])

    def values(self, batch: Batch) -> Tensor | None:
        """(B, T) float32: the critic's, of the state before a sampled token; None without one."""
        return self._score(batch, self.critic.values) if self.critic else None

    @torch.no_grad()
    def _score(self, batch: Batch, model: Callable[[Packed], Tensor]) -> Tensor:
        scores = torch.zeros_like(batch.rollout_logprobs)
        for rows in self._micro_batches(batch, batch.response_mask.any(1)):
            mask = batch.response_mask[rows]
            with self.accelerator.autocast():
                found = model(pack(batch, rows, mask, self.accelerator.device))
            scores[rows] = scores[rows].masked_scatter(mask, found.to(scores))
        return scores

    def _micro_batches(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """The rows where `rows` (B,) is True, by the budget of tokens."""
        budget = self.config.optim.micro_batch_tokens
        return micro_batches(batch, rows.nonzero()[:, 0], budget)

    # --- the update ----------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        targets: Targets,
        step: int,
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Take the step's optimizer steps: one per mini-batch and epoch.

        Rows whose every token has advantage 0 cannot move the policy where neither KL nor entropy
        is in its loss: they are not run, though the denominator counts them. Metrics of tokens
        (`entropy`, `ppo_kl`, ...) are means over the tokens that were run.

        Args:
            batch: the step's rollouts.
            targets: what the algorithm made of them.
            step: 1 for the first of the run; sets the learning rate.
            check: called once, before any weight moves, with the metrics that compare engine and
                trainer (none where no token was run). What it raises stops the step: nothing of it
                was learned.

        Returns:
            Metrics under verl's names, means over the optimizer steps; `training/rollout_*` and
            `rollout_corr/*` compare the engine's logprobs with the trainer's at the start of the
            step.

        Raises:
            RunStopped: a logprob of the trainer's at the start of the step is not finite, and no
                weight has moved; or a loss or gradient is not finite.
        """
        a = self.config.algorithm
        actions = batch.action_mask
        moves = actions if a.kl_loss_coef or a.entropy_coef else actions & (targets.advantages != 0)
        mini_batch = mini_batch_of(len(batch.rewards), a.mini_batch_size)[batch.rollout]
        old, given_old = targets.old_logprobs, targets.old_logprobs is not None
        old = torch.zeros_like(batch.rollout_logprobs) if old is None else old
        ran = actions if given_old else actions & moves.any(1)[:, None]
        collected: dict[str, list[float]] = defaultdict(list)
        compared: dict[str, float] = {}

        def compare() -> None:
            """As soon as `old` is known."""
            check_logprobs(batch, old, ran, "trainer")
            compared.update(mismatch(batch, old, ran) | weight_metrics(batch, old, ran, a))
            if check:
                check(compared)

        if given_old:
            compare()
        for epoch in range(a.ppo_epochs):
            finding = not given_old and epoch == 0
            actor = partial(self._actor_loss, batch, targets, old, finding)
            critic = partial(self._critic_loss, batch, targets)
            for m in range(int(mini_batch.max()) + 1):
                here = mini_batch == m
                # The policy first: what stops it must find the critic unmoved, too.
                micro = self._micro_batches(batch, here & moves.any(1))
                before = compare if finding else None
                counts = self._actor_optimizer.descend(step, micro, actor, before)
                _collect(collected, "actor", counts)
                if self._critic_optimizer:
                    micro = self._micro_batches(batch, here & actions.any(1))
                    counts = self._critic_optimizer.descend(step, micro, critic)
                    _collect(collected, "critic", counts)

        metrics = {name: sum(values) / len(values) for name, values in collected.items()}
        metrics["actor/lr"] = self._actor_optimizer.lr(step)
        if self._critic_optimizer:
            metrics["critic/lr"] = self._critic_optimizer.lr(step)
        return metrics | compared | target_metrics(batch, targets)

    def _actor_loss(
        self, batch: Batch, targets: Targets, old: Tensor, first_pass: bool, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of the policy's loss that some rows have; `old` is filled on the first pass."""
        a = self.config.algorithm
        mask = batch.action_mask[rows]
        take = partial(self._take, rows, mask)
        logprobs, entropy = self.policy.logprobs(
            pack(batch, rows, mask, self.accelerator.device),
            entropy_gradient=a.entropy_coef > 0,
        )
        if first_pass:
            old[rows] = old[rows].masked_scatter(mask, logprobs.detach().to(old))
        old_logprobs = logprobs.detach() if first_pass else take(old)
        weights = take(targets.weights)
        loss, clipped = policy_loss(
            logprobs, old_logprobs, take(targets.advantages), a.clip_low, a.clip_high
        )
        counted = {
            "tokens": torch.ones_like(entropy).sum(),
            "entropy": entropy.detach().sum(),
            "ppo_kl": (old_logprobs - logprobs.detach()).sum(),
            "pg_clipfrac": clipped.sum(),
        }
        if a.tis_cap:
            together = mask if a.tis_level == "sequence" else None
            ratios = importance_ratios(old_logprobs, take(batch.rollout_logprobs), together)
            loss = loss * importance_weights(ratios, a.tis_cap, a.tis_mode)
        counted["pg_loss"] = (weights * loss).detach().sum()
        if a.kl_loss_coef:
            assert targets.reference_logprobs is not None
            kl = ESTIMATORS[a.kl_type](logprobs, take(targets.reference_logprobs))
            loss = loss + a.kl_loss_coef * kl
            counted["kl_loss"] = (weights * kl).detach().sum()
        if a.entropy_coef:
            loss = loss - a.entropy_coef * entropy
        return (weights * loss).sum(), counted

    def _critic_loss(
        self, batch: Batch, targets: Targets, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of the critic's loss that some rows have."""
        assert self.critic and targets.values is not None and targets.returns is not None
        mask = batch.action_mask[rows]
        take = partial(self._take, rows, mask)
        values = self.critic.values(pack(batch, rows, mask, self.accelerator.device))
        loss, clipped = value_loss(values, take(targets.values), take(targets.returns))
        total = (take(targets.weights) * loss).sum()
        return total, {
            "tokens": torch.ones_like(values).sum(),
            "vf_loss": total.detach(),
            "vf_clipfrac": clipped.sum(),
            "vpred_mean": values.detach().sum(),
        }

    def _take(self, rows: Tensor, mask: Tensor, x: Tensor) -> Tensor:
        """Of `x` (B, T), what stands at the chosen tokens of some rows: (N,), on the device."""
        return x[rows][mask].to(self.accelerator.device)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """(T - 1,) float32: the policy's logprob, at temperature 1, of each token but the first."""
        row = pack_row(token_ids, self.accelerator.device)
        with self.accelerator.autocast():
            logprobs, _ = self.policy.logprobs(row, temperature=1.0)
        return logprobs.float().cpu()

    # --- what comes out ------------------------------------------------------------------------

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors of the plain model, for an engine: see `Policy.export`."""
        return self.policy.export()

    def save_pretrained(self, folder: Path) -> None:
        """A folder that `load_causal_lm` loads, and others do: see `Policy.save_pretrained`."""
        self.policy.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Write all that `load` needs into an existing folder: safetensors only."""
        for optimizer in self._optimizers:
            optimizer.save(folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, bit for bit.

        The model itself is the one at `model_path`; with LoRA only the adapter was saved.

        Raises:
            ConfigError: it was saved from another model or algorithm.
        """
        for optimizer in self._optimizers:
            optimizer.load(folder)

    @property
    def _optimizers(self) -> list[Optimizer]:
        both = (self._actor_optimizer, self._critic_optimizer)
        return [optimizer for optimizer in both if optimizer]


PER_TOKEN = ("entropy", "ppo_kl", "pg_clipfrac", "vf_clipfrac", "vpred_mean")
"""Counted as sums over tokens, told as means."""


def _collect(into: dict[str, list[float]], name: str, counts: dict[str, float]) -> None:
    tokens = counts.pop("tokens", 0.0)
    counts.pop("loss", None)
    for key, value in counts.items():
        into[f"{name}/{key}"].append(value / tokens if key in PER_TOKEN else value)


def _accelerator(device: str) -> Accelerator:
    """Device, mixed precision and process state; nothing else of it is used."""
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ConfigError(
            "trainer.device=cuda, but torch finds no GPU here. Set trainer.device=cpu or auto, or"
            " install a torch built for CUDA."
        )
    use_cuda = cuda and device != "cpu"
    return Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
