"""The command line that puts a program into namespaces of its own, and advice where it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Limits
from agentrl.sandbox.seccomp import seccomp_filter

FOLDER = "/tmp"
"""The program's own, in there."""
SHM_BYTES = 4 * 2**20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONPATH": FOLDER,
    # What a program prints must not depend on the order of a set, nor a machine's cores on its
    # limit of processes.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SHELL = '"$@"; exit $?'
"""For process 1 of a namespace. A shell that becomes its last command would not outlive it."""


class Files(ExitStack):
    """Contents that a program is given as descriptors: in memory, and nowhere on this machine.

    Our side of them is closed (`close`) once the program has its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fds: list[int] = []
        """What the program is to have."""

    def add(self, content: bytes) -> int:
        """A descriptor of the content, at its beginning."""
        fd = self.take(os.memfd_create("agentrl"))
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def take(self, fd: int) -> int:
        """A descriptor that is ours to close from here on."""
        self.fds.append(fd)
        self.callback(os.close, fd)
        return fd


def bwrap_command(
    python: str,
    limits: Limits,
    given: Files,
    files: Mapping[str, bytes],
    scripts: Mapping[str, bytes],
    uid: int | None,
) -> list[str]:
    """All up to the command that runs inside, less the descriptors that `Child` adds.

    Args:
        python: the interpreter that will be run, so that it can be seen.
        limits: the sizes of what it may write to.
        given: takes up the contents.
        files: of the program's folder.
        scripts: by absolute path in there, files that nothing can change.
        uid: become this user first; None stays what we are.

    Raises:
        SandboxError: there is no bwrap, or no such interpreter.
    """
    command: list[str] = []
    if uid is not None:
        command += [
            _program("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
            "--no-new-privs", "--",
        ]  # fmt: skip
    size = str(limits.disk_mb * 2**20)
    command += [
        _program("bwrap"), "--unshare-user", "--unshare-all", "--uid", "65534", "--gid", "65534",
        "--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session",
        "--as-pid-1", "--seccomp", str(given.add(seccomp_filter())),
        "--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev", "--size", size, "--tmpfs", FOLDER,
        # Last, since an environment may itself lie below /tmp.
        *_mounts(python),
    ]  # fmt: skip
    for path, content in files.items():
        command += ["--file", str(given.add(content)), f"{FOLDER}/{path}"]
    for path, content in scripts.items():
        command += ["--file", str(given.add(content)), path]
    command += ["--remount-ro", "/", "--chdir", FOLDER, "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return command


def rlimit_command(limits: Limits) -> list[str]:
    """Sets the limits of each process; inside the namespace, where no other's processes count.

    Its process 1 does, beside the program's own.
    """
    return [
        "/usr/bin/prlimit", f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
        f"--as={limits.memory_mb * 2**20}", f"--fsize={limits.disk_mb * 2**20}",
        f"--nofile={limits.open_files}", f"--nproc={limits.processes + 1}", "--core=0", "--",
    ]  # fmt: skip


@cache
def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    if name == "bwrap":
        raise SandboxError(NO_BWRAP)
    raise SandboxError(f"{name} is not installed (util-linux): programs cannot be run as others")


@cache
def _mounts(python: str) -> Sequence[str]:
    """What of this machine is to be seen in there, for reading."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path).removeprefix("/"), name]
        elif path.is_dir():
            mounts += ["--ro-bind", name, name]
    # Where libraries are, and what programs several packages offer.
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        mounts += ["--ro-bind-try", name, name]
    for folder in parts_of_python(python):
        mounts += ["--ro-bind", str(folder), str(folder)]
    return mounts


