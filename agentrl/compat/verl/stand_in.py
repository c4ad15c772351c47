"""Modules named `verl...`, for user files that import verl where it is not installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from agentrl.compat.verl import bases
from agentrl.errors import UserError

_SHIPPED = "agentrl.compat.verl.shipped"
# verl's module -> its names in `bases` or `shipped`; "verl's:ours" where the two differ.
_NAMES: dict[str, tuple[str, ...]] = {
    "verl.tools.base_tool": ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"),
    "verl.tools.schemas": (
        "OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema", "OpenAIFunctionSchema",
        "OpenAIFunctionToolSchema", "ToolResponse",
    ),
    "verl.tools.function_tool": ("function_tool",),
    "verl.tools.gsm8k_tool": ("Gsm8kTool",),
    "verl.interactions.base": ("BaseInteraction",),
    "verl.interactions.gsm8k_interaction": ("Gsm8kInteraction",),
    "verl.utils.rollout_trace": ("rollout_trace_op",),
    "verl.utils.reward_score": ("default_compute_score",),
    "verl.utils.reward_score.gsm8k": ("compute_score:gsm8k", "extract_solution"),
    "verl.utils.reward_score.math": ("compute_score:math_reward",),
    "verl.utils.reward_score.math_reward": ("compute_score:math_reward",),
    "verl.utils.reward_score.math_dapo": ("compute_score:math_dapo",),
    "verl.utils.reward_score.search_r1_like_qa_em": ("compute_score:search_qa",),
}  # fmt: skip
_PACKAGES = {
    "verl", "verl.tools", "verl.interactions", "verl.utils", "verl.utils.reward_score",
}  # fmt: skip


_LOOPS = {"verl.experimental", "verl.workers"}
"""Packages from which user files import the base class of agent loops."""


def is_missing(error: ModuleNotFoundError) -> bool:
    """Return whether an import failed because verl is missing and `stand_in` was not called."""
    return (error.name or "").partition(".")[0] == "verl" and not _stands_in()


def stand_in() -> None:
    """Make `import verl...` find agentrl's stand-ins, unless verl is installed."""
    if not _stands_in():
        sys.meta_path.append(_Finder())  # Last, so that an installed verl is found first.


def _stands_in() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(Loader):
    """Finds and loads the modules of the table; raises `UserError` for other modules of verl.

    A module is empty. Its names are looked up when they are used.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "verl":
            return None
        parent = sys.modules.get("verl")
        if parent is not None and not isinstance(parent, _Module):
            return None  # verl is installed.
        if name in _LOOPS:
            raise UserError(
                f"`import {name}...`: agent loops of verl's keep token ids, which agentrl does"
                " itself. docs/verl.md shows how to rewrite one as an `@agent_loop`."
            )
        if name not in _NAMES and name not in _PACKAGES:
            known = ", ".join(sorted(_NAMES))
            raise UserError(
                f"`import {name}`: verl is not installed, and agentrl replaces only these of its"
                f" modules: {known}. docs/verl.md says what to write instead of others."
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=name in _PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """A module that looks its names up in agentrl when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (inner := f"{self.__name__}.{name}") in _NAMES or inner in _PACKAGES:
            return importlib.import_module(inner)
        ours = {n.partition(":")[0]: n.rpartition(":")[2] for n in _NAMES.get(self.__name__, ())}
        if name not in ours:
            known = ", ".join(ours) or "nothing"
            raise UserError(
                f"`from {self.__name__} import {name}`: agentrl's stand-in for this module has"
                f" only {known}. docs/verl.md says what to write instead of the rest."
            )
        home = bases if hasattr(bases, ours[name]) else importlib.import_module(_SHIPPED)
        return getattr(home, ours[name])
