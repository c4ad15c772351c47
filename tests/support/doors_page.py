"""Writes the table of doors in docs/doors.md: `make docs`.

A cell is marked if a test is marked with `proves(door, column)`; `200 episodes at once` gives the
number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.pages import with_text_between

from agentrl.doors.door import find_door
from agentrl.file_loaders import SHIPPED_DOORS

TESTS = Path(__file__).parents[1] / "doors"
PAGE = TESTS.parents[1] / "docs" / "doors.md"
BEGIN, END = "<!-- table of doors: make docs -->\n", "<!-- end of the table of doors -->\n"
COLUMNS = ("rows", "tools", "user", "reward", "sandbox", "episodes at once", "training")


def proved() -> Iterator[tuple[str, str, str]]:
    """Yield the door, the column and the cell of each mark."""
    for file in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.proves":
                doors, *columns = (ast.literal_eval(argument) for argument in node.args)
                for column in columns:
                    number = re.match(r"\d+ ", column)
                    name = column[number.end() :] if number else column
                    assert name in COLUMNS, f"{file.name}: {column}"
                    cell = number[0].strip() if number else "✓"
                    yield from ((door, name, cell) for door in doors.split())


def versions() -> dict[str, str]:
    """Return the versions of each door's package that the tests install."""
    found: dict[str, list[str]] = {}
    for file in sorted((TESTS / "packages").glob("*.txt")):
        for line in file.read_text().splitlines():
            name, _, version = line.partition("==")
            if version:
                found.setdefault(name, []).append(version)
    return {name: ", ".join(sorted(numbers)) for name, numbers in found.items()}


def table() -> str:
    """Return the table."""
    marks = {(door, column): cell for door, column, cell in proved()}
    known = versions()
    lines = [f"| door | tested with | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in SHIPPED_DOORS:
        assert find_door(name).name == name
        cells = [marks.get((name, column), "") for column in COLUMNS]
        lines.append(f"| {name} | {known.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table."""
    return with_text_between(PAGE.read_text(), BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(page())
