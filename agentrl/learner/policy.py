"""Causal language models that score chosen tokens: the policy, and a critic.

A model runs many rows at once (`packing.py`), and the numbers of a row do not depend on the
other rows. The head is by far the widest layer; it is applied to the states of chosen tokens only.
Models stay in evaluation mode while they learn: with dropout the probability ratio at the first
update would differ from 1.

The policy learns, and an engine samples from it. With LoRA it is an adapter over a frozen base. Its
weights may be sharded over ranks (`sharding.py`). Then all ranks call the methods that gather
weights (`export`, `save_adapter`, `save_pretrained`, `perturbed_adapter`) at once, and only rank 0
writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME

from agentrl.config import ModelConfig
from agentrl.engine.local.load import (
    add_other_parts,
    empty_model,
    find_targets,
    load_model_config,
    mark_quantized,
    quiet_peft,
    stacked_parameters,
    with_published_names,
)
from agentrl.engine.local.quantize import Linear4bit
from agentrl.engine.local.routers import Routers
from agentrl.errors import ConfigError
from agentrl.learner.context_parallel import ContextGroup
from agentrl.learner.head import Head, chosen_logprobs
from agentrl.learner.modes import (
    decoder_of,
    find_scale_and_softcap,
    hidden_states,
    output_layer,
    prove_context,
    prove_mode,
)
from agentrl.learner.packing import Mode, PackedRows
from agentrl.learner.sharding import copy_full, full_tensor, is_rank_zero, reshard
from agentrl.learner.vision import vision_tower

T = TypeVar("T")

PERTURBATION = 0.3
"""The norm of the change that a perturbed adapter makes to a layer, relative to the norm of the
layer. Logprobs change by about half a nat, which is more than by training, so the measured rounding
errors are not smaller than those of training."""
LAYERS = ("layers", "h", "blocks")
"""Names of the list of blocks in transformers' classes."""
VISION_MODULES = r"(.*\.)?visual\..*"
"""The modules of the vision tower, as PEFT excludes them: some have names of the text part."""
ACTOR, CRITIC = "default", "critic"
"""Names of the LoRA adapters. PEFT writes the adapter named "default" as a plain adapter folder."""


