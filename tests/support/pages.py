"""Parts of benchmarks/templates.md that a program writes."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "benchmarks" / "templates.md"


def with_text_between(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with another text between two marks, which stay."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + text + end + after
