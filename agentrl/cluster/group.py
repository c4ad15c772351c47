"""The ranks of a run as one object, with the methods of each; and the process of a rank.

Each rank is an actor, a `RankActor`, that holds the object whose methods are called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from agentrl import errors
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.ship import Shipment, versions
from agentrl.errors import AgentRLError, ConfigError, RunStopped
from agentrl.trainer.dispatch import SPLIT, Dispatch, dispatched_methods

log = logging.getLogger("agentrl")

START_SECONDS = 300.0
"""Of processes that import torch, all at once, perhaps from a slow file system."""
BUILD_SECONDS = 3600.0
"""Of ranks that read a model."""
CALL_SECONDS = 2 * 3600.0
"""Longer than any call takes: what hangs for so long does so forever."""
WATCHDOG_SECONDS = 300.0
GRACE_SECONDS = 2.0
"""After one rank failed: for the others to say why they did, if that was the cause."""


class WorkerGroup:
    """One process a rank, and the methods of their class that were marked by `dispatch`.

    A rank that raises, ends or hangs is the end of the group: the others wait for it in a
    collective operation, and what they hold is no longer the same. `close` ends all of them.
    """

    def __init__(
        self,
        cls: type,
        pool: ResourcePool,
        *args: Any,
        shipment: Shipment | None = None,
        watchdog_s: float = WATCHDOG_SECONDS,
        deadline_s: float = CALL_SECONDS,
        **kwargs: Any,
    ):
        """Start a process on each place of a pool, and make an object in each.

        Each finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch reads them, and sees only
        the GPU of its own, which is `cuda:0` (LOCAL_RANK=0).

        Args:
            cls: of the object.
            pool: the places, in the order of ranks.
            *args: for `cls`.
            shipment: what ranks need of the controller's machine.
            watchdog_s: after so many seconds of a call, say which ranks are not done, and where.
            deadline_s: after so many, end.
            **kwargs: for `cls`.

        Raises:
            ConfigError: a machine has other packages, files or registered names than this one.
            AgentRLError: what the first rank raised.
            RunStopped: a rank ended, or raised something else.
        """
        self.size = pool.nodes * pool.each
        self._watchdog_s, self._deadline_s = watchdog_s, deadline_s
        self._end_reason = ""
        """Why it is at its end."""
        # An engine that is mended asks for weights beside the run; all ranks must be called in one
        # order, since they meet in every call.
        self._calling = threading.Lock()
        self.workers: list[WorkerInfo] = []
        actor = ray.remote(RankActor)
        self._actors: list[Any] = [
            actor.options(max_restarts=0, **pool.options(rank // pool.each)).remote(rank)
            for rank in range(self.size)
        ]
        try:
            self._open(pool, cls, (args, kwargs), shipment or Shipment())
        except BaseException:
            self.close()
            raise
        for name, how in dispatched_methods(cls).items():
            setattr(self, name, partial(self._call, name, how))
        self._name = cls.__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._name}.{name} is not dispatched")

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._end_reason = self._end_reason or "the group was closed"
        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor)

    # -- the beginning -----------------------------------------------------------------------------

    def _open(
        self, pool: ResourcePool, cls: type, arguments: tuple[tuple, dict], shipment: Shipment
    ) -> None:
        started = [actor.info.remote() for actor in self._actors]
        self.workers = self._gather("start", started, START_SECONDS)
        self._check_versions()
        alone = len({info.node for info in self.workers}) == 1
        address = "127.0.0.1" if alone else self.workers[0].address
        refs = [self._actors[0].host.remote(address, self.size)]
        (port,) = self._gather("host", refs, START_SECONDS)
        shared = {
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # The store is there already: rank 0 joins it as all others do.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if alone and sys.platform == "linux":
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        packed = ray.put(shipment)
        entered = [
            actor.enter.remote(shared | self._rank_variables(pool, rank), packed)
            for rank, actor in enumerate(self._actors)
        ]
        self._gather("enter", entered, START_SECONDS)
        shipped = ray.put(arguments)
        built = [actor.build.remote(cls, shipped) for actor in self._actors]
        self._gather("build", built, BUILD_SECONDS)

    def _rank_variables(self, pool: ResourcePool, rank: int) -> dict[str, str]:
        local = 0 if pool.gpu else rank % pool.each
        each = 1 if pool.gpu else pool.each
        return {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each)}

    def _check_versions(self) -> None:
        here = versions()
        for rank, info in enumerate(self.workers):
            different = [
                f"{package} {info.versions.get(package)} (here {version})"
                for package, version in here.items()
                if info.versions.get(package) != version
            ]
            if different:
                raise ConfigError(
                    f"{self._describe(rank)} has {', '.join(different)}. Install the same"
                )

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, name: str, how: Dispatch, *args: Any, **kwargs: Any) -> Any:
        """Call a method as it was declared; see `Dispatch`."""
        if self._end_reason:
            raise RunStopped(f"{name}: no rank is left: {self._end_reason}")
        shares: list[tuple[Any, ...]] = [()] * self.size
        if how is SPLIT:
            first, *args = args  # type: ignore[assignment]
            if len(first) != self.size:
                raise ValueError(f"{name}: {len(first)} shares for {self.size} ranks")
            shares = [(share,) for share in first]
        arguments = ray.put((tuple(args), kwargs))  # once, whoever reads it
        with self._calling:
            refs = [
                actor.call.remote(name, self._watchdog_s, arguments, *share)
                for actor, share in zip(self._actors, shares, strict=True)
            ]
        results = self._gather(name, refs)
        return results if how is SPLIT else results[0]

    def _gather(self, name: str, refs: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """The results of all ranks that were asked.

        Raises:
            AgentRLError: what the first rank that failed raised; the group is at its end.
            RunStopped: it raised something else, it died, or there is no result in time.
        """
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failed: dict[int, Failed] = {}
        start = last_warning = time.monotonic()
        end = start + (seconds or self._deadline_s)
        while waiting and (now := time.monotonic()) < end:
            if now - last_warning >= self._watchdog_s:
                last_warning = now
                log.warning(
                    "%s: %s", name, self._describe_unfinished(waiting.values(), now - start)
                )
            # In pieces, so that Ctrl-C is heard.
            done, _ = ray.wait(list(waiting), timeout=min(1.0, end - now))
            for ref in done:
                rank = waiting.pop(ref)
                result = _get_result(ref)
                if isinstance(result, Failed):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                    failed[rank] = result
                else:
                    results[rank] = result
        if failed:
            self._fail(name, failed)
        if waiting:
            message = self._describe_unfinished(waiting.values(), time.monotonic() - start)
            self._end_reason = f"{name}: {message}"
            self.close()
            raise RunStopped(f"{self._end_reason}; the ranks were ended")
        return [results[rank] for rank in range(len(refs))]

    def _fail(self, name: str, failed: dict[int, Failed]) -> NoReturn:
        """End the group with the cause: a death, an error of ours, or what came first."""
        order = sorted(
            failed, key=lambda r: (not failed[r].died, failed[r].error is None, failed[r].at)
        )
        rank = order[0]
        failure = failed[rank]
        where = self._describe(rank)
        self._end_reason = f"{where}: {name}: {failure.message}"
        self.close()
        if failure.error is not None:
            raise type(failure.error)(f"{where}: {failure.message}")
        did = failure.message if failure.died else f"raised {failure.message}"
        others = "".join(f"\n  {self._describe(r)}: {failed[r].message[:300]}" for r in order[1:])
        also = f"\nThen, of the others:{others}" if others else ""
        trace = RuntimeError(f"\n{failure.trace}") if failure.trace else None
        raise RunStopped(f"{where}, in {name}: {did}{also}") from trace

    def _describe(self, rank: int) -> str:
        here = f"rank {rank} of {self.size}"
        if rank < len(self.workers):
            info = self.workers[rank]
            here += f" (process {info.pid} on {info.address})"
        return here

    def _describe_unfinished(self, ranks: Any, seconds: float) -> str:
        return f"not done after {seconds:.0f} s: {', '.join(map(self._describe, sorted(ranks)))}"


def _get_result(ref: Any) -> Any:
    """A result that is there; `Failed` of a process that is not."""
    try:
        return ray.get(ref)
    except RayTaskError as e:  # the call itself: arguments or results do not travel
        return Failed(f"{type(e.cause).__name__}: {e.cause}", time.time(), trace=str(e))
    except RayError as e:
        message = f"its process ended ({type(e).__name__}): {exit_reason(str(e))}"
        return Failed(message, time.time(), died=True)


def exit_reason(words: str) -> str:
    """What Ray knows of the end of a process, in one line.

    Its own words are a page, most of it a list of what may have been: `Some causes: (1) ...`.
    """
    kind = words.partition("Worker exit detail:")[2] or words
    known = re.split(r"(?:^|(?<=\.) )[^.]*\(1\)", " ".join(kind.split()))[0]
    return (known or "it does not say how")[:300].strip()


# --- the process of a rank ---------------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")

NOT_USER_CODE = (
    "<",  # code of no file
    os.path.join(os.path.dirname(errors.__file__), ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")),
)
"""How the files begin that are not the user's."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
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

    message: str
    at: float
    """`time.time()`."""
    error: AgentRLError | None = None
    """The exception, where it is one of agentrl's."""
    trace: str = ""
    died: bool = False
    """Whether the process did."""


