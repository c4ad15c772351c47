"""Modules named `verl...`, for user files that import verl where it is not installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from abc import ABCMeta
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from agentrl.errors import UserError

_TABLE = yaml.safe_load(Path(__file__).with_name("stand_ins.yaml").read_text("utf-8"))
_MODULES: dict[str, list[str]] = _TABLE["modules"]
"""agentrl's module (in `agentrl.compat.verl`) for each of verl's, and the names that it replaces;
"verl's:ours" where the two names differ."""
_PACKAGES = {name.rpartition(".")[0] for name in (*_MODULES, "verl.")}
_REFUSED: dict[str, str] = _TABLE["refused"]
"""Modules of verl's that agentrl does not replace, with the reason."""
_DECORATORS: dict[str, str] = _TABLE["decorators"]
"""verl's decorators that register what agentrl refuses, with the reason."""

_FOLDER = "agentrl_user_folder_"
"""The beginning of the names of packages for files with relative imports."""


def is_missing(error: ImportError) -> bool:
    """Return whether an import failed because verl is missing and `stand_in` was not called."""
    return (error.name or "").partition(".")[0] == "verl" and not _stands_in()


def stand_in() -> None:
    """Make `import verl...` find agentrl's stand-ins, unless verl is installed."""
    if not _stands_in():
        sys.meta_path.append(_Finder())  # Last, so that an installed verl is found first.


def is_relative(error: ImportError) -> bool:
    """Return whether an import failed because it is relative, in a file outside of a package."""
    return "relative import with no known parent package" in str(error)


def load_relative(path: Path) -> ModuleType:
    """Run a file that has relative imports (`from .base import ...`) and return its module.

    A relative import is searched in the file's folder, then among verl's modules: classes that were
    copied from verl's own folders import their base class in this way.

    Raises:
        UserError: there is no such file and no such module.
    """
    stand_in()
    folder = path.resolve().parent
    package = _FOLDER + blake2b(str(folder).encode(), digest_size=8).hexdigest()
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"{package}.{path.stem}")


def _stands_in() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(Loader):
    """Loads agentrl's stand-ins for verl's modules.

    A stand-in is an empty module. Its names are looked up when they are used. A name that agentrl
    does not replace is a `_Placeholder`, because many files import more than they use here.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(_FOLDER):
            return self._find_relative(name, path)
        if name.partition(".")[0] != "verl":
            return None
        parent = sys.modules.get("verl")
        if parent is not None and not isinstance(parent, _Module):
            return None  # verl is installed.
        if name in _REFUSED:
            raise UserError(f"`import {name}`: {_REFUSED[name]}.")
        is_package = name in _PACKAGES or name not in _MODULES
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def _find_relative(
        self, name: str, path: Sequence[str] | None
    ) -> importlib.machinery.ModuleSpec:
        """Find a verl module by the last part of its name."""
        leaf = name.rpartition(".")[2]
        by_leaf = {module.rpartition(".")[2]: module for module in (*_MODULES, *_REFUSED)}
        if leaf not in by_leaf:
            replaced = ", ".join(sorted({module.rpartition(".")[2] for module in _MODULES}))
            raise UserError(
                f"`from .{leaf} import`: there is no {leaf}.py in {', '.join(path or ())}, and no"
                f" such module among those of verl's that agentrl replaces: {replaced}"
            )
        importlib.import_module(by_leaf[leaf])
        return importlib.machinery.ModuleSpec(name, self, origin=by_leaf[leaf])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name, spec.origin or spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _NotReplaced(UserError, AttributeError):
    """A file uses a name of verl's that agentrl does not replace."""


class _Placeholder(ABCMeta):
    """The type of classes in place of names of verl's that agentrl does not replace.

    They may be imported, be base classes and occur in annotations. A call or an attribute raises.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._error()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise cls._error()

    def _error(cls) -> _NotReplaced:
        missing = next(c for c in reversed(cls.__mro__) if isinstance(c, _Placeholder))
        names = _MODULES.get(missing.__module__, ("",))[1:]
        replaced = ", ".join(n.partition(":")[0] for n in names) or "nothing of this module"
        return _NotReplaced(
            f"`from {missing.__module__} import {missing.__name__}`, which {cls.__name__} uses:"
            f" verl is not installed, and agentrl replaces {replaced}. docs/verl.md says what to"
            " write instead of the rest."
        )


def _refuse(decorator: str, name: object) -> None:
    """Stand for a decorator with the name of what it registers.

    Raises:
        UserError: always.
    """
    raise UserError(f"@{decorator.rpartition('.')[2]}({name!r}): {_DECORATORS[decorator]}.")


class _Module(ModuleType):
    """A module that looks its names up in agentrl, or in an installed verl, when they are used."""

    def __init__(self, name: str, replaced: str):
        super().__init__(name)
        self._replaced = replaced
        """The name of the verl module that this module replaces."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._replaced != self.__name__:
            return getattr(importlib.import_module(self._replaced), name)
        inner = f"{self.__name__}.{name}"
        if inner in _MODULES or inner in _PACKAGES or inner in _REFUSED:
            return importlib.import_module(inner)
        if inner in _DECORATORS:
            return partial(_refuse, inner)
        home, *names = _MODULES.get(self.__name__, ("",))
        names_here = {n.partition(":")[0]: n.rpartition(":")[2] for n in names}
        if name not in names_here:
            return _Placeholder(name, (), {"__module__": self.__name__})
        return getattr(importlib.import_module(f"agentrl.compat.verl.{home}"), names_here[name])
