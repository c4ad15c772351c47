"""A program that runs a server of another project, and kills it when the parent process ends.

`ChildProcess` runs this file. Its arguments are a folder and the server's command. The standard
input of this process ends when the parent ends. Then the folder is removed (it contains the
server's keys) and the whole process group is killed. If the server ends first, the processes that
it started are killed. If the parent and this process are killed at the same moment (Ray does so
with the process of an actor), the kernel kills the server (Linux). This file uses only the standard
library, because it is run by its path.
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
    """Run the server. When it ends, kill the processes that it started."""
    folder, *command = sys.argv[1:]
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def set_death_signal() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # `preexec_fn` runs in the fork, so start the server before there is a second thread.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=set_death_signal)
    threading.Thread(target=_kill_group_at_eof, args=(folder,), daemon=True).start()
    code = server.wait()
    print(f"the server's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
