"""The plural of nouns in messages."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return the number and the noun: `1 turn`, `2,048 turns`. The plural ends in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
