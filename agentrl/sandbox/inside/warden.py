"""Run the command of an agent, and end all processes that it started, daemons included.

The gateway runs this file by its path, outside of any box. At the end of the command, it exits with
the same code, or by the same signal. At the end of its standard input (the episode has ended, or
the run was killed), it kills the command.
"""

import os
import resource
import signal
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from descendants import adopt_orphans, end_all

CANNOT_RUN = 127
"""The exit code if there is no such program, as that of a shell."""


def main():
    """Run the command in the arguments of this program."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adopt_orphans()
    command = sys.argv[1:]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    except OSError as e:
        print(f"{command[0]!r} cannot be run: {e}", flush=True)
        os._exit(CANNOT_RUN)
    threading.Thread(target=_end_at_eof, daemon=True).start()
    pid = status = 0
    while pid != process.pid:  # Others are daemons that have ended.
        pid, status = os.wait()
    end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_at_eof():
    sys.stdin.buffer.read()
    end_all()
    os._exit(-signal.SIGKILL % 256)


if __name__ == "__main__":
    main()
