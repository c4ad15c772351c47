"""Imports go one way, and heavy packages live in one place each.

Only direct imports count, at any depth of a file: transformers' tokenizers pull torch in by
themselves. A text that `import_module` gets is an import, too. What counts neither is a name in a
lazily loaded table: of `agentrl.__init__`, and the homes of shipped entries (`registry.Registry`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "agentrl"

# A room may look into rooms further up, never into its neighbours or down.
LAYERS = (
    (
        "errors",
        "file_loaders",
        "installation",
        "open_files",
        "plural",
        "process_memory",
        "regular_files",
        "terminal",
        "torch_threads",
    ),
    ("images",),
    ("trajectory",),
    ("record", "replies", "siblings"),
    ("registry",),
    ("shipment",),
    ("answers", "callbacks", "config", "http", "http_server", "metrics", "signatures", "workers"),
    ("chat", "sandbox"),
    ("data", "engine", "interactions", "rewards", "store", "tools"),
    ("agent_loops", "learner"),
    ("gateway",),
    ("doors",),
    ("watchdog",),
    ("player",),
    ("rollout_workers",),
    ("comparison", "rollout"),
    ("evaluate", "preflight"),
    ("trainer",),
    ("cluster",),
    ("report",),
    ("observers", "replay", "view"),
    ("compat", "testing"),
    ("demo", "pretrained"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {room: i for i, layer in enumerate(LAYERS) for room in layer}

HEAVY = {
    "torch": ("learner/", "trainer/", "replay/", "cluster/", "engine/local/", "engine/remote/"),
    "accelerate": ("learner/", "observers/tracking.py"),
    "peft": ("learner/", "engine/local/"),
    "ray": ("cluster/",),
    "fastapi": ("tools/serving/", "view/"),
    "uvicorn": ("http_server/",),
    "typer": ("cli/",),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(file: Path) -> str:
    return name_of(file).partition("/")[0].removesuffix(".py")


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything a file imports."""
    tree, found = ast.parse(file.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and called_name(node).endswith("import_module"):
            found += [(node.lineno, text) for text in texts_of(node.args[0], tree)]
    return found


def called_name(call: ast.Call) -> str:
    """The last part of the name of the function that is called, or an empty text."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def texts_of(value: ast.expr, tree: ast.Module) -> Iterator[str]:
    """The text that an expression is, or that a constant of the module with its name has."""
    if isinstance(value, ast.Constant):
        yield value.value
    elif isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
        yield value.values[0].value
    elif isinstance(value, ast.Name):
        for node in tree.body:
            if isinstance(node, ast.Assign) and value.id in ast.unparse(node.targets[0]):
                constants = (n for n in ast.walk(node.value) if isinstance(n, ast.Constant))
                yield from (c.value for c in constants if isinstance(c.value, str))


def package_files() -> list[Path]:
    """All but the package's front, whose imports are for type checkers, and files for users."""
    return [f for f in FILES if f != PACKAGE / "__init__.py" and "starter" not in f.parts]


@pytest.mark.parametrize("file", package_files(), ids=name_of)
def test_imports_go_one_way(file):
    room = room_of(file)
    assert room in LAYER_OF, f"{room} is new: say in LAYERS where it belongs"
    for line, name in imports(file):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top != "agentrl" or other in (room, "__version__"):
            continue
        assert other in LAYER_OF, f"{name_of(file)}:{line}: import {other} from where it is defined"
        assert LAYER_OF[other] < LAYER_OF[room], (
            f"{name_of(file)}:{line}: {room} looks into {other}"
        )


@pytest.mark.parametrize("file", package_files(), ids=name_of)
def test_heavy_packages_live_in_one_place(file):
    for line, name in imports(file):
        for heavy, places in HEAVY.items():
            if name.partition(".")[0] == heavy:
                place = f"{name_of(file)}:{line}: {heavy}"
                assert name_of(file).startswith(places), f"{place} belongs into {places}"


def test_there_are_no_utility_modules():
    for file in FILES:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        assert not {"utils", "util", "helpers", "common", "misc"} & {*parts}, file


LONGEST_BODY = 60
"""The most lines of a function below its signature, without blank lines, comments, imports and
docstrings: what a reader keeps in mind."""


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    imported = {
        line
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = set(range(body[0].lineno, (function.end_lineno or 0) + 1)) - imported
    return sum(bool(text := source[n - 1].strip()) and text[0] != "#" for n in lines)


def test_a_function_fits_on_a_page():
    long = [
        f"{name_of(file)}:{node.lineno}: {node.name} has {length} lines"
        for file in FILES
        for source in [file.read_text().splitlines()]
        for node in ast.walk(ast.parse("\n".join(source)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := body_lines(node, source)) > LONGEST_BODY
    ]
    assert not long, "\n".join(long)
