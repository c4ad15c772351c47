from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RunStopped
from agentrl.workers import Gate, LoopThread

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


def test_a_gate_lets_few_tasks_pass_in_one_iteration():
    """In their order; and what else waits on the loop runs between them."""
    passed: list[tuple[int, int]] = []
    iterations = 0

    async def work(gate: Gate, number: int) -> None:
        await gate.passed()
        passed.append((number, iterations))

    async def main() -> None:
        nonlocal iterations
        gate = Gate(4)
        tasks = [asyncio.ensure_future(work(gate, i)) for i in range(22)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iterations += 1
        before = iterations
        await work(gate, 22)  # nobody waits any more
        assert iterations == before

    asyncio.run(main())
    assert [number for number, _ in passed] == [*range(23)]
    counts = Counter(iteration for _, iteration in passed)
    assert max(counts.values()) <= 4 and len(counts) >= 6


@given(st.lists(st.sampled_from(["come", "cancel", "iterate"]), max_size=60), st.integers(1, 5))
def test_a_gate_holds_nobody_back_for_ever(events, limit):
    """Whoever comes passes or was cancelled, whatever the order."""

    async def main() -> None:
        gate = Gate(limit)
        tasks: list[asyncio.Task[None]] = []
        for event in events:
            if event == "come":
                tasks.append(asyncio.ensure_future(gate.passed()))
            elif event == "cancel" and tasks:
                tasks[len(tasks) // 2].cancel()
            else:
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            await gate.passed()

    asyncio.run(main())
