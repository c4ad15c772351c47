"""All weights in parts, each in one allocation: through memory that a server reads, or by NCCL.

In the first case a request carries names, shapes and a handle of the memory, as a pickle: the
server offers nothing else. A pickle is code to who reads it, so they go one way only: we write
them, to a server on loopback that we started with an admin key of its own, and never read one.

In the second, from GPU to GPU, this process broadcasts and the processes of a server receive.
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
from agentrl.engine.remote.control import CONTROL_SECONDS, Control, in_thread
from agentrl.engine.remote.senders import SEND_SECONDS, Sender
from agentrl.errors import EngineError
from agentrl.workers.variables import environment_variables

BUCKET_BYTES = 512 * 2**20
"""Most bytes of a bucket, but for a tensor that is larger alone."""
FLATTENED = "flattened_bucket"
"""The server's name for what comes as one tensor of bytes."""
JOIN_SECONDS = 120.0
"""Most seconds until a server has joined a group."""
JOIN_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default torch ends the whole process when a peer of a group is lost."""
GRACE_SECONDS = 10.0
"""How long a server that left a broadcast may take to say why, and a group to be torn down."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Copies of named tensors one after the other, without gaps."""

    flat: Tensor
    """All of them, of one dtype, (N,)."""
    names: list[str]
    shapes: list[torch.Size]
    last: bool
    """Whether no other comes after it."""

    @property
    def bytes(self) -> Tensor:
        """The same memory as uint8."""
        return self.flat.view(torch.uint8)


def cut(weights: Iterable[tuple[str, Tensor]], *, limit: int) -> Iterator[Bucket]:
    """Copy named tensors into buckets, in their order.

    A bucket has one dtype, since a view of another would need its bytes aligned, and lies where its
    tensors do. Tensors are held until their bucket is full, and no longer.

    Args:
        weights: at least one.
        limit: most bytes of a bucket; a larger tensor gets one of its own.
    """
    held: list[tuple[str, Tensor]] = []
    kind, size = None, 0
    for name, tensor in weights:
        if held and (size + tensor.nbytes > limit or kind != (tensor.dtype, tensor.device)):
            yield _pack(held, last=False)
            size = 0
        held.append((name, tensor))
        kind, size = (tensor.dtype, tensor.device), size + tensor.nbytes
    assert held, "no weights"
    yield _pack(held, last=True)