def parts_of_python(python: str) -> list[Path]:
    """The folders outside of /usr that an interpreter needs: its environment and installation.

    Args:
        python: `sandbox.python`.

    Raises:
        SandboxError: there is none, or it lives in a folder that holds more than Python.
    """
    path = Path(os.path.abspath(python))
    if not os.access(path, os.X_OK) or path.is_dir():
        raise SandboxError(
            f"sandbox.python={python} is no program. Name an interpreter, such as /usr/bin/python3"
            " (Debian, Ubuntu: apt-get install python3)"
        )
    folders: list[Path] = []
    # Every link on the way: an environment's python leads to that of its installation, perhaps by
    # way of another environment.
    while True:
        folder = path.parent.parent
        if not folder.is_relative_to("/usr") and path.parent != Path("/bin"):
            _refuse_more_than_python(folder, python)
            folders.append(folder)
        if not path.is_symlink():
            break
        path = Path(os.path.abspath(path.parent / path.readlink()))
    resolved = path.resolve()
    if resolved != path and not resolved.is_relative_to("/usr"):
        _refuse_more_than_python(resolved.parent.parent, python)
        folders.append(resolved.parent.parent)
    return list(dict.fromkeys(folders))


def _refuse_more_than_python(folder: Path, python: str) -> None:
    """Of an interpreter in ~/bin, all of the home directory would be shown to programs."""
    if not any((folder / "lib").glob("python3*")) and not (folder / "pyvenv.cfg").exists():
        raise SandboxError(
            f"sandbox.python={python}: {folder} is neither a Python environment nor an installation"
            " (no lib/python3* in it), so it is not shown to programs. Name the interpreter of a"
            " virtual environment, or /usr/bin/python3"
        )
    if Path.home().is_relative_to(folder):
        raise SandboxError(
            f"sandbox.python={python}: with {folder} all of your home directory would be shown to"
            " programs. Make a virtual environment elsewhere and name its interpreter"
        )


_INSTEAD = (
    "Otherwise set sandbox.backend to the URL of a SandboxFusion server; or, on a machine that may"
    " be lost, to unsafe-subprocess"
)
NO_BWRAP = (
    "bubblewrap is not installed (no bwrap on PATH), and code that a model wrote does not run"
    " without isolation. Install version 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap;"
    f" Fedora: dnf install bubblewrap; Arch: pacman -S bubblewrap). {_INSTEAD}"
)
_APPARMOR = """\
This machine lets no program make user namespaces but those that AppArmor knows (Ubuntu 24.04). As
root, write /etc/apparmor.d/bwrap:

  abi <abi/4.0>,
  include <tunables/global>
  profile bwrap /usr/bin/bwrap flags=(unconfined) {
    userns,
  }

and load it: apparmor_parser -r /etc/apparmor.d/bwrap"""
_CONTAINER = """\
In a container, its own seccomp filter is in the way. Docker: --security-opt seccomp=unconfined
--security-opt systempaths=unconfined (or a profile that allows unshare, clone with namespaces,
mount, pivot_root); Kubernetes: securityContext.seccompProfile Unconfined, procMount Unmasked. On a
bare machine, user namespaces are off: sysctl user.max_user_namespaces,
kernel.unprivileged_userns_clone"""
# What bwrap says, and what helps. The first that fits.
_CURES = (
    ("setting up uid map: Permission denied", _APPARMOR),
    ("RTM_NEWADDR", _APPARMOR),
    ("Unknown option", "This bubblewrap is too old: 0.8 or newer is needed"),
    ("mount proc", _CONTAINER),
    ("namespace", _CONTAINER),
    ("Operation not permitted", _CONTAINER),
    (
        "Can't find source path",
        "Where you are root, programs run as users of their own: these must be able to read the"
        " folders of sandbox.python",
    ),
    ("Permission denied", _APPARMOR),
)


def advice(said: str) -> str:
    """A message about a bwrap that failed, with what helps.

    Args:
        said: its own words.
    """
    said = said.strip() or "it said nothing"
    cure = next((cure for words, cure in _CURES if words in said), "")
    return f"bubblewrap does not work here: {said}\n" + (f"{cure}\n" if cure else "") + _INSTEAD
