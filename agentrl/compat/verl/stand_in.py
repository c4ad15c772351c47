"""Modules named `verl...` for files that import from verl where it is not installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from agentrl.errors import UserError

_OURS = "agentrl.compat.verl"
# Module of verl's -> its names, and where they are.
_NAMES: dict[str, dict[str, str]] = {
    "verl.tools.base_tool": {
        "BaseTool": "bases",
        "OpenAIFunctionToolSchema": "bases",
        "ToolResponse": "bases",
    },
    "verl.tools.schemas": dict.fromkeys(
        (
            "OpenAIFunctionParametersSchema",
            "OpenAIFunctionPropertySchema",
            "OpenAIFunctionSchema",
            "OpenAIFunctionToolSchema",
            "ToolResponse",
        ),
        "bases",
    ),
    "verl.tools.function_tool": {"function_tool": "bases"},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "shipped"},
    "verl.interactions.base": {"BaseInteraction": "bases"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": "shipped"},
    "verl.utils.rollout_trace": {"rollout_trace_op": "shipped"},
    "verl.utils.reward_score": {"default_compute_score": "shipped"},
    "verl.utils.reward_score.gsm8k": {
        "compute_score": "shipped:gsm8k",
        "extract_solution": "shipped",
    },
    "verl.utils.reward_score.math": {"compute_score": "shipped:math_reward"},
    "verl.utils.reward_score.math_reward": {"compute_score": "shipped:math_reward"},
    "verl.utils.reward_score.math_dapo": {"compute_score": "shipped:math_dapo"},
    "verl.utils.reward_score.search_r1_like_qa_em": {"compute_score": "shipped:search_qa"},
}  # fmt: skip
_PACKAGES = {
    "verl", "verl.tools", "verl.interactions", "verl.utils", "verl.utils.reward_score",
}  # fmt: skip


_LOOPS = {"verl.experimental", "verl.workers"}
"""Where agent loops are had from."""


def is_missing(error: ModuleNotFoundError) -> bool:
    """Whether it is verl that an import did not find, and nobody stands in for it yet."""
    return (error.name or "").partition(".")[0] == "verl" and not _stands_in()


def stand_in() -> None:
    """From now on `import verl...` finds what agentrl has of it, unless verl is installed."""
    if not _stands_in():
        sys.meta_path.append(_Finder())  # the last: an installed verl is found before


def _stands_in() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(Loader):
    """Finds the modules of the table, and says of others that they are not there.

    It is also their loader: it makes an empty module, whose names come as they are asked for.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "verl":
            return None
        parent = sys.modules.get("verl")
        if parent is not None and not isinstance(parent, _Module):
            return None  # verl itself is installed
        if name in _LOOPS:
            raise UserError(
                f"`import {name}...`: agent loops of verl's keep token ids themselves, which"
                " agentrl does for them. docs/verl.md shows how one becomes an `@agent_loop`."
            )
        if name not in _NAMES and name not in _PACKAGES:
            known = ", ".join(sorted(_NAMES))
            raise UserError(
                f"`import {name}`: verl is not installed, and agentrl stands in for these of its"
                f" modules only: {known}. docs/verl.md says what to write in place of others."
            )
        return importlib.machinery.ModuleSpec(name, self, is_package=name in _PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """A module whose names are looked up in agentrl when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (inner := f"{self.__name__}.{name}") in _NAMES or inner in _PACKAGES:
            return importlib.import_module(inner)
        home, _, other = _NAMES.get(self.__name__, {}).get(name, "").partition(":")
        if not home:
            known = ", ".join(_NAMES.get(self.__name__, {})) or "nothing"
            raise UserError(
                f"`from {self.__name__} import {name}`: agentrl's stand-in for verl has {known}"
                " there. docs/verl.md says what to write in place of the rest."
            )
        return getattr(importlib.import_module(f"{_OURS}.{home}"), other or name)
