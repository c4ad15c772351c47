"""What a model is told of a program that it wrote: what it printed, and how it ended."""

from __future__ import annotations

import signal

from agentrl.sandbox.base import Completed

MAX_STDERR = 2000
"""Of a longer stderr the end is told: there a traceback says what is wrong."""
NOTES = {
    "time": "timed out after {seconds:.0f} s",
    "cpu": "stopped: CPU time limit exceeded",
    "output": "stopped: too much output",
}


def report(done: Completed) -> str:
    """The program's stdout, the end of its stderr, and a note where it did not end well."""
    parts = [done.stdout.rstrip("\n")]
    stderr = done.stderr.strip("\n")
    if len(stderr) > MAX_STDERR:
        stderr = f"[...]\n{stderr[-MAX_STDERR:]}"
    if stderr:
        parts.append(f"stderr:\n{stderr}")
    if note := _note(done):
        parts.append(f"[{note}]")
    return "\n".join(p for p in parts if p) or "(no output)"


def _note(done: Completed) -> str:
    if done.ended_by in NOTES:
        return NOTES[done.ended_by].format(seconds=done.seconds)
    if done.ended_by == "signal":
        return f"crashed: {_signal(-done.exit_code)}"
    return f"exit code {done.exit_code}" if done.exit_code else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
