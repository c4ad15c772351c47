"""A worker process: runs the functions that its parent sends, one after the other.

This file is run by its path, so it imports nothing of agentrl before the parent has sent
`sys.path`. The parent logs everything that the functions print.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import pickle
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, cast

OUT_OF_MEMORY = 77
"""Exit code of a worker whose function needed more memory than the limit."""
MAX_BYTES = 64 * 2**20
"""The longest message, in bytes. A function that returns more has a bug."""
LOADED = b"loaded"
"""Sent when a function's module is imported. The function's time limit starts then."""


def take_channel() -> BinaryIO:
    """Return the channel to the parent, which is the standard input of this process.

    Standard input is replaced by an empty file, so that functions do not read from the channel.
    """
    channel = socket.socket(fileno=os.dup(0)).makefile("rwb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return cast(BinaryIO, channel)


def send(channel: BinaryIO, message: bytes) -> None:
    """Write one message in the format that `ChildProcess` reads.

    End this process if the parent has ended, since nobody reads the message.
    """
    try:
        channel.write(len(message).to_bytes(4, "little") + message)
        channel.flush()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def receive(channel: BinaryIO) -> bytes:
    """Read one message. End this process if there is none, since nobody reads an answer."""
    size = channel.read(4)
    if len(size) < 4:
        os._exit(0)
    return channel.read(int.from_bytes(size, "little"))


def _find_function(file: str, module: str, name: str) -> Callable[..., Any]:
    import importlib

    from agentrl.registry import load_file_again

    target: Any = load_file_again(file) if file else importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _run(channel: BinaryIO, job: bytes) -> bytes:
    """Return the reply to a job: what its function returned or raised."""
    try:
        file, module, name, arguments = pickle.loads(job)
        function = _find_function(file, module, name)
        args, kwargs = pickle.loads(arguments)
        send(channel, LOADED)
        result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        reply = pickle.dumps((True, result))
        if len(reply) > MAX_BYTES:
            raise ValueError(f"the result has {len(reply)} bytes, more than {MAX_BYTES}")
        return reply
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as e:
        return pickle.dumps((False, _describe_error(e)))


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _describe_error(error: BaseException) -> tuple[str, str, str, bytes]:
    """Return type, text and source location of an exception.

    An exception of agentrl is pickled as well.
    """
    from agentrl.errors import Infrastructure, ToolError, UserError

    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith((package, "<"))] or frames
    where = f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
    pickled = b""
    if isinstance(error, (ToolError, UserError, Infrastructure)):
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # A user's subclass may have another constructor.
            pickled = b""
    return type(error).__name__, str(error), where, pickled


def main() -> None:
    """Run the functions that the parent process sends, until this process is killed."""
    channel = take_channel()
    faulthandler.enable()
    sys.argv = [""]
    sys.path[:], memory_mb = pickle.loads(receive(channel))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
    while True:
        send(channel, _run(channel, receive(channel)))


if __name__ == "__main__":
    main()
