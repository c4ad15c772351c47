"""The HTTP client against servers that answer well, badly, late, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import ssl
import subprocess
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.raw_server import Handler, answer, read_request, serving

from agentrl.errors import ConfigError, EngineError, Infrastructure
from agentrl.http import HttpClient, fetch, fetch_json


def always(data: bytes) -> Handler:
    """Answer every request with the same bytes, and count the connections."""

    async def handler(reader, writer):
        while True:
            await read_request(reader)
            writer.write(data)

    return handler


async def get(url: str, seconds: float = 5.0, **options) -> tuple[int, object]:
    async with HttpClient(url, **options) as client:
        return await client.request_json("GET", "/x", deadline=time.monotonic() + seconds)


async def test_a_request_and_its_answer():
    seen = []

    async def echo(reader, writer):
        while True:
            line, headers, body = await read_request(reader)
            seen.append((line, headers, body))
            writer.write(answer(body or b"null", "201 Created"))

    async with serving(echo) as url, HttpClient(f"{url}/v1/", token="secret") as client:
        deadline = time.monotonic() + 5
        body = {"text": "ü€", "n": [1, 2.5, None]}
        assert await client.request_json("POST", "/a?b=%20c", body, deadline=deadline) == (
            201,
            body,
        )
        assert await client.request_json("GET", "/a", deadline=deadline) == (201, None)
        assert await client.request_json("DELETE", "/a", deadline=deadline) == (201, None)
    (post, headers, sent), (read, plain, nothing), (delete, empty, _) = seen
    assert (post, read, delete) == (
        "POST /v1/a?b=%20c HTTP/1.1",
        "GET /v1/a HTTP/1.1",
        "DELETE /v1/a HTTP/1.1",
    )
    assert json.loads(sent) == body
    assert headers == {
        "host": url.removeprefix("http://"),
        "accept": "application/json",
        "authorization": "Bearer secret",
        "content-type": "application/json",
        "content-length": str(len(sent)),
    }
    assert nothing == b""
    assert "content-type" not in plain
    assert empty["content-length"] == "0"


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

GOOD = [
    (answer(b'{"a": 1}'), (200, {"a": 1})),
    (answer(b"[]", "404 Not Found"), (404, [])),
    (answer(b'"x"', "302 Found", "location: http://127.0.0.1:1/"), (302, "x")),
    (answer(b'{"error": 1}', "503 Busy", "retry-after: 1"), (503, {"error": 1})),
    (b"HTTP/1.1 204 No Content\r\n\r\n", (204, None)),
    (answer(b""), (200, None)),
    (CHUNKED + b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n", (200, [1, 2])),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"[3]"), (200, [3])),
    (answer(b"[4]", "200 OK", "content-encoding: identity"), (200, [4])),
    (answer(b"[5]", "200 OK", "connection: close"), (200, [5])),
]


@pytest.mark.parametrize(("data", "expected"), GOOD, ids=range(len(GOOD)))
@pytest.mark.parametrize("pieces", [1, 4])
async def test_valid_answers(data, expected, pieces):
    """In one piece, and byte by byte; and again on the same client."""

    async def handler(reader, writer):
        while True:
            await read_request(reader)
            step = max(1, len(data) // pieces) if pieces > 1 else len(data)
            for i in range(0, len(data), step):
                writer.write(data[i : i + step])
                await writer.drain()
                await asyncio.sleep(0)

    async with serving(handler) as url, HttpClient(url) as client:
        for _ in range(2):
            result = await client.request_json("GET", "/", deadline=time.monotonic() + 5)
            assert result == expected


async def test_an_answer_that_ends_with_its_connection():
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n[1, ")
        await writer.drain()
        writer.write(b"2]")

    async with serving(handler) as url:
        assert await get(url) == (200, [1, 2])


BAD = [
    (b"nonsense\r\n\r\n", "nonsense for an answer|Expected HTTP|not"),
    (answer(b"<html>oops</html>", "500 Oops"), "status 500 and not JSON: <html>oops</html>"),
    (answer(b"NaN"), "status 200 and not JSON"),
    (answer(b"\xff\xfe"), "not JSON"),
    (
        answer(b"\x1f\x8b", "200 OK", "content-encoding: gzip"),
        "content-encoding gzip, but only identity",
    ),
    (answer(b"[" + b"1," * 5000 + b"1]"), "longer than this client accepts"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "nonsense|Invalid|Content-Length"),
    (CHUNKED + b"zz\r\n", "nonsense|chunk"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=range(len(BAD)))
async def test_invalid_answers(data, message):
    async with serving(always(data)) as url:
        with pytest.raises(EngineError, match=message) as e:
            await get(url, error=EngineError, max_bytes=1000)
    assert f"GET {url}/x" in str(e.value)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", answer(b"[1, 2]")[:-2]])
async def test_a_dropped_connection(sent):
    tries = []

    async def handler(reader, writer):
        await read_request(reader)
        tries.append(1)
        writer.write(sent)

    async with serving(handler) as url, HttpClient(url) as client:
        for retries in (0, 2):
            del tries[:]
            with pytest.raises(Infrastructure, match="closed by the server"):
                await client.request_json(
                    "GET", "/x", deadline=time.monotonic() + 5, retries=retries
                )
            assert len(tries) == retries + 1


async def test_nobody_listens():
    with pytest.raises(Infrastructure, match=r"GET http://127\.0\.0\.1:1/x: .*Connect call failed"):
        await get("http://127.0.0.1:1")


async def test_a_busy_server_without_a_delay_is_not_retried_without_end():
    times = []

    async def handler(reader, writer):
        while True:
            await read_request(reader)
            times.append(time.monotonic())
            writer.write(answer(b"0", "503 Busy", "retry-after: 0"))

    async with serving(handler) as url, HttpClient(url) as client:
        deadline = time.monotonic() + 1.2
        result = await client.request_json("GET", "/x", deadline=deadline, wait_if_busy=True)
    assert result == (503, 0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert 2 <= len(gaps) <= 3
    assert all(gap > 0.09 * 2**i for i, gap in enumerate(gaps))


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n["])
@pytest.mark.timing
async def test_the_deadline_holds(sent):
    """A request and its retries have one deadline. After the deadline, nothing is sent again."""
    tries = []

    async def handler(reader, writer):
        await read_request(reader)
        tries.append(1)
        writer.write(sent)
        await reader.read()

    async with serving(handler) as url, HttpClient(url) as client:
        began = time.monotonic()
        with pytest.raises(Infrastructure, match="no response before the deadline"):
            await client.request_json("GET", "/x", deadline=began + 0.3, retries=2)
        assert 0.25 < time.monotonic() - began < 1.0
        assert len(tries) == 1
        with pytest.raises(Infrastructure, match="no response before the deadline"):
            await client.request_json("GET", "/x", deadline=began)


async def test_a_connection_is_kept_and_used_again():
    connections = []

    async def handler(reader, writer):
        connections.append(1)
        while True:
            await read_request(reader)
            writer.write(answer(b"1"))

    async with serving(handler) as url, HttpClient(url) as client:

        async def one():
            return await client.request_json("GET", "/", deadline=time.monotonic() + 5)

        for _ in range(5):
            await one()
        assert len(connections) == 1
        await asyncio.gather(*(one() for _ in range(8)))
        assert len(connections) <= 8


async def test_a_stale_connection_is_replaced():
    """Closed while it idled: seen before it is used, so that no retry is needed."""
    connections = []

    async def handler(reader, writer):
        connections.append(1)
        await read_request(reader)
        writer.write(answer(b"1"))

    async with serving(handler) as url, HttpClient(url) as client:
        for _ in range(3):
            result = await client.request_json("GET", "/", deadline=time.monotonic() + 5)
            assert result == (200, 1)
            await asyncio.sleep(0.05)
    assert len(connections) == 3


async def test_extra_bytes_after_an_answer_are_never_the_next_answer():
    """A server that says too much is not believed, and its connection not used again."""

    async def handler(reader, writer):
        await read_request(reader)
        writer.write(answer(b"1") + answer(b"666"))
        await reader.read()

    async with serving(handler) as url, HttpClient(url) as client:
        for _ in range(3):
            result = await client.request_json("GET", "/", deadline=time.monotonic() + 5)
            assert result == (200, 1)
            await asyncio.sleep(0.02)


async def test_giving_up_closes_the_connection():
    """The late answer to a cancelled request is nobody's."""
    requests = []

    async def handler(reader, writer):
        while True:
            line, _, _ = await read_request(reader)
            requests.append(line)
            await asyncio.sleep(0.1)
            writer.write(answer(line.split()[1].strip("/").encode()))

    async with serving(handler) as url, HttpClient(url) as client:
        first = asyncio.create_task(client.request_json("GET", "/1", deadline=time.monotonic() + 5))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        result = await client.request_json("GET", "/2", deadline=time.monotonic() + 5)
        assert result == (200, 2)
    assert len(requests) == 2


