"""Runs a server that is not ours, and kills it when our parent ends.

`ChildProcess` runs this file as a program. Its arguments are a folder and the server's command. Our
standard input ends when the parent ends, however it ends. Then the folder is removed (it holds the
server's keys) and the whole process group is killed. If the server ends first, the processes that
it left behind are killed. Our parent and this process may be killed at the same moment (Ray does so
with the process of an actor): then the kernel kills the server (Linux). This file uses only the
standard library, because it is started by its path.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
"""An option of prctl(2): the signal that the caller gets when its parent ends."""


def _kill_group_at_eof(folder: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the server, and kill the processes that it left behind."""
    folder, *command = sys.argv[1:]
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def set_death_signal() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # Start it before there is a second thread, because `preexec_fn` runs in the fork.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=set_death_signal)
    threading.Thread(target=_kill_group_at_eof, args=(folder,), daemon=True).start()
    code = server.wait()
    print(f"the server's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
