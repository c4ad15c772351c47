"""Named tensors on disk, whole or sharded, as safetensors.

torch's distributed checkpoint does the work. Each rank writes its shards, with their places in the
headers of the files, and reads the shards that it needs: two ranks, or one, can read what four
ranks wrote. This uses its safetensors format. Its other formats keep a pickled index, and loading a
pickle can run code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from agentrl.errors import ConfigError, RunStopped

PARAMETER_PREFIX = "parameter."
"""The prefix of the names of parameters, to tell them from an optimizer's moments."""
FILE_BYTES = 2 * 2**30
"""The approximate size of a rank's files. While a file is written, its tensors are in memory twice.
"""


def write_state(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors. All ranks call it at once.

    Quantised tensors are written dequantised, because ranks with other shards quantise other
    blocks.

    Args:
        folder: the folder to make; its parent exists. It is the same for all ranks, on all
            machines.
        tensors: the same names on all ranks. Each rank writes its shard of a DTensor.

    Raises:
        RunStopped: a rank cannot write there.
    """
    if not folder.parent.is_dir():
        raise RunStopped(
            f"{folder.parent} does not exist. trainer.output must be on a file system that the"
            " machines of all ranks see"
        )
    numbers = {name: dequantize(tensor).contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), _assign_files(numbers), save_distributed=True)
    with _translate_errors(f"write {folder}", OSError, RunStopped):
        save(numbers, storage_writer=writer, no_dist=not dist.is_initialized())


def read_state(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite named tensors with the values of `write_state`. All ranks call it at once.

    Args:
        folder: a folder of `write_state`; it may hold more tensors.
        tensors: tensors with the same shapes as the written ones; DTensors get their shards,
            however they are sharded.

    Raises:
        ConfigError: the files are damaged, or lack a name.
    """
    numbers = {name: dequantize(tensor) for name, tensor in tensors.items()}
    with _translate_errors(f"read {folder}", Exception, ConfigError):
        load(
            dict(numbers),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=not dist.is_initialized(),
        )
    for name, tensor in tensors.items():
        if numbers[name] is not tensor:
            _local(tensor).copy_(_local(numbers[name]))


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder of `write_state`, by name.

    The result is empty if there is no such folder.

    Raises:
        ConfigError: the files are damaged.
    """
    if not folder.is_dir():
        return {}
    with _translate_errors(f"read {folder}", Exception, ConfigError):
        saved_shapes = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in saved_shapes.items()}  # type: ignore[union-attr]


def check_state(folder: Path, ours: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Check that the written tensors whose names begin with `prefix` fit `ours`.

    Returns:
        The written names that do not begin with `prefix`.

    Raises:
        ConfigError: the written names or shapes differ, or no such tensor was written.
    """
    saved_shapes = shapes_in(folder)
    saved = {name: shape for name, shape in saved_shapes.items() if name.startswith(prefix)}
    if not saved:
        raise ConfigError(
            f"{folder.parent} has no {folder.name}: a run with another algorithm saved it"
        )
    expected = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            both = [
                list(shapes[name]) if name in shapes else "missing" for shapes in (saved, expected)
            ]
            raise ConfigError(
                f"{folder} is of another model: {name.removeprefix(prefix)} is {both[0]} in the"
                f" checkpoint and {both[1]} in this run"
            )
    return saved_shapes.keys() - saved.keys()


def _assign_files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to one of a rank's files. Return the number of its file, from 1."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size >= FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.numel() * tensor.element_size() // ranks
    return numbers


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dequantize(tensor: Tensor) -> Tensor:
    """Return the tensor itself, unless it is quantised."""
    local = _local(tensor)
    if type(local) is Tensor:
        return tensor
    numbers = local.dequantize()
    if isinstance(tensor, DTensor):
        numbers = DTensor.from_local(
            numbers,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return numbers.cpu()  # on a GPU they would take four times their memory


@contextmanager
def _translate_errors(
    action: str, kind: type[Exception], raise_as: type[Exception]
) -> Iterator[None]:
    """Raise errors of `kind` as `raise_as`, with the rank that failed and the reason.

    Other errors stay as they are.
    """
    error: BaseException | None = None
    where = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist says so
            yield
    except CheckpointException as e:
        rank, (error, _) = min(e.failures.items())
        where = f"rank {rank} " if dist.is_initialized() and dist.get_world_size() > 1 else ""
    except Exception as e:
        error = e
    if isinstance(error, kind):
        raise raise_as(f"{where}cannot {action}: {error}") from error
    if error is not None:
        raise error
