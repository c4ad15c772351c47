"""Send all weights in buckets, each in one allocation: through shared memory, or by NCCL.

With shared memory, a request contains names, shapes and a handle of the memory, as a pickle, which
is the only format that the server supports. A pickle can run code of its writer, so pickles are
sent in one direction only: agentrl writes them for a server on loopback that it started with its
own admin key, and never reads one.

With NCCL, from GPU to GPU, this process broadcasts and the processes of a server receive.
"""

from __future__ import annotations

import base64
import inspect
import io
import os
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore, Store
from torch.multiprocessing import reductions

from agentrl.engine.base import Update
from agentrl.engine.remote.admin import ADMIN_SECONDS, AdminClient, in_thread
from agentrl.engine.remote.senders import SEND_SECONDS, Sender
from agentrl.errors import EngineError
from agentrl.workers.variables import environment_variables

BUCKET_BYTES = 512 * 2**20
"""The most bytes of a bucket, except if a single tensor is larger."""
FLATTENED = "flattened_bucket"
"""The server's name of the format in which a bucket is one tensor of bytes."""
JOIN_SECONDS = 120.0
"""The time limit for a server to join a group."""
JOIN_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default, torch ends the whole process when a peer of a group is lost."""
GRACE_SECONDS = 10.0
"""The time limit for a server that left a broadcast to report why, and for the end of a group."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Copies of named tensors, one after the other, without gaps."""

    flat: Tensor
    """All tensors, of one dtype, (N,)."""
    names: list[str]
    shapes: list[torch.Size]
    last: bool
    """True if it is the last bucket of the update."""

    @property
    def bytes(self) -> Tensor:
        """Return the same memory as uint8."""
        return self.flat.view(torch.uint8)


def make_buckets(weights: Iterable[tuple[str, Tensor]], *, limit: int) -> Iterator[Bucket]:
    """Copy named tensors into buckets, in their order.

    A bucket has one dtype, because a view of another dtype would need aligned bytes. It is on the
    device of its tensors. References to tensors are kept only until their bucket is full.

    Args:
        weights: at least one named tensor.
        limit: the most bytes of a bucket; a larger tensor gets its own bucket.
    """
    pending: list[tuple[str, Tensor]] = []
    kind, size = None, 0
    for name, tensor in weights:
        if pending and (size + tensor.nbytes > limit or kind != (tensor.dtype, tensor.device)):
            yield _pack(pending, last=False)
            size = 0
        pending.append((name, tensor))
        kind, size = (tensor.dtype, tensor.device), size + tensor.nbytes
    assert pending, "no weights"
    yield _pack(pending, last=True)


