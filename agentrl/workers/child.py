"""A worker process: runs functions that it is sent, one after the other, until its parent ends.

Started by its path with a socket as its one argument, so it looks for nothing of ours before it is
told where to find it. Whatever the functions print goes to the parent's log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import inspect
import os
import pickle
import resource
import select
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

OUT_OF_MEMORY = 77
"""Exit code of a worker whose function needed more memory than it may have."""
MAX_BYTES = 64 * 2**20
"""Of a message; who returns more has made a mistake."""
LOADED = b"loaded"
"""Sent when a function's module is there: from then on its time counts."""


def send(channel: socket.socket, message: bytes) -> None:
    """Write one message."""
    channel.sendall(struct.pack(">Q", len(message)) + message)


def _receive(channel: socket.socket) -> bytes:
    with channel.makefile("rb", buffering=0) as file:
        (size,) = struct.unpack(">Q", _exactly(file, 8))
        return _exactly(file, size)


def _exactly(file: Any, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        piece = file.read(size - len(read))
        if not piece:
            os._exit(0)  # the parent has no more use for us
        read += piece
    return bytes(read)


def _end_with_parent() -> None:
    """Be ended by the kernel with the parent, whatever runs here: standard input is its leash.

    A thread that waits for the end would not do: a regular expression gone wild holds the
    interpreter, and the thread would never run.
    """
    leash = os.dup(0)
    os.set_inheritable(leash, False)
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([leash], [], [], 0)[0]:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _find(file: str, module: str, name: str) -> Callable[..., Any]:
    import importlib

    from agentrl.registry import load_file

    found: Any = load_file(file) if file else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _run(channel: socket.socket, job: bytes) -> bytes:
    """The reply to a job: what its function returned, or what it raised."""
    try:
        file, module, name, given = pickle.loads(job)
        function = _find(file, module, name)
        args, kwargs = pickle.loads(given)
        send(channel, LOADED)
        returned = function(*args, **kwargs)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        reply = pickle.dumps((True, returned))
        if len(reply) > MAX_BYTES:
            raise ValueError(f"the result has {len(reply)} bytes, more than {MAX_BYTES}")
        return reply
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as e:
        return pickle.dumps((False, _told(e)))


async def _awaited(returned: Any) -> Any:
    return await returned


def _told(error: BaseException) -> tuple[str, str, str, bytes]:
    """Type, text and place of an exception; pickled as well, if it is one of agentrl's."""
    from agentrl.errors import Infrastructure, ToolError, UserError

    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((package, "<"))] or frames
    where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    whole = b""
    if isinstance(error, (ToolError, UserError, Infrastructure)):
        try:
            whole = pickle.dumps(error)
            pickle.loads(whole)
        except Exception:  # one of the user's, with a constructor of its own
            whole = b""
    return type(error).__name__, str(error), where, whole


def main() -> None:
    """Serve the parent at the other end of the socket."""
    _end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    os.dup2(2, 1)
    faulthandler.enable()
    sys.argv = [""]
    sys.path[:], memory_mb = pickle.loads(_receive(channel))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
    while True:
        send(channel, _run(channel, _receive(channel)))


if __name__ == "__main__":
    main()
