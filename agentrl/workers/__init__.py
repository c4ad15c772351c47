"""Work that may hang, crash or never end, kept away from the event loop: threads and processes.

`run_all` and `PerLoop` are for what stays on it.
"""

from __future__ import annotations

from agentrl.workers.loops import PerLoop, run_all
from agentrl.workers.processes import Processes, WorkerDied, WorkerError, check_reachable
from agentrl.workers.threads import Outcome, Threads

__all__ = [
    "Outcome",
    "PerLoop",
    "Processes",
    "Threads",
    "WorkerDied",
    "WorkerError",
    "check_reachable",
    "run_all",
]
