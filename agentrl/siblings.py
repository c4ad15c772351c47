"""Imports of a user file from its folder: `import helpers` in `env.py` finds `helpers.py` there.

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
    siblings = find_siblings(path)
    if not siblings:
        return
    folder = path.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    for file in (path, *siblings):
        for name in _imported_names(file, folder, relative=False):
            for own in (folder / name / "__init__.py", folder / f"{name}.py"):
                if own.is_file() and name != "agentrl":
                    _check_import(file, name, own)
                    break


def _imported_names(file: Path, folder: Path, *, relative: bool = True) -> Iterator[str]:
    """Return the names of the modules and packages that a file may import from a folder.

    Args:
        file: a Python file in the folder, or in a package in it.
        folder: the folder.
        relative: whether to include relative imports.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # The import itself reports this.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and relative and file.parent == folder:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (module.partition(".")[0] for module in modules)


def _files_of(name: str, folder: Path) -> list[Path]:
    """Return the files of the module or package with a name in a folder."""
    package = folder / name
    if (package / "__init__.py").is_file() or any(package.glob("*.py")):
        return sorted(package.rglob("*.py"))
    module = folder / f"{name}.py"
    return [module] if module.is_file() else []


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
