"""Start a run again after a crash (`trainer.max_restarts`).

The command becomes the parent of a process with the same command, which trains. The parent only
waits, forwards signals, and starts the process again from the run's newest checkpoint if it
crashed: killed by a signal (out of memory, a segmentation fault), or ended by an error that is no
mistake in the config or in the user's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.errors import AgentRLError, UserCodeError, UserError
from agentrl.plural import plural
from agentrl.terminal import echo
from agentrl.workers.child_process import python_command
from agentrl.workers.parent_watch import PR_SET_PDEATHSIG

CRASHED = 75
"""The exit code of a process that may be started again (EX_TEMPFAIL of sysexits.h)."""
PARENT = "AGENTRL_PARENT"
"""The environment variable that holds the process id of the parent."""
PAUSE_SECONDS = 2.0
FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def is_supervised() -> bool:
    """Return whether this process is the child that trains."""
    return os.environ.get(PARENT) == str(os.getppid())


def run_supervised(words: Sequence[str], folder: Path, max_restarts: int) -> int:
    """Run the command in a child process, and again after each crash. Return its exit code.

    Args:
        words: the arguments of the command.
        folder: the run's folder.
        max_restarts: how often the command is started again.
    """
    restarts = 0
    while True:
        # Before the first checkpoint, the run starts as the command says.
        is_saved = restarts and any(folder.glob("global_step_*"))
        code = _run([*words, *(["trainer.resume=auto"] if is_saved else [])])
        crashed = code == CRASHED or (code < 0 and -code not in FORWARDED)
        if not crashed or restarts == max_restarts:
            return 1 if code == CRASHED else code if code >= 0 else 128 - code
        restarts += 1
        end = f"signal {signal.Signals(-code).name}" if code < 0 else "an error"
        echo(
            f"the run ended with {end}; it is started again"
            f" ({restarts} of {plural(max_restarts, 'restart')}, trainer.max_restarts)",
            err=True,
        )
        time.sleep(PAUSE_SECONDS)


def _run(words: Sequence[str]) -> int:
    """Run the command in a child process; return its exit code, or minus the signal's number."""
    command = python_command("from agentrl.cli import main; main()")
    environment = {**os.environ, PARENT: str(os.getpid())}
    # In a process group of its own, so that Ctrl-C arrives once: forwarded by this process.
    child = subprocess.Popen([*command, *words], env=environment, process_group=0)
    before = {s: signal.signal(s, lambda s, _: child.send_signal(s)) for s in FORWARDED}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_code_of_crashes() -> Iterator[None]:
    """In the child: exit with `CRASHED` after an error that a restart may not meet again."""
    if not is_supervised():
        yield
        return
    # If the parent is killed, this process saves and ends, as after Ctrl-C.
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        yield
    except (UserError, UserCodeError):
        raise
    except AgentRLError as e:
        echo(f"error: {e}", err=True)
        sys.exit(CRASHED)
    except Exception:
        echo(traceback.format_exc(), err=True, nl=False)
        sys.exit(CRASHED)