def return_failure(method: Callable[P, R]) -> Callable[P, R | Failed]:
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
            message = f"{type(e).__name__}: {e}{describe_location(e)}"
            return Failed(message, time.time(), trace=trace)

    return call


def describe_location(error: BaseException) -> str:
    """` (FILE:LINE: TEXT)`: the innermost line of the user's, or, where none is, of anybody's."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith(NOT_USER_CODE)] or frames
    if not user_frames:
        return ""
    last = user_frames[-1]
    text = f": {last.line}" if last.line else ""
    return f" ({last.filename}:{last.lineno}{text})"


class RankActor:
    """An actor. Its methods hand back `Failed` for what they raise."""

    def __init__(self, rank: int):
        """Nothing is loaded yet.

        Args:
            rank: the number, for messages.
        """
        self._number = rank
        self._object: Any = None
        self._store: Any = None

    def __repr__(self) -> str:  # Ray puts it before the lines that are printed here
        return f"rank {self._number}"

    @return_failure
    def info(self) -> WorkerInfo:
        """Where this is."""
        context = ray.get_runtime_context()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return WorkerInfo(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            tuple(filter(None, visible.split(","))),
            versions(),
        )

    @return_failure
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

    @return_failure
    def enter(self, environment: dict[str, str], shipment: Shipment) -> None:
        """Be a rank: with its variables, and with the user's files."""
        os.environ.update(environment)
        shipment.unpack()

    @return_failure
    def build(self, cls: Callable[..., Any], arguments: tuple[tuple, dict]) -> None:
        """Make the object that methods are called on."""
        args, kwargs = arguments
        self._object = cls(*args, **kwargs)

    @return_failure
    def call(self, method: str, seconds: float, arguments: tuple[tuple, dict], *share: Any) -> Any:
        """Call a method of it.

        Args:
            method: its name.
            seconds: after so many, print where every thread is.
            given: the arguments that all ranks have.
            share: this rank's own, which comes first.
        """
        args, kwargs = arguments
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, repeat=True, file=sys.__stderr__)
        try:
            return getattr(self._object, method)(*share, *args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