@torch.no_grad()
def _pack(pending: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    """Return a bucket of the pending tensors, and clear the list."""
    names, tensors = map(list, zip(*pending, strict=True))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    pending.clear()
    return Bucket(flat, names, [t.shape for t in tensors], last)


class BucketSender(Sender):
    """Sends all weights, a bucket at a time.

    Tensors that are not in the update keep their values.
    """

    def __init__(
        self,
        admin: AdminClient,
        *,
        tp: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """Store the options; send nothing yet.

        Args:
            admin: the client of a server on this machine.
            tp: the number of the server's processes that share a model.
            bucket_bytes: the most bytes to copy at a time.
        """
        super().__init__(admin)
        self._tp, self._bucket_bytes = tp, bucket_bytes

    def send(self, update: Update) -> int:
        """Send the weights.

        The version is sent with the last bucket. Until then, and after an error in this method,
        answers are sampled from mixed weights and carry the old version.
        """
        size = 0
        for bucket in make_buckets(update.weights(), limit=self._bucket_bytes):
            body = {
                "load_format": FLATTENED,
                "flush_cache": False,
                "weight_version": str(update.version) if bucket.last else None,
            }
            self._send_bucket(bucket, body)
            size += bucket.bytes.nbytes
            # The server has read it. Free its memory before the next bucket is allocated.
            del bucket
        return size

    @abstractmethod
    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        """Send a bucket and return when the server has read it.

        `body` has the fields of the request that do not depend on the transport.
        """


class IpcSender(BucketSender):
    """Sends weights to a server on the same GPU as the learner, or on a CPU like the learner.

    This process must have started the server. If a server has several GPUs, all its processes read
    from the learner's GPU, which they must see.
    """

    def send(self, update: Update) -> int:
        """Send the weights, then release the shared GPU memory."""
        try:
            return super().send(update)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        # One pickle per process, because torch counts the readers of the memory.
        pickles = [base64.b64encode(serialize(bucket)).decode() for _ in range(self._tp)]
        self._admin.manage(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": pickles} | body,
            seconds=SEND_SECONDS,
        )


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


class NcclSender(BucketSender):
    """Sends weights to a server on other GPUs of this machine.

    The group of this process and the server exists from the first `send` to `close`, or to an
    error; the next `send` creates a new group. The rendezvous listens on loopback. NCCL chooses the
    network interface for the data (`NCCL_SOCKET_IFNAME`).
    """

    def __init__(self, admin: AdminClient, *, backend: str = "nccl", **options: Any):
        """Store the options; send nothing yet.

        Args:
            admin: the client of a server on this machine.
            backend: nccl, or gloo if all tensors are on CPUs.
            **options: see `BucketSender`.
        """
        # NCCL fails with "invalid argument" if processes have different values; servers have 0.
        # NCCL reads the variable once, so set it before anything in this process uses NCCL.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        super().__init__(admin, **options)
        self._backend = backend
        self.group: BroadcastGroup | None = None

    def send(self, update: Update) -> int:
        """Send the weights; create the group first if there is none."""
        try:
            if self.group is None:
                self._join()
            return super().send(update)
        except BaseException:
            self._abort_group()
            raise

    def close(self) -> None:
        """Leave the group. It takes a limited time, whatever happened to the server."""
        if self.group is None:
            return
        group, body = self.group, {"group_name": self.group.name}
        with suppress(EngineError):
            # Both run at the same time: all processes of an NCCL group must leave it together.
            _run_both(
                lambda: self._admin.manage("/destroy_weights_update_group", body),
                group.shutdown,
                ADMIN_SECONDS,
            )
        self._abort_group()

    def _join(self) -> None:
        name, size = f"agentrl-{uuid.uuid4().hex[:8]}", 1 + self._tp
        self.group = group = BroadcastGroup(name, self._backend, size)
        body = {
            "master_address": "127.0.0.1",
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        path = "/init_weights_update_group"
        with environment_variables(JOIN_VARIABLES):
            _run_both(
                lambda: self._admin.manage(path, body, seconds=JOIN_SECONDS),
                group.open,
                JOIN_SECONDS,
            )

    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        group, data = self.group, bucket.bytes
        assert group is not None
        body |= {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group.name,
        }
        path = "/update_weights_from_distributed"
        if data.is_cuda:  # The thread that sends the data waits only for its own streams.
            torch.cuda.current_stream(data.device).synchronize()
        _run_both(
            lambda: self._admin.manage(path, body, seconds=SEND_SECONDS),
            lambda: group.broadcast(data),
            SEND_SECONDS,
        )

    def _abort_group(self) -> None:
        """Abort the group. Its pending operations end, or continue to block their threads."""
        group, self.group = self.group, None
        if group is not None:
            wait([in_thread(group.abort)], timeout=GRACE_SECONDS)


class BroadcastGroup:
    """This process's end of a group, as rank 0. SGLang creates the other end in the same way.

    It does not use the group registry of `torch.distributed`: it needs no default group, and it
    does not affect code that creates or destroys one later.
    """

    def __init__(self, name: str, backend: str, size: int):
        """Listen for the other processes.

        Args:
            name: a name that no other group of the server has.
            backend: nccl or gloo.
            size: the size of the group.
        """
        self.name, self._backend, self._size = name, backend, size
        self._is_aborted = Event()
        self._group: Any = None
        # The socket that torch creates would accept other machines and need a fixed port.
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            self.port,
            size,
            is_master=True,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def open(self) -> None:
        """Wait until all processes of the server have joined the group."""
        # These are the keys that `torch.distributed` uses for a group that SGLang creates.
        backends = BackendConfig(Backend(self._backend))  # type: ignore[arg-type]
        device = next(iter(backends.device_backend_map))
        store: Store = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        # The timeout exceeds all time limits of this module, so that these apply.
        timeout = timedelta(seconds=2 * SEND_SECONDS)
        if self._backend == "gloo":
            group = dist.ProcessGroupGloo(store, 0, self._size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
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


def _run_both(
    send_request: Callable[[], object], run_own_part: Callable[[], object], seconds: float
) -> None:
    """Send a request to the server and run this process's part of the operation at the same time.

    Raises:
        EngineError: one of the two failed (the server's reason comes first), or they took longer
            than `seconds`.
    """
    request, action = in_thread(send_request), in_thread(run_own_part)
    wait([request, action], timeout=seconds, return_when=FIRST_EXCEPTION)
    if action.done() and action.exception() is not None:
        wait([request], timeout=GRACE_SECONDS)
    for part in (request, action):
        if part.done() and (error := part.exception()) is not None:
            if isinstance(error, EngineError):
                raise error
            raise EngineError(f"sending weights: {type(error).__name__}: {error}") from error
    if not (request.done() and action.done()):
        raise EngineError(f"sending weights: not done after {seconds:g} s")
