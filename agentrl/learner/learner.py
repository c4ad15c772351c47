"""The learner: the policy, the models that it is compared with, and the optimizer steps.

It runs in the controller process and works on whole batches, (B, T) tensors on the CPU. The path of
a batch from here to the loss is:

    Learner.update           mini-batches: one optimizer step each
    packing.assign_rows      the rows of a mini-batch as micro-batches, for each rank
    Rank.forward_backward    loss and gradient of each micro-batch (`losses.py`)
    Rank.optimizer_step      the optimizer step

There are one or several ranks, in this process or in others. The loss of a mini-batch is a sum over
its micro-batches and ranks. `Targets.weights` already contain the denominator, so loss and gradient
do not depend on how the rows are split.

There are three logprobs, which are never mixed: those of the engine (`Batch.rollout_logprobs`),
those of the trainer at the start of the step (`Targets.old_logprobs`), and those of the trainer
now. The truncated importance weights compare the first two, PPO's ratio compares the last two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.config import Config
from agentrl.config.teacher import POLICY
from agentrl.engine.remote.senders import Route
from agentrl.errors import RunStopped
from agentrl.learner.algorithms import target_metrics
from agentrl.learner.batch import (
    Batch,
    Targets,
    TokenRows,
    assign_mini_batches,
    check_logprobs,
    check_tokens,
    count_mini_batches,
)
from agentrl.learner.mismatch import importance_weight_metrics, mismatch_metrics
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.packing import MicroBatch, Mode, assign_rows, make_micro_batch
from agentrl.learner.rank import (
    LearnerRanks,
    LocalRankGroup,
    LossName,
    ModelName,
    PassResult,
    Rank,
    start_ranks,
)
from agentrl.learner.sharding import full_tensor
from agentrl.registry import policy_losses
from agentrl.store import LEARNED
from agentrl.workers.owned_folder import OwnedFolder


@dataclass(frozen=True, slots=True)
class Learned:
    """The numbers that an update used for each token, (B, T); NaN where a number is unknown.

    Numbers are known for sampled tokens of rollouts that train (`Batch.action_mask`). Those of the
    passes are also unknown in rows that were not run, see `Learner.update`. A field is None if it
    is unknown for all tokens.
    """

    old_logprobs: Tensor | None
    """The trainer's at the start of the step."""
    reference_logprobs: Tensor | None
    """Those of the reference policy; None without a KL term."""
    teacher_logprobs: Tensor | None
    """Those of the teacher; None without a teacher."""
    values: Tensor | None
    """The critic's at the start of the step; None without a critic."""
    advantages: Tensor
    returns: Tensor | None
    """The targets of the critic; None without a critic."""
    importance_weights: Tensor | None
    """The factors of the policy loss that correct for sampling by the engine, after
    `algorithm.tis_cap`; None without a cap."""
    entropy: Tensor | None
    """The entropy of the policy in the first pass of the token, in nats."""
    clipped: Tensor | None
    """The number of passes in which the policy loss clipped the token; None if the loss does not
    report it (`losses.clipped_tokens`)."""

    def table(self, batch: Batch) -> pa.Table:
        """Return one row for each row of the batch, for `TrajectoryStore.write_learned`.

        Args:
            batch: the batch of the update.
        """
        width = batch.response_mask.shape[1]
        is_token = torch.arange(width) < batch.response_lengths[:, None]  # (B, T)
        ends = batch.response_lengths.cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0)).int().numpy()
        first_rows = torch.searchsorted(batch.rollout, batch.rollout)  # of the same rollout
        columns: dict[str, Any] = {
            "episode_id": [batch.episodes[r] for r in batch.rollout.tolist()],
            "segment": (torch.arange(len(batch.rollout)) - first_rows).numpy(),
        }
        for name, kind in LEARNED.items():
            numbers: Tensor | None = getattr(self, name)
            if numbers is None:
                flat = pa.nulls(int(offsets[-1]), kind)
            else:
                chosen = numbers[is_token]
                unknown = chosen.isnan()
                known = chosen.masked_fill(unknown, 0.0)
                flat = pa.array(known.numpy(), mask=unknown.numpy()).cast(kind)
            columns[name] = pa.ListArray.from_arrays(offsets, flat)
        return pa.table(columns)


