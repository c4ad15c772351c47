"""Weights spread over ranks by torch's `fully_shard` (FSDP2), the same on GPUs and CPUs.

Every rank holds a piece of every weight, in float32 where it learns, and gathers a layer's pieces
in the precision it computes in just before the layer runs. Gradients are summed over ranks, never
averaged: a loss is a sum whose weights hold the whole mini-batch's denominator.

Accelerate gives the process's device, precision and clipping. It prepares no model: on a CPU its
FSDP plugin makes DDP of it without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from agentrl.config import OptimConfig
from agentrl.engine.local.load import resolve_device, without_launcher_variables
from agentrl.errors import ConfigError

MIN_COMPILED_SIZE = 10**8
"""Weights from which on a run earns back the minute that compiling takes."""
MAX_COMPILED_VARIANTS = 64
"""Programs that a layer may be compiled to: with and without a gradient, each adapter or none of
them, prompts shared or not. Past torch's own limit it would run uncompiled."""
MAX_GATHERED_SHARE = 0.25
"""Weights that take less of a GPU's memory than this stay gathered between forward and backward."""


def open_accelerator(device: str) -> tuple[Accelerator, DeviceMesh | None]:
    """This process's device and precision, and the ranks that weights are spread over.

    Which rank this is, and of how many, is in the environment, as launchers have it: RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    Args:
        device: auto, cpu or cuda.

    Returns:
        no mesh for one process on a CPU: there is nothing to spread.

    Raises:
        ConfigError: no such device.
    """
    use_cuda = resolve_device(device) == "cuda"
    if use_cuda and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch finds no GPU here. Set trainer.device=cpu or auto, or"
            " install a torch built for CUDA."
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Servers that weights are broadcast to run with it, and NCCL reads it once.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if (ranks > 1 or use_cuda) and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        alone = {} if ranks > 1 else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone)
    first_device = AcceleratorState._shared_state.get("device")
    if first_device and (first_device.type == "cuda") != use_cuda:
        # Accelerate holds a process to its first device; there may be a run after another.
        AcceleratorState._reset_state(reset_partial_state=True)
    with without_launcher_variables():
        accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if use_cuda else "no")
    if ranks == 1 and not use_cuda:
        return accelerator, None
    return accelerator, init_device_mesh(accelerator.device.type, (dist.get_world_size(),))


def shard(
    packed_model: nn.Module,
    layers: Sequence[nn.Module],
    value_head: nn.Module | None,
    mesh: DeviceMesh | None,
    compute: torch.dtype | None,
    config: OptimConfig,
) -> None:
    """Make a scorer what `config` says, and spread it over the ranks of `mesh`.

    Args:
        scorer: with all its adapters and heads; its parameters become others.
        layers: its blocks, each of which is gathered by itself.
        value_head: computes in the precision of its weights, if there is one.
        mesh: the ranks; None leaves the weights as they are.
        compute: the precision of forward and backward passes; None: that of the weights.
        config: the section `optim`: recompute, compile, offload.
    """
    on_gpu = mesh is not None and mesh.device_type == "cuda"
    size = sum(p.numel() for p in packed_model.parameters())
    compiled = config.compile == "auto" and on_gpu and size >= MIN_COMPILED_SIZE
    if compiled:
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, MAX_COMPILED_VARIANTS)
    for layer in layers:
        # The layer's own function, and neither what surrounds it nor the hooks upon it.
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if config.recompute:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    if mesh is None:
        return
    upcast_trainable(packed_model)
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload == "all" else OffloadPolicy()
    shard_module = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload,
        reshard_after_forward=mesh.size() > 1 and not _fits_gathered(packed_model, mesh),
    )
    mp_policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32 if compute else None
    )
    if value_head is not None:
        shard_module(value_head, mp_policy=MixedPrecisionPolicy())
    for layer in layers:
        shard_module(layer, mp_policy=mp_policy)
    shard_module(packed_model, mp_policy=mp_policy)
    for module in _sharded(packed_model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    local = [n for n, p in packed_model.named_parameters() if not isinstance(p, DTensor)]
    assert not local, f"not spread over ranks: {local[:3]}"


def upcast_trainable(packed_model: nn.Module) -> None:
    """What learns, learns in float32 or wider: updates are far below the steps of a bfloat16."""
    for module in packed_model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()
                assert getattr(module, name) is p


def reshard(packed_model: nn.Module) -> None:
    """Forget gathered weights: who changes the pieces next would not be seen in them."""
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
    """All of a tensor: gathered, where it is spread over ranks, by all of them at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_full(parameter: Tensor, values: Tensor) -> None:
    """Overwrite a parameter by the whole of its new values, the same on all ranks."""
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
    """Whether this process writes what all ranks have gathered."""
    return not dist.is_initialized() or dist.get_rank() == 0
