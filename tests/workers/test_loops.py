from __future__ import annotations

import asyncio
import os

import pytest
import uvloop

from agentrl.errors import RunStopped
from agentrl.workers import LoopThread

MAKERS = pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])


async def answer() -> int:
    await asyncio.sleep(0.001)
    return 42


@MAKERS
def test_a_loop_that_is_stopped_leaves_no_file_open(make):
    LoopThread("first", make).stop()  # the first loop of a process opens files that stay
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        loop = LoopThread("test", make)
        assert loop.submit(answer()).result(10) == 42
        loop.stop()
        loop.stop()
        assert not loop.is_alive
    assert os.listdir("/proc/self/fd") == before


@MAKERS
def test_tasks_that_are_left_are_cancelled_and_clean_up(make):
    seen = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            seen.append("cleaned up")

    loop = LoopThread("test", make)
    left = [loop.submit(hang()) for _ in range(3)]
    loop.submit(answer()).result(10)
    loop.stop()
    assert seen == ["cleaned up"] * 3 and all(future.cancelled() for future in left)


def test_work_for_a_loop_that_has_ended():
    loop = LoopThread("rollouts")
    loop.stop()
    with pytest.raises(RunStopped, match="the thread 'rollouts' has ended"):
        loop.submit(answer())


def test_a_task_that_ignores_its_cancellation_does_not_hold_the_thread(monkeypatch):
    monkeypatch.setattr("agentrl.workers.loops.CANCEL_SECONDS", 0.05)

    async def stay() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    loop = LoopThread("test")
    loop.submit(stay())
    loop.submit(answer()).result(10)
    loop.stop()
    assert not loop.is_alive
