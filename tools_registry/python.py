"""Runs Python programs in the sandbox, each call as its own program.

    $ agentrl tools call python '{"code": "sum(n * n for n in range(10))"}' --file shelf:python
    285

The section `sandbox` sets the limits of a program.
"""

from __future__ import annotations

import ast

from agentrl import ToolError, tool
from agentrl.sandbox import Sandbox
from agentrl.sandbox.report import report

MAX_CODE = 20_000


# The sandbox kills a program much earlier. This timeout includes the wait for a free slot.
@tool(timeout=120)
async def python(code: str, sandbox: Sandbox) -> str:
    """Run a Python program and return its output and the value of its last expression.

    There is no network access. Variables and files are not kept between calls.

    Args:
        code: the program, for example "sum(n * n for n in range(10))"
    """
    if len(code) > MAX_CODE:
        raise ToolError(f"the program has {len(code)} characters, maximum {MAX_CODE}")
    return report(await sandbox.run(shows_last_value(code)))


def shows_last_value(code: str) -> str:
    """Return the program, changed to print the value of its last expression, as a notebook does.

    All other code keeps its lines, so that a traceback shows the lines that the model wrote.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return code  # the interpreter reports the error
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1].value
    assert last.end_lineno is not None and last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)  # columns count bytes
    end, begin = last.end_lineno - 1, last.lineno - 1
    lines[end] = _insert(lines[end], last.end_col_offset, b"))")
    lines[begin] = _insert(lines[begin], last.col_offset, b"__import__('sys').displayhook((")
    return b"".join(lines).decode()


def _insert(line: bytes, column: int, what: bytes) -> bytes:
    return line[:column] + what + line[column:]
