"""Turns that are held back while the weights of a server change, and their parts."""

import asyncio
import itertools
import random
import threading
import time
from array import array
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest

from agentrl.engine.base import Sampling
from agentrl.engine.remote.client import RemoteEngine
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


def test_parts_keep_the_kept_tokens_of_their_tokens():
    ids, counts = array("i", [1, 5, 2, 2, 6, 7, 3]), array("i", [2, 1, 4])
    cut = replace(part([1, 2, 3], 6), kept_ids=ids, kept_counts=counts)
    last = replace(part([9], 7, "stop"), kept_ids=array("i", [9, 8]), kept_counts=array("i", [2]))
    turn = join_parts([without_last_token(cut), last])
    assert turn.token_ids.tolist() == [1, 2, 9] and turn.kept_counts.tolist() == [2, 1, 2]
    assert turn.kept_ids.tolist() == [1, 5, 2, 9, 8]


def test_a_part_without_experts_is_followed_by_those_of_all_tokens():
    last = replace(part([9], 7, "stop"), experts=array("h", range(10)), experts_width=2)
    turn = join_parts([part([1], 6), last])
    assert (turn.experts, turn.experts_width) == (last.experts, 2)


END = 1


def token_of(version: int, seed: int, position: int) -> int:
    """Return the token that weights of a version sample at a position."""
    draw = random.Random(f"{version} {seed} {position}").random()
    return END if draw < 0.06 else 2 + int(draw * 97) + 100 * version


class SimulatedServer(RemoteEngine):
    """A server without HTTP, which aborts turns at any moment and checks ends as SGLang does."""

    name = url = "simulated"
    max_length, _vocabulary, _uses_seeds = 400, 10**9, True
    adapters = SimpleNamespace(in_use=lambda fields: nullcontext())
    _policy_version = SimpleNamespace(request_fields={})

    def __init__(self, seed: int):
        self._gate, self.reprefilled = TurnGate(), 0
        self.rng = random.Random(seed)
        self.weights = self.aborts = self.empty_parts = self.full_parts = 0

    def _check_sampling(self, *_): ...

    def _body(self, row, sampling, limit, seed):
        row = orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        return {"row": row, "limit": limit, "seed": seed, "start": sampling.experts_from}

    async def _ask(self, body, *_):
        start, ids, versions = self.aborts, [], []
        await asyncio.sleep(self.rng.random() * 0.004)
        while start == self.aborts:
            if ids and (ids[-1] == END or len(ids) == body["limit"]):
                return body, ids, versions, "stop" if ids[-1] == END else "length"
            versions.append(self.weights)
            ids.append(token_of(self.weights, body["seed"], len(body["row"]) + len(ids)))
            await asyncio.sleep(self.rng.random() * 0.002)
        self.empty_parts += not ids
        self.full_parts += len(ids) == body["limit"]
        return body, ids, versions, "abort"

    def _read_turn(self, answer, *_):
        body, ids, versions, reason = answer
        # The only expert of a token is its position.
        inputs = range(body["start"], len(body["row"]) + len(ids) - 1) if ids else ()
        return Generation(
            array("i", ids), array("f", versions), array("i", versions), reason, prompt_tokens=0,
            experts=array("h", inputs), experts_width=1,
        )  # fmt: skip

    def change_weights(self) -> None:
        self._gate.close()
        while self._gate.in_flight:
            self.aborts += 1
            time.sleep(0.001)
        before = self.aborts
        time.sleep(self.rng.random() * 0.003)
        self.weights += 1
        if self.rng.random() < 0.15:
            self._gate.fail(EngineError("the disk is full"))
            time.sleep(0.002)
            self._gate.close()
        assert not self._gate.in_flight and self.aborts == before
        self._gate.open()


SimulatedServer.__abstractmethods__ = frozenset()


async def test_turns_while_weights_change_again_and_again(caplog):
    """Each token is what the weights of its version sample there, once; no end is within a turn."""
    server, over = SimulatedServer(0), threading.Event()

    def change() -> None:
        while not over.is_set():
            time.sleep(server.rng.random() * 0.01)
            server.change_weights()

    async def play(number: int) -> int:
        rng = random.Random(number)
        prompt, limit = array("i", [0] * rng.randrange(1, 30)), rng.choice([1, 2, 3, 17, 60])
        turn = server.generate(
            prompt,
            Sampling(max_tokens=limit, experts_from=0),
            episode_id=f"e{number}",
            seed=number,
            deadline=time.monotonic() + 60,
        )
        try:
            async with asyncio.timeout(rng.random() * 0.02 if rng.random() < 0.1 else 60):
                generation = await turn
        except (TimeoutError, EngineError):
            return 0
        ids, versions = [*generation.token_ids], [*generation.versions]
        places = range(len(prompt), len(prompt) + len(ids))
        assert ids == [token_of(v, number, p) for v, p in zip(versions, places, strict=True)]
        assert versions == sorted(versions) == [*generation.logprobs]
        assert [*generation.experts] == [*range(len(prompt) + len(ids) - 1)]
        assert END not in ids[:-1] and 1 <= len(ids) <= limit
        assert generation.finish_reason == ("stop" if ids[-1] == END else "length")
        assert ids[-1] == END or len(ids) == limit
        return len({*versions})

    thread = threading.Thread(target=change)
    thread.start()
    kinds = Counter[int]()
    rounds = itertools.count()
    try:
        # How often turns are aborted depends on the load of the machine.
        while server.aborts < 50 or not (kinds[2] and server.empty_parts and server.full_parts):
            first = 40 * next(rounds)
            kinds.update(await asyncio.gather(*map(play, range(first, first + 40))))
    finally:
        over.set()
        await asyncio.to_thread(thread.join)
    assert server._gate.in_flight == 0
    assert "never retrieved" not in caplog.text
