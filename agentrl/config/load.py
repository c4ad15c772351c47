"""Build a `Config` from all sources of values, and report all mistakes in one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.environment import find_secret, hide_secrets
from agentrl.config.section import types_in
from agentrl.config.sections import FIELDS, Config, file_names
from agentrl.config.sources import Setting, merge, read_overrides, read_yaml, verl_keys
from agentrl.errors import ConfigError
from agentrl.file_loaders import door_of
from agentrl.plural import plural
from agentrl.registry import did_you_mean


def load_config(
    yaml_path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
    *,
    translated: Sequence[Setting] = (),
    mistakes: Sequence[str] = (),
) -> Config:
    """Build a run's config.

    Args:
        yaml_path: a YAML file of sections.
        overrides: texts such as `optim.lr=1e-5`, which override the file.
        flags: values by dotted key, which override the overrides. None: the flag is not set.
        preset: values by dotted key, which replace defaults: the settings of a model preset.
        translated: settings from a config of another project, which the overrides override.
        mistakes: mistakes that are known already, to be reported with the others.

    Raises:
        ConfigError: there are mistakes. It lists all of them, each with its source, its value and
            the allowed values.
    """
    mistakes = [*mistakes]
    types: dict[str, type] = {p: get_origin(i.annotation) or object for p, i in FIELDS.items()}
    settings = read_yaml(yaml_path, FIELDS, mistakes, _TEXT_KEYS) if yaml_path else []
    settings += [*translated, *read_overrides(overrides, mistakes, _allowed_of, _TEXT_KEYS)]
    for path, value in (flags or {}).items():
        settings.append(Setting(path, value, flag_of(path) or "argument"))
    settings = _without_other_algorithm(settings)
    defaults = [Setting(path, value, "preset") for path, value in (preset or {}).items()]
    merged = merge(defaults, types, mistakes) | merge(settings, types, mistakes)
    config = _validate(merged, mistakes)
    refuse(mistakes)
    if config.trainer.output:
        return config
    files = file_names(config.data.train or config.data.val).partition(", ")[0]
    if door_of(files):  # reasoning-gym:letter_counting?n=500
        files = files.partition("?")[0].replace(":", "/")
    name = Path(files or "run").stem
    return config.with_values("trainer", output=f"runs/{name}")


def refuse(mistakes: Sequence[str]) -> None:
    """Raise a `ConfigError` that lists the mistakes; do nothing if there are none."""
    if mistakes:
        lines = hide_secrets("".join(f"\n  - {mistake}" for mistake in mistakes))
        raise ConfigError(f"{plural(len(mistakes), 'mistake')} in the configuration:{lines}")


def _without_other_algorithm(settings: list[Setting]) -> list[Setting]:
    """Remove settings that only repeat the defaults of an `algorithm.name` that is overridden.

    The config.yaml of a run contains every key. If the user loads it and sets another
    `algorithm.name`, the values that the first name had set are not the user's choice.
    """
    section = "algorithm."
    names = [k for k, setting in enumerate(settings) if setting.path == f"{section}name"]
    if len(names) < 2 or settings[names[-1]].value == settings[names[0]].value:
        return settings
    first = settings[names[0]]
    try:
        set_by_name = AlgorithmConfig.model_validate({"name": first.value}).model_dump()
    except ValidationError:
        return settings  # the unknown name is reported later
    return [
        setting
        for k, setting in enumerate(settings)
        if k >= names[-1]
        or not setting.path.startswith(section)
        or setting.source.partition(":")[0] != first.source.partition(":")[0]
        or set_by_name.get(setting.path.removeprefix(section)) != setting.value
    ]


_TEXT_KEYS = {
    path
    for path, info in FIELDS.items()
    if types_in(info.annotation) & {str, float, bool, Any} == {str}
}


def flag_of(path: str) -> str:
    """Return the option of `agentrl train` that sets a key, or ""."""
    return _extra(FIELDS[path], "flag") if path in FIELDS else ""


def allowed(info: FieldInfo) -> str:
    """Describe the values that a key accepts."""
    if text := _extra(info, "allowed"):
        return text
    origin, arguments = get_origin(info.annotation), get_args(info.annotation)
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(arguments[:-1]), arguments[-1])))
    if origin is list:
        choices = get_args(arguments[0])
        return f"a list of {' and '.join(choices)}" if choices else "a list of texts"
    kinds: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number"}
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in info.metadata
        for name, sign in signs.items()
        if name in type(limit).__slots__
    ]
    return " ".join([kinds.get(info.annotation, "text"), " and ".join(limits)]).strip()


def _allowed_of(path: str) -> str:
    """Return the values that a key accepts in angle brackets; "" if there is no such key."""
    return f"<{allowed(FIELDS[path])}>" if path in FIELDS else ""


def description(info: FieldInfo) -> str:
    """Return the docstring of a key on one line."""
    return " ".join((info.description or "").split())


def _extra(info: FieldInfo, name: str) -> str:
    extra = info.json_schema_extra
    return str(extra[name]) if isinstance(extra, dict) else ""


def _validate(merged: Mapping[str, Setting], mistakes: list[str]) -> Config:
    """Return the config of all valid settings, and append the mistakes in the other settings.

    Invalid values are removed and the others are validated again. So an invalid value does not hide
    a contradiction between other keys.
    """
    settings = dict(merged)
    while True:
        try:
            config = Config.model_validate(_tree(settings.values()))
            mistakes.extend(filter(None, map(_describe_secret, settings.values())))
            return config
        except ValidationError as e:
            errors = e.errors(include_url=False)
        if not errors[0]["loc"]:
            mistakes.extend(str(errors[0]["ctx"]["error"]).splitlines())  # type: ignore[index]
            return Config()  # The keys contradict each other, which the caller refuses.
        for error in errors:
            where = ".".join(map(str, error["loc"]))
            path = next(f for f in FIELDS if f"{where}.".startswith(f"{f}."))
            if path in settings:  # pydantic reports a union once for each of its types
                problem = str(error.get("ctx", {}).get("error", ""))
                mistakes.append(_invalid_value(settings.pop(path), FIELDS[path], problem))


def _describe_secret(setting: Setting) -> str:
    """Return the message for a value that contains a key of a service, or ""."""
    where = find_secret(setting.value, setting.path)
    return where and (
        f"{where} ({setting.source}): this looks like a key or a password, and the run would store"
        " it in its config.yaml. Export it as an environment variable, and write"
        f" {where}='${{oc.env:NAME}}'"
    )


def _tree(settings: Iterable[Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for setting in settings:
        section, _, leaf = setting.path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = setting.value
    return tree


def _invalid_value(setting: Setting, info: FieldInfo, problem: str) -> str:
    """Return the message for an invalid value, with the allowed values and the key's meaning."""
    problem = problem or verl_keys().explain_value(setting.path, setting.value)
    if problem:
        end = "" if problem.endswith((".", "?")) else "."  # a suggestion may have ended it
        problem = f"{problem}{end} It "
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    suggestion = did_you_mean(str(setting.value), choices)
    return f"{setting}: {problem}must be {allowed(info)}.{suggestion} {description(info)}"
