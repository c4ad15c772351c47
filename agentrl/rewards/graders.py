"""Which reward judges a row: the one that the config names, else the grader of `data_source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.answers import plain_number
from agentrl.errors import ConfigError, DataError
from agentrl.registry import did_you_mean, load_file, rewards
from agentrl.rewards.base import Grader

GRADERS = {"openai/gsm8k": "gsm8k", "agentrl/arithmetic": "gsm8k"}
"""data_source -> the registered `compute_score` that judges its rows."""

GOLD: Mapping[str, Callable[[Any], str]] = {"gsm8k": lambda truth: f"#### {plain_number(truth)}"}
"""Per grader, the shortest text that deserves full marks, made from a ground truth."""


def grader_of(data_source: str, kwargs: Mapping[str, Any]) -> Grader:
    """The grader that comes with agentrl for rows of `data_source`.

    Raises:
        DataError: there is none; the message says how to give one.
        ConfigError: it does not take these `reward.kwargs`.
    """
    if data_source not in GRADERS:
        said = f"no grader for data_source {data_source!r}" if data_source else "no data_source"
        raise DataError(
            f"{said}.{did_you_mean(data_source, GRADERS)} Known: {', '.join(GRADERS)}. Or set"
            f" reward.function to a registered reward ({', '.join(rewards.names())}) or to your own"
            " (path.py:function)"
        )
    name = GRADERS[data_source]
    return Grader(name, rewards.get(name), kwargs)


def find_reward(name: str) -> Callable[..., Any]:
    """The function behind `reward.function`: a registered name, or `path.py:function`.

    Raises:
        ConfigError: no such reward; the message lists what there is.
        UserError: the file is missing or does not load.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        return _function_in(path, attribute)
    if name.endswith(".py"):
        raise ConfigError(f"reward.function={name!r} must name its function: {name}:FUNCTION")
    if name not in rewards:
        raise ConfigError(
            f"reward.function={name!r}: {rewards.unknown(name)}. Others are named by their file"
            " (path.py:function), or registered by a file listed in `files`"
        )
    return rewards.get(name)


def _function_in(path: str, name: str) -> Callable[..., Any]:
    functions = {
        k: v for k, v in vars(load_file(path)).items() if callable(v) and not k.startswith("_")
    }
    if name not in functions:
        raise ConfigError(
            f"reward.function: no function {name!r} in {path}.{did_you_mean(name, functions)}"
            f" It has: {', '.join(functions) or 'none'}"
        )
    return functions[name]
