"""`Door`: the adapter of another project, and how configs and datasets reach it.

    data:         {train: "reasoning-gym:letter_counting?n=2000"}    rows of the door
    environments: {maze: "openenv://localhost:8000"}                 an environment of the door

A dataset's rows contain the name of the environment only. So addresses come from the config, and a
row chooses neither programs nor servers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import parse_qsl

from agentrl.config import Config
from agentrl.data.files import write_generated
from agentrl.errors import ConfigError, DataError, UserCodeError
from agentrl.file_loaders import SHIPPED_DOORS, door_names, door_of
from agentrl.registry import ENVIRONMENT, did_you_mean

log = logging.getLogger("agentrl")


@dataclass(frozen=True, slots=True)
class Door:
    """An adapter of another project.

    Attributes:
        name: the beginning of its addresses.
        description: what it brings, in a few words.
        load: registers an environment or an agent loop. Its arguments are the name that rows use
            and the address. It raises `UserError` if nothing is at the address.
        rows: returns the rows of an address of `data.train`, in the columns of docs/data.md; None
            if the project has no rows.
        check: raises `UserError` if the project cannot be used with a config; None if there is
            nothing to check.
        requirements: what pip installs for it, in a virtual environment that only this door uses;
            none if agentrl talks to a server of the project.
        python: the oldest Python that these packages support.
    """

    name: str
    description: str
    load: Callable[[str, str], None]
    rows: Callable[[str], Sequence[Mapping[str, Any]]] | None = None
    check: Callable[[Config], None] | None = None
    requirements: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)


class Named:
    """The tasks or games of a door that a config names, with their settings. Rows name no others.

    Args:
        kind: what it is, for messages.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._named: list[tuple[str, Any]] = []

    def add(self, name: str, settings: Any = None) -> None:
        """Add what an address of the config names."""
        self._named.append((name, settings))

    def require(self, *names: Any, settings: Any = None) -> None:
        """Raise `UserCodeError` if the config names none of `names` with exactly these settings."""
        if not any((name, settings) in self._named for name in names):
            chosen, *known = (
                repr(name) + (f" with {given}" if given else "")
                for name, given in [(names[0], settings), *self._named]
            )
            raise UserCodeError(
                f"the config does not name the {self._kind} {chosen}."
                f" It names: {', '.join(known) or 'none'}"
            )


@cache
def find_door(name: str) -> Door:
    """Return the door with a name.

    Raises:
        ConfigError: there is no such door, or the object of the entry point is not a `Door`.
    """
    if name in SHIPPED_DOORS:
        return importlib.import_module(f"agentrl.doors.{name.replace('-', '_')}").DOOR
    for point in entry_points(group="agentrl.doors"):
        if point.name == name:
            door = point.load()
            if not isinstance(door, Door) or door.name != name:
                raise ConfigError(f"the entry point {point.value} must be a Door named {name!r}")
            return door
    raise ConfigError(
        f"no door {name!r}.{did_you_mean(name, door_names())} Doors: {', '.join(door_names())}"
    )


_loaded: set[str] = set()


def load(address: str) -> None:
    """Register the environment or the loop at an address `environment+DOOR:REST#ALIAS`.

    The address of rows has no alias: they use the name of the door. `agentrl.registry.load_file`
    calls it, once for each file of a config.

    Raises:
        UserError: nothing is at the address. The message says what to start or to install.
    """
    if address not in _loaded:
        rest, _, alias = address.removeprefix(ENVIRONMENT).rpartition("#")
        door = find_door(rest.partition(":")[0])
        if alias or door.rows:  # `rows_file` says what is wrong with other rows.
            door.load(alias or door.name, rest)
        _loaded.add(address)


def check_doors(config: Config) -> None:
    """Raise `UserError` if a door whose rows a config names cannot be used with it.

    Warn if it names the same rows twice, such as for validation.
    """
    seen: dict[str, str] = {}
    for address in filter(door_of, config.data.files):
        part, _, query = address.partition("?")
        rows = f"{part}?{sorted({'seed': '0', **dict(parse_qsl(query)), 'n': ''}.items())}"
        if rows in seen:
            log.warning(
                "%s and %s: the same rows. Give one another seed or name", seen[rows], address
            )
        seen[rows] = address
    for name in sorted({door_of(name) for name in config.data.files} - {""}):
        if check := find_door(name).check:
            check(config)


@cache
def rows_file(address: str) -> str:
    """Write the rows of an address of `data.train`, and return the file.

    Raises:
        DataError: the door has no rows, or the address has none.
        UserError: the address is wrong, or the door's package failed.
    """
    name = address.partition(":")[0]
    door = find_door(name)
    if door.rows is None:
        use = f'environments={{NAME: "{address}"}}'
        raise DataError(f"{address} is a server, not rows. Write {use}, and rows that name it")
    rows = [dict(row) for row in door.rows(address)]
    if not rows:
        raise DataError(f"{address} has no rows")
    try:
        return write_generated(address, rows)
    except TypeError as e:  # an option such as `seed` is too large
        raise DataError(f"{address}: its rows cannot be written: {e}") from None


def read_address(
    address: str, defaults: Mapping[str, Any], *, only: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the part of an address between `DOOR:` and `?`, and the options after it.

    An option has the type of its default. One without a default is a text, or a number or boolean
    as in YAML.

    Args:
        address: `DOOR:PART?OPTION=VALUE&OPTION=VALUE`.
        defaults: the door's own options.
        only: whether an option that is not the door's own is an error.

    Raises:
        ConfigError: an option is unknown, has the wrong type, or occurs twice.
    """
    from agentrl.config.sources import parse_value

    part, _, query = address.partition(":")[2].partition("?")
    options = dict(defaults)
    seen: set[str] = set()
    for name, text in parse_qsl(query, keep_blank_values=True):
        value = parse_value(text)
        if name in seen:
            raise ConfigError(f"{address}: the option {name} occurs twice")
        if isinstance(defaults.get(name), float) and type(value) is int:
            value = float(value)
        if name in defaults and type(value) is not type(defaults[name]):
            kind = type(defaults[name]).__name__
            raise ConfigError(f"{address}: the option {name}={text} must be of type {kind}")
        if only and name not in defaults:
            raise ConfigError(f"{address}: no option {name}. Options: {', '.join(defaults)}")
        seen.add(name)
        options[name] = value
    return part, options
