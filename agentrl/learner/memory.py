"""Estimate the memory that a run needs on each of its GPUs, or in RAM if it uses the CPU.

The formula counts what the learner allocates. `benchmarks/README.md` lists its terms with their
sources in the code, and compares it with measured peaks. No weights are loaded, and no GPU is
needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from agentrl.config import Config
from agentrl.config.sources import assignment
from agentrl.engine.local.load import empty_model, load_model_config, reads_images
from agentrl.engine.local.quantize import BYTES_PER_WEIGHT
from agentrl.engine.local.rows import GROWTH
from agentrl.errors import ConfigError
from agentrl.learner.attention import HAS_GQA
from agentrl.learner.head import BLOCK_BYTES, CPU_BLOCK_BYTES
from agentrl.learner.sharding import MAX_GATHERED_SHARE, MIN_COMPILED_SIZE
from agentrl.torch_threads import CGROUP

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
MIN_CPU_PASS_TOKENS = 512
"""On a CPU, passes of this many tokens are as fast as larger ones, so no smaller ones are
suggested."""
LOCAL_ROWS = 256
"""The most episodes that the local engine plays at once (`slots` of `LocalEngine`)."""
HALF, FULL = 2, 4
"""Bytes of a bfloat16 and of a float32."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of one GPU in the part of a step that needs most."""

    part: str
    """update (forward and backward passes), optimizer step, or generation. Loading needs less: a
    rank never has more than its shards and what a forward pass gathers."""
    terms: Mapping[str, int]
    """Bytes by what takes them, the largest first."""
    pass_tokens: int
    """The tokens of the largest forward pass."""
    offloaded: int = 0
    """Bytes that `optim.offload` keeps in the CPU's memory for each rank."""
    small_share: str = ""
    """A sentence if the share of a server cannot hold the weights and one row."""

    @property
    def total(self) -> int:
        """The sum of all terms, in bytes."""
        return sum(self.terms.values())

    def describe(self, available: int | None = None) -> str:
        """Return one line: the total, the part of a step, and the terms.

        Args:
            available: the memory of the GPU, or the RAM, if it is known.
        """
        of_device = f" of {gib(available)}" if available else ""
        passes = f", passes of {self.pass_tokens} tokens" if self.part == "update" else ""
        shown = {name: size for name, size in self.terms.items() if size >= 0.05 * GIB}
        terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in shown.items())
        return f"{gib(self.total)}{of_device} ({self.part}{passes}): {terms}"


