"""What a tool is given of its episode, by the names of its parameters.

    state      a dictionary of the episode, shared by all of its tools that ask for it
    sample     the row
    messages   the conversation so far, to be read
    sandbox    where model-written code runs

No model ever sees these. A parameter of such a name is the model's all the same where its
annotation is of something else: `state: str`, of an address.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

from typing_extensions import is_typeddict

from agentrl.sandbox import Sandbox
from agentrl.signatures import KEYWORD
from agentrl.trajectory import Message, Sample

TO_CALLS = ("state", "sample", "messages", "sandbox")
TO_CONSTRUCTORS = ("state", "sample", "sandbox")

_SEQUENCES = {tuple, list, abc.Sequence, abc.Collection, abc.Iterable}


def injected(
    function: Callable[..., Any],
    names: Collection[str] = TO_CALLS,
    models_own: Collection[str] = (),
) -> tuple[str, ...]:
    """Which of these names a function, or a class's constructor, asks for.

    Args:
        function: as it is written.
        names: what there is to be had.
        models_own: names that a schema written by hand offers the model.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a constructor written in C, with no signature
        return ()
    return tuple(
        name
        for name in names
        if name in parameters
        and name not in models_own
        and parameters[name].kind in KEYWORD
        and _fits(name, _annotation(function, parameters[name]))
    )


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """A parameter's annotation; Any where it has none, or one that cannot be evaluated."""
    if parameter.annotation is parameter.empty:
        return Any
    code = function.__init__ if isinstance(function, type) else inspect.unwrap(function)
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        known = getattr(code, "__globals__", {})
        return typing.get_type_hints(holder, known, include_extras=True)[parameter.name]
    except (NameError, TypeError, SyntaxError, AttributeError):
        # Imported for type checkers only: the model could not be shown it either.
        return Any


def _fits(name: str, annotation: Any) -> bool:
    """Whether what stands under this name may be what agentrl gives under it."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _fits(name, typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(name, choice) for choice in typing.get_args(annotation))
    kind = origin or annotation
    if kind is Any or kind is object:
        return True
    if name == "state":
        return kind in (dict, abc.Mapping, abc.MutableMapping) or is_typeddict(kind)
    if name == "messages":
        items = [a for a in typing.get_args(annotation) if a is not ...]
        return kind in _SEQUENCES and all(i in (Message, Any) for i in items)
    return kind is (Sample if name == "sample" else Sandbox)
