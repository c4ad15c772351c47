"""Errors of user code: the exception of the user, and the line that raised it."""

from __future__ import annotations

import pytest

from agentrl.errors import UserCodeError, user_code


def empty():
    return next(iter(()))


async def empty_later():
    return empty()


async def call_now():
    with user_code("the reward"):
        empty()


async def call_later():
    with user_code("the reward"):
        await empty_later()


@pytest.mark.parametrize("call", [call_now, call_later])
async def test_a_stop_iteration_keeps_its_name_and_line(call):
    """Python turns it into a RuntimeError at the end of a coroutine; contextlib relies on it."""
    line = empty.__code__.co_firstlineno + 1
    with pytest.raises(UserCodeError, match="the reward raised StopIteration") as caught:
        await call()
    assert f"({__file__}:{line})" in str(caught.value)
