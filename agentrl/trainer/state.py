"""Named tensors on disk, whole or in pieces: safetensors and nothing else.

torch's distributed checkpoint does the work. Each rank writes the pieces that it holds, with their
places in the files' headers, and reads those that it is to hold: what four ranks wrote, two read,
or one. Of its formats this is the one for safetensors. The others keep an index that is a pickle,
and to read a pickle is to run what is in it.
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
"""What the names of parameters begin with, beside those of an optimizer's moments."""
FILE_BYTES = 2 * 2**30
"""About the size of a rank's files; so much of what is written is in memory twice."""


def write_state(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors. With ranks, all call it at once.

    Quantised ones are written as numbers: ranks that hold other pieces quantise other blocks.

    Args:
        folder: to be made, in one that is there: the same for all ranks, on all machines.
        tensors: the same names on all ranks; of a DTensor each writes its piece.

    Raises:
        RunStopped: a rank cannot write there.
    """
    if not folder.parent.is_dir():
        raise RunStopped(
            f"{folder.parent} is not there. trainer.output must lie where the machines of all ranks"
            " see it"
        )
    numbers = {name: _dequantize(tensor).contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), _files_of(numbers), save_distributed=True)
    with _translate_errors(f"write {folder}", OSError, RunStopped):
        save(numbers, storage_writer=writer, no_dist=not dist.is_initialized())


def read_state(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite named tensors by what `write_state` wrote. With ranks, all call it at once.

    Args:
        folder: what was written; it may hold more.
        tensors: of the shapes that were written; DTensors get their pieces, however they were cut.

    Raises:
        ConfigError: the files are damaged, or lack a name.
    """
    numbers = {name: _dequantize(tensor) for name, tensor in tensors.items()}
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
    """The shapes of what `write_state` wrote, by name; {} where it did not.

    Raises:
        ConfigError: the files are damaged.
    """
    if not folder.is_dir():
        return {}
    with _translate_errors(f"read {folder}", Exception, ConfigError):
        saved_shapes = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in saved_shapes.items()}  # type: ignore[union-attr]


def check_state(folder: Path, ours: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Refuse what was written of others than `ours`, which all begin with `prefix`.

    Returns:
        the names that begin otherwise.

    Raises:
        ConfigError: other names or shapes, or nothing at all.
    """
    saved_shapes = shapes_in(folder)
    saved = {name: shape for name, shape in saved_shapes.items() if name.startswith(prefix)}
    if not saved:
        raise ConfigError(
            f"{folder.parent} holds no {folder.name}: it was saved by a run of another algorithm"
        )
    here = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            both = [list(shapes[name]) if name in shapes else "missing" for shapes in (saved, here)]
            raise ConfigError(
                f"{folder} is of another model: {name.removeprefix(prefix)} is {both[0]} there and"
                f" {both[1]} here"
            )
    return saved_shapes.keys() - saved.keys()


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes to."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size >= FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.numel() * tensor.element_size() // ranks
    return numbers


def _local(tensor: Tensor) -> Tensor:
    """This rank's piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dequantize(tensor: Tensor) -> Tensor:
    """The tensor itself, unless it is quantised."""
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
    return numbers.cpu()  # on a GPU all of them would take four times what they did


@contextmanager
def _translate_errors(what: str, kind: type[Exception], becomes: type[Exception]) -> Iterator[None]:
    """Name the rank that failed, and why. What is not of `kind`, Ctrl-C included, stays itself."""
    error: BaseException | None = None
    where = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as was said
            yield
    except CheckpointException as e:
        rank, (error, _) = min(e.failures.items())
        where = f"rank {rank} " if dist.is_initialized() and dist.get_world_size() > 1 else ""
    except Exception as e:
        error = e
    if isinstance(error, kind):
        raise becomes(f"{where}cannot {what}: {error}") from error
    if error is not None:
        raise error
