"""The tool server's doors: who gets in, with what; and a server process that nobody outlives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import registry
from agentrl.config import ToolsConfig
from agentrl.errors import ToolServerError, UserError
from agentrl.http import HttpClient, fetch_json
from agentrl.http_server import guard as guard_module
from agentrl.http_server import server as server_module
from agentrl.tools import HttpToolbox, open_toolbox
from agentrl.tools.serving.background import serve_in_background
from agentrl.tools.serving.listen import ToolServer
from agentrl.trajectory import Sample, ToolCall

TOKEN = "open-sesame"
ZOO = str(Path(__file__).parents[1] / "support" / "tool_zoo.py")


@pytest.fixture(scope="module")
def url():
    """A server in this process that offers `double` and the class tool `tally`."""
    from agentrl.tools import tool

    with registry.tools.isolated(keep=()):

        @tool
        def double(n: int) -> int:
            """Double a number."""
            return 2 * n

        @tool
        class Tally:
            """Counts."""

            def __init__(self):
                self.n = 0

            def count(self) -> int:
                """Count."""
                self.n += 1
                return self.n

            def reward(self) -> int:
                return self.n

        @tool
        class Shelf:
            """Something to fill."""

            def __init__(self, at: dict, n: int):
                at.clear()

            def fill(self, with_: Any) -> str:
                """Fill it."""
                with_["a"].append("mine")
                return "filled"

        ready = threading.Event()
        server = ToolServer("127.0.0.1", 0, TOKEN, ready.set)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert ready.wait(20)
        yield server.url
        server.should_exit = True
        thread.join(20)


def send(url: str, text: bytes) -> tuple[int, dict[str, str], bytes]:
    """A request written by hand: status, headers and body of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 10) as s:
        s.sendall(text)
        data = b""
        while b"\r\n\r\n" not in data:
            more = s.recv(65536)
            assert more, f"hung up after {data!r}"
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        while len(body) < int(headers["content-length"]):
            body += s.recv(65536)
    return int(status.split()[1]), headers, body


