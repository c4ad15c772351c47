"""Run a tool server in child processes, and restart a process that dies.

    Workers    a server: one or several processes; each episode is served by one of them
      Worker   one of these processes, and its restarts

This process owns the listening sockets and passes them to the workers. So a restarted worker has
the same port, and requests that arrive during the restart wait. The sessions of the dead worker are
lost, and their episodes are played again.

A worker receives one message with its settings, such as files and token. They are not in its
arguments or environment, which other users could read. The worker replies that it serves, or why it
cannot. It stops at the end of its standard input. This process logs its output.
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
from agentrl.http_server.bind import bind, url_of
from agentrl.registry import load_file, load_file_again, tools
from agentrl.sandbox import configure
from agentrl.tools.session import MAX_CALLS, ShardInfo
from agentrl.workers import child
from agentrl.workers.child_process import ChildProcess, python_command

log = logging.getLogger("agentrl.tools.serving.app")

START_SECONDS = 60.0
DRAIN_SECONDS = 30.0
STOP_SECONDS = 20.0
RESTARTS = 5
"""A worker that dies this often within `RESTARTS_WITHIN_SECONDS` is not restarted."""
RESTARTS_WITHIN_SECONDS = 60.0


class RunningServer(NamedTuple):
    """The URL and token of a server that was started, and the handle to stop it."""

    url: str
    """The URL of the first worker. GET /tools lists the ports of the others."""
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
) -> RunningServer:
    """Start a server for the tools in `files`, and return when it answers.

    It runs until `handle.stop()`, or until this process ends.

    Args:
        files: paths or `shelf:NAME`, as for `load_file`.
        workers: number of processes that share the episodes.
        host: address to bind.
        port: port of the first worker; the others have the next ones. 0 takes free ports.
        token: bearer token. None creates one, "" asks for none.
        max_calls: limit of concurrent calls in a worker.
        sandbox: the section `sandbox` of the config.

    Raises:
        UserError: a file does not load, or an address cannot be bound.
        ToolServerError: the server did not start. The message has its last lines of output.
    """
    token = secrets.token_urlsafe(32) if token is None else token
    with contextlib.ExitStack() as unused:
        bound = [
            unused.enter_context(bind(host, port + number if port else 0, token))
            for number in range(workers)
        ]
        unused.pop_all()
    ports = [s.getsockname()[1] for s in bound] if workers > 1 else []
    settings = {
        "files": list(files),
        "token": token,
        "ports": ports,
        "max_calls": max_calls,
        "sandbox": dict(sandbox or {}),
    }
    url = url_of(bound[0])
    return RunningServer(url, token, Workers(settings, bound))


class Workers:
    """All processes of a server."""

    def __init__(self, settings: Mapping[str, Any], bound: Sequence[socket.socket]):
        is_loaded_here = bool(tools.user_names())
        self._workers = [
            Worker({**settings, "number": i, "is_first_to_load": not (is_loaded_here or i)}, s)
            for i, s in enumerate(bound)
        ]
        try:
            for worker in self._workers:
                worker.wait_until_it_serves()
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by number. A restart changes them."""
        return [w.process.pid for w in self._workers]

    @property
    def running(self) -> bool:
        """True if all workers run."""
        return all(w.process.running for w in self._workers)

    def wait(self) -> None:
        """Block until a worker died and is not restarted."""
        while all(w.is_watched for w in self._workers):
            time.sleep(0.2)

    def drain(self) -> None:
        """Let the running calls end, then stop; see `ToolServer`."""
        for worker in self._workers:
            worker.ask_to_drain()
        end = time.monotonic() + DRAIN_SECONDS
        try:
            for worker in self._workers:
                worker.process.wait(end - time.monotonic())
        except BaseException:  # such as a second signal
            for worker in self._workers:
                worker.process.kill()
            raise
        self.stop()

    def stop(self) -> None:
        """Stop the workers, and kill those that take too long. Idempotent."""
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
    """One process of a server, which is restarted when it dies."""

    def __init__(self, settings: Mapping[str, Any], bound: socket.socket):
        self._settings, self._socket = settings, bound
        self._deaths: deque[float] = deque(maxlen=RESTARTS)
        self._lock = threading.Lock()
        self._has_served = self._stopping = False
        self.is_watched = True
        """True if the process is restarted when it dies."""
        self.process = self._start()

    def wait_until_it_serves(self) -> None:
        """Wait for the first message of the process.

        Raises:
            UserError: a file does not load.
            ToolServerError: it ended or took too long. The message has its last lines of output.
        """
        process = self.process
        try:
            message = json.loads(process.receive(time.monotonic() + START_SECONDS))
        except (EOFError, TimeoutError):
            self.close_input()
            process.stop(1.0)
            raise ToolServerError(f"the tool server did not start{_last_lines(process)}") from None
        if "user_error" in message:
            raise UserError(message["user_error"])
        self._has_served = True

    def ask_to_drain(self) -> None:
        """Ask the process to stop when its calls are done, and do not restart it."""
        with self._lock:
            self._stopping = True
        self.process.terminate()

    def close_input(self) -> None:
        """Ask the process to stop, and do not restart it. Idempotent."""
        with self._lock:
            self._stopping = True
        self._socket.close()
        self.process.close_input()

    def _start(self) -> ChildProcess:
        main = "from agentrl.tools.serving.background import main; main()"
        descriptor = self._socket.fileno()
        process = ChildProcess(
            python_command(main, "-u"),
            stops_at_eof=True,
            inherited_fds=[descriptor],
            on_line=lambda line: log.warning("%s", line),
            on_end=self._on_end,
        )
        with contextlib.suppress(EOFError):  # it died at once; its output says why
            settings = {**self._settings, "socket": descriptor}
            process.send(json.dumps(settings).encode(), time.monotonic() + START_SECONDS)
        return process

    def _on_end(self, process: ChildProcess) -> None:
        """Restart the process if it died by itself, unless this happens too often."""
        with self._lock:
            if not self._stopping and self._has_served:
                now = time.monotonic()
                self._deaths.append(now)
                too_often = (
                    len(self._deaths) == RESTARTS
                    and self._deaths[0] > now - RESTARTS_WITHIN_SECONDS
                )
                consequence = "too often to be restarted" if too_often else "and is restarted"
                message = f"the tool server ended by itself, code {process.exit_code}"
                log.error("%s, %s%s", message, consequence, _last_lines(process))
                if not too_often:
                    process.stop()
                    self.process = self._start()
                    return
        self.is_watched = False
        self._socket.close()  # further requests are refused at once


