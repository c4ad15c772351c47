"""Streamed answers over HTTP: events, pings, errors after the headers, and clients that leave."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from support.failing_engine import FailingEngine

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.play import play
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.gateway import serve
from agentrl.gateway.session import Session
from agentrl.testing import byte_tokenizer, call
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
QUESTION = {"role": "user", "content": "Q"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
BODY = {"messages": [QUESTION], "tools": [TOOL], "stream": True}


class Slow(Scripted):
    """Each turn takes longer than a stream waits before its first byte."""

    async def generate(self, *args, **kwargs):
        await asyncio.sleep(0.2)
        return await super().generate(*args, **kwargs)


class SlowToFail(FailingEngine):
    async def generate(self, *args, **kwargs):
        await asyncio.sleep(0.2)
        return await super().generate(*args, **kwargs)


@pytest.fixture
def hasty(monkeypatch):
    """Let a stream begin, and send pings, while the turn is being sampled."""
    monkeypatch.setattr(serve, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(serve, "PING_SECONDS", 0.02)


def played(agent, engine):
    """Play an agent (`async def agent(client)`) over HTTP; return trajectory and session."""
    sessions = []

    @agent_loop("streams_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        sessions.append(Session(ep))
        async with serve.Gateway().session(sessions[0]) as (url, key):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                await agent(client)
            await sessions[0].close()
        if sessions[0].failure:
            raise sessions[0].failure

    sample = Sample("s", (Message("user", "Q"),), agent_name="streams_test")
    return play(sample, engine, TOKENIZER), sessions[0]


async def lines_of(client, **fields):
    """Return the lines of a stream."""
    async with client.stream("POST", "/chat/completions", json=BODY | fields) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line async for line in response.aiter_lines() if line]


def chunks_of(lines):
    data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def test_the_events_of_a_stream_are_those_of_the_answer():
    made = call("calc", x=1)

    async def agent(client):
        chunks = chunks_of(await lines_of(client, stream_options={"include_usage": True}))
        *deltas, end, usage = chunks
        assert len({c["id"] for c in chunks}) == 1
        assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
        role, text, tool = (c["choices"][0]["delta"] for c in deltas)
        assert role == {"role": "assistant", "content": ""} and text == {"content": "Hm."}
        (streamed,) = tool["tool_calls"]
        assert streamed["index"] == 0 and streamed["function"]["arguments"] == '{"x": 1}'
        assert end["choices"][0]["finish_reason"] == "tool_calls"
        assert all(c["usage"] is None for c in (*deltas, end))
        sampled = len(TOKENIZER.encode(f"Hm.\n{made}")) + 1
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == sampled
        assert all("usage" not in c for c in chunks_of(await lines_of(client)))

    t, _ = played(agent, Scripted([f"Hm.\n{made}", "a"], TOKENIZER))
    assert len(t.turns) == 2


def test_pings_come_before_a_slow_answer(hasty):
    async def agent(client):
        lines = await lines_of(client)
        pings = [line for line in lines if line == ": ping"]
        assert len(pings) > 2 and lines[: len(pings)] == pings
        assert chunks_of(lines)[1]["choices"][0]["delta"] == {"content": "a"}

    played(agent, Slow(["a"], TOKENIZER))


def test_a_client_that_leaves_its_stream_gets_the_answer_when_it_asks_again(hasty):
    async def agent(client):
        async with client.stream("POST", "/chat/completions", json=BODY) as response:
            async for line in response.aiter_lines():
                assert line == ": ping"
                break
        chunks = chunks_of(await lines_of(client))
        assert chunks[1]["choices"][0]["delta"] == {"content": "one"}
        chunks = chunks_of(await lines_of(client))  # It got the answer: this is a new sample.
        assert chunks[1]["choices"][0]["delta"] == {"content": "two"}

    t, session = played(agent, Slow(["one", "two"], TOKENIZER))
    assert [e.kind for e in session.events] == ["first", "retry", "branch"] and len(t.turns) == 2


def test_a_stream_that_is_lost_before_its_first_byte_is_no_new_sample():
    async def agent(client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json=BODY, timeout=0.1)
        await asyncio.sleep(0.3)
        chunks = chunks_of(await lines_of(client))
        assert chunks[1]["choices"][0]["delta"] == {"content": "one"}

    t, session = played(agent, Slow(["one", "two"], TOKENIZER))
    assert [e.kind for e in session.events] == ["first", "retry"] and len(t.turns) == 1


def test_an_error_after_the_headers_is_an_event(hasty):
    async def agent(client):
        *_, line = await lines_of(client)
        error = json.loads(line.removeprefix("data: "))["error"]
        assert error["code"] == "engine" and error["type"] == "server_error"
        response = await client.post("/chat/completions", json=BODY)
        assert response.status_code == 400  # An error before the headers has its own status.
        assert response.json()["error"]["code"] == "episode_over"

    with pytest.raises(EngineError, match="is down"):
        played(agent, SlowToFail([], failures=1))
