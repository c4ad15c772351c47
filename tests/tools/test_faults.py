"""A tool server that answers badly, late or not at all: the right class of error, in time, once.

The faults are put in by a proxy in front of a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from email.utils import formatdate

import pytest

from agentrl import registry
from agentrl.errors import ToolServerError, UserCodeError
from agentrl.http import HttpClient
from agentrl.http.client import retry_after_seconds
from agentrl.tools import HttpToolbox, tool
from agentrl.tools.serving.listen import ToolServer
from agentrl.trajectory import Sample, ToolCall

TOKEN = "open-sesame"
RAN: list[str] = []
"""Every execution of the tool, by key."""


@pytest.fixture(scope="module")
def url():
    """A server in this process."""
    with registry.tools.isolated(keep=()):

        @tool(timeout=1.0)
        def once(key: str) -> str:
            """Count executions; not idempotent."""
            RAN.append(key)
            return f"{key}: {RAN.count(key)}"

        ready = threading.Event()
        server = ToolServer("127.0.0.1", 0, TOKEN, ready.set)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert ready.wait(20)
        yield server.url
        server.should_exit = True
        thread.join(20)


def answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Proxy:
    """Hands requests on, but for calls: those meet the faults, one after another.

    A fault is the bytes that are answered instead of asking the server; None hangs up without an
    answer, and "lost" does so after the server has answered.
    """

    def __init__(self, url: str):
        self.port = int(url.rpartition(":")[2])
        self.faults: list[bytes | str | None] = []
        self.calls: list[float] = []
        """When a call arrived."""
        self.delay = 0.0
        """Seconds that everything is under way, each way."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                request = head + await reader.readexactly(int(length or b"0"))
                await asyncio.sleep(self.delay)
                fault: bytes | str | None = ""
                if b"/calls " in head.partition(b"\r\n")[0]:
                    self.calls.append(time.monotonic())
                    fault = self.faults.pop(0) if self.faults else ""
                if fault is None:
                    break
                if fault == "never":
                    await asyncio.sleep(30)
                if isinstance(fault, bytes):
                    writer.write(fault)
                    if fault.endswith(b"half"):
                        break
                    continue
                upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.port)
                upstream.write(request)
                head = await upstream_reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                body = await upstream_reader.readexactly(int(length))
                upstream.close()
                if fault == "lost":
                    break
                await asyncio.sleep(self.delay)
                writer.write(head + body)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def through(url: str, **timeouts: float) -> AsyncIterator[tuple[Proxy, HttpToolbox]]:
    proxy = Proxy(url)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    box = HttpToolbox(f"http://127.0.0.1:{port}", TOKEN, **timeouts)
    try:
        yield proxy, box
    finally:
        await box.aclose()
        server.close()


@pytest.fixture
def key(request) -> str:
    return request.node.name


async def played(box: HttpToolbox, key: str, turn: int = 0) -> str:
    [result] = await box.run([ToolCall("once", {"key": key})], key, turn)
    assert result.ok
    return result.content


BUSY = b'{"error": "Busy", "message": "full"}'