Check = Callable[[Mapping[str, float]], None]


class Learner:
    """The policy that learns, on one rank or many."""

    def __init__(
        self,
        model_path: str | Path,
        config: Config,
        *,
        total_steps: int,
        group: LearnerRanks | None = None,
    ):
        """Load the model; no data is read.

        Args:
            model_path: a model or a PEFT adapter; see `load_causal_lm`.
            config: the run's config.
            total_steps: the length of the run, for the learning rate.
            group: ranks that hold that model. None: one rank in this process.

        Raises:
            ConfigError: there is no such model or device, or LoRA has nothing to adapt.
        """
        self.config = config
        self.ranks = group or start_ranks(None, model_path, config)
        """All ranks. Methods that all ranks run in the same way (`save`, `load`, `score`, ...) are
        called on this group."""
        self.rank: Rank | None = self.ranks.rank if isinstance(self.ranks, LocalRankGroup) else None
        """The rank, if there is one rank and it is in this process."""
        self.total_steps = total_steps
        """The length of the run, which the learning rate depends on."""
        self._inputs: dict[str, tuple[Mode, int]] = {}
        """The results of `_input_of`: of the policy (""), and of teachers."""
        self.policy_steps = 0
        """The number of optimizer steps of the policy in this process."""

    # --- forward passes before the update --------------------------------------------------------

    def logprobs(self, batch: TokenRows) -> Tensor:
        """Return the policy's logprob of every sampled token, (B, T) float32, 0 elsewhere."""
        return self._forward(batch, "policy")

    def old_logprobs(self, batch: Batch) -> Tensor | None:
        """Return `logprobs` for `Targets`, (B, T), or None if the update computes them itself.

        The update computes them if the whole batch is one mini-batch, however many epochs there
        are: its first pass uses the same weights. A KL penalty in the reward and a teacher need
        them before the update.
        """
        a = self.config.algorithm
        is_one_mini_batch = count_mini_batches(len(batch.rewards), a.mini_batch_size) == 1
        needs_them = a.kl_reward_coef or self.config.teacher.model
        return None if is_one_mini_batch and not needs_them else self.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> Tensor | None:
        """Return the initial policy's logprobs, (B, T) float32, or None without a KL term.

        With LoRA the reference is the base model with the adapter disabled. Otherwise it is a
        frozen copy, loaded on first use.
        """
        a = self.config.algorithm
        uses_kl = a.kl_loss_coef or a.kl_reward_coef
        return self.initial_logprobs(batch) if uses_kl else None

    def initial_logprobs(self, batch: Batch) -> Tensor:
        """Return the initial policy's logprobs, (B, T) float32."""
        return self._forward(batch, "reference")

    def teacher_logprobs(self, rows: TokenRows, teacher: str) -> Tensor:
        """Return the logprobs of a teacher that the learner holds, (B, T) float32.

        A teacher with the path of the policy's model is the initial policy.

        Args:
            rows: the rows, with the prompts that the teacher reads.
            teacher: the path of its model, or `policy`.

        Raises:
            ConfigError: the model cannot be loaded.
            RunStopped: a token id is not in its vocabulary.
        """
        if teacher == POLICY:
            return self.logprobs(rows)
        if teacher == self.config.model.path:
            return self._forward(rows, "reference")
        return self._forward(rows, "teacher", teacher)

    def values(self, batch: Batch) -> Tensor | None:
        """Return the critic's values, (B, T) float32, or None without a critic.

        A value is that of the state before a sampled token.
        """
        return self._forward(batch, "critic") if self.config.algorithm.critic else None

    def _forward(self, batch: TokenRows, model: ModelName, teacher: str = "") -> Tensor:
        batch, mask = self._with_experts(batch, model == "policy"), batch.response_mask
        rows, shares = self._make_micro_batches(batch, mask.any(1), mask, {}, teacher)
        results = self.ranks.forward(shares, model, teacher) if any(shares) else []
        return _scatter(mask, rows, results[:: self._context_size])

    # --- the update ------------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        targets: Targets,
        step: int,
        check: Check | None = None,
        *,
        learn_policy: bool = True,
    ) -> tuple[dict[str, float], Learned]:
        """Run the optimizer steps of the step: one per mini-batch and epoch.

        A row whose tokens all have advantage 0 cannot move the policy, unless a KL or an entropy
        term is in the loss. Such rows are not run, but the denominator counts them. Metrics of
        tokens (`entropy`, `ppo_kl`, ...) are means over the tokens that were run.

        Args:
            batch: the step's rollouts.
            targets: the targets of that batch.
            step: the number of the step, from 1; it determines the learning rate.
            check: called once, before any weight changes, with the metrics that compare engine and
                trainer (an empty mapping if no token was run). If it raises, no weight has changed.
            learn_policy: False: only the critic learns, and engine and trainer are not compared.

        Returns:
            Metrics under verl's names, as means over the optimizer steps (a gradient norm of 0 if
            there was none). `training/rollout_*` and `rollout_corr/*` compare the engine's logprobs
            with the trainer's at the start of the step. And the numbers that were used for each
            token.

        Raises:
            RunStopped: a logprob of the trainer at the start of the step is not finite (no weight
                has changed), or a loss or gradient is not finite (the message says whether
                weights have changed).
        """
        self.ranks.zero_grad()
        a, mask, old = self.config.algorithm, batch.action_mask, targets.old_logprobs
        mini_batch = assign_mini_batches(len(batch.rewards), a.mini_batch_size)[batch.rollout]
        columns = {name: self._columns(name, batch, targets) for name in ("actor", "critic")}
        is_run = self._find_rows_to_run(batch, targets)  # (B,)
        mismatch: dict[str, float] = {}
        if learn_policy and old is not None:
            mismatch = self._compare(batch, old, mask, step, check)
        collected: dict[str, list[float]] = defaultdict(list)
        of_tokens: dict[str, Tensor] = {}
        for epoch, m in product(range(a.ppo_epochs), range(int(mini_batch.max()) + 1)):
            in_mini_batch = mini_batch == m
            # The policy first: if it stops the step, the critic must not have changed either.
            if learn_policy:
                rows_to_run = in_mini_batch & is_run
                rows, results = self._forward_backward(
                    "actor", batch, rows_to_run, mask, columns["actor"]
                )
                if old is None:
                    old = _scatter(mask, rows, _of_tokens(results, "logprobs"))
                    columns["actor"]["old"] = old
                    mismatch = self._compare(batch, old, mask & is_run[:, None], step, check)
                _record_tokens(of_tokens, mask, rows, results, is_first=epoch == 0)
                sums = self._optimizer_step("actor", step, results, is_first=not collected)
                _add_metrics(collected, "actor", sums)
                if rows:
                    collected["perf/micro_batches"].append(len(rows[0]))
            if a.critic:
                rows_to_run = in_mini_batch & mask.any(1)
                _, results = self._forward_backward(
                    "critic", batch, rows_to_run, mask, columns["critic"]
                )
                sums = self._optimizer_step("critic", step, results, is_first=not collected)
                _add_metrics(collected, "critic", sums)

        learning = ["actor"] * learn_policy + ["critic"] * a.critic
        metrics = {f"{name}/grad_norm": 0.0 for name in learning}  # if no step was made
        metrics |= {name: sum(values) / len(values) for name, values in collected.items()}
        metrics |= {f"{name}/lr": self._lr(name, step) for name in learning}
        has_old = mask if targets.old_logprobs is not None else mask & is_run[:, None]
        learned = Learned(
            old_logprobs=_nan_outside(has_old, old),
            reference_logprobs=_nan_outside(mask, targets.reference_logprobs),
            teacher_logprobs=_nan_outside(mask, targets.teacher_logprobs),
            values=_nan_outside(mask, targets.values),
            advantages=targets.advantages.masked_fill(~mask, math.nan),
            returns=_nan_outside(mask, targets.returns),
            **{name: of_tokens.get(name) for name in PASS_NUMBERS},
        )
        return metrics | mismatch | target_metrics(batch, targets, self.config.teacher), learned

    def gradient(
        self, batch: Batch, targets: Targets, rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the gradient of the policy loss, before clipping. No weight changes.

        It is that of a first pass, in which the policy is still that of the start of the step, and
        the sum over all mini-batches. The learner must have one rank, in this process.

        Args:
            batch: the step's rollouts.
            targets: the targets of that batch.
            rows: (B,) bool, the rows to run; None: all.

        Returns:
            The gradient of each parameter, by name; empty if no row has a loss.
        """
        assert self.rank is not None
        self.ranks.zero_grad()
        is_run = self._find_rows_to_run(batch, targets)
        is_run = is_run if rows is None else is_run & rows
        columns = self._columns("actor", batch, targets)
        self._forward_backward("actor", batch, is_run, batch.action_mask, columns)
        parameters = self.rank.optimizers["actor"].parameters
        gradients = {
            name: full_tensor(parameter.grad).clone()
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        self.ranks.zero_grad()
        return gradients

    @contextmanager
    def use(self, config: Config) -> Iterator[None]:
        """Use the algorithm of another config within the block; one rank, in this process."""
        assert self.rank is not None
        before = self.config
        self.config = self.rank.config = config
        try:
            yield
        finally:
            self.config = self.rank.config = before

    def _find_rows_to_run(self, batch: Batch, targets: Targets) -> Tensor:
        """Return the rows that can move the policy, (B,) bool; see `update`."""
        a, mask = self.config.algorithm, batch.action_mask
        has_loss = mask if a.kl_loss_coef or a.entropy_coef else mask & (targets.advantages != 0)
        return has_loss.any(1)

    def _columns(self, loss: LossName, batch: Batch, targets: Targets) -> dict[str, Tensor]:
        """Return the (B, T) tensors that a loss needs, by name.

        Without `old`, the logprobs of the first pass are the old ones.
        """
        a, t = self.config.algorithm, targets
        columns: dict[str, Tensor | None] = {"weights": t.weights}
        if loss == "critic":
            columns |= {"values": t.values, "returns": t.returns}
        else:
            columns |= {"advantages": t.advantages, "old": t.old_logprobs}
            columns["rollout"] = batch.rollout_logprobs if a.weighs_tokens else None
            columns["reference"] = t.reference_logprobs if a.kl_loss_coef else None
        return {name: column for name, column in columns.items() if column is not None}

    def _compare(
        self, batch: Batch, old: Tensor, mask: Tensor, step: int, check: Check | None
    ) -> dict[str, float]:
        """Compare engine and trainer at the tokens of `mask`, before any weight changes."""
        check_logprobs(batch, old, mask, "trainer")
        mismatch = mismatch_metrics(batch, old, mask, version=step - 1)
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
        """Add the gradient of the rows where `rows` (B,) is True to the gradients of the ranks.

        Returns:
            The rows of each rank's micro-batches, and its result; both are empty for no rows. Of
            ranks that share rows, only the first is listed: all have the same result.
        """
        batch = self._with_experts(batch, loss == "actor")
        rows_by_rank, shares = self._make_micro_batches(batch, rows, mask, columns)
        results = self.ranks.forward_backward(shares, loss) if any(shares) else []
        return rows_by_rank, results[:: self._context_size]

    def _with_experts(self, batch: TokenRows, is_policy: bool) -> TokenRows:
        """Return rows with the experts that the engine chose, if a model runs these.

        Only the policy does: its logprobs are compared with the engine's. A reference, a teacher
        and a critic are other models, whose own routers choose.

        Raises:
            RunStopped: the policy must run them, and the rows have none.
        """
        if not (is_policy and self.config.rollout.router_replay):
            return batch if batch.experts is None else replace(batch, experts=None)
        if isinstance(batch, Batch) and batch.experts is None and batch.response_mask.any():
            raise RunStopped(
                "rollout.router_replay=true, but these rollouts were stored without the experts"
                " that the engine chose. Set rollout.router_replay=false"
            )
        return batch

    def _make_micro_batches(
        self,
        batch: TokenRows,
        rows: Tensor,
        mask: Tensor,
        columns: Mapping[str, Tensor],
        teacher: str = "",
    ) -> tuple[list[list[Tensor]], list[list[MicroBatch]]]:
        """Make micro-batches of the rows where `rows` (B,) is True, for the policy or a teacher.

        Returns:
            For each rank the row numbers of its micro-batches, and the micro-batches. Ranks that
            share rows have the same micro-batches, and their row numbers are listed once.

        Raises:
            RunStopped: a token id is not in the model's vocabulary.
        """
        mode, vocabulary = self._input_of(teacher)
        check_tokens(batch, vocabulary)
        size = self._context_size
        budget = self.config.optim.micro_batch_tokens * size
        # The images of several rows have no common positions in a pass.
        split = mode if batch.images is None else Mode.ALONE
        shares = assign_rows(batch, rows.nonzero()[:, 0], self.ranks.size // size, budget, split)
        made = [[make_micro_batch(batch, r, mask, columns, mode) for r in s] for s in shares]
        return shares, [micro_batches for micro_batches in made for _ in range(size)]

    @property
    def _context_size(self) -> int:
        """The number of ranks that share rows; see `open_context`."""
        return self.config.trainer.context_parallel_size if self.ranks.size > 1 else 1

    def _input_of(self, teacher: str) -> tuple[Mode, int]:
        """Return how rows become the input of a model, and the size of its vocabulary."""
        if teacher not in self._inputs:
            mode = self.ranks.mode(teacher)[0]
            self._inputs[teacher] = mode, self.ranks.vocabulary(teacher)
        return self._inputs[teacher]

    @property
    def mode(self) -> Mode:
        """How rows become the input of the policy; the same on all ranks."""
        return self._input_of("")[0]

    def _optimizer_step(
        self,
        name: Literal["actor", "critic"],
        step: int,
        results: Sequence[PassResult],
        *,
        is_first: bool = True,
    ) -> dict[str, float]:
        """Update the weights with the gradients of the ranks.

        Without results no step is made: the gradient is zero, and momentum alone must not move the
        weights.

        Args:
            name: the model.
            step: the number of the training step.
            results: the results of the passes, one per micro-batch.
            is_first: False if an earlier optimizer step of this training step changed weights.

        Returns:
            The sums of the results' counts, and the gradient norm as `grad_norm`; empty if no step
            was made.

        Raises:
            RunStopped: the loss or the gradient is not finite. This optimizer step has not changed
                the weights.
        """
        if not results:
            return {}
        counts: dict[str, float] = defaultdict(float)
        for result in results:
            for key, value in result.counts.items():
                counts[key] += value
        finite = all(map(math.isfinite, counts.values()))
        lr = self._lr(name, step)
        counts["grad_norm"] = self.ranks.optimizer_step(name, lr) if finite else math.nan
        self.policy_steps += name == "actor"
        if not math.isfinite(counts["grad_norm"]):
            values = ", ".join(f"{key}={value}" for key, value in counts.items())
            weights = (
                "The weights have not changed."
                if is_first
                else "Earlier optimizer steps of this training step have changed the weights, so"
                " these are not saved."
            )
            raise RunStopped(
                f"step {step}: the {name}'s loss or gradient is not finite ({values})."
                f" {weights} {self._explain_failure(name, step)}"
            )
        return dict(counts)

    def _lr(self, name: str, step: int) -> float:
        o = self.config.optim
        peak = o.lr if name == "actor" else o.critic_lr
        return learning_rate(peak, o, self.total_steps, step)

    def _explain_failure(self, name: str, step: int) -> str:
        """Return the likely causes of a loss that is not finite."""
        advice = f"A lower learning rate (now {self._lr(name, step):g}) usually helps"
        advice += ". Logprobs of the engine and rewards were checked before and are finite."
        loss = self.config.algorithm.policy_loss
        if name == "actor" and loss not in policy_losses.shipped:
            return f"The likeliest cause is your own policy loss {loss!r}. Otherwise: {advice}"
        return advice

    # --- saving and exporting --------------------------------------------------------------------

    @property
    def has_lora(self) -> bool:
        """True if an adapter learns, False if all weights do."""
        return self.config.model.lora_rank > 0

    def export(self, *, published: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors of the plain model for an engine; see `Policy.export`.

        Ranks in other processes pass them through files.
        """
        if self.rank is not None:
            yield from self.rank.policy.export(published=published)
            return
        with OwnedFolder("weights") as folder:
            route = Route(0, folder=folder, published=published)
            sent = self.ranks.send_weights(route)
            if sent.errors:
                raise RunStopped(*sent.errors.values())
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, "pt") as weights:
                    yield from ((name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118

    @contextmanager
    def perturbed_adapter(self) -> Iterator[None]:
        """Use a perturbed LoRA adapter within the block; see `Policy.perturbed_adapter`."""
        self.ranks.perturb_adapter(self.config.trainer.seed)
        try:
            yield
        finally:
            self.ranks.restore_adapter()


SUM_METRICS = ("grad_norm", "pg_loss", "kl_loss", "vf_loss")
"""Metrics that are sums over the mini-batch. All others are divided by the number of tokens."""


def _add_metrics(into: dict[str, list[float]], name: str, counts: dict[str, float]) -> None:
    tokens = counts.pop("tokens", 0.0)
    counts.pop("loss", None)
    for key, value in counts.items():
        into[f"{name}/{key}"].append(value if key in SUM_METRICS else value / tokens)


PASS_NUMBERS = ("importance_weights", "entropy", "clipped")
"""The fields of `Learned` that the passes report."""


def _of_tokens(results: Sequence[PassResult], name: str) -> list[list[Tensor | None]]:
    """Return a number of the tokens of each micro-batch; None where a pass does not report it."""
    return [[tokens.get(name) for tokens in result.tokens] for result in results]


def _record_tokens(
    into: dict[str, Tensor],
    mask: Tensor,
    rows_by_rank: Sequence[Sequence[Tensor]],
    results: Sequence[PassResult],
    *,
    is_first: bool,
) -> None:
    """Add `PASS_NUMBERS` of a pass to (B, T) tensors.

    Args:
        into: the tensors by name, NaN where a number is unknown.
        mask: (B, T) bool, the chosen tokens.
        rows_by_rank: the rows of each rank's micro-batches.
        results: the result of each rank.
        is_first: True for the first pass of these rows. In later ones only `clipped` is read.
    """
    for name in PASS_NUMBERS if is_first else ("clipped",):
        flats = _of_tokens(results, name)
        if name not in into:
            kinds = [flat.dtype for share in flats for flat in share if flat is not None]
            if not kinds:
                continue
            dtype = torch.promote_types(kinds[0], torch.float32)
            into[name] = torch.full(mask.shape, math.nan, dtype=dtype)
        out = into[name]
        for rows, flat in _pairs(rows_by_rank, flats):
            chosen, now = mask[rows], out[rows]
            numbers = math.nan if flat is None else flat.to(out)
            now[chosen] = numbers if is_first else now[chosen] + numbers
            out[rows] = now


def _scatter(
    mask: Tensor,
    rows_by_rank: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor | None]],
) -> Tensor:
    """Return a (B, T) tensor of the ranks' values at the chosen tokens; 0 elsewhere."""
    pairs = [(rows, flat) for rows, flat in _pairs(rows_by_rank, values) if flat is not None]
    kinds = {flat.dtype for _, flat in pairs} | {torch.float32}
    out = torch.zeros(mask.shape, dtype=max(kinds, key=lambda kind: kind.itemsize))
    for rows, flat in pairs:
        out[rows] = out[rows].masked_scatter(mask[rows], flat.to(out))
    return out


def _pairs(
    rows_by_rank: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the rows of each micro-batch that has any, and its values."""
    for share, flats in zip(rows_by_rank, values, strict=False):
        yield from (pair for pair in zip(share, flats, strict=True) if len(pair[0]))


def _nan_outside(mask: Tensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.masked_fill(~mask, math.nan)
