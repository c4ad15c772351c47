"""A wait for a job ends with it, when its time is over, or when it is cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.tools.runner import Waiters, cancel_waiters, wait_for_job


async def test_a_wait_ends_with_its_job():
    job = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, job.set_result, None)
    began = time.monotonic()
    await wait_for_job(job, 30.0)
    assert job.done()
    assert time.monotonic() - began < 5
    await wait_for_job(job, 30.0)  # a job that is done already


@pytest.mark.timing
async def test_each_wait_has_its_own_end():
    """Begun one after another, some of them done early: the others end in order and in time."""
    loop = asyncio.get_running_loop()
    took: dict[int, float] = {}

    async def wait(i: int) -> None:
        await asyncio.sleep(0.05 * i)
        job, began = loop.create_future(), time.monotonic()
        if i % 2:
            loop.call_later(0.01, job.set_result, None)
        await wait_for_job(job, 0.2)
        took[i] = time.monotonic() - began
        assert job.done() == bool(i % 2)

    await asyncio.gather(*map(wait, range(6)))
    assert [i for i in took if not i % 2] == [0, 2, 4]
    assert all(0.18 < took[i] < 2 for i in (0, 2, 4))
    assert all(took[i] < 0.18 for i in (1, 3, 5))


async def test_a_cancelled_wait_leaves_its_job_and_the_others():
    loop = asyncio.get_running_loop()
    job, other = loop.create_future(), loop.create_future()
    first, second = (asyncio.create_task(wait_for_job(j, 0.1)) for j in (job, other))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not job.cancelled()
    await second
    assert not other.done()


async def test_cancelled_waits_leave_their_jobs():
    loop = asyncio.get_running_loop()
    jobs = [loop.create_future() for _ in range(4)]
    waits: Waiters = set()
    limits = [waits, waits, waits, None]
    tasks = [
        asyncio.create_task(wait_for_job(j, 30.0, w)) for j, w in zip(jobs, limits, strict=True)
    ]
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
    await wait_for_job(job, -1.0)
    assert not job.done()
