"""The number of CPU threads with which torch computes in each process of a run.

torch starts a thread per core, and each operation ends when its last thread ends. A thread that
waits for the others spins: with GNU's OpenMP for up to 300,000 rounds (`GOMP_SPINCOUNT`). If other
work needs the same cores (the event loop, tools, servers, other ranks), the waiting thread takes
the core of the thread that it waits for. On two busy cores, an update with two threads took 4 to 8
times as long as with one, and 4 times the CPU time. Waiting threads that sleep
(`OMP_WAIT_POLICY=PASSIVE`) do not do this.

The processes apply the number themselves, since only some packages import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_THREADS = 8
"""More threads do not make a learner faster whose passes run on a GPU: its operations on the CPU
are short. On 64 cores, updates of 0.5B ran at 51,900 tokens/s with torch's default and at 125,200
with 8 threads."""
SMALL_MODEL = 10**7
"""The number of weights below which decoding uses one thread: an operation of a decode step takes
microseconds, less than waking another thread. With 0.5 million weights, a step of 8 rows took
0.64 ms with one thread and 1.0 ms with two."""
NUMBER, WAIT_POLICY = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """The number of threads of a process, and why."""

    count: int
    cores: int
    """The cores of the machine that this process may use."""
    reason: str

    def __str__(self) -> str:
        """Return text such as `8 of 64 cores (more do not help)`."""
        return f"{self.count} of {self.cores} cores ({self.reason})"


def choose_threads(
    processes: int = 1, *, current: int | None = None, weights: int | None = None
) -> ThreadCount:
    """Return the number of threads with which torch should compute in this process.

    The number is that of `OMP_NUM_THREADS`. Without it, the cores are divided by the processes, and
    the result is at most `MAX_THREADS`. A smaller number that torch already has wins over both.
    Without passive waiting, a core stays free.

    Args:
        processes: the number of processes of the run on this machine that compute at the same time.
        current: the number that torch has in this thread; None if it has no meaning.
        weights: the number of weights of the local engine's model; None for a learner. While the
            engine decodes, a core stays free for the event loop and the tools.
    """
    cores = count_cores()
    if number := number_from_environment():
        count, reason = number, NUMBER
    elif weights is not None and weights < SMALL_MODEL:
        count, reason = 1, "a small model"
    else:
        count, reason = _share(cores, processes, leaves_core=weights is not None)
    if current is not None and current < count:
        count, reason = current, "torch's own number"
    return ThreadCount(count, cores, reason)


def _share(cores: int, processes: int, *, leaves_core: bool) -> tuple[int, str]:
    """Return the number of threads of one of several processes, and why."""
    count = cores // processes
    reason = f"{processes} processes" if processes > 1 else "all cores"
    if count * processes == cores > 1 and (leaves_core or not waits_passively()):
        count, reason = (cores - 1) // processes, "a core stays free"
    if count > MAX_THREADS:
        count, reason = MAX_THREADS, "more do not help"
    return max(count, 1), reason


def number_from_environment() -> int:
    """Return the number in `OMP_NUM_THREADS`; 0 without a valid one.

    OpenMP also takes a list, whose first number counts here: `4,2`.
    """
    first = os.environ.get(NUMBER, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def prepare_threads() -> None:
    """Let waiting threads sleep and give the same bits, unless the user or an import decided.

    Intel's MKL chooses its code by where tensors lie in memory, and with two threads the last
    digits of a product depend on it: a replay differed from its run. The strict mode ends this
    (2 % slower on one CPU with AVX-512). OpenMP and MKL read the variables when torch is imported.
    Child processes inherit them.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def waits_passively() -> bool:
    """Return whether waiting threads sleep, according to the environment."""
    return os.environ.get(WAIT_POLICY, "").strip().upper() == "PASSIVE"


def count_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use: its affinity and its CPU quota.

    Args:
        cgroup: the folder of the container's cgroup, of version 1 or 2.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([cores, *_quota(cgroup)]))


def _quota(cgroup: Path) -> Iterable[int]:
    """Yield the whole cores of the CPU quota, if there is one."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        yield int(quota) // int(period)  # `max` is no number: no quota
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
        if int(quota) > 0:
            yield int(quota) // int((cgroup / "cpu/cpu.cfs_period_us").read_text())
