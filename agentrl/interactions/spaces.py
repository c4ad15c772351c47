"""Gymnasium's spaces as text: describe an observation, read an action."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium import make as make
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

MAX_ENTRIES = 64
"""An observation with more numbers (an image) is not described as text."""
ArraySpace = Box | MultiBinary | MultiDiscrete


def describe(space: Space[Any], value: Any, names: Sequence[str] = ()) -> str:
    """Return an observation as text, such as `cart 0.02, pole -0.031`.

    Args:
        space: the space of the observation.
        value: the observation.
        names: the names of the observation's numbers or parts in order, or of the values of a
            `Discrete`.
    """
    if isinstance(space, Discrete):
        return names[int(value) - int(space.start)] if names else str(int(value))
    if isinstance(space, Tuple):
        return _join([describe(s, v) for s, v in zip(space.spaces, value, strict=True)], names)
    if isinstance(space, Dict):
        texts = [describe(s, value[k]) for k, s in space.spaces.items()]
        return _join(texts, names or [*space.spaces])
    if isinstance(space, ArraySpace):
        texts = [f"{x:.3g}" for x in np.asarray(value, float).ravel()]
        return _join(texts, names) if names else f"[{', '.join(texts)}]"
    return str(value)


def _join(texts: Sequence[str], names: Sequence[str]) -> str:
    if not names:
        return ", ".join(texts)
    return ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def read_action(space: Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """Return the last action in a text; None if there is no action, or it is not in the space.

    Args:
        space: the space of the actions.
        text: the assistant's message.
        names: the names of the values of a `Discrete`; then numbers are not accepted.
    """
    if isinstance(space, Text):
        action: Any = text.strip()
    elif isinstance(space, Discrete):
        action = _find_name(text, names) if names else _find_integer(text)
        if action is not None:
            action = np.int64(action + (int(space.start) if names else 0))
    else:
        action = _array(space, text)
    return action if action is not None and space.contains(action) else None


def _find_name(text: str, names: Sequence[str]) -> int | None:
    """Return the index of the name that occurs last in the text."""
    longest = sorted(names, key=len, reverse=True)
    matches = re.findall(
        rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)", text, re.IGNORECASE
    )
    return [n.casefold() for n in names].index(matches[-1].casefold()) if matches else None


def _find_integer(text: str) -> int | None:
    numbers = re.findall(r"(?<![\w.])-?\d{1,9}(?!\w|\.\d)", text)
    return int(numbers[-1]) if numbers else None


def _array(space: Any, text: str) -> Any:
    """Return the last JSON list of numbers; if the space has one number, brackets are optional."""
    lists = re.findall(r"\[[^\[\]]{0,2000}\]", text)
    if not lists and space.shape in ((), (1,)):
        lists = [f"[{x}]" for x in re.findall(r"-?\d+(?:\.\d+)?", text)]
    try:
        values = np.asarray(json.loads(lists[-1]), float) if lists else np.empty(0)
        if values.size != np.prod(space.shape) or not np.isfinite(values).all():
            return None
    except (ValueError, TypeError):
        return None
    array = values.astype(space.dtype)
    return array.reshape(space.shape) if np.allclose(array, values) else None


def describe_action(space: Space[Any], names: Sequence[str] = ()) -> str:
    """Return a description of valid actions, for the message about an invalid action."""
    if isinstance(space, Discrete):
        if names:
            return f"one of: {', '.join(names)}"
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, Text):
        allowed = "".join(sorted(space.character_set))
        length = f"{space.min_length} to {space.max_length}"
        return f"a text of {length} characters out of {allowed!r:.80}"
    size = int(np.prod(space.shape or (1,)))
    kind = "numbers" if isinstance(space, Box) else "integers"
    return f"a JSON list of {size} {kind} within their limits, for example {json.dumps([0] * size)}"


def problems(
    actions: Space[Any] | None,
    observations: Space[Any] | None,
    action_names: Sequence[str],
    observation_names: Sequence[str],
) -> Iterator[str]:
    """Yield why an environment cannot be played as text, or why the names do not fit its spaces.

    Args:
        actions: the space of the actions; None if a class overrides `read`.
        observations: the space of the observations; None if a class overrides `describe`.
        action_names: the argument `actions` of the interaction.
        observation_names: the argument `observations` of the interaction.
    """
    if actions is not None:
        if not isinstance(actions, Discrete | Text | ArraySpace):
            yield f"its actions {actions} cannot be read from text: override `read`"
        elif action_names and not (
            isinstance(actions, Discrete) and len(action_names) == actions.n
        ):
            yield f"actions={list(action_names)} must have one name for each of {actions}"
    if observations is not None:
        if _size(observations) > MAX_ENTRIES:
            yield f"its observations {observations} cannot be described: override `describe`"
        elif observation_names and len(observation_names) != _parts(observations):
            yield (
                f"observations={list(observation_names)} must have one name for each part of"
                f" {observations}, which has {_parts(observations)}"
            )


def _parts(space: Space[Any]) -> int:
    """Return how many names an observation needs."""
    if isinstance(space, Discrete):
        return int(space.n)
    if isinstance(space, Tuple | Dict):
        return len(space.spaces)
    return int(np.prod(space.shape)) if isinstance(space, ArraySpace) else 0


def _size(space: Space[Any]) -> float:
    """Return how many numbers and texts an observation has; infinity if it has anything else."""
    if isinstance(space, Discrete | Text):
        return 1
    if isinstance(space, ArraySpace):
        return float(np.prod(space.shape))
    if isinstance(space, Tuple | Dict):
        return sum(map(_size, space.spaces.values() if isinstance(space, Dict) else space.spaces))
    return math.inf