def gib(size: float) -> str:
    """Return a number of bytes as GiB."""
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower."""

    parameters: int
    layers: int
    hidden: int
    mlp: int
    patches: int
    """The patches of an image token."""

    def kept_numbers(self, recompute: bool) -> int:
        """Return the numbers that are kept for the backward pass of an image token."""
        # Measured in the three families; a number of float32 counts as two of bfloat16.
        layer, outside = 17 * self.hidden + 4 * self.mlp, 14 * self.hidden
        layers = self.layers * layer
        if recompute:
            layers = min(layers, self.layers * self.hidden + layer)
        return self.patches * (layers + outside)


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
    vision: VisionShape | None
    """The sizes of the vision tower, whose parameters are in `outer_parameters`, too."""
    linear: Mapping[str, tuple[int, int]]
    """Inputs and outputs of the linear modules of all layers, by name."""

    @property
    def cache_numbers(self) -> int:
        """The keys and values of a token in all layers."""
        return 2 * self.key_width * self.layers


def estimate_memory(
    shape: ModelShape,
    config: Config,
    *,
    row_tokens: int,
    pass_tokens: int | None = None,
    gpu_bytes: int = ASSUMED_GPU_BYTES,
    gpus: int = 0,
    shares_keys: bool | None = None,
    image_tokens: int = 0,
) -> MemoryEstimate:
    """Return the memory that a run needs on its first GPU.

    Terms that depend on the rows are upper bounds: passes are full, and all tokens are scored.

    Args:
        shape: the sizes of the model (`read_shape`).
        config: the config of the run.
        row_tokens: the longest row, prompt and response, in tokens.
        pass_tokens: the tokens of the largest forward pass; None: computed from
            `optim.micro_batch_tokens`, `row_tokens` and the number of rows of an optimizer step.
        gpu_bytes: the memory of a GPU.
        gpus: the GPUs of this machine; 0: as many as the learner uses.
        shares_keys: True if the attention kernel shares keys between query heads; None: the
            installed kernel.
        image_tokens: the most image tokens of a row: those of images that a pass reads.
    """
    ranks = config.trainer.ranks
    step_tokens = -(-config.rollouts_of_update * row_tokens // ranks)
    tokens = pass_tokens or _pass_tokens(config, row_tokens, step_tokens)
    if shares_keys is None:
        shares_keys = HAS_GQA or find_spec("flash_attn") is not None
    learner = _Learner(shape, config, ranks, gpu_bytes, shares_keys, image_tokens=image_tokens)
    awake, asleep = _engine(shape, config, ranks, row_tokens, gpu_bytes, gpus)
    parts = {
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
    on_gpu = replace(learner, config=_with(config, {"optim.offload": "none"}))
    return MemoryEstimate(
        part,
        _largest_first({**parts[part], "CUDA": CONTEXT_BYTES}),
        tokens,
        offloaded=on_gpu.held - learner.held,
        small_share=_find_small_share(shape, config, row_tokens, gpu_bytes),
    )


def estimate_cpu_memory(
    shape: ModelShape,
    config: Config,
    *,
    prompt_tokens: int,
    response_tokens: int,
    val_rollouts: int = 0,
    process_bytes: int = 0,
    image_tokens: int = 0,
) -> MemoryEstimate:
    """Return the RAM that the process of a run on the CPU needs.

    There is one rank, and all numbers are float32. Like on a GPU, the terms are upper bounds.

    Args:
        shape: the sizes of the model (`read_shape`).
        config: the config of the run.
        prompt_tokens: the tokens of the longest prompt. A pass computes a prompt once for all
            responses to it.
        response_tokens: the tokens of the longest response, with the results of tools.
        val_rollouts: the number of rollouts of a validation, which the engine plays at once.
        process_bytes: the memory of the process without a model: the code of its packages.
        image_tokens: the most image tokens of a row.
    """
    row_tokens, rows = prompt_tokens + response_tokens, config.rollouts_of_update
    step_tokens = -(-rows // config.rollout.n) * prompt_tokens + rows * response_tokens
    tokens = _pass_tokens(config, row_tokens, step_tokens)
    learner = _Learner(
        shape,
        _with(config, {"optim.offload": "none"}),
        ranks=1,
        gpu_bytes=0,
        shares_keys=True,
        on_cpu=True,
        repeated=rows * row_tokens / step_tokens,
        image_tokens=image_tokens,
    )
    engine = 0
    if config.rollout.name == "local":
        rollouts = max(config.rollouts_of_step, val_rollouts)
        slots = 1 << (min(LOCAL_ROWS, rollouts) - 1).bit_length()  # a power of two
        capacity = -(-row_tokens // GROWTH) * GROWTH
        engine = FULL * (shape.parameters + shape.cache_numbers * slots * capacity)
    terms = {
        **learner.state,
        "gradients": learner.gradients,
        "activations": learner.activations(tokens),
        "logits and buffers": learner.buffers(tokens),
        "engine": engine,
        "Python and packages": process_bytes,
    }
    return MemoryEstimate("update", _largest_first(terms), tokens)


def _largest_first(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the terms that are not 0, the largest first."""
    in_order = sorted(terms.items(), key=lambda term: -term[1])
    return {name: size for name, size in in_order if size}