FAULTS = {
    "500": (answer("500 Oh", b'{"detail": "x"}'), ToolServerError, "status 500"),
    "500 of user code": (
        answer("500 Oh", b'{"error": "UserCodeError", "message": "tool x: constructor"}'),
        UserCodeError,
        "tool x: constructor",
    ),
    "502 in HTML": (answer("502 Bad", b"<html>nginx"), ToolServerError, "502 and not JSON: <html>"),
    "503": (answer("503 Busy", BUSY), ToolServerError, "full"),
    "503 for long": (answer("503 Busy", BUSY, "retry-after: 3600"), ToolServerError, "full"),
    "503 nonsense": (answer("503 Busy", BUSY, "retry-after: soon"), ToolServerError, "full"),
    "429": (answer("429 Too Many", BUSY), ToolServerError, "full"),
    "garbage": (b"\x00\x01\x02 what\r\n\r\n", ToolServerError, "POST http://"),
    "not JSON": (answer("200 OK", b"okay"), ToolServerError, "status 200 and not JSON"),
    "not a result": (answer("200 OK", b"[1]"), ToolServerError, r"\[1\]"),
    "other fields": (
        answer("200 OK", b'{"a": 1}'),
        ToolServerError,
        "did not answer with a tool result",
    ),
    "encoded": (
        answer("200 OK", b"x", "content-encoding: gzip"),
        ToolServerError,
        "content-encoding gzip, but only identity is accepted",
    ),
    "redirect": (answer("302 Found", b"", "location: http://127.0.0.1:1/"), ToolServerError, "302"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.timing
async def test_malformed_answers_are_infrastructure_errors(url, key, name):
    """Each is a machine's failure, at once; the call that did not run may be sent again."""
    fault, error, message = FAULTS[name]
    async with through(url) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = [fault]
        began = time.monotonic()
        with pytest.raises(error, match=message):
            await played(box, key)
        assert time.monotonic() - began < 1.0
        assert (len(proxy.calls), RAN.count(key)) == (1, 0)
        assert await played(box, key) == f"{key}: 1"


@pytest.mark.parametrize("fault", [None, b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\nhalf"])
async def test_a_broken_connection_is_retried_twice(url, key, fault):
    async with through(url) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = [fault, fault]
        assert await played(box, key) == f"{key}: 1"
        assert (len(proxy.calls), RAN.count(key)) == (3, 1)
        proxy.faults = [fault] * 3
        with pytest.raises(ToolServerError, match="closed by the server"):
            await played(box, key, 1)
        assert (len(proxy.calls), RAN.count(key)) == (6, 1)


async def test_a_lost_answer_is_sent_again(url, key):
    """The tool is not idempotent, and ran: sent again, the call is not run again."""
    async with through(url) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = ["lost"]
        assert await played(box, key) == f"{key}: 1"
        proxy.faults = ["lost"] * 3
        with pytest.raises(ToolServerError):
            await played(box, key, 1)
        assert await played(box, key, 1) == f"{key}: 2"
        assert (len(proxy.calls), RAN.count(key)) == (6, 2)


@pytest.mark.timing
async def test_an_answer_that_never_comes_costs_the_deadline(url, key):
    """To a tenth; and it is not sent again after it."""
    async with through(url, request_seconds=0.5, queue_seconds=0.0) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = ["never"]
        began = time.monotonic()
        with pytest.raises(ToolServerError, match="no response before the deadline"):
            await played(box, key)
        assert 1.5 <= time.monotonic() - began < 1.65
        assert len(proxy.calls) == 1


@pytest.mark.parametrize("status", ["503 Busy", "429 Too Many Requests"])
async def test_a_busy_server_is_retried_after_its_delay(url, key, status):
    async with through(url) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = [
            answer(status, BUSY, "retry-after: 1"),
            answer(status, BUSY, "Retry-After: 0"),
        ]
        assert await played(box, key) == f"{key}: 1"
        first, second, third = proxy.calls
        assert 1.0 <= second - first < 1.5
        assert third - second < 0.3
        assert RAN.count(key) == 1


async def test_a_slow_network_that_loses_things(url, key):
    """F15: 200 ms each way, and every fifth call or its answer is lost; all are answered, once."""
    async with through(url) as (proxy, box):
        proxy.delay = 0.2
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = [None, "", "", "lost", ""] * 4
        calls = [ToolCall("once", {"key": f"{key} {i}"}) for i in range(20)]
        began = time.monotonic()
        results = await box.run(calls, key, 0)
        assert [r.content for r in results] == [f"{key} {i}: 1" for i in range(20)]
        assert time.monotonic() - began < 4.0
        assert len(proxy.calls) == 28


@pytest.mark.timing
async def test_a_busy_server_is_not_retried_beyond_the_deadline(url, key):
    async with through(url, request_seconds=0.5, queue_seconds=0.0) as (proxy, box):
        await box.open(key, Sample("s", (), tools=("once",)))
        proxy.faults = [answer("503 Busy", BUSY, "retry-after: 1")] * 9
        began = time.monotonic()
        with pytest.raises(ToolServerError):
            await played(box, key)
        assert 1.0 <= time.monotonic() - began < 1.65
        assert len(proxy.calls) == 2


@pytest.mark.timing
async def test_a_busy_answer_is_returned_unless_wait_if_busy_is_set(url):
    async with through(url) as (proxy, box):
        proxy.faults = [answer("503 Busy", BUSY, "retry-after: 1")]
        async with HttpClient(box.url) as client:
            began = time.monotonic()
            status, _ = await client.request_json("POST", "/calls ".strip(), {}, deadline=began + 5)
        assert (status, time.monotonic() - began < 0.5) == (503, True)


def test_retry_after_headers():
    assert [retry_after_seconds(text) for text in (b"0", b" 12 ")] == [0.0, 12.0]
    date = formatdate(time.time() + 60, usegmt=True).encode()
    for nonsense in (date, b"soon", b"-1", b"1.5", b"", b"\xff", b"\xb2", b"nan"):
        assert retry_after_seconds(nonsense) == float("inf")
