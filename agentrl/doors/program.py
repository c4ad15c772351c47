"""The process in which a door's package runs, with the Python of that package.

Packages of other projects pin what agentrl needs in other versions. So `agentrl doors install NAME`
makes a virtual environment for each door, and a process of its Python runs a file of `programs/`.
If this process ends, so does that one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from agentrl.doors.door import Door, find_door
from agentrl.errors import Infrastructure, ToolError, UserCodeError, UserError
from agentrl.installation import home
from agentrl.workers import PerLoop
from agentrl.workers.child_process import ChildProcess

PROGRAMS = Path(__file__).parent / "programs"
SEND_SECONDS = 300.0
"""The longest time that a program takes to read a request: it may import its package first."""
CLOSE_SECONDS = 300.0
"""The longest time that a program has to free its resources at the end. Docker waits 10 s for each
container that ignores SIGTERM, and stops some at the same time."""
IDLE_SECONDS = 1e6
"""The longest time between two answers of a program."""
ROWS_SECONDS = 600.0
"""The longest time that a program takes to make rows."""


def environment_folder(name: str) -> Path:
    """Return the folder of the virtual environment of a door's packages."""
    return home() / "doors" / name


def find_python(door: Door) -> str:
    """Return the Python that has a door's packages: its own environment, else this Python.

    Raises:
        UserError: neither has them. The message has the command that installs them.
    """
    own = environment_folder(door.name) / "bin" / "python"
    if own.exists():
        return str(own)
    package = door.name.replace("-", "_")
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    raise UserError(f"{door.name} needs its package. Install it: agentrl doors install {door.name}")


def _start(door: Door) -> ChildProcess:
    program = PROGRAMS / f"{door.name.replace('-', '_')}.py"
    python = find_python(door)
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return ChildProcess(
        [python, "-P", str(PROGRAMS / "serve.py"), str(program)],
        stops_at_eof=True,
        environment={"PATH": path, "PYTHONUNBUFFERED": "1"},
        # A fork of it may live on and hold its end of the socket, which gives no EOF then.
        on_end=ChildProcess.close_input,
    )


def _read(door: Door, answer: dict[str, Any]) -> Any:
    """Return the result in an answer.

    Raises:
        Infrastructure: something that the package needs is down.
        ToolError: it refuses the call of the model.
        UserCodeError: it raised another error.
    """
    if "error" not in answer:
        return answer["result"]
    error = {"infrastructure": Infrastructure, "refused": ToolError}.get(
        answer["kind"], UserCodeError
    )
    text = answer["error"]
    if error is not UserCodeError:
        text = text.partition(": ")[2]  # the name of the program's own exception
    # A refusal is a text for the model, which does not know the package.
    raise error(text if error is ToolError else f"{door.name}: {text}")


def call_once(name: str, function: str, **arguments: Any) -> Any:
    """Call a function of a door's program in a process that ends afterwards.

    Raises:
        UserError: the package is missing, or it raised an error.
    """
    door = find_door(name)
    child = _start(door)
    try:
        deadline = time.monotonic() + ROWS_SECONDS
        request = {"id": 0, "call": function, "arguments": arguments}
        child.send(json.dumps(request).encode(), deadline)
        return _read(door, json.loads(child.receive(deadline)))
    except (UserCodeError, Infrastructure, ToolError) as e:
        raise UserError(str(e)) from None
    except (EOFError, TimeoutError) as e:
        child.wait(1.0)
        raise UserError(f"{name}: its process failed ({e}):\n" + _tail(child)) from None
    finally:
        child.stop(CLOSE_SECONDS)


def _tail(child: ChildProcess) -> str:
    return "\n".join(f"  {line}" for line in [*child.tail][-8:])


Waiting = dict[int, asyncio.Future[dict[str, Any]]]
"""The calls that wait for a process, by their numbers."""


class Program:
    """A door's process for one event loop. It starts with the first call, and again if it dies."""

    def __init__(self, name: str):
        self._door = find_door(name)
        self._numbers = itertools.count()
        self._child: ChildProcess | None = None
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._waiting: Waiting = {}

    async def call(self, function: str, **arguments: Any) -> Any:
        """Call a function of the program. If this is cancelled, so is the function.

        Raises:
            Infrastructure: the process died, or something that the package needs is down.
            ToolError: the package refuses the call of the model.
            UserCodeError: the package raised an error.
            UserError: the package is not installed.
        """
        child = self._running()
        number = next(self._numbers)
        waiting = self._waiting
        future = waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "call": function, "arguments": arguments})
            return _read(self._door, await future)
        except asyncio.CancelledError:
            if child is self._child:
                self._send({"cancel": number})
            raise
        finally:
            del waiting[number]

    def close(self) -> None:
        """End the process, after it has freed its resources."""
        if self._child is not None:
            self._child.stop(CLOSE_SECONDS)

    def _send(self, request: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(request).encode())

    def _running(self) -> ChildProcess:
        if self._child is None or not self._child.running:
            self._child, self._outbox = child, outbox = _start(self._door), SimpleQueue()
            self._waiting = waiting = {}
            # The thread must not keep the loop, whose end also ends the process (`_programs`).
            loop = weakref.ref(asyncio.get_running_loop())
            for work in (
                partial(self._transmit, child, outbox),
                partial(self._receive, child, waiting, loop),
            ):
                threading.Thread(target=work, name=self._door.name, daemon=True).start()
        return self._child

    @staticmethod
    def _transmit(child: ChildProcess, outbox: SimpleQueue[bytes]) -> None:
        """Send requests to a process until it ends, and kill it if it reads none."""
        with suppress(EOFError):
            while child.running:
                try:
                    child.send(outbox.get(timeout=1.0), time.monotonic() + SEND_SECONDS)
                except Empty:
                    pass
                except TimeoutError:
                    child.kill()

    def _receive(
        self, child: ChildProcess, waiting: Waiting, loop: weakref.ref[asyncio.AbstractEventLoop]
    ) -> None:
        """Deliver the answers of a process, and fail what waits for it when it ends."""

        def run(function: Callable[..., None], *arguments: Any) -> None:
            if (running := loop()) is not None:
                running.call_soon_threadsafe(function, *arguments)

        with suppress(RuntimeError):  # The loop was closed.
            try:
                while True:
                    answer = json.loads(child.receive(time.monotonic() + IDLE_SECONDS))
                    run(self._deliver, waiting, answer)
            except (EOFError, TimeoutError):
                child.wait(1.0)
            run(self._fail, child, waiting)

    @staticmethod
    def _deliver(waiting: Waiting, answer: dict[str, Any]) -> None:
        future = waiting.get(answer["id"])
        if future is not None and not future.done():
            future.set_result(answer)

    def _fail(self, child: ChildProcess, waiting: Waiting) -> None:
        code = "" if child.exit_code is None else f" with exit code {child.exit_code}"
        for future in waiting.values():
            if not future.done():
                future.set_exception(
                    Infrastructure(f"{self._door.name}: its process ended{code}:\n{_tail(child)}")
                )


_programs: PerLoop[dict[str, Program]] = PerLoop(
    dict, lambda programs: [program.close() for program in programs.values()]
)


def program(name: str) -> Program:
    """Return the program of a door for the running event loop."""
    programs = _programs.get()
    if name not in programs:
        programs[name] = Program(name)
    return programs[name]
