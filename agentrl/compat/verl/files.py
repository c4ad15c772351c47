"""verl's YAML files: tool_config_path and interaction_config_path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from agentrl.compat.verl.adapters import name_of, register_interaction, register_tool
from agentrl.compat.verl.bases import OpenAIFunctionToolSchema
from agentrl.compat.verl.stand_in import is_missing, stand_in
from agentrl.errors import UserError

PAGE = "docs/verl.md"


def load_yaml(path: Path) -> None:
    """Register the tools or interactions that a YAML file of verl's names.

    Modules are looked for in the file's folder first, then where Python looks.

    Raises:
        UserError: no such file of verl's; or a class that cannot be loaded or made.
        RegistryError: a name that is taken.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read as YAML: {e}") from None
    if isinstance(content, list) and any("_target_" in c for c in content if isinstance(c, dict)):
        raise UserError(
            f"{path} names agent loops of verl's (_target_): those keep token ids themselves, which"
            f" agentrl does for them. {PAGE} shows how one becomes an `@agent_loop`."
        )
    kinds = {"tools": _load_tool, "interaction": _load_interaction}
    given = {k: v for k, v in content.items() if k in kinds} if isinstance(content, dict) else {}
    if not given or not all(isinstance(v, list) for v in given.values()):
        raise UserError(
            f"{path} is no file of verl's tools or interactions: it needs a list under `tools` or"
            " `interaction`. (A run's own settings are given with --config.)"
        )
    seen: set[tuple[str, str]] = set()
    with _importing_from(path.parent):
        for kind, entries in given.items():
            for i, entry in enumerate(entries):
                where = f"{path}: {kind}[{i}]"
                if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
                    raise UserError(f"{where} needs a class_name, got {entry!r:.100}")
                _refuse_interpolations(entry, where)
                name = kinds[kind](entry, where)
                # The registry takes one class under one name for the same definition, read again.
                if (kind, name) in seen:
                    raise UserError(f"{where}: two {kind.rstrip('s')}s are called {name!r}")
                seen.add((kind, name))


def _load_tool(entry: Mapping[str, Any], where: str) -> str:
    """Register a tool; its name."""
    config = dict(entry.get("config") or {})
    if config.get("type", "native") != "native":
        raise UserError(
            f"{where}: type={config['type']!r}: the tools of an MCP server are had with"
            " --file mcp+http://HOST/PATH or mcp+stdio:COMMAND (docs/tools.md)"
        )
    schema = entry.get("tool_schema")
    try:
        parsed = OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    except ValueError as e:
        raise UserError(f"{where}: tool_schema: {e}") from None
    cls = _class(entry["class_name"], where)
    with _named_as(f"{where}: {cls.__qualname__} cannot be made"):
        made = cls(config, parsed)
    return register_tool(made, where)


def _load_interaction(entry: Mapping[str, Any], where: str) -> str:
    """Register an interaction; its name."""
    name = entry.get("name") or name_of(entry["class_name"])
    cls = _class(entry["class_name"], where)
    with _named_as(f"{where}: {cls.__qualname__} cannot be made"):
        made = cls({"name": name, **(entry.get("config") or {})})
    register_interaction(made, name, where)
    return name


def _class(path: str, where: str) -> Any:
    """What a dotted path names."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(f"{where}: class_name={path!r}: expected MODULE.CLASS")
    with _named_as(f"{where}: class_name={path!r} does not load"):
        try:
            cls = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as e:
            if not is_missing(e):
                raise
            stand_in()
            cls = getattr(importlib.import_module(module), name)
    if any(base.__name__ == "AgentLoopBase" for base in getattr(cls, "__mro__", ())):
        raise UserError(f"{where}: {path} is an agent loop: {PAGE} shows its translation")
    return cls


@contextmanager
def _named_as(problem: str) -> Iterator[None]:
    """Turn an exception of the user's code into a `UserError` that begins with `problem`."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{problem}: {type(e).__name__}: {e}") from e


def _refuse_interpolations(value: Any, where: str) -> None:
    """`${oc.env:X}` would reach the tool as text."""
    if isinstance(value, str) and "${" in value:
        raise UserError(f"{where}: {value!r}: interpolations are not read here; write the value")
    for inner in value.values() if isinstance(value, dict) else ():
        _refuse_interpolations(inner, where)
    for inner in value if isinstance(value, list) else ():
        _refuse_interpolations(inner, where)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Its modules are found first; what they import later still is, at the end of the path."""
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)
