"""Load verl's YAML files: tool_config_path and interaction_config_path."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from agentrl.compat.verl.adapters import interaction_name, register_interaction, register_tool
from agentrl.compat.verl.bases import OpenAIFunctionToolSchema
from agentrl.compat.verl.stand_in import is_missing, is_relative, load_relative, stand_in
from agentrl.config.environment import map_leaves
from agentrl.config.sources import load_yaml as read_yaml_file
from agentrl.errors import UserError

PAGE = "docs/verl.md"


def load_yaml(path: Path) -> None:
    """Register the tools or interactions that a YAML file of verl's names.

    Modules are searched in the file's folder first, then on Python's path.

    Raises:
        UserError: the file is not one of verl's, or a class cannot be loaded or called.
        RegistryError: a name is taken.
    """
    try:
        content = read_yaml_file(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{path} cannot be read as YAML: {e}") from None
    if isinstance(content, list) and any("_target_" in c for c in content if isinstance(c, dict)):
        loops = ", ".join(f"{c.get('name')!r} ({c.get('_target_')})" for c in content)
        raise UserError(
            f"{path}: the agent loops {loops}: they keep token ids, which agentrl does itself."
            f" {PAGE} has the ten lines that replace one"
        )
    kinds = {"tools": _load_tool, "interaction": _load_interaction}
    lists = {k: v for k, v in content.items() if k in kinds} if isinstance(content, dict) else {}
    if not lists or not all(isinstance(v, list) for v in lists.values()):
        raise UserError(
            f"{path} is not a file of verl's tools or interactions: it needs a list under `tools`"
            " or `interaction`. (Use --config for the settings of a run.)"
        )
    loaded_names: set[tuple[str, str]] = set()
    with _importing_from(path.parent):
        for kind, entries in lists.items():
            for i, entry in enumerate(entries):
                where = f"{path}: {kind}[{i}]"
                if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
                    raise UserError(f"{where} needs a class_name, not {entry!r:.100}")
                map_leaves(partial(_refuse_interpolation, where), entry)
                name = kinds[kind](entry, where, path.parent)
                # The registry accepts the same class under the same name again.
                if (kind, name) in loaded_names:
                    raise UserError(f"{where}: two {kind.rstrip('s')}s have the name {name!r}")
                loaded_names.add((kind, name))


def _load_tool(entry: Mapping[str, Any], where: str, folder: Path) -> str:
    """Register a tool and return its name."""
    config = dict(entry.get("config") or {})
    if config.get("type", "native") != "native":
        servers = _mcp_files(entry, folder) or ["mcp+http://HOST/PATH or mcp+stdio:COMMAND"]
        raise UserError(
            f"{where}: type={config['type']!r}: load the tools of an MCP server with --file"
            f" {', '.join(servers)} (docs/tools.md). Its token is read from AGENTRL_MCP_TOKEN"
        )
    schema = entry.get("tool_schema")
    try:
        parsed = OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    except ValueError as e:
        raise UserError(f"{where}: tool_schema: {e}") from None
    cls = _class(entry["class_name"], where)
    with _user_errors(f"{where}: {cls.__qualname__} cannot be made"):
        instance = cls(config, parsed)
    return register_tool(instance, where)


def _mcp_files(entry: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the values of --file that replace an entry of `type: mcp`; [] if they are unknown."""
    mcp = entry.get("mcp")
    path = mcp.get("mcp_servers_config_path") if isinstance(mcp, dict) else None
    try:
        servers = json.loads((folder / str(path)).read_text("utf-8"))["mcpServers"].values()
        return [f"mcp+{server['url']}" for server in servers]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _load_interaction(entry: Mapping[str, Any], where: str, folder: Path) -> str:
    """Register an interaction and return its name."""
    name = entry.get("name") or interaction_name(entry["class_name"])
    cls = _class(entry["class_name"], where)
    with _user_errors(f"{where}: {cls.__qualname__} cannot be made"):
        instance = cls({"name": name, **(entry.get("config") or {})})
    register_interaction(instance, name, where)
    return name


def _class(path: str, where: str) -> Any:
    """Return the class at a dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(f"{where}: class_name={path!r} must be MODULE.CLASS")
    with _user_errors(f"{where}: class_name={path!r} does not load"):
        cls = getattr(_import_module(module), name)
    if any(base.__name__ == "AgentLoopBase" for base in getattr(cls, "__mro__", ())):
        raise UserError(f"{where}: {path} is an agent loop: {PAGE} shows how to rewrite it")
    return cls


def _import_module(name: str) -> ModuleType:
    """Import a module, with a substitute for verl if it is needed."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        if is_relative(e):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            return load_relative(Path(spec.origin))
        if not is_missing(e):
            raise
        stand_in()
        return _import_module(name)


@contextmanager
def _user_errors(problem: str) -> Iterator[None]:
    """Turn an exception of the user's code into a `UserError` that begins with `problem`."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{problem}: {type(e).__name__}: {e}") from e


def _refuse_interpolation(where: str, leaf: Any) -> None:
    """Raise `UserError` for a value such as `${oc.env:X}`: the tool would get it as text."""
    if isinstance(leaf, str) and "${" in leaf:
        raise UserError(f"{where}: {leaf!r}: interpolations are not supported; write the value")


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Put a folder first on Python's path within this block, and last on it afterwards.

    It stays on the path for modules that are imported later.
    """
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)
