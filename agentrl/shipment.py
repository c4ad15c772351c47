"""Sends the user's files to other processes of a run, and checks that paths and packages match."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir

from agentrl import __version__, registry
from agentrl.errors import ConfigError
from agentrl.regular_files import atomic_file
from agentrl.siblings import find_siblings

PACKAGES = ("torch", "transformers", "accelerate", "peft")
"""Packages whose versions must be the same on all machines."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """The files, paths and names of the controller that its ranks or rollout workers need."""

    folder: str = field(default_factory=os.getcwd)
    """The working directory, which relative paths start from."""
    files: tuple[tuple[str, Mapping[str, bytes]], ...] = ()
    """Each of the user's files: its path, and the contents of the file and of the modules of its
    folder that it imports, by their paths within the folder."""
    shelf: tuple[str, ...] = ()
    """Names of files that come with agentrl, and addresses of servers and environments."""
    paths: tuple[str, ...] = ()
    """Folders and files that exist for the controller and must exist for every rank."""
    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The names that the user registered, by kind."""

    @classmethod
    def pack(cls, files: Iterable[str], paths: Iterable[str], *, plays: bool = False) -> Shipment:
        """Read the user's files, and record the names that they registered in this process.

        Args:
            files: as in `config.files`; they are already loaded.
            paths: paths that must exist for every rank if they exist here.
            plays: whether the other processes play rollouts. Ranks call no tools.

        Raises:
            UserError: a file is missing.
        """
        addresses = ("mcp+", registry.ENVIRONMENT)
        files = [f for f in files if plays or not f.startswith(addresses)]
        named = [f for f in files if f.startswith((registry.SHELF, *addresses))]
        user_files = [registry.resolve_file(f) for f in files if f not in named]
        return cls(
            files=tuple((str(path), _read(path)) for path in user_files),
            shelf=tuple(named),
            paths=tuple(path for path in paths if path and Path(path).exists()),
            names=user_registrations(),
        )

    def unpack(self) -> None:
        """Load the files in another process, which may be on another machine.

        A file that exists there, at the same path with the same content, is loaded from that path.
        Any other file is copied to a temporary folder, with the modules of its folder that it
        imports, and loaded from there.

        Raises:
            UserError: a file does not load.
            ConfigError: a path does not exist, or a registered name is not registered here.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        if missing := [path for path in self.paths if not Path(path).exists()]:
            raise ConfigError(
                f"{', '.join(missing)}: exists on the machine of the run, but not here. Put it on a"
                " file system that all machines see, at the same path"
            )
        for name in self.shelf:
            registry.load_file_again(name)
        for path, contents in self.files:
            registry.load_file_again(str(local_copy(Path(path), contents)))
        own_names = user_registrations()
        for kind, names in self.names.items():
            if missing_names := sorted(names - own_names.get(kind, frozenset())):
                raise ConfigError(
                    f"the run has the {kind} {', '.join(map(repr, missing_names))}, but this"
                    " process does not. Define it in a file and name the file with --file (files)"
                )


def user_registrations() -> dict[str, frozenset[str]]:
    """Return the names that the user's own code registers, by kind of registry."""
    return {kind.kind: frozenset(kind.user_names()) for kind in registry.all_registries()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must be the same everywhere."""
    result = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "agentrl": __version__}
    for package in PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = "none"
    return result


def _read(path: Path) -> dict[str, bytes]:
    """Return the contents of a user file and of the modules of its folder that it imports."""
    files = [path, *find_siblings(path)] if path.suffix == ".py" else [path]
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in files}


def local_copy(path: Path, contents: Mapping[str, bytes]) -> Path:
    """Return a path of the file on this machine; copy it to a temporary folder if necessary.

    Args:
        path: the file's path on the controller's machine.
        contents: of the file and the modules that it imports, by their paths within its folder.
    """
    if all(_has_content(path.parent / name, content) for name, content in contents.items()):
        return path
    # The folder is named by the contents, so all ranks of a machine write the same files.
    folder = Path(gettempdir()) / f"agentrl-files-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: files cannot be written there")
    digest = sha256(repr(sorted(contents.items())).encode()).hexdigest()
    copy_folder = folder / digest[:32]
    for name, content in contents.items():
        copy = copy_folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(copy) as staging:
            staging.write_bytes(content)
    return copy_folder / path.name


def _has_content(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
