"""A tool server in a process of its own, for as long as a training run lives.

The two processes talk over the child's standard streams: the parent writes one line of JSON (files
and token: never in argv or the environment, where others look), the child answers one line (its URL,
or why there is none). Then the parent keeps the pipe open: its end, by whatever death, is the
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
        # A session of its own: Ctrl-C is for the run, which still needs its tools to finish a step.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "agentrl.tools.background"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._said: queue.Queue[dict[str, str]] = queue.Queue()
        self._stopping = False
        self._reader = threading.Thread(target=self._read, name="tool-server-log", daemon=True)
        self._reader.start()
        try:
            self._send(json.dumps({"files": list(files), "token": token}))
            said = self._said.get(timeout=START_SECONDS)
        except (queue.Empty, OSError):
            said = {}
        if "url" not in said:
            self.stop()
            if "user_error" in said:
                raise UserError(said["user_error"])
            raise ToolServerError(f"the tool server did not start.{self._last_lines()}")
        self.url = said["url"]

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server: its sessions are closed; killed if that takes too long. Idempotent."""
        self._stopping = True
        ...
