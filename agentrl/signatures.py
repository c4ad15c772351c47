"""Inspect functions and classes of the user: their locations and their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.errors import RegistryError
from agentrl.registry import did_you_mean

INJECTED_INTO_INTERACTIONS = ("sample", "chat")
"""Parameters of an interaction's constructor that agentrl passes itself."""
KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that can be passed by name."""


def locate(target: Callable[..., Any]) -> str:
    """Return `FILE:LINE` of the definition of a function or class, for error messages."""
    if inspect.isfunction(target):
        code = inspect.unwrap(target).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getfile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):  # defined at a prompt, or written in C
        return f"{target.__module__}.{target.__qualname__}"


def identify(target: Any) -> str:
    """Return `NAME, FILE:LINE` of a function or class, or the repr of anything else."""
    if inspect.isfunction(target) or isinstance(target, type):
        return f"{target.__qualname__}, {locate(target)}"
    return repr(target)


def require_name(decorator: str, name: Any, reader: str = "rows refer") -> None:
    """Raise `RegistryError` if a decorator was written without the name in parentheses.

    Args:
        decorator: its name.
        name: the argument that it got: without a name, this is the decorated function or class.
        reader: who uses the name, and a verb, for the message.
    """
    if not isinstance(name, str):
        raise RegistryError(
            f'write @{decorator}("name") above {identify(name)}: {reader} to it by name'
        )


def find_argument_problems(
    function: Callable[..., Any], kwargs: Mapping[str, Any], injected: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the call `function(**kwargs)`, or an empty list.

    Args:
        function: a function, or a class for its constructor.
        kwargs: the user's arguments, by name.
        injected: names that agentrl passes itself; they must not be in `kwargs`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a constructor written in C, with no signature
        return [f"{identify(function)} has no signature: write an __init__"] if kwargs else []
    accepted = [p for p in parameters if p.kind in KEYWORD and p.name not in injected]
    names = [p.name for p in accepted]
    has_var_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        f"missing argument {p.name!r}"
        for p in accepted
        if p.default is p.empty and p.name not in kwargs
    ]
    problems += [
        f"argument {p.name!r} is positional-only, and arguments are passed by name: remove the '/'"
        for p in parameters
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty and p.name not in injected
    ]
    for name in kwargs:
        if name in injected:
            problems.append(f"argument {name!r} is passed by agentrl: remove it")
        elif name not in names and not has_var_keyword:
            choices = ", ".join(names) if names else "no arguments"
            problems.append(
                f"unknown argument {name!r}.{did_you_mean(name, names)} It takes: {choices}"
            )
    return problems


def merge_arguments(
    key: str, row: Mapping[str, Any], config: Mapping[str, Any], config_only: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Merge the arguments of a row and of the config; also return the conflicts as messages.

    Args:
        key: the config key of the config's arguments.
        row: the row's arguments, by name.
        config: the config's arguments, by name.
        config_only: arguments that a row must not set.
    """
    problems = []
    for name in row:
        if name in config_only:
            problems.append(
                f"argument {name!r} can only be set in the config ({key}.{name}), not in a row"
            )
        elif name in config:
            problems.append(
                f"argument {name!r} is set twice: {row[name]!r:.60} in the row and"
                f" {config[name]!r:.60} in {key}.{name}. Remove one of them"
            )
    return {**config, **row}, problems
