"""Gymnasium's spaces as text: an observation to read, an action that was written."""

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
"""An observation of more numbers (a picture) is no text."""
Row = Box | MultiBinary | MultiDiscrete


def describe(space: Space[Any], value: Any, names: Sequence[str] = ()) -> str:
    """An observation as text, such as `cart 0.02, pole -0.031`.

    Args:
        space: that it is of.
        value: the observation.
        names: of its numbers or parts in order, or of the values of a `Discrete`.
    """
    if isinstance(space, Discrete):
        return names[int(value) - int(space.start)] if names else str(int(value))
    if isinstance(space, Tuple):
        return _listed([describe(s, v) for s, v in zip(space.spaces, value, strict=True)], names)
    if isinstance(space, Dict):
        return _listed([describe(s, value[k]) for k, s in space.spaces.items()], [*space.spaces])
    if isinstance(space, Row):
        texts = [f"{x:.3g}" for x in np.asarray(value, float).ravel()]
        return _listed(texts, names) if names else f"[{', '.join(texts)}]"
    return str(value)


def _listed(texts: Sequence[str], names: Sequence[str]) -> str:
    if not names:
        return ", ".join(texts)
    return ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def read_action(space: Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """The last action that a text names, or None.

    Args:
        space: the actions.
        text: what the assistant wrote.
        names: of the values of a `Discrete`; then numbers are not read.
    """
    if isinstance(space, Text):
        action: Any = text.strip()
    elif isinstance(space, Discrete):
        action = _named(text, names) if names else _whole(text)
        if action is not None:
            action = np.int64(action + (int(space.start) if names else 0))
    else:
        action = _row(space, text)
    return action if action is not None and space.contains(action) else None


def _named(text: str, names: Sequence[str]) -> int | None:
    """The place of the last of these names that is written."""
    longest = sorted(names, key=len, reverse=True)
    found = re.findall(
        rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)", text, re.IGNORECASE
    )
    return [n.casefold() for n in names].index(found[-1].casefold()) if found else None


def _whole(text: str) -> int | None:
    found = re.findall(r"(?<![\w.])-?\d{1,9}(?!\w|\.\d)", text)
    return int(found[-1]) if found else None


def _row(space: Any, text: str) -> Any:
    """The last JSON list of numbers; where the space holds one number, that number will do."""
    found = re.findall(r"\[[^\[\]]{0,2000}\]", text)
    if not found and space.shape in ((), (1,)):
        found = [f"[{x}]" for x in re.findall(r"-?\d+(?:\.\d+)?", text)]
    try:
        values = np.asarray(json.loads(found[-1]), float) if found else np.empty(0)
        if values.size != np.prod(space.shape) or not np.isfinite(values).all():
            return None
    except (ValueError, TypeError):
        return None
    whole = values.astype(space.dtype)
    return whole.reshape(space.shape) if np.allclose(whole, values) else None


def how_to_act(space: Space[Any], names: Sequence[str] = ()) -> str:
    """What an action looks like, for somebody who wrote none."""
    if isinstance(space, Discrete):
        if names:
            return f"one of: {', '.join(names)}"
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, Text):
        return f"a text of {space.min_length} to {space.max_length} characters that it takes"
    size = int(np.prod(space.shape or (1,)))
    kind = "numbers" if isinstance(space, Box) else "whole numbers"
    return f"a list of {size} {kind} within their limits, such as {json.dumps([0] * size)}"


def problems(
    actions: Space[Any] | None,
    observations: Space[Any] | None,
    named: Sequence[str],
    labels: Sequence[str],
) -> Iterator[str]:
    """Why an environment cannot be played as text, or its names do not fit it.

    Args:
        actions: its actions; None where a class reads them its own way.
        observations: its observations; None where a class describes them its own way.
        named: the argument `actions`.
        labels: the argument `observations`.
    """
    if actions is not None:
        if not isinstance(actions, Discrete | Text | Row):
            yield f"its actions {actions} cannot be read from text: override `read`"
        elif named and not (isinstance(actions, Discrete) and len(named) == actions.n):
            yield f"actions={list(named)} must name each of {actions}"
    if observations is not None:
        if _size(observations) > MAX_ENTRIES:
            yield f"its observations {observations} are no text: override `describe`"
        elif labels and len(labels) != _parts(observations):
            yield f"observations={list(labels)} must name each part of {observations}"


def _parts(space: Space[Any]) -> int:
    """How many names describe it."""
    if isinstance(space, Discrete):
        return int(space.n)
    if isinstance(space, Tuple):
        return len(space.spaces)
    return int(np.prod(space.shape)) if isinstance(space, Row) else 0


def _size(space: Space[Any]) -> float:
    """How many numbers and texts an observation holds; infinite where it holds something else."""
    if isinstance(space, Discrete | Text):
        return 1
    if isinstance(space, Row):
        return float(np.prod(space.shape))
    if isinstance(space, Tuple | Dict):
        return sum(map(_size, space.spaces.values() if isinstance(space, Dict) else space.spaces))
    return math.inf
