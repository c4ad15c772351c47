"""The descendants of this process, also those that have left its session (daemons)."""

import ctypes
import os
import signal
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans():
    """Become the parent of descendants whose parent ends (Linux), so that they stay descendants."""
    if os.path.isdir("/proc"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(keep=0):
    """Return the pid and state of all descendants, without `keep` and its descendants."""
    parents, states = {}, {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            parents[int(name)], states[int(name)] = int(parent), state
    own_pid, states_below = os.getpid(), {}
    for pid in parents:
        ancestor = pid
        while ancestor not in (0, own_pid, keep or -1):
            ancestor = parents.get(ancestor, 0)
        if ancestor == own_pid and pid != own_pid:
            states_below[pid] = states[pid]
    return states_below


def end_all(keep=0, reap=lambda: None):
    """Kill all descendants, except for `keep` and its descendants.

    `reap` collects the exit codes of those that have ended.
    """
    for attempt in range(1000):
        remaining = [pid for pid, state in descendants(keep).items() if state != b"Z"]
        if not remaining:
            break
        # Stop all of them first: otherwise it could fork faster than it is killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in remaining:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.001 * min(attempt, 20))
        reap()
    reap()
