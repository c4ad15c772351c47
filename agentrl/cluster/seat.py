"""A rank's process: what stands between a worker group and the object that it is about."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import ray

from agentrl import errors
from agentrl.cluster.ship import Shipment, versions
from agentrl.errors import AgentRLError

P = ParamSpec("P")
R = TypeVar("R")

NOT_THEIRS = (
    "<",  # code of no file
    os.path.join(os.path.dirname(errors.__file__), ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")),
)
"""How the files begin that are not the user's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is."""

    node: str
    """Ray's name for the machine."""
    address: str
    pid: int
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES has them."""
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """What was raised, as it can travel: exceptions of others may not be picklable."""

    said: str
    at: float
    """`time.time()`."""
    error: AgentRLError | None = None
    """The exception, where it is one of agentrl's."""
    trace: str = ""
    died: bool = False
    """Whether the process did."""


def caught(method: Callable[P, R]) -> Callable[P, R | Failed]:
    """Hand back `Failed` for what a method raises."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | Failed:
        try:
            return method(*args, **kwargs)
        except AgentRLError as e:
            # A subclass of the user's is in a module that only this process has.
            kind = next(c for c in type(e).__mro__ if c.__module__ == errors.__name__)
            return Failed(str(e), time.time(), error=kind(str(e)))
        except BaseException as e:  # SystemExit is the end of a call, not of a group
            trace = traceback.format_exc()
            said = f"{type(e).__name__}: {e}{raised_at(e)}"
            return Failed(said, time.time(), trace=trace)

    return call


def raised_at(error: BaseException) -> str:
    """` (FILE:LINE: TEXT)`: the innermost line of the user's, or, where none is, of anybody's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(NOT_THEIRS)] or frames
    if not theirs:
        return ""
    last = theirs[-1]
    text = f": {last.line}" if last.line else ""
    return f" ({last.filename}:{last.lineno}{text})"


class Seat:
    """An actor. Its methods hand back `Failed` for what they raise."""

    def __init__(self, rank: int):
        """Nothing is loaded yet.

        Args:
            rank: the number, for messages.
        """
        self._number = rank
        self._held: Any = None
        self._store: Any = None

    def __repr__(self) -> str:  # Ray puts it before the lines that are printed here
        return f"rank {self._number}"

    @caught
    def place(self) -> Place:
        """Where this is."""
        context = ray.get_runtime_context()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            tuple(filter(None, visible.split(","))),
            versions(),
        )

    @caught
    def host(self, address: str, world: int) -> int:
        """Open the meeting point of all ranks, which is there as long as this process.

        torch would have rank 0 open it, at a port that was free a while ago and on all interfaces.

        Args:
            address: the interface.
            world: how many ranks.

        Returns:
            Its port.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            port,
            world,
            is_master=True,
            timeout=timedelta(minutes=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    @caught
    def enter(self, environment: dict[str, str], shipment: Shipment) -> None:
        """Be a rank: with its variables, and with the user's files."""
        os.environ.update(environment)
        shipment.unpack()

    @caught
    def build(self, cls: Callable[..., Any], given: tuple[tuple, dict]) -> None:
        """Make the object that methods are called on."""
        args, kwargs = given
        self._held = cls(*args, **kwargs)

    @caught
    def call(self, method: str, seconds: float, given: tuple[tuple, dict], *share: Any) -> Any:
        """Call a method of it.

        Args:
            method: its name.
            seconds: after so many, print where every thread is.
            given: the arguments that all ranks have.
            share: this rank's own, which comes first.
        """
        args, kwargs = given
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, repeat=True, file=sys.__stderr__)
        try:
            return getattr(self._held, method)(*share, *args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
