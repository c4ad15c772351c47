"""A rank: one process of the learner. It holds weights and runs forward and backward passes.

The methods gather weights and sum gradients over all ranks. So each method is called on all ranks
at once, with the same number of micro-batches (`packing.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from agentrl.config import Config
from agentrl.engine.local.load import (
    base_and_adapters,
    compute_dtype,
    image_processor,
    load_causal_lm,
    max_row_length,
)
from agentrl.engine.local.rounding import rounded_again
from agentrl.engine.remote.senders import (
    Route,
    Sent,
    WeightsSender,
    check_folder_visible,
)
from agentrl.images import read_pixels
from agentrl.learner.context_parallel import open_context
from agentrl.learner.dispatch import BROADCAST, SPLIT, Placement, RankGroup, dispatch
from agentrl.learner.losses import (
    ESTIMATORS,
    clipped_tokens,
    engine_weights,
    importance_ratios,
    importance_weights,
    token_losses,
    value_loss,
)
from agentrl.learner.optimizer import BETAS, Optimizer
from agentrl.learner.packing import MicroBatch, Mode, PackedRows, pack_row
from agentrl.learner.policy import ACTOR, CRITIC, Critic, PackedModel, Policy
from agentrl.learner.profile import RankProfile, annotate
from agentrl.learner.sharding import (
    convert,
    is_rank_zero,
    keep_shards,
    open_accelerator,
    reshard,
    shard,
    wrap_layers,
)
from agentrl.learner.vision import freeze_vision_tower, vision_blocks

ModelName = Literal["policy", "reference", "critic", "teacher"]
LossName = Literal["actor", "critic", "sft"]
FORWARD_RANGES: dict[ModelName, str] = {
    "policy": "old_logprobs", "reference": "reference_logprobs", "critic": "critic_values",
    "teacher": "teacher_logprobs",
}  # fmt: skip
"""The names of `Rank.forward` in profiles."""
ADAPTER_FOLDER = "adapter"
"""The folder of a checkpoint with the policy's LoRA adapter, as PEFT loads it. It does not exist if
the base is an adapter that was merged at loading: no path names such a base."""

COMPILED_ROWS = (256, 16384)
"""The tokens of the rows that `Rank.compile` runs with a gradient, if passes may be as long. Short
and long passes get programs of their own: torch fuses the gradients of norms from 4096 tokens on,
or from twice the hidden size, and a short pass has the logits of the whole vocabulary at once."""


@dataclass(slots=True)
class PassResult:
    """The result of a rank's forward and backward passes."""

    counts: dict[str, float] = field(default_factory=dict)
    """Sums over the rank's micro-batches, `tokens` and `loss` among them."""
    tokens: list[dict[str, Tensor]] = field(default_factory=list)
    """For each micro-batch of the policy, numbers of its chosen tokens, (N,) each: the `entropy`;
    the `importance_weights` if the loss has any; `clipped`, bool, if the loss reports it; the
    `logprobs` before the update if the micro-batch has no old ones."""


class LocalRankGroup:
    """A group with one rank, in this process."""

    size = 1

    def __init__(self, rank: Any):
        """Use the rank."""
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.rank, name, None)
        mode = getattr(method, "dispatch", None)
        if method is None or mode is None:
            raise AttributeError(f"{type(self.rank).__name__}.{name} is not marked by `dispatch`")
        if mode is SPLIT:
            return lambda shares, *args, **kwargs: [method(shares[0], *args, **kwargs)]
        return method

    def close(self) -> None:
        """Leave the groups of the rank. There is no process to end."""
        self.rank.close()