async def test_many_at_once_are_never_mixed_up():
    async def handler(reader, writer):
        while True:
            _, _, body = await read_request(reader)
            await asyncio.sleep(json.loads(body) % 7 / 1000)
            writer.write(answer(body))

    async with serving(handler) as url, HttpClient(url) as client:

        async def one(n):
            deadline = time.monotonic() + 20
            return await client.request_json("POST", "/", n, deadline=deadline)

        assert await asyncio.gather(*map(one, range(300))) == [(200, n) for n in range(300)]


async def test_no_proxy_from_the_environment(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:1")
    async with serving(always(answer(b"1"))) as url:
        assert await get(url) == (200, 1)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "localhost",
        "ftp://host",
        "file:///etc/passwd",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://user:password@host",
        "http://host/?q=1",
        "http://host/#a",
        "http://ho st",
        "http://host\r\nx: y",
        "http://hö.st",
        "http://gpu..local:30000",
        "http://.:1",
        f"http://{'a' * 70}.local",
        "http://xn--zzzz999a.com",
        "http://[v1.a]",
        "",
    ],
)
def test_invalid_urls(url):
    with pytest.raises(ConfigError, match="not a server's URL"):
        HttpClient(url)
    with pytest.raises(ConfigError, match="not a server's URL"):
        fetch(url, "/", timeout=5)