def _last_lines(process: ChildProcess) -> str:
    lines = "\n  ".join(process.tail)
    return f"; its last lines:\n  {lines}" if lines else ", and printed nothing"


# -- in the worker --------------------------------------------------------------------------------


def main() -> None:
    """Serve with the settings in the first message, until the parent process ends."""
    from agentrl.tools.serving.listen import ToolServer

    channel = child.take_channel()
    settings = json.loads(child.receive(channel))
    os.set_inheritable(settings["socket"], False)  # programs that tools start must not inherit it

    def answer(**answer: str) -> None:
        child.send(channel, json.dumps(answer).encode())

    try:
        configure(SandboxConfig.model_validate(settings["sandbox"]))
        load = load_file if settings["is_first_to_load"] else load_file_again
        for name in settings["files"]:
            load(name)
        server = ToolServer(
            "",
            0,
            settings["token"],
            lambda: answer(serving=server.url),
            bound=socket.socket(fileno=settings["socket"]),
            shard=ShardInfo(tuple(settings["ports"]), settings["number"]),
            max_calls=settings["max_calls"],
        )
    except UserError as e:
        answer(user_error=str(e))
        sys.exit(2)

    def watch() -> None:
        channel.read(1)  # blocks until the end of the input
        server.should_exit = True
        time.sleep(0.75 * STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end of input", daemon=True).start()
    server.serve_forever()
