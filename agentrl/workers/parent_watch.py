"""Removes what a process leaves behind that was killed: folders, servers, agents of Ray.

`ChildProcess` runs this file as a program. Its arguments are a folder and the command of a server
of another project. The standard input of this process ends when the parent ends. Then the folder is
removed (it contains the server's keys) and the whole process group is killed. If the server ends
first, the processes that it started are killed. Without a command, the program waits for the end of
the parent only.

If the parent and this process are killed at the same moment (Ray does so with the process of an
actor), the kernel kills the server (Linux), and the folder is abandoned. The next process that
makes an `OwnedFolder` removes it (`remove_abandoned`). This file uses only the standard library,
because it is run by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

PR_SET_PDEATHSIG = 1
"""An option of prctl(2): the signal that the caller gets when its parent ends."""
PREFIX = "agentrl-"
OWNER = ".owner"
"""The file of a folder that its owner has locked. It names the owner's process and machine."""
SHARED_FILES = ".shared_memory"
"""The file of a folder with the names of the files in shared memory that belong to it."""
SHARED_MEMORY = Path("/dev/shm")
SGLANG_LOADS = "sglang_loads_"
"""The prefix of a file in shared memory that each SGLang server creates and never removes."""
LAST_CLEANUP_SECONDS = 3.0
"""The time for the processes of a cluster to end, whose folders are removed after that."""


def describe_owner() -> str:
    """Return the text of `OWNER` for this process."""
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def record_shared_memory(folder: Path, group: int) -> None:
    """Record which files in shared memory a server uses. `remove_folder` removes them, too.

    Args:
        folder: the server's folder.
        group: the process group of the server.
    """
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(process.name)) != group:
                continue
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = Path(os.readlink(file))
                    if target.parent == SHARED_MEMORY and target.name.startswith(SGLANG_LOADS):
                        names.add(target.name)
    if names:
        with contextlib.suppress(OSError), open(folder / SHARED_FILES, "a") as record:
            record.writelines(f"{name}\n" for name in sorted(names))


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that belongs to it: Ray's agents, and files in shared memory."""
    _kill_ray(folder)
    with contextlib.suppress(OSError):
        for name in (folder / SHARED_FILES).read_text().split():
            if name.startswith(SGLANG_LOADS) and "/" not in name:
                with contextlib.suppress(OSError):
                    (SHARED_MEMORY / name).unlink()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name == OWNER:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (folder / OWNER).unlink(missing_ok=True)  # Last: without it, nobody removes the rest.
        folder.rmdir()


def remove_abandoned() -> None:
    """Remove the folders of this user's processes that ended without removing them.

    A folder is removed only if it has an `OWNER` that was written on this machine, and that no
    process has locked. So those of other users, of live processes and of other programs stay.
    """
    for parent in {"/tmp", gettempdir()}:
        for folder in Path(parent).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), _locked(folder) as is_abandoned:
                if is_abandoned:
                    remove_folder(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder within the block; yield whether it is abandoned.

    Raises:
        OSError: a process has locked it, or it is no folder of an owner.
    """
    with contextlib.ExitStack() as stack:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, opened)
        # Some file systems support locks only for files that are open for writing.
        owner = os.open(OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
        stack.callback(os.close, owner)
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner of an empty file has not locked it yet. Locks of other machines may not be
        # visible here.
        host = os.read(owner, 1024).decode(errors="replace").rpartition(" on ")[2].strip()
        yield os.fstat(opened).st_uid == os.getuid() and host == socket.gethostname()


def _kill_ray(folder: Path) -> None:
    """Kill the processes of a Ray cluster whose token is in the folder.

    Its agents would live for two more minutes after the cluster was killed.
    """
    variable = f"RAY_AUTH_TOKEN_PATH={folder}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if process.stat().st_uid != os.getuid():
                continue
            # It refers to the same process even if the process ends and its id is used again.
            pid_file = os.pidfd_open(int(process.name))
            stack.callback(os.close, pid_file)
            if not (process / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            environment = (process / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(variable) for entry in environment):
                signal.pidfd_send_signal(pid_file, signal.SIGKILL)


def _kill_group_at_eof(folder: Path) -> None:
    sys.stdin.buffer.read()
    record_shared_memory(folder, os.getpgrp())
    remove_folder(folder)
    os.killpg(0, signal.SIGKILL)


def _remove_at_eof(folder: Path) -> None:
    sys.stdin.buffer.read()
    remove_folder(folder)
    time.sleep(LAST_CLEANUP_SECONDS)  # Other processes of the cluster end and may write until then.
    remove_folder(folder)
    remove_abandoned()


def main() -> None:
    """Run the server. When it ends, kill the processes that it started."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    if not command:
        _remove_at_eof(folder)
        return
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
