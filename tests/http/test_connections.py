"""The connections of a process: shared, limited, fair, and no part of anybody's time limit."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import asynccontextmanager, closing

import pytest
from support.raw_server import answer, read_request, serving

from agentrl.errors import Infrastructure
from agentrl.http import HttpClient, pool
from agentrl.http.pool import TimeLimit, pool_of_loop, waiting_requests
from agentrl.http.public import PUBLIC_WEB


class Counted:
    """A server that takes `seconds` for an answer, and counts its connections."""

    def __init__(self, seconds: float = 0.0, hangs: bool = False):
        self.seconds, self.hangs = seconds, hangs
        self.now = self.most = self.ever = 0
        self.paths: list[str] = []

    async def handle(self, reader, writer):
        self.now, self.ever = self.now + 1, self.ever + 1
        self.most = max(self.most, self.now)
        try:
            while True:
                line, _, _ = await read_request(reader)
                self.paths.append(line.split()[1])
                await asyncio.sleep(self.seconds)
                if not self.hangs:
                    writer.write(answer(b"1"))
        finally:
            self.now -= 1


@asynccontextmanager
async def clients(most: int, *servers: Counted):
    """A client for each server, in a loop that may have `most` connections."""
    pool_of_loop().max_connections = most
    urls, contexts = [], []
    for server in servers:
        context = serving(server.handle)
        urls.append(await context.__aenter__())
        contexts.append(context)
    opened = [HttpClient(url) for url in urls]
    yield opened
    for client, context in zip(opened, contexts, strict=True):
        await client.aclose()
        await context.__aexit__(None, None, None)


async def ask(client: HttpClient, path: str = "/", seconds: float = 5.0):
    return await client.request_json("GET", path, deadline=time.monotonic() + seconds)


async def until(condition, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.01)


async def test_servers_share_the_limit():
    servers = [Counted(0.01), Counted(0.01), Counted(0.01)]
    seen = 0

    async def watch():
        nonlocal seen
        while True:
            seen = max(seen, sum(s.now for s in servers))
            await asyncio.sleep(0.001)

    async with clients(4, *servers) as three:
        watching = asyncio.create_task(watch())
        asks = [ask(three[i % 3]) for i in range(90)]
        assert await asyncio.gather(*asks) == [(200, 1)] * 90
        watching.cancel()
    assert 3 <= seen <= 4 + 1  # the server hears a moment later of a connection that was closed


async def test_clients_of_one_server_share_connections():
    server = Counted()
    async with clients(10, server) as [client]:
        other = HttpClient(client.base_url, token="other")
        for _ in range(3):
            assert await ask(client) == await ask(other) == (200, 1)
    assert server.ever == 1


async def test_first_in_first_out():
    server = Counted(0.002)
    async with clients(2, server) as [client]:
        await asyncio.gather(*(ask(client, f"/{i}") for i in range(40)))
    assert server.paths == [f"/{i}" for i in range(40)]


async def test_a_tool_call_does_not_wait_behind_all_turns():
    """The server with the fewest requests in flight is next, however many wait for the others."""
    engine, tools = Counted(0.1), Counted()
    done = []
    async with clients(4, engine, tools) as [turns, calls]:

        async def noted(client, name):
            await ask(client, seconds=20)
            done.append(name)

        work = [asyncio.create_task(noted(turns, "turn")) for _ in range(20)]
        await asyncio.sleep(0.02)
        await noted(calls, "call")
        assert done.count("turn") <= 4
        await asyncio.gather(*work)


@pytest.mark.timing
async def test_many_turns_are_not_shut_out_by_many_calls():
    engine, tools = Counted(0.01), Counted(0.01)
    async with clients(4, engine, tools) as [turns, calls]:

        async def without_end():
            while True:
                await ask(calls, seconds=20)

        calling = [asyncio.create_task(without_end()) for _ in range(12)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await asyncio.gather(*(ask(turns, seconds=20) for _ in range(20)))
        assert time.monotonic() - began < 2.0
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)


async def test_an_idle_connection_makes_room():
    one, other = Counted(), Counted()
    async with clients(1, one, other) as [first, second]:
        for _ in range(3):
            assert await ask(first) == await ask(second) == (200, 1)
        await until(lambda: one.now == 0)
        assert (one.most, other.most) == (1, 1)
        assert pool_of_loop().connection_count == 1


async def test_a_connection_that_is_idle_for_long_is_closed(monkeypatch):
    monkeypatch.setattr(pool, "MAX_IDLE_SECONDS", 0.1)
    server = Counted(0.01)
    async with clients(10, server) as [client]:
        await asyncio.gather(*(ask(client) for _ in range(5)))
        assert server.now == pool_of_loop().connection_count == 5
        await until(lambda: server.now == 0)
        assert pool_of_loop().connection_count == 0 and not pool_of_loop().queues


async def test_waiting_for_a_connection_does_not_count():
    server = Counted(0.3)
    async with clients(1, server) as [client]:
        began = time.monotonic()
        asks = [ask(client, seconds=0.5) for _ in range(4)]
        assert await asyncio.gather(*asks) == [(200, 1)] * 4
        assert time.monotonic() - began > 1.1
        async with TimeLimit(0.5):  # of an episode, say
            asks = [ask(client, seconds=0.5) for _ in range(4)]
            await asyncio.gather(*asks)


@pytest.mark.timing
async def test_time_without_waiting_counts():
    busy, other = Counted(0.6), Counted(hangs=True)
    async with clients(1, busy, other) as [first, second]:
        waited_for = asyncio.create_task(ask(first))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(Infrastructure, match="no response before the deadline"):
            await ask(second, seconds=0.3)
        assert 0.75 < time.monotonic() - began < 1.5
        assert (await waited_for)[0] == 200
    limit = TimeLimit(0.2)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.sleep(5)
    assert time.monotonic() - began < 1.0 and limit.deadline < time.monotonic()


@pytest.mark.timing
async def test_a_time_limit_continues_after_the_wait():
    busy, other = Counted(0.4), Counted()
    async with clients(1, busy, other) as [first, second]:
        waited_for = asyncio.create_task(ask(first))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with TimeLimit(0.3) as limit:
                before = limit.deadline
                await ask(second)
                assert limit.deadline - before == pytest.approx(0.35, abs=0.15)
                await asyncio.sleep(5)
        assert 0.5 < time.monotonic() - began < 1.2
        await waited_for


async def test_health_checks_do_not_wait_behind_turns():
    server = Counted(hangs=True)
    async with clients(2, server) as [client]:
        turns = [asyncio.create_task(ask(client, "/turn", seconds=0.6)) for _ in range(6)]
        await asyncio.sleep(0.05)
        watching = HttpClient(client.base_url, reserved=True)
        server.hangs = False
        assert await ask(watching, "/health", seconds=0.5) == (200, 1)
        await asyncio.gather(*turns, return_exceptions=True)
        await watching.aclose()


@pytest.mark.timing
async def test_the_wait_for_the_connection_of_a_health_check_counts(monkeypatch):
    server = Counted(hangs=True)
    async with clients(2, server) as [client]:
        watching = HttpClient(client.base_url, reserved=True)
        pool_of_loop(reserved=True).max_connections = 1
        began = time.monotonic()
        asks = [ask(watching, seconds=0.3) for _ in range(5)]
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(e, Infrastructure) for e in results)
        assert time.monotonic() - began < 0.9
        await watching.aclose()


async def test_waiting_requests_are_listed():
    server = Counted(0.3)
    async with clients(1, server) as [client]:
        asks = [asyncio.create_task(ask(client)) for _ in range(4)]
        await asyncio.sleep(0.05)
        [line] = waiting_requests()
        assert line.startswith(f"3 requests to {client.base_url} wait for a free connection: 1 are")
        assert "`ulimit -n` is" in line
        await asyncio.gather(*asks)
        assert waiting_requests() == []


async def test_waiting_requests_to_the_public_web_are_listed():
    ours = pool_of_loop()
    ours.max_connections = 1
    async with ours.reserve_slot(PUBLIC_WEB):
        waiter = asyncio.create_task(ours.acquire(PUBLIC_WEB))
        await asyncio.sleep(0.01)
        [line] = waiting_requests()
    assert line.startswith("1 requests to the public web wait for a free connection: 1 are")
    ours.release(await waiter)


@pytest.mark.parametrize("seed", range(5))
async def test_a_request_that_gives_up_leaves_its_connection_to_the_next(seed):
    """Cancelled while they wait, connect, or hear the answer, and late: nothing is ever lost."""
    draw = random.Random(seed)
    servers = [Counted(0.005), Counted(0.02), Counted(0.005, hangs=True)]
    async with clients(3, *servers) as three:
        tasks, ends = [], Counter()
        for _ in range(200):
            seconds = draw.choice([0.01, 5.0]) if draw.random() < 0.5 else 5.0
            client = draw.choice(three[:2] if seconds == 5.0 else three)
            tasks.append(asyncio.create_task(ask(client, seconds=seconds)))
            if draw.random() < 0.3:
                await asyncio.sleep(draw.random() * 0.01)
            if draw.random() < 0.4:
                draw.choice(tasks).cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            ends[type(outcome).__name__] += 1
        assert set(ends) <= {"tuple", "CancelledError", "Infrastructure"} and ends["tuple"] > 20
        ours = pool_of_loop()
        await until(lambda: ours.connection_count <= 3)
        assert all(line.busy == 0 and not line.waiting for line in ours.queues.values())
        assert await asyncio.gather(*(ask(three[0]) for _ in range(9))) == [(200, 1)] * 9
        for client in three:
            await client.aclose()
        await until(lambda: ours.connection_count == 0)
        assert not ours.queues


async def test_a_connection_that_ends_late_fails_no_later_request():
    """Its server has no line in the pool any more, and then a new one."""
    server = Counted(0.3)
    async with clients(3, server) as [client]:
        first = asyncio.create_task(ask(client))
        await asyncio.sleep(0.05)
        first.cancel()
        second = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        [line] = pool_of_loop().queues.values()
        assert line.busy == 1
        await second


def test_event_loops_share_the_limit(monkeypatch):
    """This holds too if a loop ended without closing its connections."""
    monkeypatch.setattr(pool, "_pools", {})  # loops of other tests may not be closed
    asyncio.run(_left_open())

    async def both():
        ours, server = pool_of_loop(), Counted(0.05)
        whole = ours.max_connections
        half = await asyncio.to_thread(asyncio.run, _most())
        assert half == ours.max_connections == whole // 2
        # The other loop has ended, and a request finds no room.
        monkeypatch.setattr(pool, "_max_connections", 2)
        ours.max_connections = 1
        async with serving(server.handle) as url:
            await asyncio.gather(*(ask(HttpClient(url)) for _ in range(4)))
        assert ours.max_connections == server.most == 2

    asyncio.run(both())


def test_a_running_event_loop_can_release_its_share(monkeypatch):
    """Closed rollouts do so: their event loop stays."""
    monkeypatch.setattr(pool, "_pools", {})

    async def both():
        ours = pool_of_loop()
        whole = ours.max_connections
        assert await there(_most()) == ours.max_connections == whole // 2
        await there(_leave())
        assert ours.max_connections == whole
        assert await there(_most()) == whole // 2

    def there(what):
        return asyncio.to_thread(other.run_until_complete, what)

    with closing(asyncio.new_event_loop()) as other:
        asyncio.run(both())


async def _leave():
    pool.leave_pool()


async def _left_open():
    server = Counted()
    async with serving(server.handle) as url:
        await ask(HttpClient(url))


async def _most():
    return pool_of_loop().max_connections
