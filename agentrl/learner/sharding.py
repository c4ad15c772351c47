"""Sharding weights over ranks with torch's `fully_shard` (FSDP2), the same on GPUs and CPUs.

Every rank holds a shard of every weight, in float32 if the weight learns. Just before a layer runs,
its shards are gathered in the precision of the computation. Gradients are summed over ranks, not
averaged: a loss is a sum, and its weights contain the denominator of the whole mini-batch.

No GPU ever holds the whole model. transformers reads one weight after the other into memory of the
CPU. Within `keep_shards`, a rank cuts its shard out of each and drops the rest, and the model gets
a `Placeholder`. `shard` replaces the placeholders by the shards.

Accelerate provides the device of the process, its precision and gradient clipping. It does not
prepare the model: on a CPU its FSDP plugin would silently use DDP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.fx.experimental import _config as shape_config
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from agentrl.config import OptimConfig
from agentrl.engine.local.load import resolve_device, without_launcher_variables
from agentrl.errors import ConfigError
from agentrl.torch_threads import choose_threads
from agentrl.workers.variables import environment_variables

MIN_COMPILED_SIZE = 10**8
"""The number of weights from which compiling, which takes a minute, makes a run faster."""
MAX_COMPILED_VARIANTS = 64
"""The number of programs that a layer may be compiled to: with and without a gradient, for each
adapter or none. Beyond torch's own limit, which is lower, the layer would run uncompiled."""
MAX_GATHERED_SHARE = 0.25
"""Weights that take less than this share of a GPU's memory stay gathered between forward and
backward."""


