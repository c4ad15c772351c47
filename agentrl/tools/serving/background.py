"""A tool server in processes of its own, watched over: one that dies is started again.

    Workers    a server: one or several processes, an episode stays with one of them
      Worker   one of them, and those that came before it

The sockets belong to this process, which listens on them all the time and hands them down: a worker
that is started again has the port it had, and who calls meanwhile waits for it. Its sessions are
gone with it, so their episodes are played again.

A worker is talked to over its standard streams: it is sent one line of JSON (files and token: never
in argv or the environment, where others look), and answers one line (that it serves, or why it does
not). Then the pipe stays open: its end, by whatever death, is the worker's signal to stop. What
tools print, and what goes wrong in them, reaches our log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from agentrl.errors import ToolServerError, UserError
from agentrl.tools.serving.admission import MAX_CALLS
from agentrl.tools.serving.bind import bind, url_of
from agentrl.tools.serving.worker import MARK, STOP_SECONDS

log = logging.getLogger("agentrl.tools.serving.app")

START_SECONDS = 60.0
DRAIN_SECONDS = 30.0
RESTARTS = 5
"""A worker that dies so often within `RESTARTS_WITHIN_S` is not started again."""
RESTARTS_WITHIN_S = 60.0
TAIL_LINES = 50


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
    bound: list[socket.socket] = []
    try:
        for number in range(workers):
            bound.append(bind(host, port + number if port else 0, token))
    except UserError:
        for one in bound:
            one.close()
        raise
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
    """All processes of a server. What they are told, and where each listens: see `worker.main`."""

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
        return all(w.process.poll() is None for w in self._workers)

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
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(end - time.monotonic(), 0))
        except BaseException:  # a second signal
            for worker in self._workers:
                worker.process.kill()
            raise
        self.stop()

    def stop(self) -> None:
        """End the server and its sessions; killed where that takes too long. Idempotent."""
        for worker in self._workers:
            worker.let_go()
        end = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.end(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()


class Worker:
    """One process of a server, started again when it dies."""

    def __init__(self, order: Mapping[str, Any], bound: socket.socket):
        self._order, self._socket = order, bound
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._said: queue.Queue[dict[str, str]] = queue.Queue()
        self._served = False
        self._deaths: deque[float] = deque(maxlen=RESTARTS)
        self._lock = threading.Lock()
        self._stopping = False
        self.watched = True
        """Whether it is started again when it dies."""
        self.process = self._start()
        threading.Thread(target=self._watch, name="tool-server-log", daemon=True).start()

    def wait_until_it_serves(self) -> None:
        """Wait for its first word.

        Raises:
            UserError: a file does not load.
            ToolServerError: it ended, or took too long; with the last lines it said.
        """
        try:
            said = self._said.get(timeout=START_SECONDS)
        except queue.Empty:
            said = {}
        if "user_error" in said:
            raise UserError(said["user_error"])
        if "serving" not in said:
            self.let_go()
            self.end(time.monotonic() + 1.0)
            raise ToolServerError(f"the tool server did not start{self._last_lines()}")

    def ask_to_drain(self) -> None:
        """Tell it to stop when its calls are done, and start no other."""
        with self._lock:
            self._stopping = True
        self.process.send_signal(signal.SIGTERM)

    def let_go(self) -> None:
        """Tell it to stop, and start no other. Idempotent."""
        with self._lock:
            self._stopping = True
        self._socket.close()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for its end, and bring it about at the deadline."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # It finds modules where this process does. A session of its own: Ctrl-C is for the run,
        # which still needs its tools to finish a step.
        main = "from agentrl.tools.serving.worker import main; main()"
        code = f"import sys; sys.path[:] = {sys.path!r}; {main}"
        descriptor = self._socket.fileno()
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once: its output tells
            print(json.dumps({**self._order, "socket": descriptor}), file=process.stdin)
            process.stdin.flush()
        return process

    def _watch(self) -> None:
        """Pass on what the process says, and start another when it ended by itself."""
        while self._read():
            pass
        self.watched = False
        self._socket.close()  # who still calls is refused, and need not wait

    def _read(self) -> bool:
        """Follow the process to its end; whether there is another one now."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(MARK):
                    said = json.loads(line.removeprefix(MARK))
                    self._served = self._served or "serving" in said
                    self._said.put(said)
                else:
                    self._tail.append(line.rstrip())
                    log.warning("%s", line.rstrip())
        code = self.process.wait()
        self._said.put({})
        with self._lock:
            if self._stopping or not self._served:
                return False
            now = time.monotonic()
            self._deaths.append(now)
            often = len(self._deaths) == RESTARTS and self._deaths[0] > now - RESTARTS_WITHIN_S
            what = "too often to be started again" if often else "and is started again"
            ended = "the tool server ended by itself"
            log.error("%s, code %s, %s%s", ended, code, what, self._last_lines())
            self._tail.clear()
            if not often:
                if self.process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        self.process.stdin.close()
                self.process = self._start()
            return not often

    def _last_lines(self) -> str:
        lines = "\n  ".join(self._tail)
        return f"; its last lines:\n  {lines}" if lines else ", and said nothing"
