"""Read a config of verl's: a YAML file for Hydra, which verl reads with OmegaConf.

Supported are what verl's own example configs use: `defaults` lists, and the interpolations
`${section.key}`, `${.key}`, `${oc.select:section.key,DEFAULT}` and `${oc.env:NAME,DEFAULT}`. verl's
own configs (`ppo_trainer` and its parts) are not read: `verl_defaults.csv` has their defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.sources import Setting, parse_value, read_yaml
from agentrl.config.verl_keys import GROUPS, MAPPINGS

_SEARCH = "hydra.searchpath"
_INTERPOLATION = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
"""Its default may be `{}`."""
_KEY = re.compile(r"\.*[\w-]+(\.[\w-]+)*")


def is_verl_config(file: str) -> bool:
    """Return whether a YAML file has keys that only a config of verl's has."""
    return any(
        setting.path.startswith("actor_rollout_ref.")
        or (setting.path == "defaults" and isinstance(setting.value, list))
        for setting in read_yaml(file, (), [])
    )


def read_verl_config(file: str, mistakes: list[str]) -> dict[str, Setting]:
    """Return the settings of a config of verl's and of the files that its `defaults` name.

    Args:
        file: the path of the YAML file.
        mistakes: the list to which mistakes are appended.
    """
    settings = {s.path: s for s in read_yaml(file, MAPPINGS, mistakes)}
    settings.pop(_SEARCH, None)
    defaults = settings.pop("defaults", None)
    settings = {path: s for path, s in settings.items() if not path.endswith("_target_")}
    if defaults is None:
        return settings
    if not isinstance(defaults.value, list):
        mistakes.append(f"{defaults}: must be a list")
        return settings
    merged: dict[str, Setting] = {}
    has_self = "_self_" in defaults.value
    # Without _self_, the file's own settings come last, as in verl's files.
    for entry in [*defaults.value, *([] if has_self else ["_self_"])]:
        if entry == "_self_":
            merged |= settings
            continue
        name = entry if isinstance(entry, str) else ""
        included = Path(file).parent / f"{name}.yaml"
        groups = entry if isinstance(entry, dict) else [name]
        if name.startswith("ppo_") or all(re.split("[@/]", str(g))[0] in GROUPS for g in groups):
            continue
        if name and included.is_file() and included.resolve() != Path(file).resolve():
            merged |= read_verl_config(str(included), mistakes)
        else:
            mistakes.append(
                f"defaults: {entry!r} ({defaults.source}): must be verl's ppo_trainer, _self_ or"
                f" the name of a YAML file in the same folder ({included.parent})"
            )
    return merged


def resolve(
    settings: Mapping[str, Setting], defaults: Mapping[str, Any], mistakes: list[str]
) -> dict[str, Setting]:
    """Return the settings with their interpolations replaced by values.

    Args:
        settings: all settings of a config, by key.
        defaults: verl's default of each key.
        mistakes: the list to which mistakes are appended: interpolations that cannot be resolved.
    """
    values = {**defaults, **{path: s.value for path, s in settings.items()}}
    resolved = {}
    for path, setting in settings.items():
        try:
            used: dict[str, str] = {}
            value = _resolve(setting.value, values, [path], used)
        except ValueError as e:
            mistakes.append(f"{setting}: {e}")
            continue
        if value == "???":
            mistakes.append(f"{setting}: has no value. Set {path}=VALUE on the command line")
        else:
            resolved[path] = replace(setting, value=value, references=used)
    return resolved


def resolve_value(value: Any, values: Mapping[str, Any], path: str) -> Any:
    """Return the value of the key `path` with its interpolations replaced.

    Raises:
        ValueError: the reason why one cannot be replaced.
    """
    return _resolve(value, values, [path], {})


def _resolve(
    value: Any, values: Mapping[str, Any], seen: Sequence[str], used: dict[str, str]
) -> Any:
    """Return a value with its interpolations replaced.

    Args:
        value: the value.
        values: the values of all keys.
        seen: the keys that refer to one another until here; the last one has this value.
        used: gets the reference of each environment variable that is used, by its value.

    Raises:
        ValueError: the reason why one cannot be replaced.
    """
    if isinstance(value, list):
        return [_resolve(v, values, seen, used) for v in value]
    if isinstance(value, dict):
        return {k: _resolve(v, values, seen, used) for k, v in value.items()}
    while isinstance(value, str) and (match := _INTERPOLATION.search(value)):
        replacement = _lookup(match[1].strip(), values, seen, used)
        if match[0] == value:
            return replacement
        value = value.replace(match[0], str(replacement))
    if isinstance(value, str) and "${" in value:
        raise ValueError("its interpolation is not closed")
    return value


def _lookup(text: str, values: Mapping[str, Any], seen: Sequence[str], used: dict[str, str]) -> Any:
    """Return the value of the text between `${` and `}`."""
    resolver, colon, rest = text.partition(":")
    name, comma, default = (part.strip() for part in rest.partition(","))
    if colon and resolver == "oc.env":
        if name not in os.environ and not comma:
            raise ValueError(f"the environment variable {name} is not set")
        if os.environ.get(name):
            used[os.environ[name]] = f"${{oc.env:{name}}}"
        return parse_value(os.environ.get(name, default))
    if colon and resolver == "oc.select":
        key = _absolute(name, seen[-1])
        if key not in values:
            return parse_value(default) if comma else None
    elif not colon and _KEY.fullmatch(text):
        key = _absolute(text, seen[-1])
    else:
        raise ValueError(f"${{{text}}} is not supported: write the value")
    if key not in values:
        raise ValueError(f"${{{text}}}: the config does not set {key}: write the value")
    if key in seen:
        raise ValueError(f"${{{text}}} refers to itself")
    return _resolve(values[key], values, [*seen, key], used)


def _absolute(key: str, path: str) -> str:
    """Return the key that a relative one (`.key`, `..section.key`) in the value of `path` means."""
    name = key.lstrip(".")
    up = len(key) - len(name)
    return ".".join([*path.split(".")[: len(path.split(".")) - up], name]) if up else key
