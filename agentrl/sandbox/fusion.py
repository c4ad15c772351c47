"""Run programs on a SandboxFusion server over HTTP (github.com/bytedance/SandboxFusion).

The server is responsible for their isolation.
"""

from __future__ import annotations

import base64
import time
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.http import HttpClient
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.program import (
    Completed,
    EndedBy,
    Limits,
    Program,
    clean_input,
    readable_output,
)

ANSWER_SECONDS = 60.0
"""The time that the server has to answer, in addition to the program's time."""


class SandboxFusion(Sandbox):
    """The sandbox of `sandbox.backend=http://HOST:PORT`."""

    def __init__(self, config: SandboxConfig):
        super().__init__(config)
        self.name = f"SandboxFusion at {config.backend}"
        self._client = HttpClient(config.backend, error=SandboxError)

    async def _run(self, program: Program) -> Completed:
        """Run a program. The server supports only the limits of time and memory."""
        limits = program.limits
        files = {n: base64.b64encode(c).decode("ascii") for n, c in program.files.items()}
        request = {
            "code": clean_input(program.code),
            "language": program.language,
            "stdin": clean_input(program.stdin),
            "files": files,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_mb,
        }
        deadline = time.monotonic() + limits.seconds + ANSWER_SECONDS
        # The request is not repeated after a broken connection, because the program may be running.
        status, answer = await self._client.request_json(
            "POST", "/run_code", request, deadline=deadline
        )
        return self._read_result(status, answer, limits)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _read_result(self, status: int, answer: Any, limits: Limits) -> Completed:
        """Return the result of a program.

        Raises:
            SandboxError: the server failed, not the program.
        """
        result = answer.get("run_result") if isinstance(answer, dict) else None
        succeeded = status == 200 and answer.get("status") in ("Success", "Failed")
        if not succeeded or not isinstance(result, dict):
            message = (answer.get("message") if isinstance(answer, dict) else "") or answer
            raise SandboxError(f"{self.name}: status {status}: {str(message)[:500]}")
        timed_out = result.get("status") == "TimeLimitExceeded"
        code = -9 if timed_out else result.get("return_code")
        if not isinstance(code, int):
            raise SandboxError(f"{self.name}: a program ended with return_code={code!r}")
        # A signal N is -N in Python and 128 + N in a shell.
        code = 128 - code if code > 128 else code
        ended_by: EndedBy = "time" if timed_out else "signal" if code < 0 else ""
        stdout, stderr = (
            readable_output((result.get(name) or "").encode(errors="replace"), limits.output_bytes)
            for name in ("stdout", "stderr")
        )
        return Completed(
            stdout, stderr, code, ended_by, round(result.get("execution_time") or 0.0, 4)
        )
