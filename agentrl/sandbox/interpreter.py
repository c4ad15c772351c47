"""The Python that programs are run with: where it is, and what of this machine it needs to see."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.errors import SandboxError


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
