"""verl's config keys, and the messages about them.

`verl_keys.yaml` says what agentrl makes of a key. `verl_defaults.csv` has the keys of verl's
versions; `make verl-keys` writes it from verl's own files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text("utf-8"))


def _by_key(keys_of_texts: dict[str, list[str]]) -> dict[str, str]:
    return {key: text for text, keys in keys_of_texts.items() for key in keys}


RENAMED: dict[str, str] = _TABLE["renamed"]
"""agentrl's key of the same meaning, for each of verl's."""
CHANGED: dict[str, str] = _TABLE["changed"]
"""Advice on the keys whose meaning differs."""
UNNEEDED = _by_key(_TABLE["unneeded"])
"""Advice on the keys that need no counterpart."""
REFUSED = _by_key(_TABLE["refused"])
"""Advice on the keys that change what is learned and have no counterpart."""
WHYS: dict[str, str] = _TABLE["whys"]
"""Why a setting is not verl's, by agentrl's key, or has no counterpart, by verl's."""
SAME: dict[str, list[Any]] = _TABLE["same"]
"""The values of refused keys that are what agentrl does, where that is not verl's default."""
SHARED: list[str] = _TABLE["shared"]
"""The keys that verl and agentrl have in common."""
VALUES: dict[str, dict[Any, Any]] = _TABLE["values"]
"""agentrl's value for each of verl's, for the keys where they are written differently."""
CHOICES: dict[str, Any] = _TABLE["choices"]
"""The choices of some keys, by a name for them."""
MAPPINGS: list[str] = _TABLE["mappings"]
"""The keys whose values are mappings."""
OWN: set[str] = {*_TABLE["own"]}
"""The names of sections in which users of verl put keys of their own."""
FILES: list[str] = _TABLE["files"]
"""The files of verl's own config, such as `ppo_trainer` and `actor/dp_actor`."""
MACHINE: list[str] = _TABLE["machine"]
"""The keys whose defaults are not taken."""

VERL_KEYS: dict[str, str] = {
    **{key: f"Use {ours}" for key, ours in RENAMED.items()},
    **CHANGED,
    **UNNEEDED,
    **REFUSED,
}
"""Advice for each of verl's dotted keys that agentrl does not have."""

_SECTIONS = ("actor_rollout_ref.", "critic.", "custom_reward_function.", "reward_model.")
"""The sections that only verl has."""


@cache
def verl_versions(engine: str = "dp") -> dict[str, dict[str, Any]]:
    """Return the keys of each version of verl, oldest first, with their defaults.

    Args:
        engine: verl's training engine (`model_engine`), whose defaults count where they differ. For
            FSDP and names that are none of verl's it is `dp`.
    """
    with Path(__file__).with_name("verl_defaults.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows.sort(
        key=lambda row: (engine not in (row["engines"] or engine), "dp" not in row["engines"])
    )
    names = {name for row in rows for name in (row["first"], row["last"])}
    order = sorted(names, key=lambda name: [*map(int, name.split("."))])
    versions: dict[str, dict[str, Any]] = {name: {} for name in order}
    for row in rows:
        for name in order[order.index(row["first"]) : order.index(row["last"]) + 1]:
            versions[name].setdefault(row["key"], json.loads(row["default"]))
    return versions


def known_key(path: str) -> str:
    """Return the key of the table that a key of verl's is or is below; "" if there is none."""
    while path and path not in VERL_KEYS:
        path = path.rpartition(".")[0]
    return path


def is_known(path: str) -> bool:
    """Return whether verl has a key: one of the tables', of Hydra's, or a user's own."""
    names = path.split(".")
    paths = {".".join(names[:end]) for end in range(1, len(names) + 1)}
    has_key = any(paths & keys.keys() for keys in verl_versions().values())
    return has_key or path in VERL_KEYS or path in SHARED or not OWN.isdisjoint(names)


def explain_key(path: str, mappings: Collection[str] = ()) -> str:
    """Return the message about a verl key or a key below one; "" if verl has no such key.

    Args:
        path: the key.
        mappings: the keys of agentrl that are mappings, below which users put their own keys.
    """
    if above := known_key(path):
        suffix = path.removeprefix(above) if RENAMED.get(above) in mappings else ""
        return f"this is verl's name. {VERL_KEYS[above]}{suffix}"
    if path.startswith(_SECTIONS) or any(path in keys for keys in verl_versions().values()):
        return "this is verl's name, and agentrl has no such setting"
    return ""


def explain_value(path: str, value: object) -> str:
    """Return the message about a value that only verl accepts; "" for any other value."""
    if path in ("trainer.save_freq", "trainer.test_freq") and value == -1:
        return "use 0 instead of verl's -1"
    if path == "trainer.logger" and "console" in (value if isinstance(value, list) else [value]):
        return "the console is always on: remove it"
    return ""
