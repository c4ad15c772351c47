"""Config keys that were removed, with what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: dict[str, tuple[Any, str]] = {
    "algorithm.whiten_rewards": (
        False, "algorithm.whiten_advantages normalizes the advantages",
    ),
    "trainer.watchdog_s": (300.0, "the time is 300 seconds in all runs"),
}  # fmt: skip
"""For each key its value in all runs today, and the reason. A stored config may have that value."""


def is_constant(path: str, value: Any) -> bool:
    """Return whether a key was removed and has the value that all runs have today."""
    return path in REMOVED and value in (REMOVED[path][0], None)


def without_removed(tree: Any) -> Any:
    """Return a tree of sections without the removed keys that have the value of all runs."""
    return {
        section: {k: v for k, v in keys.items() if not is_constant(f"{section}.{k}", v)}
        if isinstance(keys, Mapping)
        else keys
        for section, keys in tree.items()
    }