class Policy:
    """A causal language model that computes logprobs of tokens."""

    def __init__(self, model: PreTrainedModel, temperature: float, *, prove: bool = True):
        """Find how rows become the input of `model`; `add_adapter` freezes it.

        Args:
            model: in evaluation mode.
            temperature: divides the logits.
            prove: False if the model is not whole yet; then call `packed_model.prove` later.

        Raises:
            ConfigError: see `prove_mode`.
        """
        self.model = model
        self.temperature = temperature
        self.peft: PeftModel | None = None
        self.packed_model = PackedModel(model)
        if prove:
            self.packed_model.prove()

    @cached_property
    def _adaptable(self) -> tuple[list[str], list[str]]:
        """The modules and stacked parameters of the base, before the first adapter renames them."""
        return find_adaptable_modules(self.model), stacked_parameters(self.model)

    def logprobs(
        self,
        packed: PackedRows,
        *,
        entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy at each chosen token, (N,) each.

        Args:
            packed: the rows.
            entropy_gradient: True if the entropy has a gradient.
            temperature: replaces the policy's.
        """
        temperature = self.temperature if temperature is None else temperature

        def read(hidden: Tensor) -> tuple[Tensor, Tensor]:
            return chosen_logprobs(
                hidden,
                self.packed_model.head,
                packed.tokens,
                temperature,
                entropy_gradient,
                kept=packed.kept,
            )

        logprobs, entropy = self.packed_model(packed, read)
        return packed.join(logprobs), packed.join(entropy)

    def add_adapter(
        self, name: str, rank: int, alpha: int, target_modules: str | list[str], seed: int
    ) -> None:
        """Add a LoRA adapter, and freeze the weights of the base.

        The adapter has no dropout (see `policy.py`) and starts at zero: the policy equals its base.

        Raises:
            ConfigError: there are no such modules to adapt.
        """
        modules, stacked = check_targets(target_modules, *self._adaptable)
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=modules,
            target_parameters=stacked or None,
            exclude_modules=VISION_MODULES if vision_tower(self.model) else None,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), quiet_peft():
            torch.default_generator.manual_seed(seed)
            try:
                if self.peft is None:
                    self.peft = get_peft_model(self.model, config, adapter_name=name)  # type: ignore
                else:
                    self.peft.add_adapter(name, config)
            except ValueError as e:
                raise ConfigError(f"model.lora_target_modules={target_modules!r}: {e}") from e
        self.model.eval()
        self._unfreeze_adapters()

    def quantize(self, device: torch.device | str) -> None:
        """Quantize the modules that have an adapter to 4 bits. Call it after `add_adapter`.

        Only these: their weights are what engines get (`export`), so an engine gets the rounded
        base, too.

        Args:
            device: where the quantized weights are kept.

        Raises:
            ConfigError: a module is no linear layer.
        """
        for name, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer):
                base = layer.get_base_layer()
                if not isinstance(base, nn.Linear):
                    raise ConfigError(
                        f"model.quantization=nf4: {name} is a {type(base).__name__}, not a"
                        " torch.nn.Linear. Set model.quantization=none"
                    )
                layer.base_layer = Linear4bit(base, device)

    def parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """Return the trainable parameters of an adapter by name; without LoRA of the model."""
        named = self.model.named_parameters()
        learning = {n: p for n, p in named if p.requires_grad}
        return {n: p for n, p in learning.items() if self.peft is None or f".{adapter}." in n}

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Use the adapter `name` instead of the policy's within the block, in backward passes too.

        None disables all adapters: the model is then the initial policy.
        """
        assert self.peft is not None
        with ExitStack() as stack:
            stack.callback(self._unfreeze_adapters)
            if name is None:
                stack.enter_context(self.peft.disable_adapter())
            else:
                self.peft.set_adapter(name)
                stack.callback(self.peft.set_adapter, ACTOR)
            # The shards learn, not the gathered weights.
            stack.callback(reshard, self.packed_model)
            yield

    def _unfreeze_adapters(self) -> None:
        """Make all adapters trainable again: PEFT freezes those that are not active."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)

    @contextmanager
    def perturbed_adapter(self, seed: int) -> Iterator[None]:
        """Replace the LoRA adapter within the block by another one, whose output is not zero.

        An initial adapter is zero: it would not show that an engine ignores adapters.
        """
        layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        before = [_lora_b(layer).detach().clone() for layer in layers]
        random = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for layer in layers:
                    up = _lora_b(layer)
                    copy_full(up, torch.randn(up.shape, generator=random))
                    change = _delta_weight(layer)
                    size = full_tensor(base_weight(layer).norm()) / full_tensor(change.norm())
                    copy_full(up, full_tensor(up) * (PERTURBATION * size))
            yield
        finally:
            with torch.no_grad():
                for layer, values in zip(layers, before, strict=True):
                    _lora_b(layer).copy_(values)

    def save_adapter(self, folder: Path) -> None:
        """Save the policy's LoRA adapter to a folder that PEFT and engines load."""
        assert self.peft is not None
        adapters = self._gather_adapters()
        if is_rank_zero():
            with quiet_peft():
                self.peft.save_pretrained(
                    str(folder),
                    selected_adapters=[ACTOR],
                    # Otherwise PEFT asks the hub whether the vocabulary has grown.
                    save_embedding_layers=False,
                    state_dict=adapters,
                )
            if any(isinstance(module, Linear4bit) for module in self.model.modules()):
                mark_quantized(folder)

    def _gather_adapters(self) -> dict[str, Tensor]:
        """Return the tensors of all LoRA adapters, by their names in PEFT's model."""
        named = self.model.named_parameters()
        return {f"base_model.model.{n}": full_tensor(p).cpu() for n, p in named if "lora_" in n}

    def export(
        self, dtype: torch.dtype | None = None, *, published: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that an engine needs to sample from this policy, by name.

        With LoRA these are the adapted weights, each merged from the unchanged base: adding to the
        base in place and subtracting again would accumulate rounding errors. Without LoRA these are
        all weights. The names are those of the plain model. The tensors may share memory with the
        model: use them before the next update.

        Args:
            dtype: the dtype of the tensors; None: their own. A shard is converted before it is
                gathered.
            published: True if the tensors have the names and shapes of the model's files; see
                `with_published_names`.
        """
        weights = self._gather_weights(dtype)
        return with_published_names(self.model, weights) if published else weights

    def _gather_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export` by their names in the model."""
        if self.peft is None:
            for name, p in self.model.named_parameters():
                yield name, full_tensor(p.detach().to(dtype or p.dtype))
            return
        for name, layer in self.adapted():
            with torch.no_grad():
                weight = base_weight(layer)
                merged = full_tensor(weight) + full_tensor(_delta_weight(layer))
            yield name, merged.to(dtype or weight.dtype)

    def adapted(self) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the adapted weights by their names in the plain model."""
        for name, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer):
                leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
                yield plain_name(f"{name}.{leaf}"), layer

    def save_pretrained(self, folder: Path, dtype: str = "float32") -> None:
        """Save to a folder that transformers loads; with LoRA to one that PEFT loads.

        If the base is itself a model with a merged adapter, no path names it, and a saved adapter
        could only refer to another base. Then the whole model is saved, with LoRA merged.

        Args:
            folder: the folder to make.
            dtype: the precision of a whole model; an adapter keeps its own.
        """
        if self.peft is not None and self.model.name_or_path:
            self.save_adapter(folder)
        else:
            self.save_whole(folder, dtype)

    def save_whole(self, folder: Path, dtype: str = "float32") -> None:
        """Save the whole model to a folder that transformers loads, in a precision.

        LoRA is merged, as in `export`. What else the base has is added: see `add_other_parts`.
        """
        kind: torch.dtype = getattr(torch, dtype)
        # With the buffers: some routers have biases that are no parameters.
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in self.model.named_parameters()}
        base = {
            plain_name(name): full_tensor(weight.detach()).cpu()
            for name, weight in self.model.state_dict().items()
            if "lora_" not in name and name not in tied
        }
        merged = {} if self.peft is None else {n: t.cpu() for n, t in self.export(kind)}
        if is_rank_zero():
            for name in base.keys() - {name for name, _ in self.model.named_buffers()}:
                base[name] = base[name].to(self.saved_dtype(name, kind))
            self.model.save_pretrained(folder, state_dict=base | merged)
            file = folder / CONFIG_NAME  # transformers has written the precision of the learner
            own = json.loads(file.read_text()) | {"dtype": dtype}
            file.write_text(json.dumps(own, indent=2) + "\n")
            if self.model.name_or_path:
                add_other_parts(folder, self.model.name_or_path)

    def saved_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the precision of a weight in a folder whose model is loaded in `dtype`.

        transformers loads some weights in float32 in any case, such as routers.
        """
        plan = self.model._get_dtype_plan(dtype)
        return torch.float32 if any(part in name for part in plan) else dtype


class Critic:
    """A transformer with a scalar head: the expected return of the state before a token.

    The head starts at zero, so the first values are 0. It computes in float32 or wider: a bfloat16
    has too few digits to estimate a return.
    """

    def __init__(self, packed_model: PackedModel):
        """Make the head.

        Args:
            packed_model: the transformer; the critic's own, or the one shared with the policy.
        """
        self.packed_model = packed_model
        model = packed_model.model
        wide = torch.promote_types(model.dtype, torch.float32)
        width = output_layer(model).weight.shape[1]
        self.head = nn.Linear(width, 1, device=model.device, dtype=wide)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        packed_model.value_head = self.head

    def decoder_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights of the critic's own transformer that learn.

        The output layer is left out: the critic does not use it.
        """
        model = self.packed_model.model
        parts = {"model": decoder_of(model), "visual": vision_tower(model) or nn.Module()}
        named = [(f"{k}.{n}", p) for k, part in parts.items() for n, p in part.named_parameters()]
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def values(self, packed: PackedRows) -> Tensor:
        """Return the value of the state before each chosen token, (N,)."""
        return packed.join(self.packed_model(packed, self._read))

    def _read(self, hidden: Tensor) -> Tensor:
        # A copy: the output of a sharded module must not be a view.
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).clone()


# --- the packed model ----------------------------------------------------------------------------


class PackedModel(nn.Module):
    """A causal language model and, if there is a critic, its head.

    `sharding.shard` shards this module over ranks. Weights are gathered only within `forward` and
    `prove`, so all code that reads them runs there.
    """

    mode: Mode
    """How rows become the input of the model."""
    mode_reason: str
    """Why no earlier mode; see `prove_mode`."""

    def __init__(self, model: PreTrainedModel):
        """Take a model in evaluation mode, and run nothing: call `prove` before the first pass."""
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        self.routers: Routers | None = None

    @torch.no_grad()
    def prove(
        self,
        compute: torch.dtype | None = None,
        tokens: int | None = None,
        context: ContextGroup | None = None,
        *,
        replays: bool = False,
    ) -> None:
        """Find how rows become the input of the model, and set its attention implementation.

        Args:
            compute: the precision of the model's passes; None: that of its weights.
            tokens: those of a micro-batch; see `prove_mode`.
            context: the ranks that share rows.
            replays: True if rows have experts (`PackedRows.experts`).

        Raises:
            ConfigError: see `prove_mode`, `prove_context` and `Routers`.
        """
        self._scale_and_softcap = find_scale_and_softcap(self.model)
        self.routers = Routers(self.model) if replays else None
        self.mode, self.mode_reason = prove_mode(self.model, compute, tokens)
        if context:
            prove_context(self.model, self.mode, context)

    @property
    def head(self) -> Head:
        """The output layer. Its weights are whole within `forward` only."""
        layer = output_layer(self.model)
        return Head(layer.weight, layer.bias, *self._scale_and_softcap)

    def layers(self) -> list[nn.Module]:
        """Return the blocks of the transformer, in order.

        Raises:
            ConfigError: they cannot be found.
        """
        decoder = decoder_of(self.model)
        layers = next((x for n in LAYERS if (x := getattr(decoder, n, None)) is not None), None)
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"{type(self.model).__name__} cannot be trained here: it has no list of layers (a"
                f" torch.nn.ModuleList of its {type(decoder).__name__} named {' or '.join(LAYERS)})"
            )
        return list(layers)

    def forward(self, packed: PackedRows, read: Callable[[Tensor], T]) -> T:
        """Run the transformer, and apply `read` to the states of the chosen tokens, (N, H)."""
        if self.routers:
            # They stay until the next pass: layers that are recomputed need them in `backward`.
            self.routers.replay(None if packed.experts is None else packed.experts.flatten(0, 1))
        return read(hidden_states(self.model, packed))


# --- LoRA layers ---------------------------------------------------------------------------------


def base_weight(layer: LoraLayer) -> Tensor:
    """Return the frozen weight."""
    if isinstance(layer, ParamWrapper):
        return layer.get_param()
    return layer.get_base_layer().weight  # type: ignore[return-value]


def _delta_weight(layer: LoraLayer) -> Tensor:
    """Return what the policy's adapter adds to the frozen weight."""
    if not isinstance(layer, ParamWrapper):
        return layer.get_delta_weight(ACTOR)  # type: ignore[operator]
    # PEFT's own method reshapes the matrices, which it cannot do with shards.
    pair: Any = layer.lora_A[ACTOR].weight, layer.lora_B[ACTOR].weight
    down, up = map(full_tensor, pair)
    down = down.view(layer.num_experts, -1, down.shape[1])
    up = up.view(len(up), -1, layer.num_experts)
    delta = torch.einsum("ore,eri->eoi", up, down) * layer.scaling[ACTOR]
    delta = delta if layer._did_swap_in_out_features else delta.transpose(1, 2)
    return delta.to(base_weight(layer).dtype)


def plain_name(name: str) -> str:
    """Return the name of a frozen weight in the plain model. PEFT nests the adapters of experts."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def find_adaptable_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that can have an adapter.

    Layers outside of the decoder cannot: an adapter of the output layer would be neither trained
    nor published, and layers for images do not run on text. Layers that return
    more than a product, such as Llama 4's routers, cannot. PEFT refuses `out_proj` of Mamba layers,
    whose kernels for training read its weight and skip the adapter. If transformers stacks the
    experts of a model, PEFT interprets the names that they have in files (`gate_proj`) as the
    stacked tensors, also if the model has linear layers of these names.
    """
    decoder = set(decoder_of(model).modules())
    names = [n for n, m in model.named_modules() if m in decoder and _returns_a_product(m)]
    refused = set()
    with torch.random.fork_rng(devices=[]):
        for end in {name.rpartition(".")[2] for name in names}:
            trial: Any = nn.Module()
            trial.config = model.config
            trial.add_module(end, nn.Linear(1, 1, device="cpu"))
            try:
                inject_adapter_in_model(LoraConfig(r=1, target_modules=[end]), trial)
            except ValueError:
                refused.add(end)
    return [name for name in names if name.rpartition(".")[2] not in refused]


def check_targets(
    target_modules: str | list[str], modules: Sequence[str], stacked: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the names of the modules and of the stacked parameters that get an adapter.

    Args:
        target_modules: the value of `model.lora_target_modules`.
        modules: the modules that can have an adapter (`find_adaptable_modules`).
        stacked: the parameters that can (`stacked_parameters`).

    Raises:
        ConfigError: a name is none of these, or there is no name.
    """
    if target_modules == "all-linear":
        # PEFT's own all-linear adds stacked experts and routers to the modules of some models.
        return sorted({name.rpartition(".")[2] for name in modules}), []
    # PEFT interprets a single string as a regular expression over whole paths.
    targets = [target_modules] if isinstance(target_modules, str) else target_modules
    of_modules, of_stacked = find_targets(targets, modules), find_targets(targets, stacked)
    wrong = [t for t in targets if t not in (*of_modules, *of_stacked)]
    if wrong or not targets:
        names = sorted({name.rpartition(".")[2] for name in modules})
        names += sorted({".".join(name.split(".")[-2:]) for name in stacked})
        raise ConfigError(
            f"model.lora_target_modules={targets!r}:"
            f" {', '.join(wrong) or 'an empty list'} cannot be adapted. Choose all-linear, or"
            f" from {', '.join(names)}. The output layer and the embeddings are never adapted."
        )
    return of_modules, of_stacked


def describe_targets(config: ModelConfig) -> str:
    """Return a line about the matrices that LoRA leaves out with all-linear; "" if there are none.

    Embeddings, the output layer and vectors are not mentioned: no model's are adapted.

    Args:
        config: names the model and the modules; no weights are read.

    Raises:
        ConfigError: there are no such modules to adapt.
    """
    model = empty_model(load_model_config(config.path))
    modules = find_adaptable_modules(model)
    check_targets(config.lora_target_modules, modules, stacked_parameters(model))
    if config.lora_target_modules != "all-linear":
        return ""
    adaptable = {f"{name}.weight" for name in modules}
    others = (model.get_input_embeddings(), model.get_output_embeddings())
    common = {id(p) for layer in others if layer is not None for p in layer.parameters()}
    sizes: dict[str, int] = {}
    for name, p in model.named_parameters():
        if p.dim() > 1 and name not in adaptable and id(p) not in common:
            is_vision = re.fullmatch(VISION_MODULES, name)
            short = "the vision tower" if is_vision else re.sub(r"^.*?\.\d+\.", "", name)
            sizes[short] = sizes.get(short, 0) + p.numel()
    if not sizes:
        return ""
    names = sorted(sizes, key=lambda name: -sizes[name])
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    share = sum(sizes.values()) / sum(p.numel() for p in model.parameters())
    return (
        f"LoRA: model.lora_target_modules=all-linear leaves out {share:.1%} of the model's"
        f" parameters, which are no linear layers or cannot have an adapter: {listed}"
    )


def _returns_a_product(layer: nn.Module) -> bool:
    """Return whether a layer returns the product of its input and its weight, and nothing else."""
    if not isinstance(layer, nn.Linear | Conv1D):
        return False
    if type(layer) in (nn.Linear, Conv1D):
        return True
    try:
        result = layer(layer.weight.new_zeros(1, layer.weight.shape[1]))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(result, Tensor) and result.shape == (1, layer.weight.shape[0])


def _lora_b(layer: LoraLayer) -> Tensor:
    """Return the adapter's second matrix, which is initially zero."""
    return layer.lora_B[ACTOR].weight  # type: ignore[return-value]
