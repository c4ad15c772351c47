"""Python in the sandbox: every call is a program of its own.

    $ agentrl tools call python '{"code": "sum(n * n for n in range(10))"}' --file shelf:python
    285

What a program may take is said by the section `sandbox`.
"""

from __future__ import annotations

import ast

from agentrl import ToolError, tool
from agentrl.sandbox import Sandbox
from agentrl.sandbox.report import report

MAX_CODE = 20_000


# The sandbox ends a program long before: this is for programs that wait for a free place in it.
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
    """The program, made to print the value of its last expression, as a notebook does.

    All else stays where it stands, so that a traceback names the lines that the model wrote.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return code  # the interpreter says what is wrong
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1].value
    assert last.end_lineno is not None and last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)  # columns are in bytes
    end, begin = last.end_lineno - 1, last.lineno - 1
    lines[end] = _inserted(lines[end], last.end_col_offset, b"))")
    lines[begin] = _inserted(lines[begin], last.col_offset, b"__import__('sys').displayhook((")
    return b"".join(lines).decode()


def _inserted(line: bytes, column: int, what: bytes) -> bytes:
    return line[:column] + what + line[column:]
