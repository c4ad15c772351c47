"""The ranks of a run as one object with the methods of a rank, and the actor of a rank.

Each rank is a Ray actor, `RankActor`, which holds the object whose methods are called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import re
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from agentrl import errors
from agentrl.cluster.pool import ResourcePool
from agentrl.errors import AgentRLError, ConfigError, RunStopped
from agentrl.learner.dispatch import SPLIT, Dispatch, dispatched_methods
from agentrl.shipment import Shipment, versions
from agentrl.torch_threads import NUMBER, ThreadCount, choose_threads

log = logging.getLogger("agentrl")

START_SECONDS = 300.0
"""The time for ranks to start. All import torch at once, perhaps from a slow file system."""
BUILD_SECONDS = 3600.0
"""The time for ranks to load a model."""
CALL_SECONDS = 2 * 3600.0
"""The time limit of a call, longer than any call takes. A call that takes longer never ends."""
WATCHDOG_SECONDS = 300.0
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface of gloo."""
SIOCGIFADDR = 0x8915
"""The request for the address of an interface (Linux)."""
GRACE_SECONDS = 2.0
"""The time for other ranks to report their failure after a rank failed. It may be the cause."""


class WorkerGroup:
    """One process per rank, with the methods of their class that are marked by `dispatch`.

    A rank that raises, ends or hangs ends the group: the other ranks wait for it in a collective
    operation, and their states are no longer consistent. `close` ends all of them.
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
        """Start a process on each device of a pool, and make an object in each.

        Each process has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch reads them. It sees
        only its own GPU, as `cuda:0` (LOCAL_RANK=0).

        Args:
            cls: the class of the objects.
            pool: the devices, in the order of ranks.
            *args: for `cls`.
            shipment: the files that ranks need from the controller's machine.
            watchdog_s: after so many seconds of a call, log which ranks have not finished, and
                their machines.
            deadline_s: after so many seconds of a call, end the group.
            **kwargs: for `cls`.

        Raises:
            ConfigError: a machine has other packages, files or registered names than this one.
            AgentRLError: the first rank that failed raised it.
            RunStopped: a rank ended, or raised another exception.
        """
        self.size = pool.nodes * pool.each
        self._watchdog_s, self._deadline_s = watchdog_s, deadline_s
        self._end_reason = ""
        """Why the group has ended; empty while it runs."""
        # The recovery of an engine requests weights concurrently with the run. All ranks must get
        # their calls in the same order, since they wait for each other in every call.
        self._calling = threading.Lock()
        self.workers: list[WorkerInfo] = []
        self.threads: list[ThreadCount] = []
        """The CPU threads of each rank."""
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
        raise AttributeError(f"{self._name}.{name} is not marked by `dispatch`")

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._end_reason = self._end_reason or "the group was closed"
        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor)

    # -- starting ---------------------------------------------------------------------------------

    def _open(
        self, pool: ResourcePool, cls: type, arguments: tuple[tuple, dict], shipment: Shipment
    ) -> None:
        info_refs = [actor.info.remote() for actor in self._actors]
        self.workers = self._gather("start", info_refs, START_SECONDS)
        self._check_versions()
        is_one_machine = len({info.node for info in self.workers}) == 1
        address = "127.0.0.1" if is_one_machine else self.workers[0].address
        host_refs = [self._actors[0].host.remote(address, self.size)]
        (port,) = self._gather("host", host_refs, START_SECONDS)
        shared = {
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # The store exists already: rank 0 connects to it like all others.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **users_threads(),
        }
        nodes = Counter(info.node for info in self.workers)
        shipment_ref = ray.put(shipment)
        enter_refs = [
            actor.enter.remote(
                shared | self._rank_variables(pool, rank, is_one_machine),
                shipment_ref,
                nodes[info.node],
            )
            for rank, (actor, info) in enumerate(zip(self._actors, self.workers, strict=True))
        ]
        self.threads = self._gather("enter", enter_refs, START_SECONDS)
        arguments_ref = ray.put(arguments)
        build_refs = [actor.build.remote(cls, arguments_ref) for actor in self._actors]
        self._gather("build", build_refs, BUILD_SECONDS)

    def _rank_variables(
        self, pool: ResourcePool, rank: int, is_one_machine: bool
    ) -> dict[str, str]:
        local = 0 if pool.gpu else rank % pool.each
        local_size = 1 if pool.gpu else pool.each
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(local_size),
        }
        if sys.platform == "linux":
            # Otherwise gloo uses the address of the machine's name, which is often 127.0.0.1.
            interface = "lo" if is_one_machine else self.workers[rank].interface
            variables |= {INTERFACE: interface} if interface else {}
        return variables

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
                    f"{self._describe(rank)} has {', '.join(different)}. Install the same versions"
                )

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, name: str, how: Dispatch, *args: Any, **kwargs: Any) -> Any:
        """Call a method as its `Dispatch` declares."""
        if self._end_reason:
            raise RunStopped(f"{name}: the ranks have ended: {self._end_reason}")
        shares: list[tuple[Any, ...]] = [()] * self.size
        if how is SPLIT:
            first, *args = args  # type: ignore[assignment]
            if len(first) != self.size:
                raise ValueError(f"{name}: {len(first)} shares for {self.size} ranks")
            shares = [(share,) for share in first]
        arguments = ray.put((tuple(args), kwargs))  # stored once for all ranks
        with self._calling:
            refs = [
                actor.call.remote(name, self._watchdog_s, arguments, *share)
                for actor, share in zip(self._actors, shares, strict=True)
            ]
        results = self._gather(name, refs)
        return results if how is SPLIT else results[0]

    def _gather(self, name: str, refs: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait for the results of all ranks that were called.

        Raises:
            AgentRLError: the first rank that failed raised it; the group has ended.
            RunStopped: that rank raised another exception or died, or there is no result in time.
        """
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failed: dict[int, Failure] = {}
        start = last_warning = time.monotonic()
        end = start + (seconds or self._deadline_s)
        while waiting and (now := time.monotonic()) < end:
            if now - last_warning >= self._watchdog_s:
                last_warning = now
                log.warning("%s: %s", name, self._list_unfinished(waiting.values(), now - start))
            # In steps of a second, so that Ctrl-C works.
            done, _ = ray.wait(list(waiting), timeout=min(1.0, end - now))
            for ref in done:
                rank = waiting.pop(ref)
                result = _get_result(ref)
                if isinstance(result, Failure):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                    failed[rank] = result
                else:
                    results[rank] = result
        if failed:
            self._fail(name, failed)
        if waiting:
            message = self._list_unfinished(waiting.values(), time.monotonic() - start)
            self._end_reason = f"{name}: {message}"
            self.close()
            raise RunStopped(f"{self._end_reason}; all ranks were stopped")
        return [results[rank] for rank in range(len(refs))]

    def _fail(self, name: str, failed: dict[int, Failure]) -> NoReturn:
        """End the group, and raise the likeliest cause.

        The likeliest cause is a rank that died, else an error of agentrl, else the first failure.
        """
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
        outcome = failure.message if failure.died else f"raised {failure.message}"
        others = "".join(f"\n  {self._describe(r)}: {failed[r].message[:300]}" for r in order[1:])
        also = f"\nAfter that, other ranks failed:{others}" if others else ""
        trace = RuntimeError(f"\n{failure.trace}") if failure.trace else None
        raise RunStopped(f"{where}, in {name}: {outcome}{also}") from trace

    def _describe(self, rank: int) -> str:
        here = f"rank {rank} of {self.size}"
        if rank < len(self.workers):
            info = self.workers[rank]
            here += f" (process {info.pid} on {info.address})"
        return here

    def _list_unfinished(self, ranks: Any, seconds: float) -> str:
        return f"not done after {seconds:.0f} s: {', '.join(map(self._describe, sorted(ranks)))}"