def request(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """A good request, changed by `headers`; one given as "" is left out."""
    fields = {"host": "127.0.0.1", "authorization": f"Bearer {TOKEN}"}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(body))}
    fields |= {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


OPEN = b'{"episode_id": "e", "sample": {"tools": ["double"]}}'

MANY_KEYS = json.dumps({f"key_{i}": i for i in range(10_000)}).encode()

REFUSED = [
    (request("GET", "/tools", authorization=""), 401),
    (request("GET", "/tools", authorization="Bearer nope"), 401),
    (request("GET", "/tools", authorization=f"Basic {TOKEN}"), 401),
    (request("GET", "/tools", authorization=f"Bearer {TOKEN}x"), 401),
    (request("GET", "/openapi.json", authorization=""), 401),
    (request("DELETE", "/sessions/e", authorization=""), 401),
    (request("POST", "/sessions", OPEN, authorization=""), 401),
    (request("GET", "/tools", host="evil.test"), 403),
    (request("GET", "/tools", host="127.0.0.1.evil.test"), 403),
    (request("GET", "/tools", host="evil.test:80"), 403),
    (request("GET", "/health", host="evil.test"), 403),
    (request("GET", "/tools", origin="http://evil.test"), 403),
    (request("POST", "/sessions", OPEN, content_type="text/plain"), 415),
    (request("POST", "/sessions", OPEN, content_type=""), 415),
    (request("POST", "/sessions", OPEN, content_type="application/x-www-form-urlencoded"), 415),
    (request("POST", "/sessions/e/calls", b"{}" * 2**20), 413),
    (request("POST", "/sessions", b"{}", content_length=str(2**30)), 413),
    (request("POST", "/sessions", b"{"), 400),
    (request("POST", "/sessions", b""), 400),
    (request("POST", "/sessions", b'{"episode_id": NaN}'), 400),
    (request("POST", "/sessions", b"[" * 50_000), 400),
    (request("POST", "/sessions", b'"\\ud800"'), 400),
    (request("POST", "/sessions", b"3"), 422),
    (request("POST", "/sessions", b"{}"), 422),
    (request("POST", "/sessions", b'{"episode_id": "", "sample": {}}'), 422),
    (request("POST", "/sessions", b'{"episode_id": "e", "sample": {"tools": 3}}'), 422),
    (request("POST", "/sessions", b'{"episode_id": "e", "sample": {}, "code": "x"}'), 422),
    (request("POST", "/sessions", b'{"episode_id": "e", "sample": {"tools": ["os"]}}'), 422),
    (request("POST", "/sessions/e/calls", b'{"turn": 0, "call_index": 0}'), 422),
    (
        request(
            "POST",
            "/sessions/none/calls",
            b'{"turn": 0, "call_index": 0, "name": "double", "arguments": {"n": 1}}',
        ),
        404,
    ),
    (request("DELETE", "/sessions/none"), 404),
    (request("DELETE", "/sessions/%2e%2e"), 404),
    (request("GET", "/../tools"), 404),
    (request("GET", "/sessions/../tools"), 405),
    (request("GET", "/%2e%2e/tools"), 404),
    (request("GET", "/%2e%2e%2ftools"), 404),
    (request("POST", "/sessions/..%2f..%2ftools", b"{}"), 405),
    (request("GET", "/metrics", authorization=""), 401),
    (request("GET", "/docs"), 404),
    (request("POST", "/sessions", MANY_KEYS), 422),
    (request("POST", "/sessions/e/calls", MANY_KEYS), 422),
    (request("PUT", "/sessions/e"), 405),
]


@pytest.mark.parametrize(("text", "status"), REFUSED, ids=range(len(REFUSED)))
def test_requests_that_are_refused(url, text, status):
    actual, headers, body = send(url, text)
    assert (actual, headers["content-type"]) == (status, "application/json")
    assert "Traceback" not in body.decode()
    json.loads(body)


def test_a_body_without_a_length_is_counted(url):
    """An endless one is cut off, and the connection with it."""
    text = request("POST", "/sessions/e/calls", None, transfer_encoding="chunked")
    head = text[:-2] + b"content-type: application/json\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    status, headers, _ = send(url, head + chunk * 17)
    assert (status, headers["connection"]) == (413, "close")
    status, _, _ = send(url, head + b"3\r\n{} \r\n0\r\n\r\n")
    assert status == 422


def test_a_body_that_does_not_come(url, monkeypatch):
    monkeypatch.setattr(guard_module, "BODY_SECONDS", 0.2)
    status, headers, _ = send(url, request("POST", "/sessions", b"", content_length="10"))
    assert (status, headers["connection"]) == (408, "close")


@pytest.mark.timing
def test_a_head_that_does_not_come(url, monkeypatch):
    """Byte by byte, on a new connection and on one that was good before."""
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.3)
    host, _, port = url.removeprefix("http://").partition(":")
    for before in (b"", request("GET", "/health")):
        with socket.create_connection((host, int(port)), 10) as s:
            s.sendall(before)
            if before:
                assert s.recv(65536).startswith(b"HTTP/1.1 200")
            began, answer = time.monotonic(), b""
            s.settimeout(0.05)
            for byte in itertools.cycle(request("GET", "/tools")[:-4] + b"x"):
                with contextlib.suppress(TimeoutError):
                    answer = s.recv(65536)
                    break
                s.sendall(bytes([byte]))
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert time.monotonic() - began < 3.0
    assert send(url, request("GET", "/health"))[0] == 200


def endless(url: str, head: bytes, chunk: bytes, most: int) -> tuple[int, bytes]:
    """Send until it is refused: how much was taken, and what was said."""
    host, _, port = url.removeprefix("http://").partition(":")
    sent, answer = 0, b""
    with socket.create_connection((host, int(port)), 10) as s:
        with contextlib.suppress(ConnectionError):
            s.sendall(head)
            while sent < most:
                s.sendall(chunk)
                sent += len(chunk)
        s.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            answer = s.recv(65536)
    return sent, answer


def test_endless_requests_are_cut_off():
    """Heads, bodies and trailers that never end are cut off, and memory stays where it is."""
    url, token, server = serve_in_background(["shelf:calculator"])
    good = request("POST", "/sessions", None, authorization=f"Bearer {token}")[:-2]
    good += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    bad = good.replace(token.encode(), b"wrong")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    [pid] = server.pids

    def resident() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with server:
        assert fetch_json(url, "/health", timeout=5)[0] == 200
        before = resident()
        for head, piece, most in (
            (b"GET /", b"x" * 65536, 2**27),
            (good[:-2] + b"x: ", b"x" * 65536, 2**27),
            (good[:-2], b"x: y\r\n" * 10_000, 2**27),
            (b"", b"\r\n" * 32768, 2**27),
            (good, chunk, 2**27),
            (bad, chunk, 2**27),
            (good + b"2\r\n{}\r\n0\r\n", b"x: y\r\n" * 10_000, 2**28),
        ):
            sent, _ = endless(url, head, piece, most)
            assert sent < most, (head[-40:], piece[:10])
        assert fetch_json(url, "/health", timeout=5)[0] == 200
        assert resident() - before < 2**26