@dataclass(frozen=True, slots=True)
class _Learner:
    """The terms of a rank, in bytes."""

    shape: ModelShape
    config: Config
    ranks: int
    gpu_bytes: int
    shares_keys: bool
    on_cpu: bool = False
    repeated: float = 1.0
    """On a CPU, the tokens in attention for each token of a pass: attention computes a prompt
    again with each response to it."""
    image_tokens: int = 0
    """The most image tokens of a row."""

    @property
    def half(self) -> int:
        """Bytes of a number in a pass."""
        return FULL if self.on_cpu else HALF

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
        return self.adapter_parameters or self.shape.parameters - self.frozen_parameters

    @property
    def frozen_parameters(self) -> int:
        """The parameters of the policy that do not learn, in training of all weights."""
        vision = self.shape.vision
        return vision.parameters if vision and self.config.model.freeze_vision_tower else 0

    @property
    def quantized(self) -> int:
        """The weights of 4 bits."""
        is_quantized = self.config.model.quantization != "none"
        return is_quantized * sum(i * o for i, o in self._adapted_modules.values())

    @property
    def moments(self) -> int:
        """AdamW's moments of the policy, and of the critic if there is one."""
        trained = self.trained_parameters
        if self.config.algorithm.critic:
            # The critic's output layer does not learn unless it is the embeddings.
            unused = 0 if self.shape.is_tied else self.shape.output_layer
            trained += self.adapter_parameters or self.trained_parameters - unused
        each = 2 if self.config.optim.name == "adamw_8bit" else 2 * FULL
        return 0 if self.config.optim.offload == "all" else each * trained // self.ranks

    @property
    def state(self) -> dict[str, int]:
        """The terms that stay from step to step."""
        on_gpu = self.config.optim.offload != "all"
        frozen = self.shape.parameters if self.adapter_parameters else self.frozen_parameters
        frozen_bytes = FULL if self.on_cpu else self.shape.file_bytes
        weights = FULL * self.trained_parameters + frozen_bytes * (frozen - self.quantized)
        # Quantized weights are not spread over ranks.
        weights += int(BYTES_PER_WEIGHT * self.quantized) * self.ranks
        critic = reference = 0
        teacher = self.half * teacher_parameters(self.config)
        if self.config.algorithm.critic:
            critic = FULL * (self.adapter_parameters or self.shape.parameters)
        a = self.config.algorithm
        is_teacher = self.config.model.path in self.config.teacher.local
        if (a.kl_loss_coef or a.kl_reward_coef or is_teacher) and not self.adapter_parameters:
            reference = self.half * self.shape.parameters
        return {
            "weights": on_gpu * weights // self.ranks,
            "optimizer": self.moments if self.config.optim.offload == "none" else 0,
            "critic": on_gpu * critic // self.ranks,
            "reference": on_gpu * reference // self.ranks,
            "teacher": on_gpu * teacher // self.ranks,
        }

    @property
    def gradients(self) -> int:
        """Gradients in float32; those of the policy are dropped before the critic's exist."""
        on_gpu = self.config.optim.offload != "all"
        return on_gpu * FULL * self.trained_parameters // self.ranks

    @property
    def held(self) -> int:
        """The bytes that stay until the optimizer step: weights, optimizer state, gradients."""
        return sum(self.state.values()) + self.gradients

    @property
    def gathered_weights(self) -> int:
        """Weights in bfloat16 during a pass (`sharding.shard`); of quantized ones a layer's."""
        if self.quantized:
            modules = self._adapted_modules.values()
            whole = self.shape.parameters - self.quantized + max(i * o for i, o in modules)
            return HALF * (whole + self.adapter_parameters)
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
        return int(each * (self.shape.outer_parameters - self.frozen_parameters))

    def layer(self, tokens: int) -> int:
        """Return the bytes that a layer keeps for its backward pass."""
        s = self.shape
        context = self.config.trainer.context_parallel_size
        groups = s.heads * s.key_width // s.query_width
        copies = math.lcm(groups, context) // groups  # of key-value heads, see `ContextGroup`
        keys = s.key_width * copies if self.shares_keys else s.query_width
        # Queries, outputs; keys, values. Ranks that share rows also keep what they exchange.
        attention = 2 * s.query_width + 2 * keys + (context > 1) * s.query_width
        if self._compiled:
            # The inputs of all matrix products, and what elementwise operations start from.
            numbers = 2 * s.norms * s.hidden + attention + 3 * s.mlp
            numbers += s.has_head_norms * (s.query_width + s.key_width)
            wide = s.heads + s.norms
        else:
            # A norm keeps a copy in float32, its output, and for the gradient of its weight the
            # normalised state.
            numbers = (1 + (not self.adapter_parameters)) * s.norms * s.hidden
            numbers += attention + 4 * s.mlp
            wide = s.heads + s.norms * s.hidden
            if s.has_head_norms:
                numbers += (not self.adapter_parameters) * (s.query_width + s.key_width)
                wide += s.query_width + s.key_width
        numbers += self.config.model.lora_rank * len(self._adapted_modules) // s.layers
        if self.on_cpu:
            # Each response has its own copies, and all outputs are copied once more.
            numbers += s.query_width + int((self.repeated - 1) * (attention + s.heads))
        return tokens * (self.half * numbers + FULL * wide)

    @property
    def _compiled(self) -> bool:
        return (
            not self.on_cpu
            and self.config.optim.compile == "auto"
            and self.shape.parameters + self.adapter_parameters >= MIN_COMPILED_SIZE
        )

    def activations(self, tokens: int) -> int:
        """Return the bytes that a forward pass keeps for the backward pass."""
        s = self.shape
        kept = s.layers * self.layer(tokens)
        if self.config.optim.recompute:
            kept = min(kept, s.layers * self.half * s.hidden * tokens + self.layer(tokens))
        if s.vision and not (self.adapter_parameters or self.frozen_parameters):
            numbers = s.vision.kept_numbers(self.config.optim.recompute)
            kept += self.half * numbers * self.image_tokens
        # The last norm is never compiled.
        last_norm = (FULL + self.half * (not self.adapter_parameters)) * s.hidden * tokens
        return kept + last_norm

    def buffers(self, tokens: int) -> int:
        """Return the larger of two buffers: that of the loss head, or of a layer's backward pass.

        The gradient of the output layer exists in both.
        """
        s, half = self.shape, self.half
        output_layer = 0 if self.adapter_parameters else half * s.output_layer
        block = CPU_BLOCK_BYTES if self.on_cpu else BLOCK_BYTES
        logits = min(block, half * tokens * s.vocabulary)
        head = logits + tokens * s.hidden * (half + FULL + half)  # states; gradient, also rounded
        layer = tokens * half * (2 * s.mlp + s.hidden)
        return output_layer + max(head, layer)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPUs of this machine."""

    name: str
    total_bytes: int
    """The memory of the first GPU."""
    count: int


def find_ram(cgroup: Path = CGROUP) -> int:
    """Return the bytes of RAM that this process may use: all of the machine's or its container's.

    Args:
        cgroup: the folder of the container's cgroup, of version 1 or 2.
    """
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            sizes.append(int((cgroup / name).read_text()))  # "max" means that there is no limit
    return min(sizes)


def find_gpu() -> Gpu | None:
    """Return the GPUs that torch finds on this machine, or None if there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory, torch.cuda.device_count())


