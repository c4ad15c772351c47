"""All weights within one machine's memory: the server reads them where the learner copied them.

A request carries names, shapes and a handle of the memory, as a pickle: the server offers nothing
else. A pickle is code to who reads it, so they go one way only: we write them, to a server on
loopback that we started with an admin key of its own, and never read one.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from agentrl.engine.base import Update
from agentrl.engine.server.control import Control
from agentrl.engine.server.sender import SEND_SECONDS
from agentrl.engine.sglang.sync.bucket import BUCKET_BYTES, FLATTENED, Bucket, cut


class IpcSender:
    """Sends to a server on the learner's own GPU, or on a CPU beside a learner on a CPU.

    The processes of a server with several GPUs all read the learner's one, which they must see.
    """

    def __init__(
        self,
        control: Control,
        *,
        dtype: torch.dtype | None = None,
        tp: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """Send nothing yet.

        Args:
            control: of a server that we started here.
            dtype: the server's; None sends tensors as they are.
            tp: over how many processes a model is spread there.
            bucket_bytes: most bytes that are copied at a time.
        """
        self._control, self._dtype, self._tp = control, dtype, tp
        self._bucket_bytes = bucket_bytes

    def send(self, update: Update) -> int:
        """See `Sender`. Tensors that are not named keep their values.

        The version comes with the last bucket: whoever asks the server before gets an answer of
        mixed weights under the old one, and so does who asks it after an error here.
        """
        sent = 0
        try:
            for bucket in cut(update.weights(), dtype=self._dtype, limit=self._bucket_bytes):
                # A pickle for each process: torch counts who has yet to let go of the memory.
                pickles = [base64.b64encode(serialize(bucket)).decode() for _ in range(self._tp)]
                body = {
                    "serialized_named_tensors": pickles,
                    "load_format": FLATTENED,
                    "flush_cache": False,
                    "weight_version": str(update.version) if bucket.last else None,
                }
                self._control.manage("/update_weights_from_tensor", body, seconds=SEND_SECONDS)
                sent += bucket.bytes.nbytes
                # Answered, so read: its memory is free before the next one's is taken.
                del bucket
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()
        return sent

    def request(self) -> dict[str, Any]:
        """See `Sender`: the server's weights are what it samples from."""
        return {}

    def close(self) -> None:
        """See `Sender`."""


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