def test_requests_that_are_accepted(url):
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8900", "[::1]:80"):
        assert send(url, request("GET", "/tools", host=host))[0] == 200
    status, _, body = send(url, request("GET", "/health", authorization=""))
    assert (status, json.loads(body)) == (200, {"status": "ok", "sessions": 0, "calls": 0})
    utf8 = request("POST", "/sessions", OPEN, content_type="application/json; charset=utf-8")
    assert send(url, utf8)[0] == 200
    assert send(url, request("DELETE", "/sessions/e"))[::2] == (200, b'{"reward":0.0}')


async def test_the_protocol_with_raw_requests(url):
    """As a driver in another language would speak it."""
    async with HttpClient(url, token=TOKEN) as client:

        async def ask(method, path, body=None):
            return await client.request_json(method, path, body, deadline=time.monotonic() + 10)

        status, answer = await ask("GET", "/tools")
        assert status == 200
        assert [(t["name"], t["timeout"], t["stateful"]) for t in answer["tools"]] == [
            ("double", 30.0, False),
            ("shelf", 30.0, True),
            ("tally", 30.0, True),
        ]
        body = {"episode_id": "a b/ü", "sample": {"tools": ["double", "tally"]}}
        opened = {"opening": [], "tools": ["double", "count"]}
        assert await ask("POST", "/sessions", body) == (200, opened)
        session = "/sessions/a%20b%2F%C3%BC"
        call = {"turn": 0, "call_index": 0, "name": "double", "arguments": {"n": 4}}
        status, answer = await ask("POST", f"{session}/calls", call)
        assert status == 200
        assert answer.pop("seconds") >= 0
        assert answer == {**{"content": "8", "ok": True, "reward": None, "error": "", "images": []}}
        # The calls of a turn may be posted one by one, at once.
        posts = [
            ask(
                "POST",
                f"{session}/calls",
                {"turn": 1, "call_index": i, "name": "count", "arguments": {}},
            )
            for i in (0, 1, 2, 1, 0)
        ]
        contents = [answer["content"] for _, answer in await asyncio.gather(*posts)]
        assert sorted(contents[:3]) == ["1", "2", "3"]
        assert contents[3:] == [contents[1], contents[0]]
        other = {**call, "arguments": {"n": 5}}
        status, answer = await ask("POST", f"{session}/calls", other)
        assert (status, answer["error"]) == (409, "CallConflict")
        for _ in range(2):
            assert await ask("DELETE", session) == (200, {"reward": 3.0})
        status, answer = await ask("POST", f"{session}/calls", call)
        assert (status, answer["error"]) == (404, "UnknownEpisode")


