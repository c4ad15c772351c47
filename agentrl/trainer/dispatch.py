"""How a method is called on all ranks: what each is given, and what comes back.

    class Rank:
        @dispatch(SPLIT)
        def look(self, share, who): ...    # group.look([share_0, share_1], who) -> [.., ..]

        @dispatch(BROADCAST)
        def descend(self, step): ...       # group.descend(step) -> what rank 0 returned

A group has the methods of its ranks, whether they are one object of this process (`Alone`) or many
processes: whoever calls it does not see which.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How arguments are split and results collected."""

    SPLIT = "split"
    """The first argument is a list with an entry for each rank; so is the result. Further arguments
    are the same for all."""
    BROADCAST = "broadcast"
    """All ranks get the same arguments; the result is rank 0's."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called."""


SPLIT, BROADCAST, RANK_ZERO = Dispatch.SPLIT, Dispatch.BROADCAST, Dispatch.RANK_ZERO


def dispatch(how: Dispatch) -> Callable[[F], F]:
    """Declare how a method of a rank is called on all of them."""

    def mark(method: F) -> F:
        method.dispatch = how  # type: ignore[attr-defined]
        return method

    return mark


def dispatched(cls: type) -> dict[str, Dispatch]:
    """The methods of a class that are called on all ranks, by name."""
    return {
        name: method.dispatch
        for name in dir(cls)
        if hasattr(method := getattr(cls, name), "dispatch")
    }


class Group(Protocol):
    """Ranks, with the methods of theirs that were marked by `dispatch`."""

    size: int
    """How many ranks."""

    def __getattr__(self, name: str) -> Any: ...

    def close(self) -> None:
        """End them."""
        ...


class Alone:
    """A group of one rank, in this process."""

    size = 1

    def __init__(self, rank: Any):
        """Use the rank."""
        self.rank = rank
        for name, how in dispatched(type(rank)).items():
            method = getattr(rank, name)
            setattr(self, name, partial(_split, method) if how is SPLIT else method)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self.rank).__name__}.{name} is not dispatched")

    def close(self) -> None:
        """Nothing to end."""


def _split(method: Callable[..., Any], shares: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    (share,) = shares
    return [method(share, *args, **kwargs)]
