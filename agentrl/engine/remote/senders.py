"""Send weights from the processes that hold them to servers: by memory, by broadcast, or in files.

`WeightsSender.send` packs the weights into buckets, and its senders take one bucket after another:

- `IpcSender` gives the servers on the learner's own GPUs a handle of the bucket in memory.
- `BroadcastSender` broadcasts it to the servers on other GPUs, by NCCL.
- `FileSender` writes it to a file, which any server can read.

A bucket is many tensors in one allocation. Its handle is a pickle, the only format that SGLang
supports. A pickle can run code of its writer, so pickles are sent in one direction only: agentrl
writes them for servers that it started with its own admin key, and never reads one.

While a bucket is sent, the next one is gathered. If the weights are sharded, all ranks of the
learner call `send` at the same time: each rank gathers every bucket, and serves the servers on its
own GPU. Rank 0 broadcasts and writes files.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import os
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import gettempdir
from threading import Event
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore, Store
from torch.multiprocessing import reductions

from agentrl.engine.remote import fp8
from agentrl.engine.remote.admin import AdminClient, in_thread
from agentrl.errors import ConfigError, EngineError
from agentrl.workers.variables import environment_variables

BUCKET_BYTES = 2**30 // 3
"""The most bytes of a bucket, except if a single tensor is larger. Three are in memory: one is
sent, one is packed, and the tensors of one are still separate."""

FLATTENED = "flattened_bucket"
"""The server's name of the format in which a bucket is one tensor of bytes."""
BASE_SECONDS, BYTES_PER_SECOND = 20.0, 1e9
"""A server must take N bytes within `BASE_SECONDS + N / BYTES_PER_SECOND`."""
LOAD_SECONDS, FILE_BYTES_PER_SECOND = 60.0, 1e8
"""A server must load N bytes of files within `LOAD_SECONDS + N / FILE_BYTES_PER_SECOND`."""
JOIN_SECONDS = 120.0
"""The time limit for servers to join a group."""
LEAVE_SECONDS = 10.0
"""The time limit for leaving a group, and for a server that left a broadcast to report why."""
JOIN_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default, torch ends the whole process when a peer of a group is lost."""
NORM = "norm.weight"
"""The end of the names of norms. vLLM holds them as they are in the files: not fused, not split."""
DIGEST_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one server gets the policy."""

    source: Literal["memory", "files", "adapter"] = "files"
    """Weights that it receives as a `Target`, files with weights, or a folder with a LoRA adapter.
    Requests name an adapter, and the server's own weights stay."""
    processes: int = 1
    """See `Target`, as the next ones."""
    ranks: tuple[int, ...] = ()
    backend: str = "nccl"
    may_use_files: bool = False
    """True if the server gets files when the first weights do not come through memory: some
    machines share no memory between processes, or have no network for NCCL."""
    adapters: int = 2
    """How many adapters the server keeps, see `Adapters`."""
    fp8: bool = False
    """True if the server gets matrices of 8 bits."""