async def test_a_repeated_request_must_be_the_same(url):
    """By the values of the JSON: the order of keys and of tools says nothing."""

    def post(path: str, text: str) -> tuple[int, dict]:
        status, _, body = send(url, request("POST", path, text.encode()))
        return status, json.loads(body)

    def opened(tools: str, kwargs: str) -> tuple[int, dict]:
        sample = f'{{"tools": [{tools}]}}'
        body = f'{{"episode_id": "twice", "sample": {sample}, "create_kwargs": {kwargs}}}'
        return post("/sessions", body)

    kwargs = '{"shelf": {"at": {"x": 1, "y": [true]}, "n": 2}}'
    first = opened('"double", "shelf"', kwargs)
    assert first[0] == 200 and first[1]["opening"] == []
    assert opened('"shelf", "double"', '{"shelf":{"n":2,"at":{"y":[true],"x":1}}}') == first
    assert opened('"double", "shelf"', kwargs[:-1] + ', "double": {}}') == first
    for tools, other in (
        ('"double"', kwargs),
        ('"double", "shelf", "tally"', kwargs),
        ('"double", "shelf"', "{}"),
        ('"double", "shelf"', kwargs.replace('"n": 2', '"n": 3')),
        ('"double", "shelf"', kwargs.replace('"x": 1', '"x": true')),
        ('"double", "shelf"', kwargs.replace('"x": 1', '"x": 1.0')),
        ('"double", "shelf"', kwargs.replace("[true]", "[1]")),
    ):
        status, answer = opened(tools, other)
        assert (status, answer["error"]) == (409, "SessionConflict"), (tools, other)
    calls = '{{"turn": 0, "call_index": {}, "name": "{}", "arguments": {}}}'
    cases = [
        ("double", '{"n": 1}', ['{"n":1}'], ['{"n": true}', '{"n": 1.0}', '{"n": "1"}', "{}"]),
        (
            "fill",  # changes what it is given
            '{"with_": {"a": [0], "b": 1.50}}',
            ['{"with_": {"b": 15e-1, "a": [0]}}'],
            ['{"with_": {"a": [false], "b": 1.5}}', '{"with_": {"a": [0, 0], "b": 1.5}}'],
        ),
    ]
    for index, (name, first, same, different) in enumerate(cases):
        answer = post("/sessions/twice/calls", calls.format(index, name, first))
        assert answer[0] == 200 and answer[1]["ok"]
        for arguments in (first, *same):
            assert post("/sessions/twice/calls", calls.format(index, name, arguments)) == answer
        for arguments in different:
            status, refused = post("/sessions/twice/calls", calls.format(index, name, arguments))
            assert (status, refused["error"]) == (409, "CallConflict"), arguments
    assert send(url, request("DELETE", "/sessions/twice"))[0] == 200


METHODS = {
    "/sessions": "POST",
    "/sessions/e": "DELETE",
    "/sessions/e/calls": "POST, DELETE",  # an episode may be called "e/calls"
    "/tools": "GET",
    "/health": "GET",
    "/metrics": "GET",
}


@pytest.mark.parametrize("path", METHODS)
def test_wrong_methods_are_refused_with_the_right_ones(url, path):
    """This holds without a body too, and with a body that other routes refuse."""
    right = METHODS[path].split(", ")
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - {*right}:
        for body, kind in ((None, ""), (b"{}", "application/json"), (b"x" * 1000, "text/plain")):
            fields = {"content_type": kind} if body else {"content_length": "0"}
            status, headers, _ = send(url, request(method, path, body, **fields))
            assert (status, headers["allow"]) == (405, right[0]), (method, path)


async def test_openapi_describes_the_protocol(url):
    async with HttpClient(url, token=TOKEN) as client:
        deadline = time.monotonic() + 10
        status, api = await client.request_json("GET", "/openapi.json", deadline=deadline)
    assert status == 200
    assert {(path, *methods) for path, methods in api["paths"].items()} == {
        ("/sessions", "post"),
        ("/sessions/{episode_id}/calls", "post"),
        ("/sessions/{episode_id}/respond", "post"),
        ("/sessions/{episode_id}/reward", "post"),
        ("/sessions/{episode_id}", "delete"),
        ("/tools", "get"),
        ("/health", "get"),
        ("/metrics", "get"),
    }


@pytest.mark.parametrize(
    ("host", "port", "token", "message"),
    [
        ("0.0.0.0", 0, "", "--host 0.0.0.0 lets other machines run your tools"),
        ("::", 0, "", "a token is required"),
        ("example.test", 0, "x", "is not an IP address"),
        ("192.0.2.1", 0, "x", "cannot serve on 192.0.2.1:0"),
    ],
)
def test_servers_that_do_not_start(host, port, token, message):
    with pytest.raises(UserError, match=message):
        ToolServer(host, port, token, lambda: None)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot serve on 127.0.0.1:{port}.*another --port"):
            ToolServer("127.0.0.1", port, "", lambda: None)


# A process of its own.


async def test_a_server_in_the_background():
    url, token, server = serve_in_background([ZOO, "shelf:calculator"])
    with server:
        assert server.running
        assert fetch_json(url, "/tools", timeout=5)[0] == 401
        [pid] = server.pids
        command = Path(f"/proc/{pid}/cmdline").read_text()
        environment = Path(f"/proc/{pid}/environ").read_text()
        assert token not in command + environment
        box = HttpToolbox(url, token)
        sample = Sample("row", (), tools=("calculator", "notebook"))
        await box.open("e", sample)
        calls = [ToolCall("calculator", {"expression": "3*4"}), ToolCall("write", {"line": "x"})]
        assert [r.content for r in await box.run(calls, "e", 0)] == ["12", "x"]
        assert await box.close("e") == 1.0
        await box.aclose()
    assert not server.running
    server.stop()


