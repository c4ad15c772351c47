"""Runs Python code in the sandbox, with variables and files that persist for the episode.

    $ agentrl tools call python_session '{"code": "x = 6; x * 7"}' --file shelf:python_session
    42

The section `sandbox` sets the limits of a call. A call that exceeds them loses the variables.
"""

from __future__ import annotations

from agentrl import ToolError, tool
from agentrl.sandbox import Box, Sandbox
from agentrl.sandbox.report import report

MAX_CODE = 20_000


@tool(timeout=120)
class PythonSession:
    """One interpreter and one scratch folder per episode, created by the first call."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.box: Box | None = None

    async def python(self, code: str) -> str:
        """Run Python code and return its output and the value of its last expression.

        There is no network access. Variables, functions and files are kept between calls.

        Args:
            code: the code, for example "total = 3 * 4"
        """
        if len(code) > MAX_CODE:
            raise ToolError(f"the code has {len(code)} characters, maximum {MAX_CODE}")
        if self.box is None:
            self.box = await self.sandbox.open()
        return report(await self.box.run(code))

    async def close(self) -> None:
        """End the interpreter."""
        if self.box is not None:
            await self.box.aclose()