FROM_FILES = Delivery()


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes weights through memory."""

    url: str
    key: str = ""
    admin_key: str = ""
    processes: int = 1
    """The number of the server's processes that share a model."""
    ranks: tuple[int, ...] = ()
    """For each of these processes the learner's rank whose memory it reads. Empty: the server is on
    other GPUs, and rank 0 broadcasts to it."""
    backend: str = "nccl"
    """The backend of the broadcast: nccl, or gloo if all tensors are on CPUs."""

    @property
    def admin(self) -> AdminClient:
        """Return a client of the server."""
        return AdminClient(self.url, key=self.key, admin_key=self.admin_key)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a version of the policy is sent. It can be pickled."""

    version: int
    targets: tuple[Target, ...] = ()
    folder: Path | None = None
    """An empty folder to write the weights to, for servers that read files."""
    dtype: torch.dtype | None = None
    """The dtype in which weights are sent; None: their own."""
    published: bool = True
    """True if tensors have the names and shapes of the model's files, False if those of
    transformers. Used only if ranks send the weights."""
    bucket_bytes: int = BUCKET_BYTES
    adapter_folder: Path | None = None
    """An empty folder to write the LoRA adapter to, for servers that read it."""
    fp8: bool = False
    """True if the matrices of layers are sent in 8 bits, with scales."""


@dataclass(slots=True)
class Sent:
    """The result of sending weights."""

    size: int = 0
    """The number of bytes of all tensors."""
    names: list[str] = field(default_factory=list)
    """The names of the tensors."""
    digest: str = ""
    """A text that changes if weights change, or their buckets. It is compared with earlier digests
    only, of the same `Route.bucket_bytes`."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The weights of the model's norms, on the CPU."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why weights did not arrive, by the URL of the target, or by the folder."""


class Sender(ABC):
    """A way to send weights, on one rank."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        """Why weights did not arrive, by URL or folder."""

    @abstractmethod
    def take(self, bucket: Bucket, version: int) -> None:
        """Send a bucket; return when the servers have read it. Failures are added to `errors`.

        The version is sent with the last bucket. Until then, and after a failure, a server samples
        from mixed weights and reports the old version.
        """

    def commit(self) -> None:  # noqa: B027
        """Finish after the last bucket; all ranks call it, and none after an exception."""


class WeightsSender:
    """Sends the weights of this process, which may be one rank of several."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self._broadcast: BroadcastSender | None = None
        self._ranks: Any = None
        """A gloo group of all ranks, for small objects. It is separate from the groups that gather
        weights, because both are used at the same time."""

    def send(self, weights: Iterable[tuple[str, Tensor]], route: Route) -> Sent:
        """Send weights; all ranks call it at the same time, with equal arguments.

        Args:
            weights: named tensors, at least one. They are gathered while they are read.
            route: where to send them.

        Returns:
            The numbers are complete on rank 0 only. A failure of a server or of the disk is in
            `errors`.
        """
        is_single = not dist.is_initialized()
        rank, size = (0, 1) if is_single else (dist.get_rank(), dist.get_world_size())
        sent, summary = Sent(), _Summary()
        senders = self._open_senders(route, rank, size)
        taken: Future[None] | None = None
        cast = ((name, w.detach().to(route.dtype or w.dtype)) for name, w in weights)
        try:
            sources = fp8.quantize(cast) if route.fp8 else cast
            for bucket in make_buckets(sources, limit=route.bucket_bytes):
                summary.add(bucket)
                if bucket.flat.is_cuda:  # other threads have other streams
                    torch.cuda.current_stream(bucket.flat.device).synchronize()
                if taken is not None:
                    taken.result()
                # A daemon thread, so that Ctrl-C does not wait for a server that hangs.
                taken = in_thread(partial(_take, senders, bucket, route.version), "send-weights")
                sent.size += bucket.bytes.nbytes
                # The sender's thread frees the memory as soon as the bucket is sent.
                del bucket
            assert taken is not None
            taken.result()
        except Exception:
            if taken is not None:
                wait([taken])
            raise
        # Not after a failure of this rank: the others would not commit, and this one would wait.
        for sender in senders:
            sender.commit()
        summary.finish(sent)
        for sender in senders:
            sent.errors |= sender.errors
        if self._broadcast is not None and self._broadcast.errors:
            self._broadcast = None
        return sent

    def close(self) -> None:
        """Leave the group of the broadcast. It takes a limited time."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None

    def _open_senders(self, route: Route, rank: int, size: int) -> list[Sender]:
        senders: list[Sender] = []
        readers = [target for target in route.targets if target.ranks]
        if readers:
            if size > 1 and self._ranks is None:
                self._ranks = dist.new_group(backend="gloo")
            senders.append(IpcSender(readers, rank, self._ranks))
        if rank == 0:
            if receivers := [target for target in route.targets if not target.ranks]:
                senders.append(self._open_broadcast(receivers))
            if route.folder is not None:
                senders.append(FileSender(route.folder))
        return senders

    def _open_broadcast(self, targets: Sequence[Target]) -> BroadcastSender:
        """Return the sender whose group has these servers. A group's members never change."""
        if self._broadcast is None or self._broadcast.targets != tuple(targets):
            self.close()
            self._broadcast = BroadcastSender(targets)
        return self._broadcast