@torch.no_grad()
def _pack(held: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    """A bucket of what is held; then nothing is."""
    names, tensors = map(list, zip(*held, strict=True))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    held.clear()
    return Bucket(flat, names, [t.shape for t in tensors], last)


class BucketSender(Sender):
    """Sends all weights, a bucket at a time. Tensors that are not named keep their values."""

    def __init__(
        self,
        control: Control,
        *,
        tp: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """Send nothing yet.

        Args:
            control: of a server on this machine.
            tp: over how many processes a model is spread there.
            bucket_bytes: most bytes that are copied at a time.
        """
        super().__init__(control)
        self._tp, self._bucket_bytes = tp, bucket_bytes

    def send(self, update: Update) -> int:
        """See `Sender`.

        The version comes with the last bucket: whoever asks the server before gets an answer of
        mixed weights under the old one, and so does who asks it after an error here.
        """
        sent = 0
        for bucket in cut(update.weights(), limit=self._bucket_bytes):
            body = {
                "load_format": FLATTENED,
                "flush_cache": False,
                "weight_version": str(update.version) if bucket.last else None,
            }
            self._send_bucket(bucket, body)
            sent += bucket.bytes.nbytes
            # Answered, so read: its memory is free before the next one's is taken.
            del bucket
        return sent

    @abstractmethod
    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        """Return once the server has read a bucket; `body` is what every way's request says."""


class IpcSender(BucketSender):
    """Sends to a server on the learner's own GPU, or on a CPU beside a learner on a CPU.

    The server is one that we started here. The processes of a server with several GPUs all read the
    learner's one, which they must see.
    """

    def send(self, update: Update) -> int:
        """See `BucketSender`."""
        try:
            return super().send(update)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        # A pickle for each process: torch counts who has yet to let go of the memory.
        pickles = [base64.b64encode(serialize(bucket)).decode() for _ in range(self._tp)]
        self._control.manage(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": pickles} | body,
            seconds=SEND_SECONDS,
        )


def serialize(bucket: Bucket) -> bytes:
    """What one process of a server needs to read a bucket: the memory's handle, and what is where.

    It must be read once, and the bucket kept until then.
    """
    sizes = (shape.numel() * bucket.flat.itemsize for shape in bucket.shapes)
    places = pairwise(accumulate(sizes, initial=0))
    metadata = [
        # SGLang's own class for it is not to be had here; it reads these fields and no others.
        SimpleNamespace(
            name=name,
            shape=shape,
            dtype=bucket.flat.dtype,
            start_idx=start,
            end_idx=end,
            numel=end - start,
        )
        for name, shape, (start, end) in zip(bucket.names, bucket.shapes, places, strict=True)
    ]
    written = io.BytesIO()
    pickler = ForkingPickler(written)
    pickler.dispatch_table[Tensor] = _reduce  # type: ignore[attr-defined]
    with _shared_by_name():
        pickler.dump({"flattened_tensor": bucket.bytes, "metadata": metadata})
    return written.getvalue()


_DEVICE = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """As torch does, but a GPU goes by its UUID: the server may count others, and knows to read it.

    torch keeps what is shared until it was let go of, and has the reader wait for what was still
    being written when it was pickled.
    """
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Memory of a CPU is shared by name: file descriptors go to children of this process only."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


class NcclSender(BucketSender):
    """Sends to a server on other GPUs of this machine.

    The group of this process and the server's lives from the first `send` to `close`, or to an
    error; the next `send` makes another. The meeting point listens on loopback. Where NCCL listens
    for the data itself is NCCL's to say (`NCCL_SOCKET_IFNAME`).
    """

    def __init__(self, control: Control, *, backend: str = "nccl", **options: Any):
        """Send nothing yet.

        Args:
            control: of a server on this machine.
            backend: nccl, or gloo where all tensors lie on CPUs.
            **options: see `BucketSender`.
        """
        # Processes that disagree about it fail in NCCL with "invalid argument"; a server runs with
        # 0. NCCL reads it once, so this must come before anything else here uses NCCL.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        super().__init__(control, **options)
        self._backend = backend
        self._group: _Group | None = None

    def send(self, update: Update) -> int:
        """See `BucketSender`."""
        try:
            if self._group is None:
                self._join()
            return super().send(update)
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """See `Sender`. Bounded, whatever became of the server."""
        if self._group is None:
            return
        group, body = self._group, {"group_name": self._group.name}
        with suppress(EngineError):
            # At once: NCCL takes leave of a group together.
            _both(
                lambda: self._control.manage("/destroy_weights_update_group", body),
                group.shutdown,
                CONTROL_SECONDS,
            )
        self._abandon()

    def _join(self) -> None:
        name, size = f"agentrl-{uuid.uuid4().hex[:8]}", 1 + self._tp
        self._group = group = _Group(name, self._backend, size)
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
            _both(
                lambda: self._control.manage(path, body, seconds=JOIN_SECONDS),
                group.open,
                JOIN_SECONDS,
            )

    def _send_bucket(self, bucket: Bucket, body: dict[str, Any]) -> None:
        group, data = self._group, bucket.bytes
        assert group is not None
        body |= {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group.name,
        }
        path = "/update_weights_from_distributed"
        if data.is_cuda:  # another thread sends it, and waits for streams of its own only
            torch.cuda.current_stream(data.device).synchronize()
        _both(
            lambda: self._control.manage(path, body, seconds=SEND_SECONDS),
            lambda: group.broadcast(data),
            SEND_SECONDS,
        )

    def _abandon(self) -> None:
        """Forget the group; whatever still waits in it is ended, or left to threads of its own."""
        group, self._group = self._group, None
        if group is not None:
            wait([in_thread(group.abort)], timeout=GRACE_SECONDS)


class _Group:
    """Our end of a group, as rank 0, made as SGLang makes the other.

    Not through `torch.distributed`'s own registry of groups: a default group is neither needed nor
    split, and whoever makes or destroys one later finds nothing of ours.
    """

    def __init__(self, name: str, backend: str, size: int):
        """Listen for the others.

        Args:
            name: unlike that of any other group of the server.
            backend: nccl or gloo.
            size: of the group.
        """
        self.name, self._kind, self._size = name, backend, size
        self._left = Event()
        self._opened: Any = None
        # torch's own socket would be open to other machines, and its port be chosen beforehand.
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
        """Meet the others."""
        # The keys that `torch.distributed` uses for a group that SGLang makes.
        kinds = BackendConfig(Backend(self._kind))  # type: ignore[arg-type]
        device = next(iter(kinds.device_backend_map))
        store: Store = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        # Longer than any wait of ours, which are the ones that end things.
        timeout = timedelta(seconds=2 * SEND_SECONDS)
        if self._kind == "gloo":
            opened = dist.ProcessGroupGloo(store, 0, self._size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            options.group_name = self.name  # type: ignore[assignment]
            opened = dist.ProcessGroupNCCL(store, 0, self._size, options)
        opened._set_sequence_number_for_group()
        self._opened = opened

    def broadcast(self, data: Tensor) -> None:
        """Return when it is with the others, or once the group is aborted."""
        if data.is_cuda:
            torch.cuda.set_device(data.device)  # of this thread
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        work = self._opened.broadcast([data], options)
        # Polled, since a wait for a GPU cannot be broken off.
        while not work.is_completed():
            if self._left.is_set():
                return
            time.sleep(0.0005)
        work.wait()

    def shutdown(self) -> None:
        """Leave together with the others: instead of `abort`, since NCCL survives one of them."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.shutdown()

    def abort(self) -> None:
        """Leave at once. Only in a thread of its own: it may wait for what cannot come any more."""
        self._left.set()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.abort()


def _both(ask: Callable[[], object], act: Callable[[], object], seconds: float) -> None:
    """What a server is asked for and our part in it, at once; nothing of it outlasts the time.

    Raises:
        EngineError: one of the two failed, the server's reason first, or both take too long.
    """
    asked, acted = in_thread(ask), in_thread(act)
    wait([asked, acted], timeout=seconds, return_when=FIRST_EXCEPTION)
    if acted.done() and acted.exception() is not None:
        wait([asked], timeout=GRACE_SECONDS)
    for part in (asked, acted):
        if part.done() and (error := part.exception()) is not None:
            if isinstance(error, EngineError):
                raise error
            raise EngineError(f"sending weights: {type(error).__name__}: {error}") from error
    if not (asked.done() and acted.done()):
        raise EngineError(f"sending weights: not done after {seconds:g} s")
