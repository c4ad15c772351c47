"""Read a config of verl's: a YAML file for Hydra, which verl reads with OmegaConf.

Supported are what verl's own configs use: `defaults` with groups and packages, and the
interpolations `${section.key}`, `${.key}`, `${oc.select:section.key,DEFAULT}` and
`${oc.env:NAME,DEFAULT}`. Files of verl's own config (`ppo_trainer` and its parts) that are not next
to the YAML file have the defaults of `verl_defaults.csv`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.sources import Setting, parse_value, read_yaml
from agentrl.config.verl_keys import FILES, MAPPINGS

_SEARCH = "hydra.searchpath"
_GROUPS = {name.rpartition("/")[0] for name in FILES}
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


def read_verl_config(
    file: str, mistakes: list[str], overrides: Sequence[Setting] = ()
) -> dict[str, Setting]:
    """Return the settings of a config of verl's and of the files that its `defaults` name.

    Args:
        file: the path of the YAML file.
        mistakes: the list to which mistakes are appended.
        overrides: the settings of the command line, which may choose files of groups.
    """
    chosen = {s.path: s.value for s in overrides if is_group(s.path, s.value)}
    composer = _Composer([Path(file).parent], mistakes, chosen)
    composer.search({s.path: s for s in overrides}.get(_SEARCH))
    return composer.read(Path(file))


def as_list(value: Any) -> list[Any]:
    """Return a value that may be one, several (a list), or none (null)."""
    return value if isinstance(value, list) else [value] if value else []


def is_group(path: str, value: Any) -> bool:
    """Return whether a setting of the command line chooses a file of a group, for Hydra."""
    is_named = "@" in path or "/" in path or (path in _GROUPS and isinstance(value, str))
    return is_named and not path.startswith("hydra/")


@dataclass
class _Composer:
    """Reads the files of one config, as Hydra does."""

    folders: list[Path]
    """The folders in which files are searched: first that of the config."""
    mistakes: list[str]
    chosen: dict[str, Any]
    """The files of groups that the command line chooses: `actor@actor_rollout_ref.actor: mine`."""
    options: dict[tuple[str, str], Any] = field(default_factory=dict)
    """The chosen files of each group and key."""

    def search(self, setting: Setting | None) -> None:
        """Search in the folders of `hydra.searchpath` too. Its packages have verl's own files."""
        paths = map(str, as_list(setting and setting.value))
        self.folders += [Path(path[7:]) for path in paths if path.startswith("file://")]

    def read(
        self, file: Path, group: str = "", package: str = "", above: Sequence[Path] = ()
    ) -> dict[str, Setting]:
        """Return the settings of a file and of the files that its `defaults` name.

        Args:
            file: the file.
            group: its folder, below one of `folders`.
            package: the key below which its settings are, if it does not name another one.
            above: the files that include it, and each other.
        """
        if file in above:
            names = " -> ".join(path.name for path in (*above[above.index(file) :], file))
            self.mistakes.append(f"{above[-1]}: its `defaults` are a cycle: {names}. Remove one")
            return {}
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        if header := re.search(r"^# *@package +(\S+)", text, re.MULTILINE):
            package = {"_global_": "", "_group_": package}.get(header[1], header[1])
        prefix = package and f"{package}."
        settings = read_yaml(str(file), [k.removeprefix(prefix) for k in MAPPINGS], self.mistakes)
        own = {s.path: s for s in settings if not s.path.endswith("_target_")}
        self.search(own.pop(_SEARCH, None))
        defaults = own.pop("defaults", None)
        own = {prefix + path: replace(s, path=prefix + path) for path, s in own.items()}
        entries = as_list(defaults and defaults.value)
        if "_self_" not in entries:
            entries = [*entries, "_self_"]  # as in verl's files
        named = [item for entry in entries for item in _by_group(entry).items()]
        # What overrides another file takes its place, which is before the file's own settings.
        named.sort(key=lambda item: not item[0].startswith("override "))
        chosen = {} if above else self.chosen
        options = {**chosen, **dict(named), **chosen}
        for key, option in options.items():
            self.options.setdefault(_place(key, group, package), option)
        merged: dict[str, Setting] = {}
        for key in options:
            if key == "_self_":
                merged |= own
                continue
            place = _place(key, group, package)
            for name in as_list(self.options[place]):
                merged |= self._include(str(name), *place, key, [*above, file])
        return merged

    def _include(
        self, option: str, group: str, package: str, key: str, above: Sequence[Path]
    ) -> dict[str, Setting]:
        """Return the settings of a file of a group; {} for one of verl's own."""
        engine = str(self.options.get(("model_engine", "model_engine"), "dp"))
        option = option.replace("${model_engine}", engine)
        name = posixpath.normpath(posixpath.join(group, option))
        folders = self.folders[: 1 if name in FILES else None]
        if file := next((f for f in (at / f"{name}.yaml" for at in folders) if f.is_file()), None):
            return self.read(file, posixpath.dirname(name), package, above)
        if name.startswith("model_engine/"):
            source = "command line" if key in self.chosen else str(above[-1])
            return {"model_engine": Setting("model_engine", option, source)}
        mistake = (
            f"{above[-1]}: its `defaults` need {name}.yaml, which is neither a file of verl's"
            f" config nor in {', '.join(map(str, folders))}"
        )
        if name not in FILES and not key.startswith("optional ") and mistake not in self.mistakes:
            self.mistakes.append(mistake)
        return {}


def _by_group(entry: Any) -> dict[str, Any]:
    """Return an entry of `defaults` as a mapping; a file alone is its own group."""
    if isinstance(entry, dict):
        return {str(key): option for key, option in entry.items()}
    if entry == "_self_":
        return {entry: None}
    name, _, package = str(entry).partition("@")
    package = package or posixpath.dirname(name).strip("./").replace("/", ".")
    return {f"{name}@{package or '_here_'}": "."}


def _place(key: str, group: str, package: str) -> tuple[str, str]:
    """Return the folder and the key that a group of a file means, such as `/actor@inner.key`."""
    name, _, inner = key.rpartition(" ")[2].partition("@")
    folder = posixpath.normpath(posixpath.join("/", group, name))[1:]
    inner = inner or name.strip("./").replace("/", ".")
    full = ".".join(filter(None, (package, inner)))
    return folder, {"_global_": "", "_here_": package}.get(inner, full)


def references(settings: Iterable[Setting]) -> set[str]:
    """Return the keys that interpolations of the settings name."""
    texts = [(t, s.path) for s in settings for t in _INTERPOLATION.findall(str(s.value))]
    keys = [(t.removeprefix("oc.select:").partition(",")[0].strip(), path) for t, path in texts]
    return {_absolute(key, path) for key, path in keys}


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
