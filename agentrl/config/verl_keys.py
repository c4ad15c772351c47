"""verl's config keys (`verl_keys.yaml`), and the messages about them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text("utf-8"))

RENAMED: dict[str, str] = _TABLE["renamed"]
"""agentrl's key of the same meaning, for each of verl's."""
CHANGED: dict[str, str] = _TABLE["changed"]
"""Advice on the keys whose meaning differs."""
UNNEEDED: dict[str, str] = _TABLE["unneeded"]
"""Advice on the keys that need no counterpart."""
REFUSED: dict[str, dict[str, Any]] = _TABLE["refused"]
"""The keys that change what is learned and have no counterpart: `text` and `same`."""
SHARED: list[str] = _TABLE["shared"]
"""The keys that verl and agentrl have in common."""
VALUES: dict[str, dict[Any, Any]] = _TABLE["values"]
"""agentrl's value for each of verl's, for the keys where they are written differently."""
DEFAULTS: dict[str, Any] = _TABLE["defaults"]
"""verl's defaults."""

VERL_KEYS: dict[str, str] = {
    **{key: f"Use {ours}" for key, ours in RENAMED.items()},
    **CHANGED,
    **UNNEEDED,
    **{key: entry["text"] for key, entry in REFUSED.items()},
}
"""Advice for each of verl's dotted keys that agentrl does not have."""

_SECTIONS = ("actor_rollout_ref.", "critic.", "custom_reward_function.", "reward_model.")
"""The sections that only verl has."""


def known_key(path: str) -> str:
    """Return the key of the table that a key of verl's is or is below; "" if there is none."""
    while path and path not in VERL_KEYS:
        path = path.rpartition(".")[0]
    return path


def explain_key(path: str, mappings: Collection[str] = ()) -> str:
    """Return the message about a verl key or a key below one; "" if verl has no such key.

    Args:
        path: the key.
        mappings: the keys of agentrl that are mappings, below which users put their own keys.
    """
    if above := known_key(path):
        suffix = path.removeprefix(above) if RENAMED.get(above) in mappings else ""
        return f"this is verl's name. {VERL_KEYS[above]}{suffix}"
    if path.startswith(_SECTIONS):
        return "this is verl's name, and agentrl has no such setting"
    return ""


def explain_value(path: str, value: object) -> str:
    """Return the message about a value that only verl accepts; "" for any other value."""
    if path in ("trainer.save_freq", "trainer.test_freq") and value == -1:
        return "use 0 instead of verl's -1"
    if path == "trainer.logger" and "console" in (value if isinstance(value, list) else [value]):
        return "the console is always on: remove it"
    return ""
