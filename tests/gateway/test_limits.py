"""Limits of the servers of the gateway and `agentrl serve`, and the cost of long conversations."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from support.any_template import tokenizer_of_trl

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.config import Config, RolloutConfig
from agentrl.engine.scripted import Scripted
from agentrl.gateway.dialects import ChatCompletions
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.serve import create_app
from agentrl.gateway.session import Key, Session
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.http_server import guard
from agentrl.http_server import server as server_module
from agentrl.http_server.bind import bind
from agentrl.testing import byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture
def port(monkeypatch):
    """Serve requests until the end of the test."""
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    bound = bind("127.0.0.1", 0, "")
    server = server_module.HttpServer(create_app(lambda key: session()), bound)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield bound.getsockname()[1]
    server.should_exit = True
    thread.join(20)


def session():
    config = without_budgets(Config())
    engine = Scripted(["ok"] * 9, byte_tokenizer(), max_length=2**24)
    template = make_template(byte_tokenizer(), config)
    return StatelessSession(Runtime(engine, template, LocalToolbox(), config), 1.0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD[:-2] % 9, 408),
        (HEAD % 1000 + b'{"messages": [', 408),
        (HEAD % (2**24 + 1), 413),
    ],
    ids=["a half head", "a half body", "a long body"],
)
def test_a_request_that_does_not_end_is_closed(port, sent, status):
    with socket.create_connection(("127.0.0.1", port), 5) as s:
        s.sendall(sent)
        answer = b""
        while received := s.recv(65536):  # until the server closes the connection
            answer += received
    assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_a_client_that_sends_a_long_body_gets_the_answer(port, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 15)

    async def send():
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            return await client.post(url, content=bytes(2**24 + 2**22))

    answer = asyncio.run(send())
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_long"


SERVER = """
from agentrl.gateway.serve import create_app
from agentrl.http_server.server import HttpServer
from agentrl.http_server.bind import bind
bound = bind("127.0.0.1", 0, "")
print(bound.getsockname()[1], flush=True)
HttpServer(create_app(lambda key: object()), bound).serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_half_body_does_not_keep_a_server_from_its_end(signals):
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with socket.create_connection(("127.0.0.1", int(process.stdout.readline())), 5) as s:
        s.sendall(HEAD % 1000 + b"{")
        time.sleep(1.0)
        started = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        process.wait(30)
        # The server waits 5 s for its connections; the body has 15 s.
        seconds = time.monotonic() - started
        assert (seconds < 4) if signals == 2 else (4 < seconds < 12)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("byte", "users"),
        ("byte", "turns"),
        ("byte", "calls"),
        ("deepseekv3", "calls"),
        pytest.param("deepseekv3", "users", marks=pytest.mark.slow),
        pytest.param("deepseekv3", "turns", marks=pytest.mark.slow),
    ],
)
def test_the_cost_of_a_long_conversation_is_linear(name, shape):
    """Eight times the messages: a quadratic loop would take 64 times as long."""

    def seconds(n):
        config = without_budgets(Config())
        tokenizer = byte_tokenizer() if name == "byte" else tokenizer_of_trl(name)
        engine = Scripted(["ok"], tokenizer, max_length=2**24)
        runtime = Runtime(engine, make_template(tokenizer, config), LocalToolbox(), config)
        request = ChatCompletions().read(
            json.dumps({"messages": messages(n, shape)}).encode(), {}, AnswerMemory()
        )
        start = time.thread_time()
        asyncio.run(StatelessSession(runtime, 1.0).answer(request))
        return time.thread_time() - start

    seconds(10)
    n = 1000 if shape == "users" else 200
    small, large = seconds(n), seconds(8 * n)
    assert large < 16 * small


def test_each_sampled_turn_is_compared_once_per_request(monkeypatch):
    """Turns with the same text: 200 of the policy, 2,000 of others."""
    compared = []
    is_same = Key.is_same
    monkeypatch.setattr(Key, "is_same", lambda a, b: compared.append(0) or is_same(a, b))

    @agent_loop("limits_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        session, history = Session(ep), [{"role": "user", "content": "a"}]
        for _ in range(200):
            body = json.dumps({"messages": history}).encode()
            await session.answer(ChatCompletions().read(body, {}, AnswerMemory()))
            history += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]
        compared.clear()
        body = json.dumps({"messages": [*history, *messages(4000, "turns")[1:]]}).encode()
        await session.answer(ChatCompletions().read(body, {}, AnswerMemory()))
        await session.close()

    rollout = RolloutConfig(max_turns=999, max_trajectory_tokens=2**20)
    sample = Sample("s", (Message("user", "a"),), agent_name="limits_test")
    engine = Scripted(["b"] * 201, byte_tokenizer(), max_length=2**20)
    t = play(sample, engine, byte_tokenizer(), config=Config(rollout=rollout))
    assert len(t.turns) == 201 and len(compared) < 2 * 4401


def messages(n, shape):
    user, turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    function = {"name": "calc", "arguments": "{}"}
    call = {**turn, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    pair = {"users": [user], "turns": [turn, user], "calls": [call, result]}[shape]
    return [user, *(pair * n)[:n]]
