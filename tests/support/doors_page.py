"""Writes the table of doors in docs/doors.md: `make docs`."""

from __future__ import annotations

from pathlib import Path

from support.proofs import read_proofs, read_versions, with_table

from agentrl.file_loaders import SHIPPED_DOORS

TESTS = Path(__file__).parents[1] / "doors"
PAGE = TESTS.parents[1] / "docs" / "doors.md"
COLUMNS = ("rows", "tools", "user", "reward", "sandbox", "episodes at once", "training")


def page() -> str:
    """Return the page with the table."""
    versions = read_versions((TESTS / "packages").glob("*.txt"))
    rows = {name: {"door": name, "tested with": versions.get(name, "")} for name in SHIPPED_DOORS}
    proofs = read_proofs(TESTS.glob("test_*.py"))
    return with_table(PAGE.read_text(), "doors", COLUMNS, rows, proofs)


if __name__ == "__main__":
    PAGE.write_text(page())
