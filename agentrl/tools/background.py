"""A tool server in a process of its own, for as long as a training run lives.

The two processes talk over the child's standard streams: the parent writes one line of JSON (files
and token: never in argv or the environment, where others look), the child answers one line (its
URL, or why there is none). Then the parent keeps the pipe open: its end, by whatever death, is the
child's signal to stop. What tools print, and what goes wrong in them, reaches the parent's log.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from agentrl.errors import ToolServerError, UserError
from agentrl.registry import load_file

log = logging.getLogger("agentrl.tools.server")

START_SECONDS = 60.0
STOP_SECONDS = 20.0
TAIL_LINES = 50
_MARK = "agentrl-tool-server: "


class Served(NamedTuple):
    """A server that was started: where it is, what it asks for, how to stop it."""

    url: str
    token: str
    handle: ServerProcess


def serve_in_background(files: Sequence[str]) -> Served:
    """Start a server for the tools in `files`, on loopback, with a port and token of its own.

    Returns once it answers. It ends with `handle.stop()`, and with this process at the latest.

    Args:
        files: paths or `shelf:NAME`, as `load_file` takes them.

    Raises:
        UserError: a file does not load.
        ToolServerError: the server did not start; with the last lines it said.
    """
    token = secrets.token_urlsafe(32)
    handle = ServerProcess(files, token)
    return Served(handle.url, token, handle)


class ServerProcess:
    """The parent's end of a running server."""

    def __init__(self, files: Sequence[str], token: str):
        # It finds modules where this process does. A session of its own: Ctrl-C is for the run,
        # which still needs its tools to finish a step.
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._said: queue.Queue[dict[str, str]] = queue.Queue()
        self._serving = False
        threading.Thread(target=self._read, name="tool-server-log", daemon=True).start()
        assert self._process.stdin is not None
        try:
            print(json.dumps({"files": list(files), "token": token}), file=self._process.stdin)
            self._process.stdin.flush()
            said = self._said.get(timeout=START_SECONDS)
        except (queue.Empty, OSError):
            said = {}
        if "url" not in said:
            self.stop()
            if "user_error" in said:
                raise UserError(said["user_error"])
            raise ToolServerError(f"the tool server did not start{self._last_lines()}")
        self._serving = True
        self.url = said["url"]

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server and its sessions; killed where that takes too long. Idempotent."""
        self._serving = False
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        """Pass on what the server says, until it ends."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(_MARK):
                    self._said.put(json.loads(line.removeprefix(_MARK)))
                else:
                    self._tail.append(line.rstrip())
                    log.warning("%s", line.rstrip())
        code = self._process.wait()
        if self._serving:
            log.error("the tool server ended by itself, code %s%s", code, self._last_lines())
        self._said.put({})

    def _last_lines(self) -> str:
        lines = "\n  ".join(self._tail)
        return f"; its last lines:\n  {lines}" if lines else ", and said nothing"


def main() -> None:
    """The child: serve until the parent is gone."""
    from agentrl.tools.server import ToolServer

    parent = os.getppid()
    order = json.loads(sys.stdin.readline())
    # Tools that start programs shall not hand them the lifeline.
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        for name in order["files"]:
            load_file(name)
        server = ToolServer("127.0.0.1", 0, order["token"], lambda: _say(url=server.url))
    except UserError as e:
        _say(user_error=str(e))
        sys.exit(2)

    def watch() -> None:
        # The pipe ends with the parent, unless a fork of the parent holds it too.
        while not select.select([lifeline], [], [], 1.0)[0] and os.getppid() == parent:
            pass
        server.should_exit = True
        time.sleep(0.75 * STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    server.serve_forever()


def _say(**said: str) -> None:
    print(_MARK + json.dumps(said), flush=True)
