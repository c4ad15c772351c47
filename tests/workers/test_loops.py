from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RunStopped
from agentrl.workers import IterationLimit, LoopThread

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


async def passed(limit: IterationLimit) -> None:
    if wait := limit.enter():
        await wait


def test_few_tasks_continue_in_one_iteration():
    """In their order; what else waits on the loop runs between them."""
    resumed: list[tuple[int, int]] = []
    iterations = 0

    async def work(limit: IterationLimit, number: int) -> None:
        await passed(limit)
        resumed.append((number, iterations))

    async def main() -> None:
        nonlocal iterations
        limit = IterationLimit(4)
        tasks = [asyncio.ensure_future(work(limit, i)) for i in range(22)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iterations += 1
        has_waited: list[bool] = []
        asyncio.get_running_loop().call_soon(has_waited.append, True)
        await work(limit, 22)
        assert not has_waited  # no other task waits any more

    asyncio.run(main())
    assert [number for number, _ in resumed] == [*range(23)]
    counts = Counter(iteration for _, iteration in resumed)
    assert max(counts.values()) <= 4 and len(counts) >= 6


@given(st.lists(st.sampled_from(["come", "cancel", "iterate"]), max_size=60), st.integers(1, 5))
def test_every_waiting_task_continues_or_is_cancelled(events, number):
    async def main() -> None:
        limit = IterationLimit(number)
        tasks: list[asyncio.Task[None]] = []
        for event in events:
            if event == "come":
                tasks.append(asyncio.ensure_future(passed(limit)))
            elif event == "cancel" and tasks:
                tasks[len(tasks) // 2].cancel()
            else:
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            await passed(limit)

    asyncio.run(main())
