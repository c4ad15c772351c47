"""Imports of a user file from its folder: `import helpers` in `env.py` finds `helpers.py` there.

What is found nowhere else is searched in the current folder: verl's recipes import `recipe.NAME`.

The folder is added to the end of `sys.path`, and only if the file imports something from it. So no
other import changes its meaning. The modules of the folder keep their plain names. Python has one
module of each name, so a name that means another module already is refused.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import UserError

_ELSEWHERE = ("agentrl", "verl")
"""Packages that a folder never provides, also if it is that of a git clone: agentrl is installed,
and `agentrl.compat.verl` provides verl if it is not installed."""


def find_siblings(path: Path) -> list[Path]:
    """Return the Python files of its folder that a file imports, directly or through each other.

    Imports count anywhere in the code. Of a package, all Python files are returned.
    """
    siblings: dict[Path, None] = {}
    unread = [path]
    while unread:
        for name in _imported_names(unread.pop(), path.parent):
            for file in _files_of(name, path.parent):
                if file != path and file not in siblings:
                    siblings[file] = None
                    unread.append(file)
    return list(siblings)


def make_siblings_importable(path: Path) -> None:
    """Let a file import the modules of its folder, now and when its functions run.

    Raises:
        UserError: an imported name means another module than the one in the folder: one that is
            installed, or one of another user file's folder.
    """
    folder, here = path.parent, Path.cwd()
    if siblings := find_siblings(path):
        _append(folder)
    for file in (path, *siblings):
        for name in _imported_names(file, folder, relative=False):
            top = name.partition(".")[0]
            for own in (folder / top / "__init__.py", folder / f"{top}.py"):
                if own.is_file():
                    _check_import(file, top, own)
                    break
    for name in _imported_names(path, folder, relative=False):
        if _files_of(name, here) and importlib.util.find_spec(name.partition(".")[0]) is None:
            _append(here)


def _append(folder: Path) -> None:
    """Search a folder in all later imports, after all other places."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def _imported_names(file: Path, folder: Path, *, relative: bool = True) -> Iterator[str]:
    """Return the dotted names that a file may import from a folder.

    They include names that may be modules: for `from a import b`, "a" and "a.b".

    Args:
        file: a Python file in the folder, or in a package in it.
        folder: the folder.
        relative: whether to include relative imports.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # The import itself reports this.
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level and not (relative and file.parent == folder):
                continue
            parent = [node.module] if node.module else []
            names += [*parent, *(".".join([*parent, alias.name]) for alias in node.names)]
    yield from (name for name in names if name.partition(".")[0] not in _ELSEWHERE)


def _files_of(name: str, folder: Path) -> list[Path]:
    """Return the files in a folder of the module or package with a dotted name.

    If its first part is a package with an `__init__.py`, these are all files of that package.
    """
    top, *rest = name.split(".")
    if (folder / top / "__init__.py").is_file():
        return sorted((folder / top).rglob("*.py"))
    if (module := folder / f"{top}.py").is_file():
        return [module]
    return _files_of(".".join(rest), folder / top) if rest and (folder / top).is_dir() else []


def _check_import(file: Path, name: str, own: Path) -> None:
    """Raise `UserError` if `import NAME` finds another file than `own`."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module else importlib.util.find_spec(name)
    found = getattr(module, "__file__", None) or (spec and spec.origin) or "another module"
    if found in ("built-in", "frozen"):
        found = "Python's own module"
    elif Path(found).resolve() == own:
        return
    raise UserError(
        f"{file}: `import {name}` finds {found}, not {own}. Give the file or folder in"
        f" {own.parents[own.name == '__init__.py']} another name"
    )
