"""The profile of a rank: what it computed when, from `torch.profiler`.

`agentrl.trainer.profile` starts it in the steps of `trainer.profile_steps`. In other steps
`annotate` finds no recorder and does nothing.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function

from agentrl.regular_files import LEFTOVER_PREFIX

NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Nsight Systems sets this environment variable in the processes that it profiles."""
COMPRESSION = 6
"""gzip's level. Level 9, Python's default, takes four times as long for a tenth fewer bytes."""


class Recorder(Protocol):
    """Records the blocks that `annotate` names."""

    def record(self, name: str) -> Any:
        """Return a context manager that records a block."""
        ...

    def stop(self) -> None:
        """Record no further blocks."""
        ...


recorders: list[Recorder] = []
"""The recorders of this process while a step is profiled; empty in all other steps."""


@contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name what the block does in the profile of the present step, if there is one."""
    if not recorders:
        yield
        return
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(recorder.record(name))
        yield


class RankProfile:
    """Records the operations of a rank, and on a GPU its kernels.

    On a GPU the named blocks are also ranges of NVTX, and the recorded time is what Nsight Systems
    captures with `--capture-range=cudaProfilerApi`. Only one program can read a GPU's counters, so
    under Nsight Systems this class records no kernels.
    """

    def __init__(self, *, gpu: bool):
        """Start to record the work of this thread.

        Args:
            gpu: True if the rank is on a GPU.
        """
        self._gpu = gpu
        activities = [ProfilerActivity.CPU]
        if gpu and NSIGHT not in os.environ:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        if gpu:
            torch.cuda.profiler.start()
        recorders.append(self)

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Record a block."""
        if self._gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            with record_function(name):
                yield
        finally:
            if self._gpu:
                torch.cuda.nvtx.range_pop()

    def stop(self) -> None:
        """Record no further operations."""
        recorders.remove(self)
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        self._profiler.stop()

    def write(self, file: Path) -> str:
        """Write the trace; returns why it could not be written, or ""."""
        return write_trace(file, self._export)

    def _export(self, file: Path) -> None:
        self._profiler.export_chrome_trace(str(file))
        # torch raises nothing if it could not write the file, or only a part of it.
        tail = b""
        if file.exists():
            with file.open("rb") as written:
                written.seek(max(0, file.stat().st_size - 16))
                tail = written.read()
        if not tail.rstrip().endswith(b"}"):
            raise OSError("torch could not write the trace. Is the disk full?")


def write_trace(file: Path, write: Callable[[Path], object]) -> str:
    """Write a compressed file; returns why it could not be written, or "".

    Args:
        file: the file; its folder is made.
        write: writes the content into an uncompressed file.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=LEFTOVER_PREFIX, suffix=f"-{os.getpid()}", dir=file.parent
        ) as folder:
            plain, packed = Path(folder, "trace.json"), Path(folder, file.name)
            write(plain)
            with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION) as target:
                shutil.copyfileobj(source, target, 2**20)
            packed.rename(file)
    except (OSError, RuntimeError) as e:
        return f"cannot write {file}: {e}"
    return ""
