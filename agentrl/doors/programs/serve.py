"""Serves the functions of a program to agentrl: `python -P serve.py PROGRAM.py`.

This file and the programs run in the Python of another project's package, so they import nothing of
agentrl. Standard input is a socket. A message on it is 4 bytes of length (little-endian) and JSON,
in both directions:

    {"id": 1, "call": "score", "arguments": {...}}    a request; requests run concurrently
    {"cancel": 1}                                     ends the work for a request
    {"id": 1, "result": ...}                          an answer
    {"id": 1, "error": "TYPE: TEXT", "kind": ""}      an error; `kind` is the exception's attribute
                                                      of this name (`Unavailable`, `Refused`)

A function that is not async runs in a thread. When standard input ends, all work is cancelled, and
the program's function `close` is called, if it has one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import difflib
import importlib.util
import inspect
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

THREADS = 64


class Unavailable(Exception):
    """Something failed that is no mistake of the policy."""

    kind = "infrastructure"


class Refused(Exception):
    """The model's call cannot be run."""

    kind = "refused"


def unknown(kind: str, name: str, names: Iterable[str]) -> ValueError:
    """Return an error that lists the names most similar to an unknown one, or all if none is."""
    close = difflib.get_close_matches(name, names := sorted(names), n=3, cutoff=0.4)
    listed = f"Did you mean {', '.join(close)}?" if close else f"There are: {', '.join(names)}"
    return ValueError(f"no {kind} {name!r}. {listed}")


def check_options(options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise an error if an option is unknown, or is no number although its default is one.

    Args:
        options: the options of an address.
        known: the default of each option of the package.
    """
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"no option {name!r}. Options: {', '.join(known) or 'none'}")
        if isinstance(known[name], int | float) and not isinstance(value, int | float):
            raise ValueError(f"the option {name}={value} must be a number, as {known[name]}")


async def _answer(
    program: Any, request: dict[str, Any], writer: asyncio.StreamWriter, lock: asyncio.Lock
) -> None:
    answer: dict[str, Any] = {"id": request["id"]}
    try:
        function = getattr(program, request["call"])
        if inspect.iscoroutinefunction(function):
            answer["result"] = await function(**request["arguments"])
        else:
            answer["result"] = await asyncio.to_thread(function, **request["arguments"])
        message = json.dumps(answer).encode()
    except BaseException as e:  # SystemExit, too: a package must not end the other episodes.
        task = asyncio.current_task()
        if isinstance(e, asyncio.CancelledError) and task and task.cancelling():
            raise  # Otherwise something of the package was cancelled.
        kind = getattr(e, "kind", "")
        if not kind:
            traceback.print_exc()
        text = "".join(traceback.format_exception_only(e)).strip()  # Its own text may raise.
        error = {"id": request["id"], "error": text, "kind": kind if isinstance(kind, str) else ""}
        message = json.dumps(error).encode()
    async with lock:
        writer.write(len(message).to_bytes(4, "little") + message)
        with contextlib.suppress(ConnectionError):
            await writer.drain()


async def _serve(program: Any, channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(THREADS))
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    tasks: dict[int, asyncio.Task[None]] = {}
    lock = asyncio.Lock()
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            request = json.loads(await reader.readexactly(size))
            if "cancel" in request:
                if task := tasks.get(request["cancel"]):
                    task.cancel()
                continue
            number = request["id"]
            tasks[number] = task = asyncio.create_task(_answer(program, request, writer, lock))
            task.add_done_callback(lambda _, number=number: tasks.pop(number, None))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        for task in list(tasks.values()):
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if close := getattr(program, "close", None):
            await close()


def _end_import(channel: socket.socket, imported: threading.Event) -> None:
    """End the process if standard input ends before the package is imported: it holds nothing."""
    poll = select.poll()
    poll.register(channel, 0)  # The end is reported nevertheless.
    while not imported.is_set():
        if poll.poll(200) and not imported.is_set():
            os._exit(0)


def main(file: str) -> None:
    """Serve a program's functions until standard input ends."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # The package must not read the channel.
    sys.modules["serve"] = sys.modules[__name__]  # Programs import it.
    spec = importlib.util.spec_from_file_location("door_program", file)
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    sys.modules["door_program"] = program
    imported = threading.Event()
    threading.Thread(target=_end_import, args=(channel, imported), daemon=True).start()
    spec.loader.exec_module(program)
    imported.set()
    asyncio.run(_serve(program, channel))
    os._exit(0)  # A thread of the package may still run.


if __name__ == "__main__":
    main(sys.argv[1])
