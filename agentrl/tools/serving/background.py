"""A tool server in processes of its own, watched over: one that dies is started again.

    Workers    a server: one or several processes, an episode stays with one of them
      Worker   one of them, and those that came before it

The sockets belong to this process, which listens on them all the time and hands them down: a worker
that is started again has the port it had, and who calls meanwhile waits for it. Its sessions are
gone with it, so their episodes are played again.

A worker is sent one message (files and token: never in argv or the environment, where others look)
and answers one (that it serves, or why it does not). It stops at the end of its standard input.
What tools print, and what goes wrong in them, reaches our log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from agentrl.config import SandboxConfig
from agentrl.errors import ToolServerError, UserError
from agentrl.registry import load_file
from agentrl.sandbox import configure
from agentrl.tools.serving.bind import bind, url_of
from agentrl.tools.session import MAX_CALLS, Place
from agentrl.workers import child
from agentrl.workers.child_process import ChildProcess

log = logging.getLogger("agentrl.tools.serving.app")

START_SECONDS = 60.0
DRAIN_SECONDS = 30.0
STOP_SECONDS = 20.0
RESTARTS = 5
"""A worker that dies so often within `RESTARTS_WITHIN_S` is not started again."""
RESTARTS_WITHIN_S = 60.0


class Served(NamedTuple):
    """A server that was started: where it is, what it asks for, how to stop it."""

    url: str
    """Of its first worker, which tells of the others."""
    token: str
    handle: Workers


def serve_in_background(
    files: Sequence[str],
    *,
    workers: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    max_calls: int = MAX_CALLS,
    sandbox: Mapping[str, Any] | None = None,
) -> Served:
    """Start a server for the tools in `files`, and return once it answers.

    It ends with `handle.stop()`, and with this process at the latest.

    Args:
        files: paths or `shelf:NAME`, as `load_file` takes them.
        workers: how many processes share the episodes.
        host: address to bind.
        port: of the first worker, the others have the next ones; 0 takes free ones.
        token: bearer token; None makes one, "" asks for none.
        max_calls: calls at once in a worker.
        sandbox: the section `sandbox` of the config.

    Raises:
        UserError: a file does not load, an address that cannot be bound.
        ToolServerError: the server did not start; with the last lines it said.
    """
    token = secrets.token_urlsafe(32) if token is None else token
    with contextlib.ExitStack() as unused:
        bound = [
            unused.enter_context(bind(host, port + number if port else 0, token))
            for number in range(workers)
        ]
        unused.pop_all()
    ports = [s.getsockname()[1] for s in bound] if workers > 1 else []
    order = {
        "files": list(files),
        "token": token,
        "ports": ports,
        "max_calls": max_calls,
        "sandbox": dict(sandbox or {}),
    }
    url = url_of(bound[0])
    return Served(url, token, Workers(order, bound))


class Workers:
    """All processes of a server. What they are told, and where each listens: see `main`."""

    def __init__(self, order: Mapping[str, Any], bound: Sequence[socket.socket]):
        self._workers = [Worker({**order, "number": i}, s) for i, s in enumerate(bound)]
        try:
            for worker in self._workers:
                worker.wait_until_it_serves()
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes, by number; they change as workers are started again."""
        return [w.process.pid for w in self._workers]

    @property
    def running(self) -> bool:
        """Whether all of them are there."""
        return all(w.process.running for w in self._workers)

    def wait(self) -> None:
        """Wait until a worker is given up."""
        while all(w.watched for w in self._workers):
            time.sleep(0.2)

    def drain(self) -> None:
        """Let calls that run end, and stop; see `ToolServer`."""
        for worker in self._workers:
            worker.ask_to_drain()
        end = time.monotonic() + DRAIN_SECONDS
        try:
            for worker in self._workers:
                worker.process.wait(end - time.monotonic())
        except BaseException:  # a second signal
            for worker in self._workers:
                worker.process.kill()
            raise
        self.stop()

    def stop(self) -> None:
        """End the server and its sessions; killed where that takes too long. Idempotent."""
        for worker in self._workers:
            worker.close_input()
        end = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.process.stop(end - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Worker:
    """One process of a server, started again when it dies."""

    def __init__(self, order: Mapping[str, Any], bound: socket.socket):
        self._order, self._socket = order, bound
        self._deaths: deque[float] = deque(maxlen=RESTARTS)
        self._lock = threading.Lock()
        self._served = self._stopping = False
        self.watched = True
        """Whether it is started again when it dies."""
        self.process = self._start()

    def wait_until_it_serves(self) -> None:
        """Wait for its first word.

        Raises:
            UserError: a file does not load.
            ToolServerError: it ended, or took too long; with the last lines it said.
        """
        process = self.process
        try:
            said = json.loads(process.receive(time.monotonic() + START_SECONDS))
        except (EOFError, TimeoutError):
            self.close_input()
            process.stop(1.0)
            raise ToolServerError(f"the tool server did not start{_last_lines(process)}") from None
        if "user_error" in said:
            raise UserError(said["user_error"])
        self._served = True

    def ask_to_drain(self) -> None:
        """Tell it to stop when its calls are done, and start no other."""
        with self._lock:
            self._stopping = True
        self.process.terminate()

    def close_input(self) -> None:
        """Tell it to stop, and start no other. Idempotent."""
        with self._lock:
            self._stopping = True
        self._socket.close()
        self.process.close_input()

    def _start(self) -> ChildProcess:
        # It finds modules where this process does.
        main = "from agentrl.tools.serving.background import main; main()"
        code = f"import sys; sys.path[:] = {sys.path!r}; {main}"
        descriptor = self._socket.fileno()
        process = ChildProcess(
            [sys.executable, "-u", "-P", "-c", code],
            stops_at_eof=True,
            descriptors=[descriptor],
            on_line=lambda line: log.warning("%s", line),
            on_end=self._ended,
        )
        with contextlib.suppress(EOFError):  # it died at once: its output tells
            order = {**self._order, "socket": descriptor}
            process.send(json.dumps(order).encode(), time.monotonic() + START_SECONDS)
        return process

    def _ended(self, process: ChildProcess) -> None:
        """Start another one when it ended by itself, unless that happens too often."""
        with self._lock:
            if not self._stopping and self._served:
                now = time.monotonic()
                self._deaths.append(now)
                often = len(self._deaths) == RESTARTS and self._deaths[0] > now - RESTARTS_WITHIN_S
                what = "too often to be started again" if often else "and is started again"
                ended = f"the tool server ended by itself, code {process.exit_code}"
                log.error("%s, %s%s", ended, what, _last_lines(process))
                if not often:
                    process.stop()
                    self.process = self._start()
                    return
        self.watched = False
        self._socket.close()  # who still calls is refused, and need not wait


def _last_lines(process: ChildProcess) -> str:
    lines = "\n  ".join(process.tail)
    return f"; its last lines:\n  {lines}" if lines else ", and said nothing"


# -- in the worker --------------------------------------------------------------------------------


def main() -> None:
    """Serve, as the first message says, until the process that started this one is gone."""
    from agentrl.tools.serving.listen import ToolServer

    channel = child.take_channel()
    order = json.loads(child.receive(channel))
    os.set_inheritable(order["socket"], False)  # tools may start programs

    def answer(**answer: str) -> None:
        child.send(channel, json.dumps(answer).encode())

    try:
        configure(SandboxConfig.model_validate(order["sandbox"]))
        for name in order["files"]:
            load_file(name)
        server = ToolServer(
            "",
            0,
            order["token"],
            lambda: answer(serving=server.url),
            bound=socket.socket(fileno=order["socket"]),
            place=Place(tuple(order["ports"]), order["number"]),
            max_calls=order["max_calls"],
        )
    except UserError as e:
        answer(user_error=str(e))
        sys.exit(2)

    def watch() -> None:
        channel.read(1)  # nothing more comes: the end
        server.should_exit = True
        time.sleep(0.75 * STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end of input", daemon=True).start()
    server.serve_forever()
