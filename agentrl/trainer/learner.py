"""The learner: a policy, what it is compared with, and the optimizer steps.

It is in the controller's process and works on whole batches, (B, T) on the CPU. A batch goes one
way, from here to the loss:

    Learner.update     mini-batches, one optimizer step each
    packing.deal       their rows as micro-batches, for each rank
    Rank.accumulate    loss and gradient of each micro-batch (`losses.py`)
    Rank.descend       the optimizer step

The ranks are one or many, in this process or elsewhere. The loss of a mini-batch is a sum over its
micro-batches and ranks; since `Targets.weights` hold the denominator already, loss and gradient
depend on neither.

Three logprobs are never mixed: the engine's (`Batch.rollout_logprobs`), the trainer's at the start
of the step (`Targets.old_logprobs`), and the trainer's now. Between the first two stand the
truncated importance weights, between the last two PPO's ratio.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.config import Config
from agentrl.engine.base import Update
from agentrl.engine.remote.files import transfer_folder
from agentrl.errors import RunStopped
from agentrl.registry import policy_losses
from agentrl.trainer.algorithms import target_metrics
from agentrl.trainer.batch import (
    Batch,
    Targets,
    TokenRows,
    assign_mini_batches,
    check_logprobs,
    check_tokens,
    count_mini_batches,
)
from agentrl.trainer.dispatch import RankGroup
from agentrl.trainer.mismatch import importance_weight_metrics, mismatch_metrics
from agentrl.trainer.optimizer import learning_rate
from agentrl.trainer.packing import MicroBatch, assign_rows, make_micro_batch
from agentrl.trainer.rank import LocalRankGroup, LossName, ModelName, PassResult, Rank

Check = Callable[[Mapping[str, float]], None]


class Learner:
    """The policy that learns, whatever it is spread over."""

    def __init__(
        self,
        model_path: str | Path,
        config: Config,
        *,
        total_steps: int,
        group: RankGroup | None = None,
    ):
        """Load the model; nothing else is read.

        Args:
            model_path: a model's or a PEFT adapter's: see `load_causal_lm`.
            config: the run's.
            total_steps: of the run, for the learning rate.
            group: ranks of that model and config; None: one rank, in this process.

        Raises:
            ConfigError: no such model, no such device, nothing for LoRA to adapt.
        """
        self.config = config
        self.ranks = group or LocalRankGroup(Rank(model_path, config))
        """All of them: what each does alike (`save`, `load`, `score`, ...) is called here."""
        self.rank: Rank | None = self.ranks.rank if isinstance(self.ranks, LocalRankGroup) else None
        """The rank in this process, if it is one."""
        self._total_steps = total_steps

    # --- what a step needs to know before it updates -------------------------------------------

    def logprobs(self, batch: TokenRows) -> Tensor:
        """(B, T) float32: the policy's, of every sampled token; 0 elsewhere."""
        return self._forward(batch, "policy")

    def old_logprobs(self, batch: Batch) -> Tensor | None:
        """(B, T) `logprobs` for `Targets`, or None where the update finds them on its way.

        That is so where the whole batch is one mini-batch, however many epochs: its first pass is
        made by the same weights. A KL in the reward needs them before.
        """
        a = self.config.algorithm
        is_one_mini_batch = count_mini_batches(len(batch.rewards), a.mini_batch_size) == 1
        return None if is_one_mini_batch and not a.kl_reward_coef else self.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> Tensor | None:
        """(B, T) float32: the initial policy's, of every sampled token; None where no KL is wanted.

        With LoRA that is the base with the adapter off; else a frozen copy, loaded at first use.
        """
        a = self.config.algorithm
        uses_kl = a.kl_loss_coef or a.kl_reward_coef
        return self._forward(batch, "reference") if uses_kl else None

    def values(self, batch: Batch) -> Tensor | None:
        """(B, T) float32: the critic's, of the state before a sampled token; None without one."""
        return self._forward(batch, "critic") if self.config.algorithm.critic else None

    def _forward(self, batch: TokenRows, model: ModelName) -> Tensor:
        mask = batch.response_mask
        rows_by_rank, shares = self._make_micro_batches(batch, mask.any(1), mask, {})
        return _scatter(
            mask, rows_by_rank, self.ranks.forward(shares, model) if any(shares) else []
        )

    # --- the update ----------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        targets: Targets,
        step: int,
        check: Check | None = None,
        *,
        learn_policy: bool = True,
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
            learn_policy: False: only the critic learns, and nothing is compared.

        Returns:
            Metrics under verl's names, means over the optimizer steps that were made (a norm of 0
            if none was); `training/rollout_*` and `rollout_corr/*` compare the engine's logprobs
            with the trainer's at the start of the step.

        Raises:
            RunStopped: a logprob of the trainer's at the start of the step is not finite, and no
                weight has moved; or a loss or gradient is not finite.
        """
        self.ranks.zero_grad()
        a, mask, old = self.config.algorithm, batch.action_mask, targets.old_logprobs
        mini_batch = assign_mini_batches(len(batch.rewards), a.mini_batch_size)[batch.rollout]
        columns = {name: self._columns(name, batch, targets) for name in ("actor", "critic")}
        has_advantage = targets.advantages != 0
        is_run = (mask if a.kl_loss_coef or a.entropy_coef else mask & has_advantage).any(1)  # (B,)
        mismatch: dict[str, float] = {}
        if learn_policy and old is not None:
            mismatch = self._compare(batch, old, mask, check)
        collected: dict[str, list[float]] = defaultdict(list)
        for _, m in product(range(a.ppo_epochs), range(int(mini_batch.max()) + 1)):
            in_mini_batch = mini_batch == m
            # The policy first: what stops it must find the critic unmoved, too.
            if learn_policy:
                rows = in_mini_batch & is_run
                rows_by_rank, results = self._forward_backward(
                    "actor", batch, rows, mask, columns["actor"]
                )
                if old is None:
                    old = _scatter(mask, rows_by_rank, [result.logprobs for result in results])
                    columns["actor"]["old"] = old
                    mismatch = self._compare(batch, old, mask & is_run[:, None], check)
                _add_metrics(collected, "actor", self._optimizer_step("actor", step, results))
            if a.critic:
                rows = in_mini_batch & mask.any(1)
                _, results = self._forward_backward("critic", batch, rows, mask, columns["critic"])
                _add_metrics(collected, "critic", self._optimizer_step("critic", step, results))

        learning = ["actor"] * learn_policy + ["critic"] * a.critic
        metrics = {f"{name}/grad_norm": 0.0 for name in learning}  # if no step was made
        metrics |= {name: sum(values) / len(values) for name, values in collected.items()}
        metrics |= {f"{name}/lr": self._lr(name, step) for name in learning}
        return metrics | mismatch | target_metrics(batch, targets)

    def _columns(self, loss: LossName, batch: Batch, targets: Targets) -> dict[str, Tensor]:
        """(B, T) each: the numbers of every token that a loss needs, as far as they are known.

        Without `old` the logprobs of the first pass are the old ones.
        """
        a, t = self.config.algorithm, targets
        columns: dict[str, Tensor | None] = {"weights": t.weights}
        if loss == "critic":
            columns |= {"values": t.values, "returns": t.returns}
        else:
            columns |= {"advantages": t.advantages, "old": t.old_logprobs}
            columns["rollout"] = batch.rollout_logprobs if a.tis_cap else None
            columns["reference"] = t.reference_logprobs if a.kl_loss_coef else None
        return {name: column for name, column in columns.items() if column is not None}

    def _compare(
        self, batch: Batch, old: Tensor, mask: Tensor, check: Check | None
    ) -> dict[str, float]:
        """Compare engine and trainer at the tokens of `mask`, before a weight moves."""
        check_logprobs(batch, old, mask, "trainer")
        mismatch = mismatch_metrics(batch, old, mask)
        mismatch |= importance_weight_metrics(batch, old, mask, self.config.algorithm)
        if check:
            check(mismatch)
        return mismatch

    def _forward_backward(
        self,
        loss: LossName,
        batch: TokenRows,
        rows: Tensor,
        mask: Tensor,
        columns: Mapping[str, Tensor],
    ) -> tuple[list[list[Tensor]], list[PassResult]]:
        """Add the gradient of the rows where `rows` (B,) is True to what the ranks hold.

        Returns:
            the rows of each rank's micro-batches, and what each rank counted; nothing for no rows.
        """
        rows_by_rank, shares = self._make_micro_batches(batch, rows, mask, columns)
        return rows_by_rank, self.ranks.forward_backward(shares, loss) if any(shares) else []

    def _make_micro_batches(
        self, batch: TokenRows, rows: Tensor, mask: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[list[list[Tensor]], list[list[MicroBatch]]]:
        """Micro-batches of the rows where `rows` (B,) is True: their numbers, and contents.

        Raises:
            RunStopped: the model has no such token.
        """
        check_tokens(batch, self._vocabulary)
        budget = self.config.optim.micro_batch_tokens
        rows_by_rank = assign_rows(batch, rows.nonzero()[:, 0], self.ranks.size, budget)
        return rows_by_rank, [
            [make_micro_batch(batch, r, mask, columns) for r in share] for share in rows_by_rank
        ]

    @cached_property
    def _vocabulary(self) -> int:
        return self.ranks.vocabulary()

    def _optimizer_step(
        self, name: Literal["actor", "critic"], step: int, results: Sequence[PassResult]
    ) -> dict[str, float]:
        """Move the weights by what the ranks have gathered.

        Without any pass the gradient is zero and nothing moves, not even by momentum: what taught
        nothing changes nothing.

        Returns:
            what the passes counted, summed, and the gradient's norm as `grad_norm`; nothing if no
            step was made.

        Raises:
            RunStopped: the loss or the gradient is not finite; the weights are as they were.
        """
        if not results:
            return {}
        counts: dict[str, float] = defaultdict(float)
        for result in results:
            for key, value in result.counts.items():
                counts[key] += value
        finite = all(map(math.isfinite, counts.values()))
        counts["grad_norm"] = (
            self.ranks.optimizer_step(name, self._lr(name, step)) if finite else math.nan
        )
        if not math.isfinite(counts["grad_norm"]):
            values = ", ".join(f"{key}={value}" for key, value in counts.items())
            raise RunStopped(
                f"step {step}: the {name}'s loss or gradient is not finite ({values}). This"
                f" update was not made. {self._explain_failure(name, step)}"
            )
        return dict(counts)

    def _lr(self, name: str, step: int) -> float:
        o = self.config.optim
        peak = o.lr if name == "actor" else o.critic_lr
        return learning_rate(peak, o, self._total_steps, step)

    def _explain_failure(self, name: str, step: int) -> str:
        """What may have made a loss that is not finite."""
        advice = f"A lower learning rate (now {self._lr(name, step):g}) is the usual cure"
        advice += "; a nan in rollout_logprobs or rewards would have been named before."
        loss = self.config.algorithm.policy_loss
        if name == "actor" and loss not in policy_losses.shipped:
            return (
                f"The first suspect is the policy loss {loss!r}, which is your own. Else: {advice}"
            )
        return advice

    # --- what comes out ------------------------------------------------------------------------

    @property
    def lora(self) -> bool:
        """Whether an adapter learns."""
        return self.config.model.lora_rank > 0

    def make_update(self, version: int) -> Update:
        """The policy as it is now, for an engine."""
        adapter = self.ranks.save_adapter if self.lora else None
        return Update(version, self.export, adapter, self.ranks.write_weights)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Named tensors of the plain model, for an engine: see `Policy.export`.

        From ranks elsewhere they come through files.
        """
        if self.rank is not None:
            yield from self.rank.policy.export()
            return
        with transfer_folder() as folder:
            self.ranks.write_weights(Path(folder))
            for file in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(file, "pt") as weights:
                    yield from ((name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118

    @contextmanager
    def perturbed_adapter(self) -> Iterator[None]:
        """Within the block the LoRA adapter is another one: see `Policy.perturbed_adapter`."""
        self.ranks.perturb_adapter(self.config.trainer.seed)
        try:
            yield
        finally:
            self.ranks.restore_adapter()


SUM_METRICS = ("grad_norm", "pg_loss", "kl_loss", "vf_loss")
"""Counted as sums over the mini-batch; all else as sums over tokens, told as their means."""


def _add_metrics(into: dict[str, list[float]], name: str, counts: dict[str, float]) -> None:
    tokens = counts.pop("tokens", 0.0)
    counts.pop("loss", None)
    for key, value in counts.items():
        into[f"{name}/{key}"].append(value if key in SUM_METRICS else value / tokens)


def _scatter(
    mask: Tensor, rows_by_rank: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]
) -> Tensor:
    """(B, T) of what ranks found at the chosen tokens of their micro-batches; 0 elsewhere."""
    kinds = {flat.dtype for share in values for flat in share} | {torch.float32}
    out = torch.zeros(mask.shape, dtype=max(kinds, key=lambda kind: kind.itemsize))
    for share, flats in zip(rows_by_rank, values, strict=False):
        for rows, flat in zip(share, flats, strict=True):
            if len(rows):
                out[rows] = out[rows].masked_scatter(mask[rows], flat.to(out))
    return out
