"""Virtual environments of doors: `agentrl doors install` and `agentrl doors use`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.doors.door import Door
from agentrl.doors.program import environment_folder
from agentrl.errors import UserError

PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")


def install(door: Door, packages: Sequence[str] = (), python: str = "") -> str:
    """Install a door's packages, and others, into its virtual environment; return their version.

    Args:
        door: the door.
        packages: other packages, or another version of its own, as pip takes them.
        python: the Python for a new virtual environment; "": the existing one, else one with this
            Python, or with the first on PATH that is new enough.

    Raises:
        UserError: no Python is new enough, or pip failed.
    """
    folder = environment_folder(door.name)
    if python or not (folder / "bin" / "python").exists():
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        _run([python or _find_python(door), "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    _run([*pip, "-q", *door.requirements, *packages])
    return installed_version(door)


def use(door: Door, folder: Path) -> str:
    """Let a door use an existing virtual environment; return the version of its package.

    Raises:
        UserError: the folder is not a virtual environment, or it does not have the package; or the
            door has an environment already.
    """
    folder = folder.expanduser()
    if not (folder / "bin" / "python").exists():
        raise UserError(f"{folder} is no virtual environment: it has no bin/python")
    if not (version := _version_in(folder, door)):
        raise UserError(f"{folder} does not have the package {door.name}")
    link = environment_folder(door.name)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise UserError(f"{door.name} has an environment already. Remove it first: rm -r {link}")
    link.symlink_to(folder.resolve())
    return version


def installed_version(door: Door) -> str:
    """Return the version of a door's package in its virtual environment; "" without a package."""
    return _version_in(environment_folder(door.name), door)


def _version_in(folder: Path, door: Door) -> str:
    python = folder / "bin" / "python"
    if not python.exists():
        return ""
    code = f"from importlib.metadata import version; print(version({door.name!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def _find_python(door: Door) -> str:
    oldest = ".".join(map(str, door.python))
    check = f"import sys, ensurepip; sys.exit(sys.version_info < {door.python})"
    for name in (sys.executable, *filter(None, map(shutil.which, PYTHONS))):
        if subprocess.run([name, "-c", check], capture_output=True).returncode == 0:
            return name
    raise UserError(
        f"{door.name} needs Python {oldest} or newer, and none is on PATH. Name one:"
        f" agentrl doors install {door.name} --python /path/to/python{oldest}"
    )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-12:])
        raise UserError(f"`{' '.join(command)}` failed:\n{lines}")
