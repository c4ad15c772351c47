"""Estimate the memory that a run needs on each of its GPUs.

The formula counts what the learner allocates. `docs/gpu.md` lists its terms with their sources in
the code, and compares it with measured peaks. No weights are loaded and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from agentrl.config import Config
from agentrl.config.sources import assignment
from agentrl.errors import ConfigError
from agentrl.trainer.attention import HAS_GQA
from agentrl.trainer.head import BLOCK_BYTES
from agentrl.trainer.sharding import MAX_GATHERED_SHARE, MIN_COMPILED_SIZE

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB
"""The memory of a GPU if none is here to ask."""
SAFE_SHARE = 0.9
"""An estimate above this share of a GPU is at the limit: PyTorch's allocator reserves more than it
uses."""
CONTEXT_BYTES = GIB
"""Memory outside of PyTorch's allocator: the CUDA context, kernels, cuBLAS and NCCL."""
MIN_PASS_TOKENS = 4096
"""Smaller passes do not use the whole GPU, so none are suggested."""
LOCAL_ROWS = 256
"""The most episodes that the local engine plays at once (`slots` of `LocalEngine`)."""
HALF, FULL = 2, 4
"""Bytes of a bfloat16 and of a float32."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of one GPU in the part of a step that needs most."""

    part: str
    """update (forward and backward passes), optimizer step, generation, or loading."""
    terms: Mapping[str, int]
    """Bytes by what takes them, the largest first."""
    pass_tokens: int
    """The tokens of the largest forward pass."""

    @property
    def total(self) -> int:
        """The sum of all terms, in bytes."""
        return sum(self.terms.values())

    def describe(self, gpu_bytes: int | None = None) -> str:
        """Return one line: the total, the part of a step, and the terms.

        Args:
            gpu_bytes: the memory of the GPU, if it is known.
        """
        of_gpu = f" of {gib(gpu_bytes)}" if gpu_bytes else ""
        passes = f", passes of {self.pass_tokens} tokens" if self.part == "update" else ""
        shown = {name: size for name, size in self.terms.items() if size >= 0.05 * GIB}
        terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in shown.items())
        return f"{gib(self.total)}{of_gpu} ({self.part}{passes}): {terms}"


def gib(size: float) -> str:
    """Return a number of bytes as GiB."""
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense decoder that determine its memory."""

    parameters: int
    outer_parameters: int
    """Those outside of the layers: embeddings, output layer and last norm."""
    largest_layer: int
    """The parameters of the largest layer."""
    output_layer: int
    """The parameters of the output layer, whether or not they are also the embeddings."""
    is_tied: bool
    """True if the output layer is the embeddings."""
    layers: int
    hidden: int
    mlp: int
    heads: int
    query_width: int
    """Heads times their size."""
    key_width: int
    """Key-value heads times their size."""
    vocabulary: int
    norms: int
    """The norms of a layer over the whole hidden state."""
    has_head_norms: bool
    """True if queries and keys have norms."""
    file_bytes: int
    """Bytes of a weight in the model's files."""
    linear: Mapping[str, tuple[int, int]]
    """Inputs and outputs of the linear modules of all layers, by name."""


