"""Folders that pass weights from process to process."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from agentrl.errors import ConfigError
from agentrl.workers.owned_folder import OwnedFolder


def transfer_folder() -> TemporaryDirectory[str]:
    """Create a temporary folder that passes files from process to process.

    It is in TMPDIR. Processes on other machines that write or read it must see it
    (`check_folder_visible`).
    """
    return TemporaryDirectory(dir=_owned_folder(gettempdir(), os.getpid()))


def _owned_folder(parent: str, pid: int) -> Path:
    """Return the folder of this process for its temporary folders."""
    folder = _owned_folders.get((parent, pid))
    if folder is None or not folder.path.exists():  # A machine may remove what is old in /tmp.
        folder = _owned_folders[parent, pid] = OwnedFolder("weights", parent)
    return folder.path


_owned_folders: dict[tuple[str, int], OwnedFolder] = {}


def check_folder_visible(path: Path, where: str = "this machine") -> None:
    """Check that this machine sees a folder that passes weights.

    Args:
        path: a `transfer_folder`, or a path in one, created on the machine of the run.
        where: the name of this machine.

    Raises:
        ConfigError: this machine does not see the folder.
    """
    if not path.exists():
        raise ConfigError(
            f"weights are passed through files in {gettempdir()} of the run's machine, but {where}"
            f" does not see {path}. Set TMPDIR to a folder on a file system that all machines see"
        )
