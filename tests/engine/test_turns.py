"""Turns that are held back while the weights of a server change, and their parts."""

import asyncio
from array import array

import pytest

from agentrl.engine.remote.turns import TurnGate, join_parts, without_last_token
from agentrl.errors import EngineError
from agentrl.http.pool import TimeLimit
from agentrl.trajectory import Generation


async def passes(gate, seconds=0.0):
    async with gate.passing():
        await asyncio.sleep(seconds)


async def test_a_wait_at_the_gate_counts_against_no_time_limit():
    gate = TurnGate()
    gate.close()

    async def episode():
        async with TimeLimit(0.15):
            await passes(gate, 0.1)

    task = asyncio.create_task(episode())
    await asyncio.sleep(0.3)
    assert gate.in_flight == 0 and not task.done()
    await asyncio.to_thread(gate.open)
    await task


async def test_one_that_gives_up_at_the_gate_disturbs_no_other():
    gate = TurnGate()
    gate.close()
    tasks = [asyncio.create_task(passes(gate)) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    await asyncio.to_thread(gate.open)
    assert [type(r) for r in await asyncio.gather(*tasks, return_exceptions=True)] == [
        asyncio.CancelledError,
        type(None),
        type(None),
    ]
    assert gate.in_flight == 0 and not gate.is_closed


async def test_without_weights_turns_fail_until_there_are_new_ones():
    gate = TurnGate()
    gate.fail(EngineError("an open gate stays open"))
    await passes(gate)
    gate.close()
    task = asyncio.create_task(passes(gate))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(gate.fail, EngineError("the disk is full"))
    for turn in (task, passes(gate)):
        with pytest.raises(EngineError, match="disk is full"):
            await turn
    gate.close()
    task = asyncio.create_task(passes(gate))
    await asyncio.sleep(0.01)
    gate.open()
    await task
    assert gate.in_flight == 0


def part(ids, version, reason="abort", cached=0):
    n = len(ids)
    return Generation(
        array("i", ids), array("f", [-0.5] * n), array("i", [version] * n), reason, 4, cached
    )


def test_parts_become_one_turn():
    first = without_last_token(part([1, 2, 3], 6, cached=3))
    turn = join_parts([first, part([7], 7), part([8, 9], 8, "stop", cached=1)])
    assert turn == Generation(
        array("i", [1, 2, 7, 8, 9]),
        array("f", [-0.5] * 5),
        array("i", [6, 6, 7, 8, 8]),
        "stop",
        4,
        3,
    )