def estimate_memory(
    model: PretrainedConfig,
    config: Config,
    ranks: int,
    *,
    row_tokens: int,
    pass_tokens: int | None = None,
    gpu_bytes: int = ASSUMED_GPU_BYTES,
    gpus: int = 0,
    shares_keys: bool | None = None,
) -> MemoryEstimate:
    """Return the memory that a run needs on its first GPU.

    Terms that depend on the rows are upper bounds: passes are full, and all tokens are scored.

    Args:
        model: the config of the model.
        config: the config of the run.
        ranks: the number of ranks.
        row_tokens: the longest row, prompt and response, in tokens.
        pass_tokens: the tokens of the largest forward pass; None: computed from
            `optim.micro_batch_tokens`, `row_tokens` and the number of rows of an optimizer step.
        gpu_bytes: the memory of a GPU.
        gpus: the GPUs of this machine; 0: as many as the learner uses.
        shares_keys: True if the attention kernel shares keys between query heads; None: the
            installed kernel.

    Raises:
        ConfigError: the model is not a dense decoder, so its memory cannot be estimated.
    """
    shape = read_shape(model)
    tokens = pass_tokens or _pass_tokens(config, ranks, row_tokens)
    if shares_keys is None:
        shares_keys = HAS_GQA or find_spec("flash_attn") is not None
    learner = _Learner(shape, config, ranks, gpu_bytes, shares_keys)
    awake, asleep = _engine(shape, config, ranks, row_tokens, gpu_bytes, gpus)
    context = {"CUDA": CONTEXT_BYTES}
    parts = {
        "loading": {"weights": learner.whole_weights},
        "generation": {**learner.state, "engine": awake},
        "optimizer step": {
            **learner.state,
            "optimizer": learner.moments,
            "gradients": learner.gradients,
            "buffers": learner.reduce_buffers,
            "engine": asleep,
        },
        "update": {
            **learner.state,
            "gradients": learner.gradients,
            "gathered weights": learner.gathered_weights,
            "activations": learner.activations(tokens),
            "logits and buffers": learner.buffers(tokens),
            "engine": asleep,
        },
    }
    part = max(parts, key=lambda name: sum(parts[name].values()))
    terms = {name: size for name, size in {**parts[part], **context}.items() if size}
    in_order = dict(sorted(terms.items(), key=lambda term: -term[1]))
    return MemoryEstimate(part, in_order, tokens)