def test_the_output_of_a_served_tool_is_logged(tmp_path, caplog):
    file = tmp_path / "talker.py"
    file.write_text("print('loading')\nfrom agentrl import tool\n")
    with serve_in_background([str(file)]).handle:
        assert "loading" in caplog.text


def test_files_that_do_not_load(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("from agentrl import tool\n\n@tool\ndef f(x: Nope): ...\n")
    with pytest.raises(UserError, match="Nope"):
        serve_in_background([str(file)])
    with pytest.raises(UserError, match=r"no shipped tool file 'shelf:calculater'\. Did"):
        serve_in_background(["shelf:calculater"])


def test_a_server_that_never_serves(tmp_path, caplog):
    file = tmp_path / "dies.py"
    file.write_text("import os\nprint('last words')\nos._exit(3)\n")
    with pytest.raises(ToolServerError, match="did not start; its last lines:\n  last words"):
        serve_in_background([str(file)])
    assert "ended by itself" not in caplog.text


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends in time; a zombie is gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("fork", [False, True])
def test_a_server_does_not_outlive_its_parent(fork):
    """This holds too if a fork of the killed parent still has the pipe open."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, time\n"
            "from agentrl.tools.serving.background import serve_in_background\n"
            "served = serve_in_background(['shelf:calculator'])\n"
            f"fork = os.fork() if {fork} else -1\n"
            "print(*served.handle.pids, fork, flush=True) if fork else None\n"
            "time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child, fork_pid = map(int, parent.stdout.readline().split())
    try:
        assert not gone(child, 0.2)
        parent.kill()
        parent.wait()
        assert gone(child, 5)
    finally:
        if fork:
            os.kill(fork_pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.timing
def test_a_hung_tool_does_not_delay_the_exit():
    code = f"""
import asyncio
from agentrl.registry import load_file
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Sample, ToolCall
load_file({ZOO!r})
async def main():
    box = LocalToolbox()
    await box.open("e", Sample("s", (), tools=("hang",)))
    results = await box.run([ToolCall("hang", {{}})] * 8, "e", 0)
    assert {{r.error for r in results}} == {{"timeout"}}
    await box.aclose()
    print("done", flush=True)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    began = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - began < 2.0  # the tools hang for 30 s
    process.stdout.close()


async def test_a_server_with_hung_tools_stops():
    url, token, server = serve_in_background([ZOO])
    box = HttpToolbox(url, token)
    await box.open("e", Sample("s", (), tools=("hang",)))
    results = await box.run([ToolCall("hang", {})] * 8, "e", 0)
    assert {r.error for r in results} == {"timeout"}
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5.0
    with pytest.raises(ToolServerError):
        await box.run([ToolCall("hang", {})], "e", 1)
    await box.aclose()


def test_importing_tools_is_light():
    """Each process that runs tools imports `tool`; each one that calls them, a toolbox."""
    code = (
        "import sys; from agentrl import tool\n"
        "print({'httpx', 'rich', 'numpy'} & {*sys.modules})\n"
        "from agentrl.tools import HttpToolbox, open_toolbox\n"
        "print({'fastapi', 'torch', 'starlette', 'ray', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"


async def test_the_toolbox_that_the_config_asks_for(monkeypatch):
    with open_toolbox(ToolsConfig(transport="in_process"), []) as box:
        assert box.where == "in this process"
    with open_toolbox(ToolsConfig(), ["shelf:calculator"]) as box:
        assert box.where.startswith("at http://127.0.0.1:")
        assert [s["function"]["name"] for s in box.schemas(["calculator"])] == ["calculator"]
        await box.aclose()
    url, token, server = serve_in_background(["shelf:calculator"])
    with server:
        monkeypatch.setenv("AGENTRL_TOOLS_TOKEN", token)
        with open_toolbox(ToolsConfig(transport=url), []) as box:
            await box.open("e", Sample("s", (), tools=("calculator",)))
            [result] = await box.run([ToolCall("calculator", {"expression": "1+1"})], "e", 0)
            assert result.content == "2"
            await box.aclose()
