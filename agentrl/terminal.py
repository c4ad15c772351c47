"""Print texts to a terminal.

A text of a row, a tool, a model, an agent or a file name may contain escape sequences, which change
the terminal or forge lines. So all commands print with `echo`, and warnings are escaped, too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def printable(text: str) -> str:
    r"""Return a text with characters such as `\x1b` or `\u202e` escaped.

    These are all that are not printable, except for line breaks and tabs: control characters, and
    those that change the writing direction.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text with escapes, to standard output or with `err` to standard error."""
    stream = sys.stderr if err else sys.stdout
    print(printable(text), file=stream, end="\n" if nl else "", flush=True)


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table; the first `left` columns are aligned to the left.

    Each cell stays on its line, and its characters that are not printable are escaped.
    """
    lines = [[" ".join(printable(cell).split()) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def escape_warnings() -> None:
    """Escape the warnings that a program prints because it has no handler for them."""
    if logging.lastResort:
        logging.lastResort.setFormatter(_Formatter())
