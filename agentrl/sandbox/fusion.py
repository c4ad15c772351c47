"""Programs on another machine, over HTTP: SandboxFusion's API (github.com/bytedance/SandboxFusion).

How well they are isolated is that server's business.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.http import HttpClient
from agentrl.sandbox.base import (
    Completed,
    EndedBy,
    Limits,
    Program,
    Sandbox,
    clean,
    plain,
    shorten,
)

ANSWER_SECONDS = 60.0
"""For the server's own queue and its way back, over the time of the program."""


class SandboxFusion(Sandbox):
    """The sandbox of `sandbox.backend=http://HOST:PORT`."""

    def __init__(self, config: SandboxConfig):
        super().__init__(config)
        self.name = f"SandboxFusion at {config.backend}"
        self._client = HttpClient(config.backend, error=SandboxError)

    async def _run(self, program: Program) -> Completed:
        """Of the limits, the server knows those of time and memory."""
        limits = program.limits
        files = {n: base64.b64encode(c).decode("ascii") for n, c in program.files.items()}
        request = {
            "code": plain(program.code),
            "language": program.language,
            "stdin": plain(program.stdin),
            "files": files,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_mb,
        }
        deadline = time.monotonic() + limits.seconds + ANSWER_SECONDS
        # Not sent again by itself where the connection broke: it may be running.
        status, answer = await self._client.request_json(
            "POST", "/run_code", request, deadline=deadline
        )
        return self._completed(status, answer, limits)

    async def open(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> NoReturn:
        """Refused: the API has none."""
        raise SandboxError(
            f"{self.name} keeps no box from call to call. Set sandbox.backend=bubblewrap for tools"
            " that keep variables or files, or take one that runs whole programs"
        )

    async def aclose(self) -> None:
        """See `Sandbox.aclose`."""
        await self._client.aclose()

    def _completed(self, status: int, answer: Any, limits: Limits) -> Completed:
        """What the server says of the program.

        Raises:
            SandboxError: it says something of itself instead.
        """
        ran = answer.get("run_result") if isinstance(answer, dict) else None
        fine = status == 200 and answer.get("status") in ("Success", "Failed")
        if not fine or not isinstance(ran, dict):
            said = (answer.get("message") if isinstance(answer, dict) else "") or answer
            raise SandboxError(f"{self.name}: status {status}: {str(said)[:500]}")
        late = ran.get("status") == "TimeLimitExceeded"
        code = -9 if late else ran.get("return_code")
        if not isinstance(code, int):
            raise SandboxError(f"{self.name}: a program ended with return_code={code!r}")
        # Python says of signal N: -N; a shell, 128 + N.
        code = 128 - code if code > 128 else code
        why: EndedBy = "time" if late else "signal" if code < 0 else ""
        stdout, stderr = (
            clean(shorten((ran.get(name) or "").encode("utf-8", "replace"), limits.output_bytes))
            for name in ("stdout", "stderr")
        )
        return Completed(stdout, stderr, code, why, round(ran.get("execution_time") or 0.0, 4))
