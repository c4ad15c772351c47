"""Tables of pages whose cells tests prove: `@pytest.mark.proves(rows, *columns)`.

`rows` are names with spaces between them. A column may begin with a number, which is then the cell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.pages import with_text_between


def read_proofs(files: Iterable[Path]) -> dict[tuple[str, str], str]:
    """Return the cells that tests prove, by row and column."""
    cells = {}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.proves":
                rows, *columns = (ast.literal_eval(argument) for argument in node.args)
                for column in columns:
                    number, name = re.fullmatch(r"(?:(\d+) )?(.*)", column).groups()
                    cells |= {(row, name): number or "✓" for row in rows.split()}
    return cells


def read_versions(files: Iterable[Path]) -> dict[str, str]:
    """Return the versions of the packages in lists of requirements."""
    versions: dict[str, list[str]] = {}
    for file in sorted(files):
        for line in file.read_text().splitlines():
            if match := re.search(r"([\w-]+)(?:\[\w+\])?(?:==|@)(\d\S*)$", line):
                versions.setdefault(match[1], []).append(match[2])
    return {name: ", ".join(sorted(numbers)) for name, numbers in versions.items()}


def with_table(
    page: str,
    name: str,
    columns: Sequence[str],
    rows: Mapping[str, Mapping[str, str]],
    proofs: Mapping[tuple[str, str], str],
) -> str:
    """Return a page with its table.

    Args:
        page: the page.
        name: the name of the table, between comment marks on the page.
        columns: the columns that tests prove.
        rows: for each row, the columns before them.
        proofs: the cells that tests prove.
    """
    unknown = [key for key in proofs if key[0] not in rows or key[1] not in columns]
    assert not unknown, f"not in the table of {name}: {unknown}"
    heads = [*next(iter(rows.values())), *columns]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, first in rows.items():
        cells = [*first.values(), *(proofs.get((row, column), "") for column in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    begin, end = f"<!-- table of {name}: make docs -->\n", f"<!-- end of the table of {name} -->\n"
    assert begin in page and end in page
    return with_text_between(page, begin, end, "\n".join(lines) + "\n")
