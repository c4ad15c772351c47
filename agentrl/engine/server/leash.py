"""Holds a server's processes together: they end with the first of them, and with our parent.

Run as a program, in a session of its own, with the server's command as arguments. The parent keeps
our standard input open; its end, by whatever death, is ours and that of the whole process group.
Standard library only, since it is started by its path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command; then end whoever it left behind."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()
    print(f"the server's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
