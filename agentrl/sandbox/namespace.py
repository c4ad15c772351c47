"""The bwrap command line that isolates a program, and explanations of bwrap's failures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox.program import Limits
from agentrl.sandbox.seccomp import seccomp_filter

FOLDER = "/tmp"
"""The program's folder inside the namespace."""
SHM_BYTES = 4 * 2**20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONPATH": FOLDER,
    # The output must not depend on the order of a set, and the number of threads must not depend on
    # the machine's cores.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SHELL = '"$@"; exit $?'
"""The command of process 1. Without `exit`, the shell would replace itself by the program."""


class InheritedFiles(ExitStack):
    """Files in memory that a program inherits as open descriptors.

    `close` closes the descriptors of this process, after the program has inherited its copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fds: list[int] = []
        """The descriptors that the program inherits."""

    def add(self, content: bytes) -> int:
        """Return a descriptor of a memory file with this content, positioned at its start."""
        fd = self.take(os.memfd_create("agentrl"))
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def take(self, fd: int) -> int:
        """Add a descriptor, which is closed with this object."""
        self.fds.append(fd)
        self.callback(os.close, fd)
        return fd


def bwrap_options(
    python: str,
    limits: Limits,
    inherited: InheritedFiles,
    files: Mapping[str, bytes],
    scripts: Mapping[str, bytes],
    uid: int | None,
) -> list[str]:
    """Return bwrap and its options, without the descriptors that `Child` adds.

    Args:
        python: the interpreter, which is mounted.
        limits: the sizes of the writable folders.
        inherited: the contents of files are added to it.
        files: the files in the program's folder.
        scripts: read-only files, by their absolute path in the namespace.
        uid: the user id of the program; None for the user of this process.

    Raises:
        SandboxError: bwrap or the interpreter does not exist.
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
        "--as-pid-1", "--seccomp", str(inherited.add(seccomp_filter())),
        "--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev", "--size", size, "--tmpfs", FOLDER,
        # Last, because a Python environment may itself be below /tmp.
        *_mounts(python),
    ]  # fmt: skip
    for path, content in files.items():
        command += ["--file", str(inherited.add(content)), f"{FOLDER}/{path}"]
    for path, content in scripts.items():
        command += ["--file", str(inherited.add(content)), path]
    command += ["--remount-ro", "/", "--chdir", FOLDER, "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return command


def rlimit_command(limits: Limits) -> list[str]:
    """Return the command that sets the limits of each process.

    The command runs inside the namespace, where only the program's processes are counted. The limit
    of processes is higher by one, because process 1 is counted as well.
    """
    return [
        "/usr/bin/prlimit", f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
        f"--as={limits.memory_mb * 2**20}", f"--fsize={limits.disk_mb * 2**20}",
        f"--nofile={limits.open_files}", f"--nproc={limits.processes + 1}", "--core=0", "--",
    ]  # fmt: skip


def _program(name: str) -> str:
    if path := shutil.which(name):
        return path
    if name == "bwrap":
        raise SandboxError(NO_BWRAP)
    raise SandboxError(
        f"{name} is not installed (package util-linux), so programs cannot run as other users"
    )


@cache
def _mounts(python: str) -> Sequence[str]:
    """Return the options that mount the folders that a program needs, read-only."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path).removeprefix("/"), name]
        elif path.is_dir():
            mounts += ["--ro-bind", name, name]
    # The paths of libraries, and the links to programs that several packages provide.
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        mounts += ["--ro-bind-try", name, name]
    for folder in python_folders(python):
        mounts += ["--ro-bind", str(folder), str(folder)]
    return mounts


def python_folders(python: str) -> list[Path]:
    """Return the folders outside of /usr that an interpreter needs: environment and installation.

    Args:
        python: `sandbox.python`.

    Raises:
        SandboxError: the interpreter does not exist, or its folder contains more than Python.
    """
    path = Path(os.path.abspath(python))
    if not os.access(path, os.X_OK) or path.is_dir():
        raise SandboxError(
            f"sandbox.python={python} is not an executable file. Name an interpreter, such as"
            " /usr/bin/python3 (Debian, Ubuntu: apt-get install python3)"
        )
    folders: list[Path] = []
    # Follow every link: the python of an environment is a link to the installation's,
    # possibly through another environment.
    while True:
        folder = path.parent.parent
        if not folder.is_relative_to("/usr") and path.parent != Path("/bin"):
            _check_python_folder(folder, python)
            folders.append(folder)
        if not path.is_symlink():
            break
        path = Path(os.path.abspath(path.parent / path.readlink()))
    resolved = path.resolve()
    if resolved != path and not resolved.is_relative_to("/usr"):
        _check_python_folder(resolved.parent.parent, python)
        folders.append(resolved.parent.parent)
    return list(dict.fromkeys(folders))


def _check_python_folder(folder: Path, python: str) -> None:
    """Raise SandboxError if a folder contains more than Python, such as a home directory."""
    if not any((folder / "lib").glob("python3*")) and not (folder / "pyvenv.cfg").exists():
        raise SandboxError(
            f"sandbox.python={python}: {folder} is neither a Python environment nor an installation"
            " (no lib/python3* in it), so it is not shown to programs. Name the interpreter of a"
            " virtual environment, or /usr/bin/python3"
        )
    if Path.home().is_relative_to(folder):
        raise SandboxError(
            f"sandbox.python={python}: mounting {folder} would show your whole home directory"
            " to programs. Make a virtual environment elsewhere and name its interpreter"
        )


_ALTERNATIVES = (
    "Otherwise set sandbox.backend to the URL of a SandboxFusion server; or, on a disposable"
    " machine, to unsafe-subprocess"
)
NO_BWRAP = (
    "bubblewrap is not installed (no bwrap on PATH), and code that a model wrote does not run"
    " without isolation. Install version 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap;"
    f" Fedora: dnf install bubblewrap; Arch: pacman -S bubblewrap). {_ALTERNATIVES}"
)
_APPARMOR = """\
This machine allows user namespaces only for programs with an AppArmor profile (Ubuntu 24.04). As
root, write /etc/apparmor.d/bwrap:

  abi <abi/4.0>,
  include <tunables/global>
  profile bwrap /usr/bin/bwrap flags=(unconfined) {
    userns,
  }

and load it: apparmor_parser -r /etc/apparmor.d/bwrap"""
_CONTAINER = """\
In a container, the seccomp filter of the container blocks bubblewrap. Docker: --security-opt
seccomp=unconfined --security-opt systempaths=unconfined (or a profile that allows unshare, clone
with namespaces, mount, pivot_root); Kubernetes: securityContext.seccompProfile Unconfined,
procMount Unmasked. On a machine without containers, user namespaces are off: sysctl
user.max_user_namespaces, kernel.unprivileged_userns_clone"""
# Parts of bwrap's messages, and the remedies. The first match counts.
_FIXES = (
    ("setting up uid map: Permission denied", _APPARMOR),
    ("RTM_NEWADDR", _APPARMOR),
    ("Unknown option", "This bubblewrap is too old: 0.8 or newer is needed"),
    ("mount proc", _CONTAINER),
    ("namespace", _CONTAINER),
    ("Operation not permitted", _CONTAINER),
    (
        "Can't find source path",
        "As root, programs run as other users, which must be able to read the folders of"
        " sandbox.python",
    ),
    ("Permission denied", _APPARMOR),
)


def explain_failure(output: str) -> str:
    """Return a message about a failure of bwrap, with a remedy.

    Args:
        output: the output of bwrap.
    """
    output = output.strip() or "it printed nothing"
    fix = next((fix for words, fix in _FIXES if words in output), "")
    return (
        f"bubblewrap does not work here: {output}\n" + (f"{fix}\n" if fix else "") + _ALTERNATIVES
    )
