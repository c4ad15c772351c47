"""Threads and processes for code that may hang, crash or never end.

`LoopThread`, `run_all`, `PerLoop` and `IterationLimit` are for work on event loops.
"""

from __future__ import annotations

from agentrl.workers.loops import IterationLimit, LoopThread, PerLoop, new_loop, run_all
from agentrl.workers.processes import Processes, WorkerDied, WorkerError, locate_function
from agentrl.workers.threads import Outcome, Threads

__all__ = [
    "IterationLimit", "LoopThread", "Outcome", "PerLoop", "Processes", "Threads", "WorkerDied",
    "WorkerError", "locate_function", "new_loop", "run_all",
]  # fmt: skip
