"""Holds a server's processes together: they end with the first of them, and with our parent.

Run as a program, in a session of its own, with the server's command as arguments. The parent keeps
our standard input open; its end, by whatever death, is ours and that of the whole process group.
Our own end, by whatever death, is that of the first process where the kernel sees to it (Linux).
Standard library only, since it is started by its path.
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
"""Of prctl(2): a signal for the caller at its parent's end."""


FOLDER = "AGENTRL_ENGINE_FOLDER"
"""Environment variable with the server's folder, which holds its keys: the parent clears it away,
and who is left where the parent was killed."""


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    if folder := os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command; then end whoever it left behind."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_us() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # Before there is a second thread, since code of ours runs in the fork.
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=end_with_us)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = server.wait()
    print(f"the server's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
