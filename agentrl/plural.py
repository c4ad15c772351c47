"""Numbers in messages: the plural of nouns, and ranges of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def plural(count: int, noun: str) -> str:
    """Return the number and the noun: `1 turn`, `2,048 turns`. The plural ends in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_steps(steps: Sequence[int]) -> str:
    """Return ascending steps as text, such as `1-4, 7`; "none" for no steps."""
    return ", ".join(_ranges(steps)) or "none"


def _ranges(steps: Sequence[int]) -> Iterator[str]:
    first = 0
    for i, step in enumerate(steps):
        if i + 1 == len(steps) or steps[i + 1] != step + 1:
            yield f"{steps[first]}-{step}" if step > steps[first] else f"{step}"
            first = i + 1