def _take(senders: Sequence[Sender], bucket: Bucket, version: int) -> None:
    """Let all senders take a bucket: at the same time, if it is on a GPU.

    On a CPU they take turns, because `IpcSender` moves the bucket to shared memory.
    """
    if len(senders) == 1 or not bucket.flat.is_cuda:
        for sender in senders:
            sender.take(bucket, version)
        return
    for future in [in_thread(partial(sender.take, bucket, version)) for sender in senders]:
        future.result()


def _call_all(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Make calls at the same time; return the error of each one that failed, by its key."""
    errors = {}
    for key, future in {key: in_thread(call) for key, call in calls.items()}.items():
        try:
            future.result()
        except Exception as e:  # A failure of one server must not end the ranks.
            errors[key] = _describe(e)
    return errors


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def load_seconds(sent: Sent) -> float:
    """Return the time limit of a server for loading files with these weights."""
    return LOAD_SECONDS + sent.size / FILE_BYTES_PER_SECOND


def _time_limit(bucket: Bucket) -> float:
    return BASE_SECONDS + bucket.bytes.nbytes / BYTES_PER_SECOND


def _fields(bucket: Bucket, version: int) -> dict[str, Any]:
    """Return the fields of a request that do not depend on the transport."""
    return {
        "load_format": FLATTENED,
        # SGLang crashes if the cache is flushed while paused turns use it.
        "flush_cache": False,
        "weight_version": str(version) if bucket.last else None,
    }


class IpcSender(Sender):
    """Lets servers read the memory of the ranks on whose devices they run.

    agentrl must have started the servers, because a pickle can run code.
    """

    def __init__(self, targets: Sequence[Target], rank: int = 0, ranks: Any = None):
        """Send nothing yet.

        Args:
            targets: servers, each with the ranks whose memory it reads.
            rank: this process's rank.
            ranks: the gloo group of all ranks; None: this process is the only one.
        """
        super().__init__()
        self._targets, self._rank, self._ranks = targets, rank, ranks
        self._reads_several = any(len(set(target.ranks)) > 1 for target in targets)

    def take(self, bucket: Bucket, version: int) -> None:
        targets = [target for target in self._targets if target.url not in self.errors]
        pickles: dict[tuple[str, int], str] = {}
        try:
            for target in targets:
                for process, rank in enumerate(target.ranks):
                    # One pickle per process, because torch counts the readers of the memory.
                    if rank == self._rank:
                        data = base64.b64encode(serialize(bucket)).decode()
                        pickles[target.url, process] = data
        except Exception as e:
            self.errors |= {t.url: _describe(e) for t in targets if self._rank in t.ranks}
        if self._reads_several:
            pickles = self._merge(pickles)
        # The first rank of a server posts for the others.
        self.errors |= _call_all(
            {
                target.url: partial(self._post, target, pickles, bucket, version)
                for target in targets
                if target.ranks[0] == self._rank and target.url not in self.errors
            }
        )
        if self._reads_several:
            # The bucket of every rank must exist until the server has read it.
            self.errors = self._merge(self.errors)

    def commit(self) -> None:
        self.errors = self._merge(self.errors)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # the servers on these GPUs need the memory

    def _post(
        self,
        target: Target,
        pickles: Mapping[tuple[str, int], str],
        bucket: Bucket,
        version: int,
    ) -> None:
        """Give a server the pickles of all its processes.

        Raises:
            EngineError: the server did not read them, or a rank could not pickle its bucket.
        """
        try:
            own = [pickles[target.url, process] for process in range(len(target.ranks))]
        except KeyError:
            raise EngineError(f"{target.url}: a rank has no handle of its bucket") from None
        body = {"serialized_named_tensors": own} | _fields(bucket, version)
        target.admin.manage("/update_weights_from_tensor", body, seconds=_time_limit(bucket))

    def _merge(self, own: dict[Any, str]) -> dict[Any, str]:
        """Return the union of the dicts of all ranks; all call it at the same time."""
        if self._ranks is None:
            return own
        all_dicts: list[Any] = [None] * dist.get_world_size(self._ranks)
        dist.all_gather_object(all_dicts, own, group=self._ranks)
        return {key: value for part in all_dicts for key, value in part.items()}


class FileSender(Sender):
    """Writes each bucket to a file."""

    def __init__(self, folder: Path):
        """Write nothing yet.

        Args:
            folder: an existing folder.
        """
        super().__init__()
        self._folder, self._files = folder, 0

    def take(self, bucket: Bucket, version: int) -> None:
        if self.errors:
            return
        on_cpu = Bucket(bucket.flat.cpu(), bucket.names, bucket.shapes, bucket.last)
        file = self._folder / f"{self._files:05d}.safetensors"
        try:
            save_file(dict(on_cpu.tensors()), file)
        except (OSError, SafetensorError) as e:
            self.errors[str(self._folder)] = f"cannot write {file}: {e}"
        self._files += 1


class BroadcastSender(Sender):
    """Broadcasts to all processes of some servers, which form one group with this process.

    The group exists from the first bucket to `close`, or to a failure. A failure of one server
    leaves the others with mixed weights, so all of them fail.
    """

    def __init__(self, targets: Sequence[Target]):
        """Send nothing yet.

        Args:
            targets: servers with the same backend.
        """
        # NCCL fails with "invalid argument" if processes have different values; servers have 0.
        # NCCL reads the variable once, so set it before anything in this process uses NCCL.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        super().__init__()
        self.targets = tuple(targets)
        self.group: BroadcastGroup | None = None

    def take(self, bucket: Bucket, version: int) -> None:
        if self.errors:
            return
        try:
            if self.group is None:
                self._join()
            self._broadcast(bucket, version)
        except EngineError as e:
            self._fail(e)

    def close(self) -> None:
        """Leave the group. It takes a limited time, whatever happened to the servers."""
        if self.group is None:
            return
        body = {"group_name": self.group.name}
        with suppress(EngineError):
            # All processes of an NCCL group must leave it together.
            self._run(
                dict.fromkeys(self.targets, ("/destroy_weights_update_group", body)),
                self.group.shutdown,
                LEAVE_SECONDS,
            )
        self._abort()

    def _join(self) -> None:
        """Create the group.

        Raises:
            EngineError: a server did not join.
        """
        size = 1 + sum(target.processes for target in self.targets)
        name, backend = f"agentrl-{uuid.uuid4().hex[:8]}", self.targets[0].backend
        address = _own_address(self.targets)
        self.group = group = BroadcastGroup(name, backend, size, address)
        requests, first = {}, 1
        for target in self.targets:
            body = {
                "master_address": address,
                "master_port": group.port,
                "rank_offset": first,
                "world_size": size,
                "group_name": name,
                "backend": backend,
            }
            requests[target] = "/init_weights_update_group", body
            first += target.processes
        with environment_variables(JOIN_VARIABLES):
            self._run(requests, group.open, JOIN_SECONDS)

    def _broadcast(self, bucket: Bucket, version: int) -> None:
        group, data = self.group, bucket.bytes
        assert group is not None
        if self.targets[0].backend == "nccl" and not data.is_cuda:
            data = data.cuda()  # offloaded weights are gathered on the CPU
        body = _fields(bucket, version) | {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group.name,
        }
        self._run(
            dict.fromkeys(self.targets, ("/update_weights_from_distributed", body)),
            lambda: group.broadcast(data),
            _time_limit(bucket),
        )

    def _run(
        self,
        requests: Mapping[Target, tuple[str, dict[str, Any]]],
        own_part: Callable[[], object],
        seconds: float,
    ) -> None:
        """Send a request to each server and run this process's part at the same time.

        Raises:
            EngineError: a part failed (a server's reason comes first), or took longer than
                `seconds`.
        """
        calls = {
            in_thread(partial(target.admin.manage, path, body, seconds=seconds)): target
            for target, (path, body) in requests.items()
        }
        action = in_thread(own_part)
        wait([*calls, action], timeout=seconds, return_when=FIRST_EXCEPTION)
        if action.done() and action.exception() is not None:
            wait(calls, timeout=LEAVE_SECONDS, return_when=FIRST_EXCEPTION)
        for call in [*calls, action]:
            if call.done() and (error := call.exception()) is not None:
                raise EngineError(f"sending weights: {_describe(error)}") from error
        if slow := [target.url for call, target in calls.items() if not call.done()]:
            raise EngineError(f"sending weights: {', '.join(slow)}: not done after {seconds:g} s")
        if not action.done():
            raise EngineError(f"sending weights: not done after {seconds:g} s")

    def _fail(self, error: EngineError) -> None:
        """Abort the group, and record the error for all servers."""
        self.errors = {target.url: str(error) for target in self.targets}
        self._abort()

    def _abort(self) -> None:
        """Abort the group. Its pending operations end, or continue to block their threads."""
        group, self.group = self.group, None
        if group is not None:
            wait([in_thread(group.abort)], timeout=LEAVE_SECONDS)


def _own_address(targets: Sequence[Target]) -> str:
    """Return the address of this machine that all servers can reach; loopback if all are here."""
    hosts = {urlsplit(target.url).hostname or "" for target in targets}
    addresses = set()
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing; it chooses the interface
                addresses.add(probe.getsockname()[0])
        except OSError as e:
            raise EngineError(f"{host}: no route to this server: {e}") from e
    outside = sorted(address for address in addresses if not address.startswith("127."))
    return outside[0] if outside else "127.0.0.1"


class BroadcastGroup:
    """This process's end of a group, as rank 0. SGLang creates the other ends in the same way.

    It does not use the group registry of `torch.distributed`: it needs no default group, and it
    does not affect code that creates or destroys one later.
    """

    def __init__(self, name: str, backend: str, size: int, address: str = "127.0.0.1"):
        """Listen for the other processes.

        Args:
            name: a name that no other group of the servers has.
            backend: nccl or gloo.
            size: the size of the group.
            address: the address of the interface on which to listen. NCCL chooses the interface for
                the data itself (`NCCL_SOCKET_IFNAME`).
        """
        self.name, self._backend, self._size = name, backend, size
        self._is_aborted = Event()
        self._group: Any = None
        # The socket that torch creates would listen on all interfaces, at a fixed port.
        listener = socket.create_server((address, 0))
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            self.port,
            size,
            is_master=True,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def open(self) -> None:
        """Wait until all processes of the servers have joined the group."""
        # These are the keys that `torch.distributed` uses for a group that SGLang creates.
        backends = BackendConfig(Backend(self._backend))  # type: ignore[arg-type]
        device = next(iter(backends.device_backend_map))
        store: Store = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        if self._backend == "gloo":
            # It blocks until all have joined; `abort` cannot end that, and no bucket takes so long.
            timeout = timedelta(seconds=JOIN_SECONDS)
            group = dist.ProcessGroupGloo(store, 0, self._size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            # It exceeds all time limits of this module, so that these apply.
            options._timeout = timedelta(hours=1)
            options.group_name = self.name  # type: ignore[assignment]
            group = dist.ProcessGroupNCCL(store, 0, self._size, options)
        group._set_sequence_number_for_group()
        self._group = group

    def broadcast(self, data: Tensor) -> None:
        """Broadcast a tensor; return when the others have it, or when the group is aborted."""
        if data.is_cuda:
            torch.cuda.set_device(data.device)  # The device is a property of the thread.
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        work = self._group.broadcast([data], options)
        # Poll, because a wait for a GPU cannot be interrupted.
        while not work.is_completed():
            if self._is_aborted.is_set():
                return
            time.sleep(0.0005)
        work.wait()

    def shutdown(self) -> None:
        """Leave the group together with the others. NCCL needs this instead of `abort`."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self) -> None:
        """Leave the group at once. Call it in its own thread only: it may block."""
        self._is_aborted.set()
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class _Summary:
    """Collects what is compared with the weights that servers report, one bucket at a time.

    The digest of a bucket is made of two sums of its bits, in rows of `DIGEST_WIDTH`: the sums of
    the rows, weighted by their position, and those of the columns. So it also changes if values
    only change places.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        self._names += bucket.names
        self._sums.append(_sum_bits(bucket))
        for name, tensor in bucket.tensors():
            if name.endswith(NORM):
                self._norms[name] = tensor.clone()

    def finish(self, sent: Sent) -> None:
        """Write the results into `sent`."""
        sent.names = self._names
        numbers = [sums.tolist() for sums in self._sums]
        sent.digest = hashlib.sha256(repr((self._names, numbers)).encode()).hexdigest()
        sent.norms = {name: tensor.cpu() for name, tensor in self._norms.items()}


def _sum_bits(bucket: Bucket) -> Tensor:
    """Return the weighted sums of a bucket's bits: (3,) int64, on its device."""
    data = bucket.bytes
    bits = data.view(torch.int16) if data.numel() % 2 == 0 else data
    whole = len(bits) // DIGEST_WIDTH * DIGEST_WIDTH
    table, rest = bits[:whole].view(-1, DIGEST_WIDTH), bits[whole:]
    # Two passes: weighting each value would need a copy of four times the size.
    sums = [table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64), rest.long()]
    return torch.stack([(s * torch.arange(1, len(s) + 1, device=s.device)).sum() for s in sums])


# -- buckets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Named tensors of one dtype, one after the other, without gaps."""

    flat: Tensor
    """All tensors, (N,)."""
    names: list[str]
    shapes: list[torch.Size]
    last: bool
    """True if it is the last bucket of the update."""

    @property
    def bytes(self) -> Tensor:
        """Return the same memory as uint8."""
        return self.flat.view(torch.uint8)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name, as views of `flat`."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)


def make_buckets(
    weights: Iterable[tuple[str, Tensor]], *, limit: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Copy named tensors into buckets; those of one dtype and device in their order.

    A bucket has one dtype, because a view of another dtype would need aligned bytes. It is on the
    device of its tensors. References to tensors are kept only until their bucket is full, so at
    most `limit` bytes of each dtype are kept.

    Args:
        weights: at least one named tensor.
        limit: the most bytes of a bucket; a larger tensor gets its own bucket.
    """
    pending: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in weights:
        same = pending.setdefault((tensor.dtype, tensor.device), [])
        if same and sum(t.nbytes for _, t in same) + tensor.nbytes > limit:
            yield _pack(same, last=False)
        same.append((name, tensor))
    *others, last = pending.values()
    for same in others:
        yield _pack(same, last=False)
    yield _pack(last, last=True)


@torch.no_grad()
def _pack(pending: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    """Return a bucket of the pending tensors, and clear the list."""
    names, tensors = map(list, zip(*pending, strict=True))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    pending.clear()
    return Bucket(flat, names, [t.shape for t in tensors], last)


def serialize(bucket: Bucket) -> bytes:
    """Return a pickle from which one process of a server reads a bucket.

    It has a handle of the memory, and the names and ranges of the tensors. The process must read it
    exactly once, and the bucket must exist until then.
    """
    sizes = (shape.numel() * bucket.flat.itemsize for shape in bucket.shapes)
    ranges = pairwise(accumulate(sizes, initial=0))
    metadata = [
        # SGLang's own class is not importable here. SGLang reads only these fields.
        SimpleNamespace(
            name=name,
            shape=shape,
            dtype=bucket.flat.dtype,
            start_idx=start,
            end_idx=end,
            numel=end - start,
        )
        for name, shape, (start, end) in zip(bucket.names, bucket.shapes, ranges, strict=True)
    ]
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _reduce  # type: ignore[attr-defined]
    with _shared_by_name():
        pickler.dump({"flattened_tensor": bucket.bytes, "metadata": metadata})
    return buffer.getvalue()


_DEVICE = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor as torch does, but name a GPU by its UUID.

    The server may count GPUs differently, and can read the UUID. torch keeps shared memory until it
    is released, and makes the reader wait for writes that were pending at the time of pickling.
    """
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by name within the block.

    The alternative, file descriptors, can only be passed to child processes of this process.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def check_folder_visible(path: Path, where: str = "this machine") -> None:
    """Check that this machine sees a folder that passes weights.

    Args:
        path: a path below TMPDIR, created on the machine of the run.
        where: the name of this machine.

    Raises:
        ConfigError: this machine does not see the folder.
    """
    if not path.exists():
        raise ConfigError(
            f"weights are passed through files in {gettempdir()} of the run's machine, but {where}"
            f" does not see {path}. Set TMPDIR to a folder on a file system that all machines see"
        )