class Rank:
    """Holds the weights that learn, or one shard of them."""

    def __init__(
        self,
        model_path: str | Path,
        config: Config,
        *,
        dtype: torch.dtype | None = None,
        betas: tuple[float, float] = BETAS,
        load: Callable[..., PreTrainedModel] = load_causal_lm,
    ):
        """Load the model; no data is read.

        Args:
            model_path: a model or a PEFT adapter; see `load_causal_lm`.
            config: the run's config.
            dtype: the data type of weights and passes; None: the default of the device.
            betas: AdamW's decay rates.
            load: makes a model from path, dtype and device; the same model on all ranks.

        Raises:
            ConfigError: there is no such model or device, or LoRA has nothing to adapt.
        """
        logging.disable_progress_bar()  # one bar per model folder is noise
        self.config = config
        self._path, self._load = model_path, load
        self.accelerator, self._mesh = open_accelerator(config.trainer.device)
        self.device = self.accelerator.device
        self._context = open_context(config.trainer.context_parallel_size, self.device.type)
        cuda = self.device.type == "cuda"
        # On a GPU passes have their own precision. Trainable weights are float32, frozen weights
        # keep the data type of the files.
        self._compute = compute_dtype("cuda") if cuda and dtype is None else None
        self._dtype = dtype or ("auto" if cuda else torch.float32)
        self.policy = self._load_policy()
        self.critic: Critic | None = None
        self._frozen: dict[str, Policy] = {}
        """The reference ("") and the teachers that are loaded, by their paths."""
        self._weights_sender = WeightsSender()
        lora = config.model.lora_rank > 0
        if lora:
            self._add_adapter(ACTOR)
        if config.algorithm.critic:
            if lora:
                self._add_adapter(CRITIC)
            self.critic = Critic((self.policy if lora else self._load_policy()).packed_model)
        if self._quantizes:
            self.policy.quantize(self.device)
        replays = config.rollout.router_replay
        self._compiled = self._shard(self.policy.packed_model, replays=replays)
        trainable = {"actor": self.policy.parameters(ACTOR)}
        if critic := self.critic:
            if not lora:
                self._shard(critic.packed_model)
            weights = self.policy.parameters(CRITIC) if lora else critic.decoder_parameters()
            head = {f"head.{n}": p for n, p in critic.head.named_parameters()}
            trainable["critic"] = weights | head
        self.optimizers = {
            name: Optimizer(name, parameters, config.optim, self.accelerator, betas)
            for name, parameters in trainable.items()
        }

    @property
    def _quantizes(self) -> bool:
        return self.config.model.quantization == "nf4"

    def _load_policy(self, path: str | Path = "") -> Policy:
        """Return the policy with the shards of this rank, which `_shard` then puts into it.

        Adapters are merged into whole weights, and whole layers are quantized. So each rank loads
        such a base whole, into memory of the CPU.

        Args:
            path: another model, which is not quantized; "": the policy's.
        """
        is_quantized, path = self._quantizes and not path, path or self._path
        mesh = None if is_quantized or base_and_adapters(path)[1] else self._mesh
        with keep_shards(mesh, "cpu" if self.config.optim.offload == "all" else self.device):
            model = self._load(path, self._dtype, "cpu")
        if self.config.model.freeze_vision_tower:
            freeze_vision_tower(model)
        return Policy(model, self.config.rollout.temperature, prove=False)

    def _add_adapter(self, name: str) -> None:
        m = self.config.model
        # Each adapter has its own seed, so it does not depend on earlier random numbers.
        seed = self.config.trainer.seed + (name == CRITIC)
        self.policy.add_adapter(name, m.lora_rank, m.lora_alpha, m.lora_target_modules, seed)

    def _shard(self, packed_model: PackedModel, *, replays: bool = False) -> bool:
        """Shard a model, find how it runs rows, and apply the section `optim` to its layers.

        Args:
            packed_model: the model.
            replays: see `PackedModel.prove`.

        Returns:
            True if the layers are compiled.
        """
        layers, head, optim = packed_model.layers(), packed_model.value_head, self.config.optim
        offloads = optim.offload == "all"
        shard(packed_model, layers, head, self._mesh, self._compute, offloads)
        packed_model.prove(self._compute, optim.micro_batch_tokens, self._context, replays=replays)
        reshard(packed_model)
        blocks = vision_blocks(packed_model.model)
        return wrap_layers(packed_model, layers, self._mesh, optim, blocks)

    @dispatch(BROADCAST)
    def compile(self) -> None:
        """Compile the policy's layers, by passes without and with a gradient that is dropped.

        Otherwise the first canary and the first update would do it. This can run while servers
        start. It does nothing if the layers are not compiled.
        """
        if not self._compiled:
            return
        longest = max_row_length(self.policy.model.config)
        limit, vocabulary = min(self.config.optim.micro_batch_tokens, longest), self.vocabulary()
        for length in COMPILED_ROWS:
            ids = [i % vocabulary for i in range(min(length, limit))]
            self.score(ids)
            logprobs = self.policy.logprobs(self._pack_row(ids))[0]
            # Not the gradient of a sum, whose stride of 0 would need a program that no loss uses.
            logprobs.backward(torch.ones_like(logprobs))
        self.zero_grad()
        reshard(self.policy.packed_model)

    # --- forward passes --------------------------------------------------------------------------

    @dispatch(BROADCAST)
    def vocabulary(self, teacher: str = "") -> int:
        """Return the number of tokens in the vocabulary of the policy, or of a teacher."""
        model = (self._load_frozen(teacher) if teacher else self.policy).model
        return model.get_input_embeddings().num_embeddings  # type: ignore[return-value]

    @dispatch(BROADCAST)
    def mode(self, teacher: str = "") -> tuple[Mode, str]:
        """Return how rows become the input of the policy or of a teacher, and why.

        See `prove_mode`.
        """
        model = (self._load_frozen(teacher) if teacher else self.policy).packed_model
        return model.mode, model.mode_reason

    @dispatch(SPLIT)
    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], model: ModelName, teacher: str = ""
    ) -> list[Tensor]:
        """Run a model without gradient.

        Args:
            micro_batches: the rows.
            model: the model.
            teacher: the path of the model "teacher".

        Returns:
            For each micro-batch the logprobs of the model, or the critic's values: (N,), float32 or
            wider.
        """
        target: Policy | Critic = self.policy
        if model == "critic":
            assert self.critic is not None
            target = self.critic
        elif model == "teacher" or (model == "reference" and self.policy.peft is None):
            target = self._load_frozen(teacher)
        results = []
        with self._use_adapter_of(model), annotate(FORWARD_RANGES[model]):
            for micro_batch in micro_batches:
                rows = self._part(micro_batch.packed, teacher).to(self.device)
                is_critic = isinstance(target, Critic)
                numbers = target.values(rows) if is_critic else target.logprobs(rows)[0]
                results.append(numbers.cpu())
        reshard(target.packed_model)  # the weights may change from now on
        return results

    @dispatch(BROADCAST)
    @torch.no_grad()
    def score(self, token_ids: Sequence[int], perturbations: int = 0) -> Tensor:
        """Return the logprob of each token but the first at temperature 1, (T - 1,) float32.

        Args:
            token_ids: the row.
            perturbations: the number of passes with perturbed rounding (`rounded_again`).
                Their logprobs are further rows of the result: (1 + perturbations, T - 1).
        """
        row = self._pack_row(token_ids)
        with annotate("score"):
            rows = [self.policy.logprobs(row, temperature=1.0)[0]]
            for seed in range(perturbations):
                with rounded_again(self.policy.model, seed):
                    rows.append(self.policy.logprobs(row, temperature=1.0)[0])
        reshard(self.policy.packed_model)
        return (torch.stack(rows) if perturbations else rows[0]).float().cpu()

    def _pack_row(self, token_ids: Sequence[int]) -> PackedRows:
        row = pack_row(token_ids, self.policy.packed_model.mode)
        return self._part(row).to(self.device)

    def _part(self, packed: PackedRows, path: str = "") -> PackedRows:
        """Return what this rank runs, with the pixels of the images.

        Args:
            packed: the rows.
            path: the model that runs them; "": the policy's.
        """
        if packed.images:
            processor = image_processor(path or self._path)
            packed = replace(packed, pixels=read_pixels(processor, packed.images))
        if packed.experts is not None and self.policy.packed_model.routers:
            self.policy.packed_model.routers.check(packed.experts)
        return packed.part(self._context)

    def _use_adapter_of(self, model: ModelName | LossName) -> AbstractContextManager[None]:
        """Return a context manager that switches the shared LoRA base to the adapter of `model`."""
        if self.policy.peft is None or model not in ("critic", "reference"):
            return nullcontext()
        return self.policy.adapter(CRITIC if model == "critic" else None)

    def _load_frozen(self, path: str) -> Policy:
        """Return the initial policy ("") or a teacher, loaded on first use.

        It uses the policy's precision, so the initial policy rounds in the same way.
        """
        if path in self._frozen:
            return self._frozen[path]
        frozen = self._load_policy(path)
        frozen.model.requires_grad_(False)
        if self._compute is not None:
            for weight in frozen.model.parameters():  # Not the buffers: they stay precise.
                convert(weight, self._compute)
        self._shard(frozen.packed_model)
        self._frozen[path] = frozen
        return frozen

    # --- training --------------------------------------------------------------------------------

    @dispatch(SPLIT)
    def forward_backward(self, micro_batches: Sequence[MicroBatch], name: LossName) -> PassResult:
        """Add the gradient of some micro-batches to the gradient of this rank.

        Args:
            micro_batches: if they have no column `old`, the policy is still that of the start of
                the step: its logprobs are the old ones and are returned.
            name: the loss: the policy's, the critic's or that of supervised fine-tuning.
        """
        losses: dict[LossName, Callable[[MicroBatch], tuple[Any, ...]]] = {
            "actor": self._actor_loss, "critic": self._critic_loss, "sft": self._sft_loss
        }  # fmt: skip
        sums: dict[str, Tensor] = {}
        result = PassResult()
        with self._use_adapter_of(name):
            for micro_batch in micro_batches:
                with annotate("forward"):
                    part = self._part(micro_batch.packed)
                    rows = replace(micro_batch, packed=part).to(self.device)
                    loss, loss_sums, *tokens = losses[name](rows)
                result.tokens += tokens
                # Not `accelerator.backward`: it divides by process-wide state.
                with annotate("backward"):
                    loss.backward()
                for key, value in {"loss": loss.detach(), **loss_sums}.items():
                    sums[key] = sums[key] + value if key in sums else value
        if sums:
            numbers = torch.stack([value.double() for value in sums.values()])
            result.counts = dict(zip(sums, numbers.tolist(), strict=True))
        result.tokens = [{key: x.cpu() for key, x in tokens.items()} for tokens in result.tokens]
        return result

    @dispatch(BROADCAST)
    def optimizer_step(self, name: str, lr: float) -> float:
        """Run an optimizer step on the accumulated gradient.

        Returns:
            The gradient norm before clipping. If it is not finite, no weight has changed.
        """
        with annotate("optimizer"):
            return self.optimizers[name].step(lr)

    @dispatch(BROADCAST)
    def zero_grad(self) -> None:
        """Drop the accumulated gradient, for example of a step that was stopped."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _actor_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the policy loss of a micro-batch, sums for metrics, and `PassResult.tokens`."""
        a, columns = self.config.algorithm, batch.columns
        logprobs, entropy = self.policy.logprobs(batch.packed, entropy_gradient=a.entropy_coef > 0)
        old = columns.get("old", logprobs.detach())
        advantages = columns["advantages"].to(logprobs.dtype)
        weights = columns["weights"].to(logprobs.dtype)
        rows, mask = batch.rows, batch.mask
        loss, counts = token_losses(rows(logprobs), rows(old), rows(advantages), mask, a)
        loss = loss[mask]
        loss_sums = {
            "tokens": torch.ones_like(entropy).sum(),
            "entropy": entropy.detach().sum(),
            "ppo_kl": (old - logprobs.detach()).sum(),
            **{name: count[mask].sum() for name, count in counts.items()},
        }
        tokens = {"entropy": entropy.detach()}
        if "old" not in columns:
            tokens["logprobs"] = logprobs.detach()
        if (clipped := clipped_tokens(counts)) is not None:
            tokens["clipped"] = clipped[mask]
        if a.weighs_tokens:
            weights_of_rows = engine_weights(rows(old), rows(columns["rollout"]), mask, a)
            tokens["importance_weights"] = weights_of_rows[mask]
            loss = loss * tokens["importance_weights"]
        loss_sums["pg_loss"] = (weights * loss).detach().sum()
        if a.kl_loss_coef:
            kl = ESTIMATORS[a.kl_type](logprobs, columns["reference"])
            if a.tis_cap:  # the KL is an expectation over the current policy (`ESTIMATORS`)
                current, sampled = rows(logprobs.detach()), rows(columns["rollout"])
                ratios = importance_ratios(current, sampled, mask, "token")
                kl = kl * importance_weights(ratios[mask], a.tis_cap, "truncate")
            loss = loss + a.kl_loss_coef * kl
            loss_sums["kl_loss"] = (weights * kl).detach().sum()
        if a.entropy_coef:
            loss = loss - a.entropy_coef * entropy
        return (weights * loss).sum(), loss_sums, tokens

    def _critic_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic loss of a micro-batch, and the sums for metrics."""
        assert self.critic is not None
        columns = batch.columns
        values = self.critic.values(batch.packed)
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

    def _sft_loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of supervised fine-tuning: the weighted sum of -log p (`sft.py`)."""
        logprobs, _ = self.policy.logprobs(batch.packed)
        return -(batch.columns["weights"] * logprobs).sum(), {
            "tokens": torch.ones_like(logprobs).sum()
        }

    # --- profiles --------------------------------------------------------------------------------

    @dispatch(BROADCAST)
    def start_profile(self) -> None:
        """Record what this rank does until `stop_profile`."""
        self._profile = RankProfile(gpu=self.device.type == "cuda")

    @dispatch(SPLIT)
    def stop_profile(self, file: Path) -> str:
        """Write the profile of this rank; returns why it could not be written, or ""."""
        self._profile.stop()
        problem = self._profile.write(file)
        del self._profile  # It may be large and has cycles, and the collector runs rarely here.
        gc.collect()
        return problem

    # --- saving and exporting --------------------------------------------------------------------

    @dispatch(BROADCAST)
    def send_weights(self, route: Route) -> Sent:
        """Send the policy: its weights (see `WeightsSender.send`), its LoRA adapter, or both.

        Raises:
            ConfigError: rank 0 does not see a folder of the route.
        """
        if is_rank_zero():
            for folder in filter(None, (route.folder, route.adapter_folder)):
                check_folder_visible(folder)
        sent = Sent()
        with annotate("send_weights"):
            if route.targets or route.folder is not None:
                weights = self.policy.export(route.dtype, published=route.published)
                sent = self._weights_sender.send(weights, route)
            if route.adapter_folder is not None:
                self.policy.save_adapter(route.adapter_folder)
        return sent

    def close(self) -> None:
        """Leave the group of broadcasts."""
        self._weights_sender.close()

    @dispatch(BROADCAST)
    def save_pretrained(self, folder: Path, dtype: str = "float32") -> None:
        """Save the policy; see `Policy.save_pretrained`."""
        self.policy.save_pretrained(folder, dtype)

    @dispatch(BROADCAST)
    def saved_bytes(self) -> int:
        """Return the bytes that all ranks together `save`, without the copy of an adapter."""
        tensors = (
            t for optimizer in self.optimizers.values() for t in optimizer.tensors().values()
        )
        return sum(t.numel() * t.element_size() for t in tensors)

    @dispatch(BROADCAST)
    def save(self, folder: Path) -> None:
        """Write all that `load` needs into an existing folder; with LoRA also `ADAPTER_FOLDER`.

        Raises:
            RunStopped: a rank cannot write there.
        """
        for optimizer in self.optimizers.values():
            optimizer.save(folder)
        if self.policy.peft is not None and self.policy.model.name_or_path:
            self.policy.save_adapter(folder / ADAPTER_FOLDER)

    @dispatch(BROADCAST)
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit, for any number of ranks.

        Raises:
            ConfigError: it was saved by another model or algorithm.
        """
        for optimizer in self.optimizers.values():
            optimizer.load(folder)
        reshard(self.policy.packed_model)
        if self.critic is not None:
            reshard(self.critic.packed_model)

    @dispatch(BROADCAST)
    def perturb_adapter(self, seed: int) -> None:
        """Perturb the LoRA adapter until `restore_adapter`; see `Policy.perturbed_adapter`."""
        self._perturbation = self.policy.perturbed_adapter(seed)
        self._perturbation.__enter__()

    @dispatch(BROADCAST)
    def restore_adapter(self) -> None:
        """Undo `perturb_adapter`."""
        self._perturbation.__exit__(None, None, None)


class LearnerRanks(RankGroup, Protocol):
    """The ranks of a learner: the methods of `Rank`, each called on all ranks.

    A method that is marked `SPLIT` takes a list with the first argument of each rank, and returns a
    list with the result of each rank.
    """

    compile: Callable[[], None]
    forward_backward: Callable[[Sequence[Sequence[MicroBatch]], LossName], list[PassResult]]
    optimizer_step: Callable[[str, float], float]
    zero_grad: Callable[[], None]
    start_profile: Callable[[], None]
    stop_profile: Callable[[Sequence[Path]], list[str]]
    send_weights: Callable[[Route], Sent]
    saved_bytes: Callable[[], int]
    save: Callable[[Path], None]
    load: Callable[[Path], None]
    perturb_adapter: Callable[[int], None]
    restore_adapter: Callable[[], None]

    def vocabulary(self, teacher: str = "") -> int:
        """Return the size of a model's vocabulary; see `Rank.vocabulary`."""
        ...

    def mode(self, teacher: str = "") -> tuple[Mode, str]:
        """Return how rows become the input of a model; see `Rank.mode`."""
        ...

    def forward(
        self,
        micro_batches: Sequence[Sequence[MicroBatch]],
        model: ModelName,
        teacher: str = "",
    ) -> list[list[Tensor]]:
        """Run a model without gradient; see `Rank.forward`."""
        ...

    def score(self, token_ids: Sequence[int], perturbations: int = 0) -> Tensor:
        """Return the logprobs of a row; see `Rank.score`."""
        ...

    def save_pretrained(self, folder: Path, dtype: str = "float32") -> None:
        """Save the policy; see `Policy.save_pretrained`."""
        ...


def start_ranks(placement: Placement | None, *args: Any, **kwargs: Any) -> LearnerRanks:
    """Start the ranks of a placement; None: one rank in this process.

    The arguments are those of `Rank`.
    """
    group = (
        placement.start_ranks(Rank, *args, **kwargs)
        if placement
        else LocalRankGroup(Rank(*args, **kwargs))
    )
    return cast(LearnerRanks, group)  # Both find the methods of `Rank` at run time only.
