"""Where a run's settings come from (YAML files, `a.b.c=1` texts), and what is wrong with them.

Every reader appends what it cannot use to a list of mistakes and goes on, so that all of them are
said at once. Scalars are read as in YAML 1.2: `1e-6` is a number, `2026-11-20` and `on` are texts.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own way)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""]
    )
# YAML 1.1 takes 010 for 8.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


class _Dumper(yaml.SafeDumper):
    """Its counterpart; quotes odd characters, because PyYAML reads its own U+0085 as a space."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def dump_yaml(value: Any, flow: bool = False) -> str:
    """YAML that is read back as the same value; with `flow`, on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=2**20 if flow else 100,
    )


OF_MAPPINGS = ("interaction.kwargs",)
"""Keys that map names without dots to mappings: `interaction.kwargs.NAME.ARGUMENT=1`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value given to one key.

    Example: `Setting("optim.lr", 1e-5, "run.yaml:7")`.
    """

    path: str
    value: Any
    source: str
    """Where it was given, for messages: file and line, flag, or the command line."""

    def __str__(self) -> str:
        return f"{assignment(self.path, self.value)} ({self.source})"


def parse_value(text: str) -> Any:
    """The value of the right-hand side of `a.b.c=text`: YAML, or the text itself."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def assignment(path: str, value: Any) -> str:
    """`path=value` as one would type it; `parse_value` reads the same value back."""
    if isinstance(value, str) and value and parse_value(value) == value:
        return f"{path}={value}"
    text = dump_yaml(value, flow=True).removesuffix("...\n")  # a bare scalar ends its document
    return f"{path}={text.strip()}"


def read_overrides(texts: Iterable[str], mistakes: list[str]) -> list[Setting]:
    """Settings of the command line's `a.b.c=1`, in order; a leading `+` means nothing."""
    settings = []
    for text in texts:
        path, equals, value = text.partition("=")
        path = path.strip().removeprefix("+")
        if path.startswith("~"):
            mistakes.append(f"{text}: keys cannot be removed. {path[1:]}=null sets the default")
        elif not equals or not re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", path):
            mistakes.append(f"{text!r} is not of the form section.key=value")
        else:
            settings.append(Setting(path, parse_value(value), "command line"))
    return settings


def read_yaml(file: str, fields: Collection[str], mistakes: list[str]) -> list[Setting]:
    """Settings of a YAML file, in order.

    Args:
        file: its path.
        fields: dotted paths at which a value begins; above them are sections.
        mistakes: gets what cannot be read: the file, its syntax, repeated keys.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            mistakes.append(
                f"{file}: must hold `section:` and `key: value` lines, not {text[:40]!r}"
            )
            return []
        mistakes.extend(f"{file}:{line}: {what}" for line, what in _repeated_keys(root))
        return list(_walk(loader, root, "", file, fields))
    except OSError as e:
        mistakes.append(f"{file}: cannot be read ({e.strerror})")
    except (ValueError, RecursionError) as e:
        mistakes.append(f"{file}: not a YAML file ({e})")
    except yaml.MarkedYAMLError as e:
        line = f":{e.problem_mark.line + 1}" if e.problem_mark else ""
        mistakes.append(f"{file}{line}: YAML syntax: {e.problem or e.context}")
    except yaml.YAMLError as e:
        mistakes.append(f"{file}: YAML syntax: {e}")
    return []


def _repeated_keys(node: yaml.Node, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Line and message of every key that a mapping holds twice."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            yield line, f"{prefix}{name} is given twice; first in line {lines[name]}"
        lines.setdefault(name, line)
        yield from _repeated_keys(value, f"{prefix}{name}.")


def _walk(
    loader: _Loader, node: yaml.MappingNode, prefix: str, file: str, fields: Collection[str]
) -> Iterator[Setting]:
    """The settings below a section."""
    loader.flatten_mapping(node)
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and path not in fields:
            yield from _walk(loader, value, f"{path}.", file, fields)
        else:
            source = f"{file}:{key.start_mark.line + 1}"
            yield Setting(path, loader.construct_object(value, deep=True), source)


def merge(
    settings: Sequence[Setting], fields: Mapping[str, type], mistakes: list[str]
) -> dict[str, Setting]:
    """The setting that holds for each key: the last one given; null is the default again.

    Args:
        settings: all that was given, weakest first.
        fields: the type of value of each key; `dict` where keys of the user's own may follow.
        mistakes: gets the paths that are no keys.
    """
    merged: dict[str, Setting] = {}
    for setting in settings:
        for leaf in _leaves(setting, fields):
            owner = next((f for f in fields if leaf.path.startswith(f"{f}.")), "")
            if leaf.path in fields:
                merged.pop(leaf.path, None)
                if leaf.value is not None:
                    merged[leaf.path] = leaf
            elif fields.get(owner) is dict:
                held = merged[owner].value if owner in merged else {}
                if isinstance(held, dict):  # else it is a mistake of its own
                    name, _, inner = leaf.path[len(owner) + 1 :].partition(".")
                    if inner and owner in OF_MAPPINGS and isinstance(held.get(name, {}), dict):
                        held = {**held, name: {**held.get(name, {}), inner: leaf.value}}
                    else:
                        held = {**held, leaf.path[len(owner) + 1 :]: leaf.value}
                    merged[owner] = Setting(owner, held, leaf.source)
            elif owner and not verl_keys().explain_key(leaf.path):
                mistakes.append(f"{leaf}: {owner} is a value, there is nothing below it")
            elif keys := [f for f in fields if f.startswith(f"{leaf.path}.")]:
                if leaf.value is not None:  # `optim:` with every key commented out is nothing
                    mistakes.append(
                        f"{leaf}: {leaf.path} is a section. Its keys: {', '.join(keys)}"
                    )
            else:
                mistakes.append(f"{leaf}: {_no_such_key(leaf.path, fields)}")
    return merged


def _leaves(setting: Setting, fields: Mapping[str, type]) -> Iterator[Setting]:
    """A section given as a whole (`optim={lr: 1e-5}`) as its keys."""
    path = setting.path
    below = any(path == f or path.startswith(f"{f}.") for f in fields)
    if below or not isinstance(setting.value, dict):
        yield setting
        return
    for key, value in setting.value.items():
        yield from _leaves(Setting(f"{path}.{key}", value, setting.source), fields)


def verl_keys() -> Any:
    """Return the module that knows verl's keys: it is in a higher room, so it is imported late."""
    return importlib.import_module("agentrl.compat.verl.keys")


def _no_such_key(path: str, fields: Mapping[str, type]) -> str:
    if verls := verl_keys().explain_key(path, [f for f, kind in fields.items() if kind is dict]):
        return verls
    section, _, leaf = path.rpartition(".")
    close = [f for f in fields if f.rpartition(".")[2] == leaf]
    close += difflib.get_close_matches(path, fields, n=1, cutoff=0.75)
    if not close:
        leaves = {f.rpartition(".")[2]: f for f in fields}
        close = [leaves[m] for m in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    if close:
        return f"no such key. Did you mean {' or '.join(dict.fromkeys(close))}?"
    known = [f for f in fields if f.startswith(f"{section}.")]
    if section and known:
        return f"no such key. Keys of {section}: {', '.join(f[len(section) + 1 :] for f in known)}"
    return f"no such key. Sections: {', '.join(dict.fromkeys(f.partition('.')[0] for f in fields))}"
