"""Do these keyword arguments fit that function? Asked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.registry import did_you_mean

KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def argument_problems(
    function: Callable[..., Any], kwargs: Mapping[str, Any], given: Collection[str] = ()
) -> list[str]:
    """What is wrong with calling `function(**kwargs)`; an empty list if nothing.

    Args:
        function: a function, or a class for its constructor.
        kwargs: the user's arguments, by name.
        given: names that agentrl fills in itself; `kwargs` may not hold them.
    """
    parameters = inspect.signature(function).parameters.values()
    takes = [p for p in parameters if p.kind in KEYWORD and p.name not in given]
    names = [p.name for p in takes]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        f"missing argument {p.name!r}"
        for p in takes
        if p.default is p.empty and p.name not in kwargs
    ]
    for name in kwargs:
        if name in given:
            problems.append(f"argument {name!r} is agentrl's to give: leave it out")
        elif name not in names and not open_ended:
            listed = ", ".join(names) if names else "no arguments"
            problems.append(
                f"unknown argument {name!r}.{did_you_mean(name, names)} It takes: {listed}"
            )
    return problems
