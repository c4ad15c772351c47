"""Timing of updates on the available device: warm-up, turns, medians, memory, peak FLOP/s."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from workload.timing import cpu_seconds

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
GIB = 2**30
PEAK = 790e12
"""FLOP/s of an H200, measured with a product of two 8192 x 8192 matrices in bfloat16."""
Update = Callable[[], object]


@dataclass(slots=True)
class Timed:
    """The times of some updates."""

    warmup_s: float = 0.0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.wall)

    def once(self, update: Update) -> None:
        wall, cpu = time.perf_counter(), cpu_seconds()
        finish(update)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(cpu_seconds() - cpu)


def finish(update: Update) -> None:
    update()
    if GPU:
        torch.cuda.synchronize()


def measure(updates: Mapping[str, Update], steps: int) -> dict[str, Timed]:
    """Warm up, then run the updates in turn."""
    times = {name: Timed() for name in updates}
    for name, update in updates.items():
        began = time.perf_counter()
        for _ in range(2 if GPU else 1):  # torch.compile compiles again for another length
            finish(update)
        times[name].warmup_s = time.perf_counter() - began
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        for name, update in updates.items():
            times[name].once(update)
    return times


def memory() -> dict[str, float | None]:
    """Return the peak GiB of this process: allocated, and reserved on the device."""
    if not GPU:
        return {"peak_mem_gib": None, "peak_reserved_gib": None}
    return {
        "peak_mem_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


def limit_memory(size: float) -> None:
    """Let PyTorch raise if it needs more bytes of the GPU."""
    if GPU:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))


def peak_flops(override: float) -> float:
    """Return the FLOP/s of the device, or of a matrix product on this CPU."""
    if override or GPU:
        return override or PEAK
    x = torch.randn(1024, 1024)
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        _ = x @ x
        best = max(best, 2 * 1024**3 / (time.perf_counter() - began))
    return best


def release() -> None:
    """Free the memory of earlier measurements."""
    gc.collect()
    torch._dynamo.reset()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
