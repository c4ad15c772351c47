"""All that is wrong with a dataset, gathered and said in one error."""

from __future__ import annotations

from agentrl.errors import DataError

SHOWN = 20
"""How many different mistakes a message lists."""


class Mistakes:
    """What was found in the rows of one file. The same mistake in many rows is said once."""

    def __init__(self, path: str):
        self.path = path
        self._rows: dict[tuple[str, str], list[int]] = {}

    def add(self, row: int, field: str, what: str) -> None:
        """Note that `field` of row `row` (from 0) is wrong, and how to mend it."""
        self._rows.setdefault((field, what), []).append(row)

    @property
    def rows(self) -> set[int]:
        """The rows that something is wrong with."""
        return {row for rows in self._rows.values() for row in rows}

    def raise_any(self) -> None:
        """Raise what was noted, if anything.

        Raises:
            DataError: the first `SHOWN` different mistakes, and how many there are.
        """
        if not self._rows:
            return
        lines = []
        for (field, what), rows in list(self._rows.items())[:SHOWN]:
            more = f" (and in {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
            lines.append(f"{self.path}: row {rows[0]}, {field}: {what}{more}")
        hidden = len(self._rows) - len(lines)
        if hidden:
            lines.append(f"and {hidden:,} more kinds of mistakes")
        if len(lines) == 1:
            raise DataError(lines[0])
        wrong = len(self.rows)
        listed = "".join(f"\n  - {line}" for line in lines)
        raise DataError(f"{wrong:,} rows are wrong (rows count from 0):{listed}")
