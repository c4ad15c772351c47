"""Whether the options of `@tool` can be kept, and fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from agentrl.errors import UserError
from agentrl.signatures import place
from agentrl.tools.record import Scope, Tool


def check_options(tool: Tool) -> None:
    """Look at what a tool asks for, once, where it is written.

    Raises:
        UserError: all that is wrong with it at once.
    """
    problems = [*_values(tool), *_together(tool)]
    if problems:
        raise UserError(f"@tool on {place(tool.target)}: {'; '.join(problems)}")


def _values(tool: Tool) -> Iterator[str]:
    if not 0 < tool.timeout < math.inf:
        yield f"timeout={tool.timeout} must be above 0 seconds"
    if tool.retries < 0:
        yield f"retries={tool.retries} must be at least 0"
    if tool.max_concurrency < 0:
        yield f"max_concurrency={tool.max_concurrency} must be at least 0"
    if not 0 <= tool.rate_limit < math.inf:
        yield f"rate_limit={tool.rate_limit} must be at least 0 calls a second"
    if tool.scope not in get_args(Scope):
        yield f"scope={tool.scope!r} must be one of {', '.join(get_args(Scope))}"


def _together(tool: Tool) -> Iterator[str]:
    if tool.retries and not tool.idempotent:
        yield (
            f"retries={tool.retries} runs a failed call again: say idempotent=True if that does no"
            " harm"
        )
    if tool.scope == "call" and not tool.is_class:
        yield "scope='call' is for classes: a function keeps nothing between calls"
    if tool.cache:
        if tool.is_class:
            yield "cache=True is for functions: an object's answers depend on its earlier calls"
        elif not tool.idempotent:
            yield "cache=True leaves calls out: say idempotent=True if that does no harm"
        of_episode = sorted(tool.injected - {"sandbox"})
        if of_episode and not tool.is_class:
            yield (
                f"cache=True gives one episode's answer to another, but it takes"
                f" {' and '.join(of_episode)}"
            )
    if tool.process:
        if tool.is_class:
            yield "process=True is for functions: an object lives in this process"
        elif "." in tool.target.__qualname__ or tool.target.__module__ == "__main__":
            # Its module is still being loaded: a worker looks for it when it is there.
            yield (
                "process=True needs a function that the worker finds by its name: define it at the"
                " top level of a file of its own"
            )
        stays = sorted(tool.injected - {"sample"})
        if stays and not tool.is_class:
            yield (
                f"process=True cannot hand {' and '.join(stays)} to another process, only `sample`"
            )