@dataclass(frozen=True, slots=True)
class _Learner:
    """The terms of a rank, in bytes."""

    shape: ModelShape
    config: Config
    ranks: int
    gpu_bytes: int
    shares_keys: bool

    @property
    def adapter_parameters(self) -> int:
        """The parameters of an adapter; 0 without LoRA."""
        rank = self.config.model.lora_rank
        return sum(rank * (i + o) for i, o in self._adapted_modules.values())

    @property
    def _adapted_modules(self) -> dict[str, tuple[int, int]]:
        """Return the linear modules that get an adapter, as in `ModelShape.linear`."""
        m = self.config.model
        if not m.lora_rank:
            return {}
        targets = m.lora_target_modules
        if targets == "all-linear":
            return dict(self.shape.linear)
        names = [targets] if isinstance(targets, str) else targets
        return {
            name: sizes
            for name, sizes in self.shape.linear.items()
            if any(f".{name}".endswith(f".{target}") for target in names)
        }

    @property
    def trained_parameters(self) -> int:
        """The parameters of the policy that learn."""
        return self.adapter_parameters or self.shape.parameters

    @property
    def frozen_parameters(self) -> int:
        """The parameters under the adapter, which do not learn."""
        return self.shape.parameters if self.adapter_parameters else 0

    @property
    def moments(self) -> int:
        """AdamW's moments of the policy, and of the critic if there is one."""
        trained = self.trained_parameters
        if self.config.algorithm.critic:
            trained += self.adapter_parameters or (
                self.shape.parameters - self._unused_output_layer
            )
        each = 2 if self.config.optim.name == "adamw_8bit" else 2 * FULL
        return 0 if self.config.optim.offload == "all" else each * trained // self.ranks

    @property
    def _unused_output_layer(self) -> int:
        """The critic's output layer, which does not learn unless it is the embeddings."""
        return 0 if self.shape.is_tied else self.shape.output_layer

    @property
    def state(self) -> dict[str, int]:
        """The terms that stay from step to step."""
        on_gpu = self.config.optim.offload != "all"
        weights = FULL * self.trained_parameters + self.shape.file_bytes * self.frozen_parameters
        critic = reference = 0
        if self.config.algorithm.critic:
            critic = FULL * (self.adapter_parameters or self.shape.parameters)
        a = self.config.algorithm
        if (a.kl_loss_coef or a.kl_reward_coef) and not self.adapter_parameters:
            reference = HALF * self.shape.parameters
        return {
            "weights": on_gpu * weights // self.ranks,
            "optimizer": self.moments if self.config.optim.offload == "none" else 0,
            "critic": on_gpu * critic // self.ranks,
            "reference": on_gpu * reference // self.ranks,
        }

    @property
    def gradients(self) -> int:
        """Gradients in float32; those of the policy are dropped before the critic's exist."""
        on_gpu = self.config.optim.offload != "all"
        return on_gpu * FULL * self.trained_parameters // self.ranks

    @property
    def whole_weights(self) -> int:
        """Weights before they are sharded: each rank loads the whole model.

        If the files are not in bfloat16, the check of packed rows needs a copy in bfloat16.
        """
        copied = 0 if self.shape.file_bytes == HALF else HALF * self.shape.parameters
        return (
            FULL * self.trained_parameters + self.shape.file_bytes * self.frozen_parameters + copied
        )

    @property
    def gathered_weights(self) -> int:
        """Weights in bfloat16 during a pass (`sharding.shard`)."""
        everything = HALF * (self.shape.parameters + self.adapter_parameters)
        if self.ranks == 1 or everything < MAX_GATHERED_SHARE * self.gpu_bytes:
            return everything
        # A layer, the next one and the buffer that receives it.
        some = HALF * (self.shape.outer_parameters + 3 * self.shape.largest_layer)
        return min(everything, some)

    @property
    def reduce_buffers(self) -> int:
        """The end of a backward pass: embeddings and output layer, and their gradient.

        The gradient exists in bfloat16, in float32 to be sent, and in float32 as it is received.
        One rank copies it once more, to divide it by 1.
        """
        if self.adapter_parameters:
            return 0
        each = HALF + HALF + FULL + FULL / self.ranks + FULL * (self.ranks == 1)
        return int(each * self.shape.outer_parameters)

    def layer(self, tokens: int) -> int:
        """Return the bytes that a layer keeps for its backward pass."""
        s = self.shape
        keys = s.key_width if self.shares_keys else s.query_width
        attention = 2 * s.query_width + 2 * keys  # queries, outputs; keys, values
        if self._compiled:
            # The inputs of all matrix products, and what elementwise operations start from.
            numbers = 2 * s.norms * s.hidden + attention + 3 * s.mlp
            numbers += s.has_head_norms * (s.query_width + s.key_width)
            wide = s.heads + s.norms
        else:
            # A norm keeps a copy in float32, its output, and for the gradient of its weight the
            # normalised state.
            numbers = (
                (1 + (not self.adapter_parameters)) * s.norms * s.hidden + attention + 4 * s.mlp
            )
            wide = s.heads + s.norms * s.hidden
            if s.has_head_norms:
                numbers += (not self.adapter_parameters) * (s.query_width + s.key_width)
                wide += s.query_width + s.key_width
        numbers += self.config.model.lora_rank * len(self._adapted_modules) // s.layers
        return tokens * (HALF * numbers + FULL * wide)

    @property
    def _compiled(self) -> bool:
        return (
            self.config.optim.compile == "auto"
            and self.shape.parameters + self.adapter_parameters >= MIN_COMPILED_SIZE
        )

    def activations(self, tokens: int) -> int:
        """Return the bytes that a forward pass keeps for the backward pass."""
        s = self.shape
        kept = s.layers * self.layer(tokens)
        if self.config.optim.recompute:
            kept = min(kept, s.layers * HALF * s.hidden * tokens + self.layer(tokens))
        last_norm = (
            (FULL + HALF * (not self.adapter_parameters)) * s.hidden * tokens
        )  # never compiled
        return kept + last_norm

    def buffers(self, tokens: int) -> int:
        """Return the larger of two buffers: that of the loss head, or of a layer's backward pass.

        The gradient of the output layer exists in both.
        """
        s = self.shape
        output_layer = 0 if self.adapter_parameters else HALF * s.output_layer
        logits = min(BLOCK_BYTES, HALF * tokens * s.vocabulary)
        head = logits + tokens * s.hidden * (HALF + FULL + HALF)  # states; gradient, also rounded
        layer = tokens * HALF * (2 * s.mlp + s.hidden)
        return output_layer + max(head, layer)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPUs of this machine."""

    name: str
    total_bytes: int
    """The memory of the first GPU."""
    count: int


def find_gpu() -> Gpu | None:
    """Return the GPUs that torch finds on this machine, or None if there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory, torch.cuda.device_count())