@pytest.mark.parametrize("token", ["a\r\nb", "a\n", "clé"])
def test_a_token_that_no_header_can_hold(token):
    with pytest.raises(ConfigError, match="a bearer token must be printable ASCII"):
        HttpClient("http://host", token=token)
    with pytest.raises(ConfigError, match="a bearer token must be printable ASCII"):
        fetch("http://127.0.0.1:1", "/", token=token, timeout=5)


@given(st.text(max_size=30))
def test_no_path_can_add_a_line_to_a_request(path):
    client = HttpClient("http://host")
    try:
        written = client.build_request("GET", path)
    except ValueError:
        return
    assert written.count(b"\r\n") == 4
    assert written.startswith(f"GET {path} HTTP/1.1\r\n".encode())


async def test_a_header_of_one_request():
    seen = []

    async def handler(reader, writer):
        while True:
            seen.append((await read_request(reader))[1].get("x-key"))
            writer.write(answer(b"1"))

    async with serving(handler) as url, HttpClient(url) as client:
        deadline = time.monotonic() + 5
        await client.request_json("GET", "/", deadline=deadline, headers={"x-key": "train-0+1"})
        await client.request_json("POST", "/", {}, deadline=deadline)
    assert seen == ["train-0+1", None]


async def test_a_response_that_is_not_json_and_has_cookies():
    async def handler(reader, writer):
        while True:
            await read_request(reader)
            writer.write(answer(b"no JSON", "418 T", "Set-Cookie: a=1; path=/", "set-cookie: b=2"))

    async with serving(handler) as url, HttpClient(url) as client:
        request, deadline = client.build_request("POST", "/x"), time.monotonic() + 5
        response = await client.send(request, "POST", deadline, retries=0, wait_if_busy=False)
        assert (response.status, response.body) == (418, b"no JSON")
        assert response.cookies == (b"a=1; path=/", b"b=2")


