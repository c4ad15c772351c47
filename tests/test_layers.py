"""Imports go one way, and heavy packages live in one place each.

Only direct imports count, at any depth of a file: transformers' tokenizers pull torch in by
themselves. A name in a lazily loaded table (`agentrl.__init__`) is a text, not an import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "agentrl"

# A room may look into rooms further up, never into its neighbours or down.
LAYERS = (
    (
        "errors",
        "installation",
        "open_files",
        "plural",
        "regular_files",
        "terminal",
        "torch_threads",
        "trajectory",
    ),
    ("record", "siblings"),
    ("registry",),
    ("answers", "callbacks", "config", "http", "metrics", "signatures", "workers"),
    ("chat", "sandbox"),
    ("data", "engine", "interactions", "rewards", "store", "tools"),
    ("agent_loops", "learner"),
    ("gateway",),
    ("watchdog",),
    ("rollout",),
    ("evaluate", "plan"),
    ("capacity", "report", "servers"),
    ("view",),
    ("trainer",),
    ("cluster",),
    ("compat", "testing"),
    ("demo", "pretrained"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {room: i for i, layer in enumerate(LAYERS) for room in layer}

HEAVY = {
    "torch": ("learner/", "trainer/", "cluster/", "engine/local/", "engine/remote/"),
    "accelerate": ("learner/", "trainer/"),
    "peft": ("learner/", "engine/local/"),
    "ray": ("cluster/",),
    "fastapi": ("tools/serving/", "view/"),
    "uvicorn": ("gateway/", "tools/serving/", "view/"),
    "typer": ("cli/",),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(file: Path) -> str:
    return name_of(file).partition("/")[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


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
