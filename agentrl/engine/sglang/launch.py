"""A server of our own: on loopback, with a random key, for as long as this process lives."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.engine.sglang import leash
from agentrl.errors import ConfigError, EngineDead, EngineError
from agentrl.http import fetch_json

START_SECONDS = 1800.0
"""Loading and compiling take their time; a server that dies meanwhile is noticed at once."""
HEALTH_SECONDS = 30.0
TAIL_LINES = 25

CPU = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
)
"""How a server runs where there is no GPU; what others allot while it starts counts as its own."""


class SGLangServer:
    """A server's process, from its start to its end."""

    def __init__(
        self,
        model: str,
        *,
        python: str = "",
        cpu: bool = False,
        arguments: Sequence[str] = (),
        start_seconds: float = START_SECONDS,
    ):
        """Start a server and return once it is healthy.

        Args:
            model: a folder in transformers' format, or a name on the hub.
            python: of the environment that has SGLang; "" is this one.
            cpu: whether to do without a GPU.
            arguments: further ones of `sglang.launch_server`.
            start_seconds: how long that may take.

        Raises:
            ConfigError: there is no such Python, or no SGLang in it.
            EngineDead: it ended; with the last lines it said.
            EngineError: it is not healthy in time.
        """
        python = _python_with_sglang(python)
        self.token = secrets.token_hex(32)
        self._folder = TemporaryDirectory(prefix="agentrl-sglang-")
        folder = Path(self._folder.name)
        self._log = folder / "server.log"
        # The command line of a process is read by everybody: the key goes by a file.
        (folder / "key.yaml").write_text(json.dumps({"api-key": self.token}))
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(python, "-m", "sglang.launch_server", "--config", str(folder / "key.yaml")),
            *("--model-path", model, "--weight-version", "0"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--grammar-backend", "none"),
            *(CPU if cpu else ()),
            *arguments,
        ]
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C is for the run, which needs it to finish a step.
            self._process = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {
                    "TMPDIR": str(folder),  # its sockets lie where they are cleared away
                    "PYTHONSAFEPATH": "1",  # no file where we stand is a module
                    "SGLANG_TIMEOUT_KEEP_ALIVE": "300",  # longer than a client keeps connections
                },
                start_new_session=True,
            )
        try:
            self._wait_healthy(start_seconds)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the process that holds the server, and of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process.poll() is None

    def death(self) -> EngineDead:
        """What to raise of a server that ended: with the last lines it said."""
        lines = self._log.read_text(errors="replace").replace(self.token, "***").splitlines()
        said = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])
        return EngineDead(f"the SGLang server at {self.url} ended. Its last lines:\n{said}")

    def stop(self) -> None:
        """End it and all that it started. Idempotent."""
        assert self._process.stdin is not None
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._folder.cleanup()

    def _wait_healthy(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.running:
                raise self.death()
            with contextlib.suppress(EngineError):
                status, _ = fetch_json(
                    self.url, "/health", error=EngineError, timeout=HEALTH_SECONDS
                )
                if status == 200:
                    return
            time.sleep(0.1)
        raise EngineError(f"the SGLang server at {self.url} is not healthy after {seconds:g} s")


def _python_with_sglang(python: str) -> str:
    """The interpreter's path, after asking it for SGLang.

    Raises:
        ConfigError: it does not run, or has none.
    """
    path = str(Path(python).absolute()) if python else sys.executable
    asks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        code = subprocess.run([path, "-c", asks], cwd="/", timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"rollout.python={python}: cannot run {path}: {e}") from None
    if code:
        raise ConfigError(
            f"rollout.name=sglang: {path} has no sglang. Install it there (pip install"
            ' "agentrl[sglang]"), or name the Python of an environment that has it: rollout.python'
        )
    return path


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