@given(name=st.text(max_size=8) | st.just("x-key"), value=st.text(max_size=30))
def test_no_header_can_add_a_line_to_a_request(name, value):
    try:
        written = HttpClient("http://host").build_request("GET", "/", headers={name: value})
    except ValueError:
        return
    head, line, *ends = written.decode("ascii").split("\r\n")[-4:]
    assert (head, line, ends) == ("accept: application/json", f"{name}: {value}", ["", ""])
    assert name.isascii() and ":" not in name and name and value


@pytest.mark.parametrize(
    "header", [("x", "a\r\nb: c"), ("x", ""), ("", "a"), ("x: y", "a"), ("x", "a b"), ("x", "ü")]
)
def test_invalid_headers(header):
    with pytest.raises(ValueError, match="invalid header"):
        HttpClient("http://host").build_request("GET", "/", headers=dict([header]))


async def test_fetch_json_works_in_synchronous_code():
    async with serving(always(answer(b"[1]"))) as url:
        result = await asyncio.to_thread(fetch_json, url, "/x", timeout=5)
    assert result == (200, [1])
    with pytest.raises(Infrastructure):
        fetch_json("http://127.0.0.1:1", "/x", timeout=5)


async def test_both_clients_send_numpy_arrays():
    async def echo(reader, writer):
        while True:
            _, headers, body = await read_request(reader)
            assert headers["content-type"] == "application/json"
            writer.write(answer(body))

    body = {"ids": np.arange(3, dtype=np.int32)}
    async with serving(echo) as url:
        sync = await asyncio.to_thread(fetch_json, url, "/x", body, timeout=5)
        async with HttpClient(url) as client:
            other = await client.request_json("POST", "/x", body, deadline=time.monotonic() + 5)
    assert sync == other == (200, {"ids": [0, 1, 2]})


@pytest.mark.timing
async def test_a_timeout_is_for_the_whole_answer():
    async def drip(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await asyncio.sleep(0.05)

    async with serving(drip) as url:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"no complete response within 0\.3 s"):
            await asyncio.to_thread(fetch, url, "/x", error=EngineError, timeout=0.3)
        assert time.monotonic() - start < 2


async def test_an_answer_that_is_too_long_is_not_kept_in_memory():
    async with serving(always(answer(b"1" * 10))) as url:
        assert await asyncio.to_thread(fetch, url, "/x", timeout=5, max_bytes=10) == (
            200,
            b"1" * 10,
        )
    async with serving(always(answer(b"1" * 11))) as url:
        with pytest.raises(Infrastructure, match="the response has more than"):
            await asyncio.to_thread(fetch, url, "/x", timeout=5, max_bytes=10)


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
async def test_https_is_checked(tmp_path):
    """A certificate that nobody vouches for ends the request."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext"
        f" subjectAltName=DNS:localhost -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def handle(reader, writer):
        await read_request(reader)
        writer.write(answer(b"1"))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(Infrastructure, match="certificate"):
        await get(url)
    async with HttpClient(url) as client:
        assert client.server.tls is not None
        client.server.tls.load_verify_locations(certificate)
        result = await client.request_json("GET", "/", deadline=time.monotonic() + 5)
        assert result == (200, 1)
    server.close()
