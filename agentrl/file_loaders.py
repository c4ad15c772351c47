"""The modules that load user files of other projects: MCP servers, verl's YAML files and classes.

They import `agentrl.registry`, which needs them only for such a file. So `agentrl/__init__.py`
registers functions here that import and return them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

file_loaders: dict[str, Callable[[], Any]] = {}
