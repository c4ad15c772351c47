"""verl's config keys (`keys.yaml`), and the messages about them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text("utf-8"))
_RENAMED: dict[str, str] = _TABLE["renamed"]

VERL_KEYS: dict[str, str] = {
    **{key: f"Use {ours}" for key, ours in _RENAMED.items()},
    **_TABLE["notes"],
}
"""Advice for each of verl's dotted keys."""

_SECTIONS = ("actor_rollout_ref.", "critic.", "custom_reward_function.", "reward_model.")
"""The sections that only verl has."""


def explain_key(path: str, mappings: Collection[str] = ()) -> str:
    """Return the message about a verl key or a key below one; "" if verl has no such key.

    Args:
        path: the key.
        mappings: the keys of agentrl that are mappings, below which users put their own keys.
    """
    above, below = path, ""
    while above and above not in VERL_KEYS:
        above, _, name = above.rpartition(".")
        below = f".{name}{below}"
    if above:
        suffix = below if _RENAMED.get(above) in mappings else ""
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
