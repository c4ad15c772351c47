"""Write the text that a model reads about a program that it wrote: the output and the end."""

from __future__ import annotations

import signal

from agentrl.sandbox.program import Completed

MAX_STDERR = 2000
"""Only the end of a longer stderr is shown: a traceback ends with the error."""
NOTES = {
    "time": "timed out after {seconds:.0f} s",
    "cpu": "stopped: CPU time limit exceeded",
    "output": "stopped: too much output",
}


def report(done: Completed) -> str:
    """Return stdout, the end of stderr, and a note if the program did not exit with code 0."""
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