def smaller_settings(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield settings that need less memory, the cheapest first: the keys, and the config."""
    o, settings = config.optim, []
    if o.micro_batch_tokens >= 2 * MIN_PASS_TOKENS:
        settings.append({"optim.micro_batch_tokens": o.micro_batch_tokens // 2})
    if not o.recompute:
        settings.append({"optim.recompute": True})
    if o.offload == "none":
        settings.append({"optim.recompute": True, "optim.offload": "optimizer"})
    if o.offload != "all":
        settings.append({"optim.recompute": True, "optim.offload": "all"})
    if not config.model.lora_rank:
        settings.append({"optim.recompute": True, "model.lora_rank": 32})
    for values in settings:
        changed = config
        for path, value in values.items():
            section, _, name = path.partition(".")
            new = getattr(changed, section).model_copy(update={name: value})
            changed = changed.model_copy(update={section: new})
        yield " ".join(assignment(path, value) for path, value in values.items()), changed


def _pass_tokens(config: Config, ranks: int, row_tokens: int) -> int:
    """Return the most tokens of a forward pass: full passes of the longest rows."""
    rollouts = config.data.batch_size * config.rollout.n
    rows = min(rollouts, config.algorithm.mini_batch_size or rollouts)
    share = -(-rows * row_tokens // ranks)
    return max(row_tokens, min(config.optim.micro_batch_tokens, share))


def _engine(
    shape: ModelShape, config: Config, ranks: int, row_tokens: int, gpu_bytes: int, gpus: int
) -> tuple[int, int]:
    """Return the bytes of the engine on the learner's first GPU: while it samples, and after."""
    r = config.rollout
    weights = shape.file_bytes * shape.parameters
    if r.name == "local":
        rows = min(LOCAL_ROWS, config.data.batch_size * r.n)
        cache_bytes = 2 * shape.file_bytes * shape.key_width * shape.layers * rows * row_tokens
        return weights + cache_bytes, weights + cache_bytes
    # In one process, servers use the last GPUs of the machine (`engine/remote/open.py`).
    in_one_process = ranks == 1 and not config.trainer.ray_address
    has_other_gpus = in_one_process and r.engines * r.tensor_parallel_size < (gpus or 1)
    if r.urls or config.trainer.placement == "separate" or has_other_gpus:
        return 0, 0
    awake = int(r.gpu_memory_utilization * gpu_bytes)
    asleep = {"none": awake, "kv_cache": weights // r.tensor_parallel_size, "all": 0}
    return awake, min(awake, asleep[r.sleep])


def read_shape(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of a model, from the model's own code without weights.

    Raises:
        ConfigError: it is not a dense decoder.
    """
    text: Any = config.get_text_config()
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ImportError, RuntimeError, ValueError) as e:
        raise ConfigError(f"{config.model_type}: cannot build it without weights: {e}") from e
    layers = getattr(model.get_decoder(), "layers", None)
    mlp, heads = (getattr(text, n, None) for n in ("intermediate_size", "num_attention_heads"))
    if not isinstance(layers, nn.ModuleList) or not (isinstance(mlp, int) and heads):
        raise ConfigError(f"{type(model).__name__} has no list of layers with attention and an MLP")
    if any("expert" in name for name, _ in layers.named_modules()):
        raise ConfigError(f"{type(model).__name__} is a mixture of experts")
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    norms = [m for name, m in layers[0].named_modules() if "norm" in name.lower()]
    widths = [getattr(norm, "weight", torch.empty(0)).numel() for norm in norms]
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in model.parameters())
    output = model.get_output_embeddings().weight
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return ModelShape(
        parameters=total,
        outer_parameters=total - sum(in_layers),
        largest_layer=max(in_layers),
        output_layer=output.numel(),
        is_tied=output is model.get_input_embeddings().weight,
        layers=len(layers),
        hidden=text.hidden_size,
        mlp=mlp,
        heads=heads,
        query_width=heads * size,
        key_width=(getattr(text, "num_key_value_heads", None) or heads) * size,
        vocabulary=text.vocab_size,
        norms=widths.count(text.hidden_size),
        has_head_norms=any(width and width != text.hidden_size for width in widths),
        file_bytes=dtype.itemsize,
        linear={
            name: (module.in_features, module.out_features)
            for name, module in layers.named_modules()
            if isinstance(module, nn.Linear)
        },
    )
