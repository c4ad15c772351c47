"""The one door to a `Config`: all layers of values merged, all mistakes said at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.sections import FIELDS, Config
from agentrl.config.sources import Setting, merge, read_overrides, read_yaml, verl_keys
from agentrl.errors import ConfigError
from agentrl.registry import did_you_mean


def load_config(
    yaml_path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
) -> Config:
    """Build a run's config.

    Args:
        yaml_path: a YAML file of sections.
        overrides: texts `a.b.c=1`; they win over the file.
        flags: dotted key -> value; they win over the overrides. None: the flag was not given.
        preset: dotted key -> value, in place of defaults: what a model's recipe recommends.

    Raises:
        ConfigError: every mistake, each with its source, its value and what is allowed.
    """
    mistakes: list[str] = []
    types: dict[str, type] = {p: get_origin(i.annotation) or object for p, i in FIELDS.items()}
    given = read_yaml(yaml_path, FIELDS, mistakes) if yaml_path else []
    given += read_overrides(overrides, mistakes)
    for path, value in (flags or {}).items():
        given.append(Setting(path, value, flag_of(path) or "argument"))
    given = _without_rows_of_another(given)
    recommended = [Setting(path, value, "preset") for path, value in (preset or {}).items()]
    merged = merge(recommended, types, mistakes) | merge(given, types, mistakes)
    config = _validate(merged, mistakes)
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = "".join(f"\n  - {mistake}" for mistake in mistakes)
        raise ConfigError(f"{count} in the configuration:{lines}")
    if config.trainer.output:
        return config
    name = Path(config.data.train or config.data.val or "run").stem
    trainer = config.trainer.model_copy(update={"output": f"runs/{name}"})
    return config.model_copy(update={"trainer": trainer})


def _without_rows_of_another(given: list[Setting]) -> list[Setting]:
    """Settings without those that only repeat what an earlier `algorithm.name` had set.

    A run's own config.yaml names every key. With another algorithm given after it, what its row of
    the table had set is no wish of the user's.
    """
    section = "algorithm."
    names = [k for k, setting in enumerate(given) if setting.path == f"{section}name"]
    if len(names) < 2 or given[names[-1]].value == given[names[0]].value:
        return given
    before = given[names[0]]
    try:
        set_by_name = AlgorithmConfig.model_validate({"name": before.value}).model_dump()
    except ValidationError:
        return given  # refused with its own words
    return [
        setting
        for k, setting in enumerate(given)
        if k >= names[-1]
        or not setting.path.startswith(section)
        or setting.source.partition(":")[0] != before.source.partition(":")[0]
        or set_by_name.get(setting.path.removeprefix(section)) != setting.value
    ]


def flag_of(path: str) -> str:
    """The flag of `agentrl train` that sets a key, or ""."""
    return _extra(FIELDS[path], "flag") if path in FIELDS else ""


def allowed(info: FieldInfo) -> str:
    """What values a key takes, in words."""
    words = _extra(info, "allowed")
    if words:
        return words
    origin, arguments = get_origin(info.annotation), get_args(info.annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is list:
        choices = get_args(arguments[0])
        return f"a list of {' and '.join(choices)}" if choices else "a list of texts"
    kinds: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in info.metadata
        for name, sign in signs.items()
        if name in type(limit).__slots__
    ]
    return " ".join([kinds.get(info.annotation, "text"), " and ".join(limits)]).strip()


def description(info: FieldInfo) -> str:
    """The docstring of a key, on one line."""
    return " ".join((info.description or "").split())


def _extra(info: FieldInfo, name: str) -> str:
    extra = info.json_schema_extra
    return str(extra[name]) if isinstance(extra, dict) else ""


def _validate(merged: Mapping[str, Setting], mistakes: list[str]) -> Config:
    """The config of all settings that are right; the others go to the mistakes.

    What is wrong by itself is left out, and the rest is judged again: so a bad value does not hide
    that others contradict each other.
    """
    settings = dict(merged)
    while True:
        try:
            return Config.model_validate(_tree(settings.values()))
        except ValidationError as e:
            errors = e.errors(include_url=False)
        if not errors[0]["loc"]:
            mistakes.extend(str(errors[0]["ctx"]["error"]).splitlines())  # type: ignore[index]
            return Config()
        for error in errors:
            where = ".".join(map(str, error["loc"]))
            path = next(f for f in FIELDS if f"{where}.".startswith(f"{f}."))
            if path in settings:  # a union reports a bad value once for each of its types
                words = str(error.get("ctx", {}).get("error", ""))
                mistakes.append(_bad_value(settings.pop(path), FIELDS[path], words))


def _tree(settings: Iterable[Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for setting in settings:
        section, _, leaf = setting.path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = setting.value
    return tree


def _bad_value(setting: Setting, info: FieldInfo, words: str) -> str:
    """What was given, what is wrong with it, what is allowed, and what the key means."""
    words = words or verl_keys().explain_value(setting.path, setting.value)
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    hint = did_you_mean(str(setting.value), choices)
    end = "" if words.endswith((".", "?")) else "."  # a hint may have ended it
    wrong = f"{words}{end} It must be" if words else "must be"
    return f"{setting}: {wrong} {allowed(info)} ({description(info)}).{hint}"
