"""Waits that share a timer end when they should: with their job, or when their time is over."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.tools.runner import Deadline, Waiters, cancel_waiters


async def test_a_wait_ends_with_its_job():
    job = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, job.set_result, None)
    began = time.monotonic()
    await Deadline(30.0).wait(job)
    assert job.done()
    assert time.monotonic() - began < 5
    await Deadline(30.0).wait(job)  # a job that is done already


@pytest.mark.timing
async def test_each_wait_has_its_own_end():
    """Begun one after another, some of them done early: the others end in order and in time."""
    deadline, loop = Deadline(0.2), asyncio.get_running_loop()
    took: dict[int, float] = {}

    async def wait(i: int) -> None:
        await asyncio.sleep(0.05 * i)
        job, began = loop.create_future(), time.monotonic()
        if i % 2:
            loop.call_later(0.01, job.set_result, None)
        await deadline.wait(job)
        took[i] = time.monotonic() - began
        assert job.done() == bool(i % 2)

    await asyncio.gather(*map(wait, range(6)))
    assert [i for i in took if not i % 2] == [0, 2, 4]
    assert all(0.18 < took[i] < 2 for i in (0, 2, 4))
    assert all(took[i] < 0.18 for i in (1, 3, 5))
    # After a pause in which no wait was left, the timer is set again.
    await asyncio.sleep(0.3)
    await wait(0)
    assert took[0] > 0.18


async def test_a_cancelled_wait_leaves_its_job_and_the_others():
    deadline, loop = Deadline(0.1), asyncio.get_running_loop()
    job, other = loop.create_future(), loop.create_future()
    first, second = (asyncio.create_task(deadline.wait(j)) for j in (job, other))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not job.cancelled()
    await second
    assert not other.done()


async def test_cancelled_waits_leave_their_jobs():
    deadline, loop = Deadline(30.0), asyncio.get_running_loop()
    jobs = [loop.create_future() for _ in range(4)]
    waits: Waiters = set()
    limits = [waits, waits, waits, None]
    tasks = [asyncio.create_task(deadline.wait(j, w)) for j, w in zip(jobs, limits, strict=True)]
    await asyncio.sleep(0)
    jobs[2].set_result(None)
    assert await tasks[2] is False
    assert len(waits) == 2
    cancel_waiters(waits)
    cancel_waiters(waits)
    assert await asyncio.gather(*tasks[:2]) == [True, True]
    assert waits == set()
    assert [j.done() for j in jobs] == [False, False, True, False]
    jobs[3].set_result(None)
    assert await tasks[3] is False


async def test_no_time_at_all():
    job = asyncio.get_running_loop().create_future()
    await Deadline(-1.0).wait(job)
    assert not job.done()
