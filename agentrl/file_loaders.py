"""The modules that load what comes from other projects: MCP servers, verl's files, doors.

They import `agentrl.registry`, which needs them only for such a file. So `agentrl/__init__.py`
registers functions here that import and return them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

file_loaders: dict[str, Callable[[], Any]] = {}

SHIPPED_DOORS = (
    "benchmark", "harbor", "nemo-gym", "openenv", "reasoning-gym", "textarena", "verifiers",
)  # fmt: skip
"""The doors (`agentrl.doors`) of agentrl itself."""
RECORDED = "recorded:"
"""The beginning of the address of answers that `agentrl serve --record` stored."""
_ADDRESS = re.compile(r"([a-z][a-z0-9-]+):.*", re.DOTALL)


@cache
def door_names() -> tuple[str, ...]:
    """Return the names of all doors: the shipped ones and those of installed packages."""
    from importlib.metadata import entry_points  # Slow to import, and often not needed.

    return *SHIPPED_DOORS, *(point.name for point in entry_points(group="agentrl.doors"))


def door_of(address: str) -> str:
    """Return the name of the door of an address, such as `harbor:DIR`; "" if it has none."""
    match = _ADDRESS.fullmatch(address)
    return match[1] if match and (match[1] in SHIPPED_DOORS or match[1] in door_names()) else ""