def open_accelerator(device: str) -> tuple[Accelerator, DeviceMesh | None]:
    """Return the Accelerator of this process, and the device mesh of all ranks.

    The environment variables of torch's launchers tell which rank this is: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    Args:
        device: auto, cpu or cuda.

    Returns:
        The mesh is None for a single process on a CPU: there is nothing to shard.

    Raises:
        ConfigError: there is no such device.
    """
    use_cuda = resolve_device(device) == "cuda"
    if use_cuda and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch finds no GPU here. Set trainer.device=cpu or auto, or"
            " install a torch built for CUDA."
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:  # Ranks of a cluster have their number already.
        torch.set_num_threads(choose_threads(current=torch.get_num_threads()).count)
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Servers that receive weights by broadcast use this value, and NCCL reads it only once.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if (ranks > 1 or use_cuda) and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        single = {} if ranks > 1 else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **single)
    first_device = AcceleratorState._shared_state.get("device")
    if first_device and (first_device.type == "cuda") != use_cuda:
        # Accelerate keeps the first device of a process, but a later run may use another one.
        AcceleratorState._reset_state(reset_partial_state=True)
    with without_launcher_variables():
        accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
    if ranks == 1 and not use_cuda:
        return accelerator, None
    return accelerator, init_device_mesh(accelerator.device.type, (dist.get_world_size(),))


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer's own function, not its hooks, for rows of any length. Changes the layer.

    Parts with a convolution (linear attention, Mamba, LFM2's convolutions) are not compiled.
    torch.compile breaks the graph at their kernels, and with dynamic=True it computes with symbolic
    shapes in each of the pieces: Qwen3.5's took more than six minutes (torch 2.11). Nor are experts
    with an adapter: PEFT changes their class in each pass, so each pass would compile them again.
    """
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MAX_COMPILED_VARIANTS)
    # Otherwise, a program is only for passes in which the same lengths are equal as in the first.
    shape_config.use_duck_shape = False
    for part in layer.modules():
        is_adapted = isinstance(part, ParamWrapper)
        if is_adapted or any(isinstance(child, nn.Conv1d) for child in part.children()):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]
    layer.forward = torch.compile(layer.forward, dynamic=True)


class Placeholder(nn.Parameter):
    """A weight in a model that is not sharded yet: its shape, without memory for its values."""

    shard: Tensor
    """This rank's rows of the weight. Their data type is the one that the weight will have."""


@contextmanager
def keep_shards(mesh: DeviceMesh | None, device: torch.device | str) -> Iterator[None]:
    """Keep only this rank's shard of each weight that transformers loads within the block.

    The models that are loaded have placeholders. Weights that are in no file, and buffers, are
    whole.

    Args:
        mesh: the ranks; None: keep whole weights.
        device: where the shards are kept.
    """
    if mesh is None:
        yield
        return
    thread, ranks, rank = get_ident(), mesh.size(), mesh.get_local_rank()

    def replace(module: nn.Module, name: str, weight: nn.Parameter) -> Placeholder | None:
        # transformers marks the weights that it has read. Another thread may load another model.
        is_read = getattr(weight, "_is_hf_initialized", False) and not weight.is_meta
        if not is_read or isinstance(weight, Placeholder) or get_ident() != thread:
            return None
        rows = -(-len(weight) // ranks)  # as `fully_shard` divides them
        part = weight.detach()[rank * rows :][:rows]
        empty = torch.empty((), dtype=weight.dtype, device="cpu").expand(weight.shape)
        placeholder = Placeholder(empty, weight.requires_grad)
        placeholder.shard = torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part)
        placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
        return placeholder

    hook = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
    try:
        # Its threads would read many weights ahead.
        with environment_variables({"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
            yield
    finally:
        hook.remove()


def shard(
    packed_model: nn.Module,
    layers: Sequence[nn.Module],
    value_head: nn.Module | None,
    mesh: DeviceMesh | None,
    compute: torch.dtype | None,
    offloads: bool,
) -> None:
    """Shard a model over the ranks of `mesh`.

    Args:
        packed_model: with all its adapters and heads; its parameters are replaced.
        layers: its blocks; each is gathered separately.
        value_head: the critic's head, or None; it computes in the precision of its weights.
        mesh: the ranks; None: the weights are not sharded.
        compute: the precision of forward and backward passes; None: that of the weights.
        offloads: keep the shards in the memory of the CPU (`optim.offload=all`).
    """
    if mesh is None:
        return
    upcast_trainable(packed_model)
    placeholders = _placeholders(packed_model)
    on_meta = partial(torch.empty, device="meta")
    _replace(packed_model, placeholders, lambda _, p: on_meta(p.shape, dtype=p.shard.dtype))
    on_gpu = mesh.device_type == "cuda"
    shard_module = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if offloads else OffloadPolicy(),
        reshard_after_forward=mesh.size() > 1 and not _fits_gathered(packed_model, mesh),
    )
    reduce_dtype = torch.float32 if compute else None
    mp_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
    if value_head is not None:
        shard_module(value_head, mp_policy=MixedPrecisionPolicy())
    for layer in layers:
        shard_module(layer, mp_policy=mp_policy)
    shard_module(packed_model, mp_policy=mp_policy)
    register_fsdp_forward_method(packed_model, "prove")
    for module in _sharded(packed_model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo supports sums only
    sharded = dict(packed_model.named_parameters(remove_duplicate=False))

    def fill(name: str, placeholder: Placeholder) -> Tensor:
        device = "cpu" if offloads else mesh.device_type
        weight: Any = torch.empty_like(sharded[name].detach(), device=device)
        weight.to_local().copy_(placeholder.shard)
        del placeholder.shard
        return weight

    _replace(packed_model, placeholders, fill)
    local = [n for n, p in packed_model.named_parameters() if not isinstance(p, DTensor)]
    assert not local, f"not sharded: {local[:3]}"


def _placeholders(module: nn.Module) -> dict[str, Placeholder]:
    """Return the placeholders by all their names: tied weights are one parameter."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if isinstance(p, Placeholder)}


def _replace(
    module: nn.Module,
    placeholders: Mapping[str, Placeholder],
    make: Callable[[str, Placeholder], Tensor],
) -> None:
    """Replace each placeholder by a parameter, which `make` makes from a name of it."""
    made: dict[Placeholder, nn.Parameter] = {}
    for name, placeholder in placeholders.items():
        if placeholder not in made:
            weight = make(name, placeholder)
            made[placeholder] = nn.Parameter(weight, placeholder.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, made[placeholder])


def wrap_layers(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    config: OptimConfig,
    vision_blocks: Sequence[nn.Module] = (),
) -> bool:
    """Apply `optim.compile` and `optim.recompute` to the layers of a model. Changes the layers.

    The blocks of a vision tower are not compiled: images have many different sizes.

    Returns:
        True if the layers will be compiled, in their first pass.
    """
    size = sum(p.numel() for p in model.parameters())
    on_gpu = mesh is not None and mesh.device_type == "cuda"
    compiled = config.compile == "auto" and on_gpu and size >= MIN_COMPILED_SIZE
    for layer in layers:
        if compiled:
            compile_layer(layer)
    if config.recompute:
        for layer in (*layers, *vision_blocks):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    return compiled


def upcast_trainable(packed_model: nn.Module) -> None:
    """Convert trainable weights to float32.

    Updates are far smaller than the steps of a bfloat16.
    """
    for p in packed_model.parameters():
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            convert(p, torch.float32)


def convert(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Convert a parameter, or the shard that will replace it."""
    if isinstance(parameter, Placeholder):
        parameter.shard = parameter.shard.to(dtype)
    else:
        parameter.data = parameter.data.to(dtype)


def reshard(packed_model: nn.Module) -> None:
    """Drop gathered weights, so that a change of the shards takes effect."""
    for module in _sharded(packed_model):
        module.reshard()


def _sharded(packed_model: nn.Module) -> Iterable[FSDPModule]:
    return (m for m in packed_model.modules() if isinstance(m, FSDPModule))


def _fits_gathered(packed_model: nn.Module, mesh: DeviceMesh) -> bool:
    if mesh.device_type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return sum(2 * p.numel() for p in packed_model.parameters()) < MAX_GATHERED_SHARE * memory


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. If it is sharded, all ranks must call this at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_full(parameter: Tensor, values: Tensor) -> None:
    """Copy a full (unsharded) tensor into a parameter. All ranks call it with the same tensor."""
    if isinstance(parameter, DTensor):
        device = parameter.device_mesh.device_type
        parameter.copy_(
            distribute_tensor(
                values.to(device, parameter.dtype), parameter.device_mesh, parameter.placements
            )
        )
    else:
        parameter.copy_(values)


def is_rank_zero() -> bool:
    """Return whether this process writes the files of all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0