def _get_result(ref: Any) -> Any:
    """Return a finished result, or `Failure` if the process or the call failed."""
    try:
        return ray.get(ref)
    except RayTaskError as e:  # arguments or results cannot be pickled
        return Failure(f"{type(e.cause).__name__}: {e.cause}", time.time(), trace=str(e))
    except RayError as e:
        message = f"its process ended ({type(e).__name__}): {exit_reason(str(e))}"
        return Failure(message, time.time(), died=True)


def exit_reason(message: str) -> str:
    """Return one line of Ray's message about the end of a process: the reason.

    Ray's own message is a page, most of which is a list of possible causes: `Some causes: (1) ...`.
    """
    detail = message.partition("Worker exit detail:")[2] or message
    reason = re.split(r"(?:^|(?<=\.) )[^.]*\(1\)", " ".join(detail.split()))[0]
    return (reason or "no reason is known")[:300].strip()


# --- the actor of a rank -------------------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")

NOT_USER_CODE = (
    "<",  # code without a file
    os.path.join(os.path.dirname(errors.__file__), ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")),
)
"""Prefixes of the paths of files that are not the user's."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The machine, the process and the GPUs of a rank."""

    node: str
    """Ray's id of the machine."""
    address: str
    interface: str
    """The network interface that gloo uses; empty: gloo chooses it."""
    pid: int
    gpus: tuple[str, ...]
    """The rank's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a form that can be sent; others may not be picklable."""

    message: str
    at: float
    """`time.time()`."""
    error: AgentRLError | None = None
    """The exception, if it is one of agentrl's."""
    trace: str = ""
    died: bool = False
    """True if the process died."""


def return_failure(method: Callable[P, R]) -> Callable[P, R | Failure]:
    """Make a method return `Failure` instead of raising."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | Failure:
        try:
            return method(*args, **kwargs)
        except AgentRLError as e:
            # The module of a user's subclass may not exist in the controller.
            kind = next(c for c in type(e).__mro__ if c.__module__ == errors.__name__)
            return Failure(str(e), time.time(), error=kind(str(e)))
        except BaseException as e:  # SystemExit, too: it ends the call, not the process
            trace = traceback.format_exc()
            message = f"{type(e).__name__}: {e}{describe_location(e)}"
            return Failure(message, time.time(), trace=trace)

    return call


def set_variables(environment: dict[str, str]) -> None:
    """Set environment variables of an actor, and remove the OMP_NUM_THREADS that Ray set.

    Ray sets OMP_NUM_THREADS to the CPUs of an actor where the user has not set it. This is 1: an
    actor with a GPU reserves no CPU, the others reserve one. So 1 does not count as the user's.

    Args:
        environment: the variables; OMP_NUM_THREADS among them is the user's.
    """
    if os.environ.get(NUMBER) == "1":
        del os.environ[NUMBER]
    os.environ.update(environment)


def users_threads() -> dict[str, str]:
    """Return OMP_NUM_THREADS if the user has set it. It wins on all machines."""
    return {NUMBER: os.environ[NUMBER]} if NUMBER in os.environ else {}


def describe_location(error: BaseException) -> str:
    """Return ` (FILE:LINE: TEXT)` of the innermost line of user code.

    If no frame is the user's, the innermost frame is used.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith(NOT_USER_CODE)] or frames
    if not user_frames:
        return ""
    last = user_frames[-1]
    text = f": {last.line}" if last.line else ""
    return f" ({last.filename}:{last.lineno}{text})"


def find_interface(address: str) -> str:
    """Return the name of this machine's network interface with an IPv4 address, or ""."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # It has no IPv4 address.
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


class RankActor:
    """The actor of a rank. Its methods return `Failure` instead of raising."""

    def __init__(self, rank: int):
        """Create the actor; nothing is loaded yet.

        Args:
            rank: the number of the rank, for messages.
        """
        self._number = rank
        self._object: Any = None
        self._store: Any = None

    def __repr__(self) -> str:  # Ray prints it in front of this process's output
        return f"rank {self._number}"

    @return_failure
    def info(self) -> WorkerInfo:
        """Return the machine, the process and the GPUs of this rank."""
        context = ray.get_runtime_context()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return WorkerInfo(
            context.get_node_id(),
            (address := ray.util.get_node_ip_address()),
            os.environ.get(INTERFACE) or find_interface(address),
            os.getpid(),
            tuple(filter(None, visible.split(","))),
            versions(),
        )

    @return_failure
    def host(self, address: str, world: int) -> int:
        """Open torch's TCPStore for all ranks, which exists as long as this process.

        torch would open it on rank 0, at a port that was free some time before, on all interfaces.

        Args:
            address: the address of the interface on which the store listens.
            world: the number of ranks.

        Returns:
            The port of the store.
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
    def enter(
        self, environment: dict[str, str], shipment: Shipment, ranks_here: int
    ) -> ThreadCount:
        """Set the variables and the CPU threads of this rank, and load the user's files.

        Args:
            environment: see `set_variables`.
            shipment: the user's files.
            ranks_here: the number of ranks on this machine.
        """
        set_variables(environment)
        threads = choose_threads(ranks_here)
        torch.set_num_threads(threads.count)
        os.environ[NUMBER] = str(threads.count)  # otherwise accelerate sets its own number
        shipment.unpack()
        return threads

    @return_failure
    def build(self, cls: Callable[..., Any], arguments: tuple[tuple, dict]) -> None:
        """Make the object whose methods are called."""
        args, kwargs = arguments
        self._object = cls(*args, **kwargs)

    @return_failure
    def call(self, method: str, seconds: float, arguments: tuple[tuple, dict], *share: Any) -> Any:
        """Call a method of the object.

        Args:
            method: its name.
            seconds: after so many seconds, print the stack of every thread.
            arguments: those that all ranks get.
            share: this rank's own argument, which precedes the others.
        """
        args, kwargs = arguments
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, repeat=True, file=sys.__stderr__)
        try:
            return getattr(self._object, method)(*share, *args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