def smaller_settings(config: Config, on_cpu: bool = False) -> Iterator[tuple[str, Config]]:
    """Yield settings that need less memory, the cheapest first: their text, and the config.

    Settings with an adapter come after all that train the same weights. More GPUs come last.

    Args:
        config: the config of the run.
        on_cpu: yield only settings that save memory on a CPU.
    """
    o, r, m, t = config.optim, config.rollout, config.model, config.trainer
    halved = {"optim.micro_batch_tokens": o.micro_batch_tokens // 2}
    smallest = {"optim.micro_batch_tokens": min(o.micro_batch_tokens, MIN_PASS_TOKENS)}
    recompute = {"optim.recompute": True}
    server = {"rollout.name": "sglang"} if r.name == "local" else {}
    shares_gpu = not r.urls and t.placement == "colocated"
    # `rollout.sleep` frees the memory of a server while the learner computes.
    sleep = {**recompute, **server, "rollout.sleep": "all"} if shares_gpu else recompute
    offload_optimizer, offload_all = {"optim.offload": "optimizer"}, {"optim.offload": "all"}
    changes: list[dict[str, Any]] = [
        {},
        halved if o.micro_batch_tokens >= 2 * MIN_PASS_TOKENS else {},
        recompute,
        sleep,
        recompute | offload_optimizer,
        sleep | offload_optimizer,
        smallest | sleep,
        smallest | sleep | offload_optimizer,
        recompute | offload_all,
        sleep | offload_all,
        smallest | sleep | offload_all,
    ]
    more = [n for n in (2, 4, 8) if n > t.n_gpus_per_node]
    context = t.context_parallel_size
    gpus = [(t.n_gpus_per_node, context), *((n, context) for n in more), *((n, n) for n in more)]
    if on_cpu:
        small = {"optim.micro_batch_tokens": min(o.micro_batch_tokens, MIN_CPU_PASS_TOKENS)}
        gpus, changes = gpus[:1], [{}, small, recompute, small | recompute]
    adapters = [{}] if m.lora_rank else [{}, {"model.lora_rank": 32}]
    seen = {""}
    for (count, context), adapter, change in product(gpus, adapters, changes):
        values = {**change, **adapter, "trainer.n_gpus_per_node": count}
        values["trainer.context_parallel_size"] = context
        is_less_offload = o.offload == "all" and values.get("optim.offload") == "optimizer"
        text = " ".join(assignment(k, v) for k, v in values.items() if config.value(k) != v)
        if text not in seen and not is_less_offload:
            seen.add(text)
            yield text, _with(config, values)


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a config with other values, by their paths. They are not checked."""
    for path, value in values.items():
        section, _, name = path.partition(".")
        config = config.with_values(section, **{name: value})
    return config


def _pass_tokens(config: Config, row_tokens: int, step_tokens: int) -> int:
    """Return the most tokens of a rank's forward pass: full passes of the longest rows."""
    longest = -(-row_tokens // config.trainer.context_parallel_size)
    return max(longest, min(config.optim.micro_batch_tokens, step_tokens))


def _engine(
    shape: ModelShape, config: Config, ranks: int, row_tokens: int, gpu_bytes: int, gpus: int
) -> tuple[int, int]:
    """Return the bytes of the engine on the learner's first GPU: while it samples, and after."""
    r = config.rollout
    weights, row_bytes = _engine_sizes(shape, row_tokens)
    if r.name == "local":
        rows = min(LOCAL_ROWS, config.rollouts_of_step)
        size = HALF * (shape.parameters + shape.cache_numbers * rows * row_tokens)
        return size, size
    # In one process, servers use the last GPUs of the machine (`engine/remote/open.py`).
    in_one_process = ranks == 1 and not config.trainer.ray_address
    has_other_gpus = in_one_process and r.engines * r.tensor_parallel_size < (gpus or 1)
    if r.urls or config.trainer.placement == "separate" or has_other_gpus:
        return 0, 0
    minimum = (weights + row_bytes) // r.tensor_parallel_size
    awake = max(int(r.gpu_memory_utilization * gpu_bytes), minimum)
    asleep = {"none": awake, "kv_cache": weights // r.tensor_parallel_size, "all": 0}
    return awake, min(awake, asleep[r.sleep])


def _engine_sizes(shape: ModelShape, row_tokens: int) -> tuple[int, int]:
    """Return the bytes of an engine's weights, and those of the cache of one row."""
    row_bytes = shape.file_bytes * shape.cache_numbers * row_tokens
    return shape.file_bytes * shape.parameters, row_bytes


def _find_small_share(shape: ModelShape, config: Config, row_tokens: int, gpu_bytes: int) -> str:
    """Return a sentence if the share of a server cannot hold the weights and one row, else ""."""
    r = config.rollout
    share = r.gpu_memory_utilization * gpu_bytes
    needed = sum(_engine_sizes(shape, row_tokens)) / r.tensor_parallel_size
    if r.name == "local" or r.urls or needed <= share:
        return ""
    least = math.ceil(100 * needed / gpu_bytes) / 100
    key, value = "gpu_memory_utilization", least
    if least >= 1:
        key, value = "tensor_parallel_size", 2 * r.tensor_parallel_size
    return (
        f"rollout.gpu_memory_utilization={r.gpu_memory_utilization:g} gives a server {gib(share)},"
        f" but the weights and one row need {gib(needed)}: set rollout.{key}={value:g} or more"
    )


def teacher_parameters(config: Config) -> int:
    """Return the parameters of the teachers that the learner holds besides the initial policy.

    Raises:
        ConfigError: a model cannot be found or sized.
    """
    paths = [path for path in config.teacher.local if path != config.model.path]
    return sum(_parameters_of(path) for path in paths)


@cache
def _parameters_of(path: str) -> int:
    return read_shape(load_model_config(path)).parameters


def read_shape(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of a model, from the model's own code without weights.

    Raises:
        ConfigError: it is not a dense decoder.
    """
    text: Any = config.get_text_config()
    try:
        model: Any = empty_model(config, dtype=torch.bfloat16)
    except (ImportError, RuntimeError, ValueError) as e:
        raise ConfigError(f"{config.model_type}: cannot build it without weights: {e}") from e
    layers = getattr(model.get_decoder(), "layers", None)
    names = "intermediate_size", "num_attention_heads", "head_dim"
    try:
        mlp, heads, head_size = (getattr(text, name, None) for name in names)
    except RuntimeError as e:  # transformers raises it for sizes that differ between layers.
        raise ConfigError(f"{type(model).__name__}: {e}") from e
    if not isinstance(layers, nn.ModuleList) or not (isinstance(mlp, int) and heads):
        raise ConfigError(f"{type(model).__name__} has no list of layers with attention and an MLP")
    if any("expert" in name for name, _ in layers.named_modules()):
        raise ConfigError(f"{type(model).__name__} is a mixture of experts")
    size = head_size or text.hidden_size // heads
    norms = [m for name, m in layers[0].named_modules() if "norm" in name.lower()]
    weights = [getattr(norm, "weight", None) for norm in norms]
    widths = [0 if weight is None else weight.numel() for weight in weights]
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
        vision=_read_vision(model, config) if reads_images(config) else None,
        linear={
            name: (module.in_features, module.out_features)
            for name, module in layers.named_modules()
            if isinstance(module, nn.Linear)
        },
    )


def _read_vision(model: Any, config: Any) -> VisionShape:
    vision = config.vision_config
    # Qwen2-VL's `hidden_size` is that of the text.
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    mlp = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    parameters = sum(p.numel() for p in model.base_model.visual.parameters())
    return VisionShape(parameters, vision.depth, hidden, mlp, vision.spatial_merge_size**2)
