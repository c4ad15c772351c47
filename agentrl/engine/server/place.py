"""Where a server of our own stands: its GPUs, and on which machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.engine.server.process import LOOPBACK, ServerProcess, Serving

Start = Callable[[str], tuple[ServerProcess, bool]]
"""Starts a server that listens on an address; with a word on how (see `Place.run`)."""


def here(start: Start) -> tuple[Serving, bool]:
    """On this machine, for this machine alone."""
    return start(LOOPBACK)


@dataclass(frozen=True, slots=True)
class Place:
    """One of a run's places for servers."""

    gpus: Sequence[int] = ()
    """Those of the server, as torch counts them there; none: a CPU."""
    shared: bool = False
    """Whether the first of them is the learner's."""
    near: bool = True
    """Whether the learner's weights are in this process's memory, or on a GPU that it sees."""
    run: Callable[[Start], tuple[Serving, bool]] = here
    """Has a server started there, and hands back what this process needs of it."""
