"""Anthropic's Messages API: what a request means, and what its answers and errors look like."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from support.any_template import tokenizer_of_trl
from support.failing_engine import FailingEngine
from support.wires import WIRES

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.control import EpisodeControl
from agentrl.agent_loops.play import play
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError, UserCodeError
from agentrl.gateway import serve
from agentrl.gateway.dialects import ChatCompletions, Messages
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, ChatRequest, Refusal
from agentrl.gateway.session import Session
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.http_server import guard
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

DIALECT = Messages()
TOKENIZER, QWEN = byte_tokenizer(), tokenizer_of_trl("qwen3")
QUESTION = {"role": "user", "content": "Q"}
TOOL = {"name": "calc", "description": "d", "input_schema": {"type": "object"}}
BODY = {"model": "claude", "max_tokens": 100, "messages": [QUESTION], "tools": [TOOL]}
CALC = call("calc", x="1", y=2)
THOUGHT = "<think>\nhm\n</think>\n\n"


def read(*messages, **fields) -> ChatRequest:
    data = BODY | {"messages": messages or [QUESTION], **fields}
    return DIALECT.read(json.dumps(data).encode(), {}, AnswerMemory())


def text(text, **fields):
    return {"type": "text", "text": text, **fields}


def result(id, content, **fields):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


# -- requests -------------------------------------------------------------------------------------


def test_a_request_of_claude_code():
    """The shape of its requests: several system blocks, a system message, results, reminders."""
    cached = {"cache_control": {"type": "ephemeral"}}
    request = read(
        {"role": "user", "content": [text("<system-reminder>"), text("Q", **cached)]},
        {"role": "system", "content": [text("# Environment")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "any"},
            {"type": "redacted_thinking", "data": "x"},
            text("Hm."),
            {"type": "tool_use", "id": "c0", "name": "calc", "input": {"x": "é", "y": [1.5]}},
            {"type": "tool_use", "id": "c1", "name": "calc", "input": {}},
        ]},
        {"role": "user", "content": [
            text("before"),
            result("c0", "12", is_error=False, **cached),
            result("c1", [text("a"), text("b"), {"type": "tool_reference", "tool_name": "Web"}]),
            text("after"),
        ]},
        system=[text("x-anthropic-billing-header: 1"), text("You are", **cached)],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        stop_sequences=["a", "b"],
        stream=True,
    )  # fmt: skip
    assert request.messages == (
        ChatMessage("system", "x-anthropic-billing-header: 1\nYou are"),
        ChatMessage("user", "<system-reminder>\nQ"),
        ChatMessage("system", "# Environment"),
        ChatMessage(
            "assistant",
            "Hm.",
            (ChatCall("c0", "calc", '{"x": "é", "y": [1.5]}'), ChatCall("c1", "calc", "{}")),
            reasoning="hm",
        ),
        ChatMessage("tool", "12", call_id="c0"),
        ChatMessage("tool", "a\nb\nWeb", call_id="c1"),
        ChatMessage("user", "before\nafter"),
    )
    assert [*request.tools] == [{"type": "function", "function": {
        "name": "calc", "description": "d", "parameters": {"type": "object"}}}]  # fmt: skip
    assert request.ignored == ("thinking", "context_management", "effort")
    assert (request.model, request.max_tokens, request.stop) == ("claude", 100, ("a", "b"))
    assert request.stream and request.shows_thinking


def test_messages_without_blocks():
    no_text, empty = {"role": "assistant", "content": []}, {"role": "user", "content": []}
    assert read(QUESTION, no_text, empty, system="S").messages == (
        ChatMessage("system", "S"),
        ChatMessage("user", "Q"),
        ChatMessage("assistant", ""),
        ChatMessage("user", ""),
    )
    only_result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
    assert read(only_result).messages == (ChatMessage("tool", "", call_id="c"),)
    assert not read().shows_thinking and not read(thinking={"type": "disabled"}).shows_thinking


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"temperature": 1, "top_p": 1, "top_k": 5}, ("temperature", "top_p", "top_k")),
        ({"tool_choice": {"type": "auto"}}, ()),
        ({"tool_choice": {"type": "any"}}, ("tool_choice",)),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         ("parallel_tool_calls",)),
    ],
)  # fmt: skip
def test_fields_that_the_run_decides_are_counted(fields, ignored):
    assert read(**fields).ignored == ignored


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "one of user, assistant, system"),
        ({"messages": ["x"]}, "messages[0].role must be"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a text or a list"),
        ({"messages": [{"role": "user", "content": [text(5)]}]}, "parts of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "parts of type text or image: files and results of server tools are not read, not"
         " 'document'"),
        ({"messages": [{"role": "user", "content": [result("c", [{"type": "document"}])]}]},
         "not 'document'"),
        ({"messages": [{"role": "assistant", "content": [result("c", "")]}]}, "not 'tool_result'"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "calc", "input": "{}"}]}]}, "object as input"),
        ({"system": 5}, "system must be a text or a list of parts, not 5"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0] must be a tool that the agent runs, with name and input_schema, not"
         " 'web_search_20250305'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "not 'bash_20250124'"),
        ({"tools": [5]}, "not 5"),
        ({"tools": ["custom"]}, "not 'custom'"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "not 'text'"),
        ({"tools": {}, "max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"thinking": 5}, "thinking must be an object, not 5"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported: let the agent"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
    ],
)  # fmt: skip
def test_a_wrong_request_names_what_is_wrong(fields, why):
    with pytest.raises(Refusal) as error:
        read(**fields) if "messages" not in fields else read(
            *fields["messages"], **({"messages": []} if not fields["messages"] else {})
        )
    assert error.value.status == 400 and why in str(error.value), str(error.value)


def test_arguments_that_are_nested_too_deeply_are_refused():
    nested = json.loads("[" * 600 + "]" * 600)
    block = {"type": "tool_use", "id": "c", "name": "calc", "input": {"x": nested}}
    with pytest.raises(Refusal, match="cannot be written"):
        read(QUESTION, {"role": "assistant", "content": [block]})


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (Answer("chatcmpl-a-0", "x"), "end_turn", None),
        (Answer("chatcmpl-a-0", "x", finish_reason="length", stop="x"), "max_tokens", None),
        (Answer("chatcmpl-a-0", "x", stop="END"), "stop_sequence", "END"),
        (Answer("chatcmpl-a-0", "x", finish_reason="tool_calls"), "tool_use", None),
    ],
)
def test_the_reason_of_the_end(answer, reason, sequence):
    message = json.loads(DIALECT.write(answer, read()))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    *_, delta, stop = DIALECT.events(answer, read())
    name, data, *_ = delta.decode().split("\n")
    assert name == "event: message_delta" and stop.startswith(b"event: message_stop\n")
    end = {"stop_reason": reason, "stop_sequence": sequence}
    assert json.loads(data.removeprefix("data: "))["delta"] == end


def test_an_answer_and_its_events():
    calls = (ChatCall("c0", "calc", '{"x": 12345678901234567890123}'), ChatCall("c1", "calc", "{}"))
    answer = Answer(
        "chatcmpl-a-0", "T", "hm", calls, "tool_calls", prompt_tokens=9, cached_tokens=4,
        completion_tokens=3,
    )  # fmt: skip
    request = read(thinking={"type": "enabled", "budget_tokens": 1024})
    usage = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "chatcmpl-a-0"},
        {"type": "text", "text": "T"},
        {"type": "tool_use", "id": "c0", "name": "calc", "input": {"x": 12345678901234567890123}},
        {"type": "tool_use", "id": "c1", "name": "calc", "input": {}},
    ]
    head = {"id": "msg_a-0", "type": "message", "role": "assistant", "model": "claude"}
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    assert json.loads(DIALECT.write(answer, request)) == {
        **head, **end, "content": content, "usage": usage
    }  # fmt: skip
    events = [event.decode().split("\n") for event in DIALECT.events(answer, request)]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [lines[0] for lines in events] == [f"event: {d['type']}" for d in data]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [d["type"] for d in data] == [
        "message_start", *block[:2], *block[1:], *(block * 3), "message_delta", "message_stop"
    ]  # fmt: skip
    assert data[0]["message"] == {
        **head, "content": [], "stop_reason": None, "stop_sequence": None,
        "usage": usage | {"output_tokens": 0},
    }  # fmt: skip
    assert [d["delta"]["type"] for d in data if d["type"] == block[1]] == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"
    ]  # fmt: skip
    assert data[-2]["usage"] == usage
    hidden = json.loads(DIALECT.write(answer, read()))["content"]
    assert hidden == content[1:], "thinking is only for clients that ask for it"
    empty = json.loads(DIALECT.write(Answer("a", ""), read()))["content"]
    assert empty == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_the_types_of_errors(status, kind):
    refusal = Refusal(status, "code", "why")
    error = {
        "type": "error",
        "error": {"type": kind, "message": "why", "details": {"error_code": "code"}},
    }
    assert json.loads(DIALECT.error(refusal)) == error
    name, data, *_ = DIALECT.error_event(refusal).decode().split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == error


# -- sessions -------------------------------------------------------------------------------------


def played(agent, engine, tokenizer=TOKENIZER):
    """Play an agent (`async def agent(client, session)`) over HTTP; return the trajectory."""

    @agent_loop("messages_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        session = Session(ep)
        async with serve.Gateway().session(session) as (url, key):
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client:
                await agent(client, session)
            await session.close()
        if session.failure:
            raise session.failure

    sample = Sample("s", (Message("user", "Q"),), agent_name="messages_test")
    return play(sample, engine, tokenizer)


async def ask(client, *messages, **fields):
    answer = await client.post(
        "/messages?beta=true",
        json=BODY | {"messages": messages, **fields},
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


SCRIPT = (f"{THOUGHT}Hm.\n{CALC}\n{CALC}", f"{THOUGHT}So.\n{CALC}", "It is 12.", "Yes.")


@pytest.mark.parametrize("name", WIRES)
def test_the_same_conversation_has_the_same_rows_in_each_dialect(name):
    """Chat completions are the measure: tools, parallel calls, thinking, and an edited history."""

    def rows(wire):
        async def agent(client, session):
            tools = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
            history = [{"role": "system", "content": "S"}, QUESTION]
            for said in (None, None, "Sure?", None):
                answer = await client.post(wire.dialect.path, content=wire.body(history, tools))
                assert answer.status_code == 200, answer.text
                history.append(wire.message(answer.content))
                history += [
                    {"role": "tool", "tool_call_id": c["id"], "content": f"12 {i}"}
                    for i, c in enumerate(history[-1].get("tool_calls", ()))
                ]
                if said:
                    history.append({"role": "user", "content": said})
                    del history[2:5]  # the first turn and its results
            kinds = [event.kind for event in session.events]
            assert kinds == ["first", "clean", "clean", "branch"]

        t = played(agent, Scripted(SCRIPT, QWEN), QWEN)
        return [
            (s.prompt_ids, s.response_ids, s.response_mask, s.logprobs, s.versions)
            for s in t.segments
        ], t.final_text

    expected = rows(WIRES["chat_completions"])
    assert rows(WIRES[name]) == expected
    assert len(expected[0]) == 2 and expected[1] == "Yes."


def test_thinking_that_is_not_shown_stays_in_the_row():
    async def agent(client, session):
        first = await ask(client, QUESTION)
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        answer = {"role": "assistant", "content": first["content"]}
        results = [result(first["content"][1]["id"], "12")]
        await ask(client, QUESTION, answer, {"role": "user", "content": results})

    t = played(agent, Scripted([f"{THOUGHT}Hm.\n{CALC}", "done"], QWEN), QWEN)
    assert len(t.segments) == 1 and t.counts["gateway/realigned"] == 1
    assert [r.content for r in t.turns[0].tool_results] == ["12"]


def test_a_stop_sequence_that_ends_an_answer_is_named():
    async def agent(client, session):
        message = await ask(client, QUESTION, stop_sequences=["never", "END"])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
        assert message["content"] == [text("one")]
        message = await ask(client, QUESTION, stop_sequences=["never"])
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        body = {"messages": [QUESTION], "stop": "END"}
        chat = (await client.post("/chat/completions", json=body)).json()["choices"][0]
        assert (chat["finish_reason"], chat["message"]["content"]) == ("stop", "one")

    played(agent, Scripted(["one END two", "three", "one END"], TOKENIZER))


def test_a_prefill_is_refused():
    async def agent(client, session):
        prefill = {"role": "assistant", "content": "The answer is"}
        for path in ("/messages", "/messages/count_tokens"):
            answer = await client.post(path, json=BODY | {"messages": [QUESTION, prefill]})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert answer.headers["x-should-retry"] == "false"
            assert "the last message must not be an assistant message" in error["message"]
        assert len(session.refusals) == 1  # A count is no request of the episode.
        await ask(client, QUESTION)

    played(agent, Scripted(["a"], TOKENIZER))


def test_a_template_without_later_system_messages_says_so():
    """Claude Code looks for these words, and sends the conversation in another way then."""

    async def agent(client, session):
        later = {"role": "system", "content": "# Environment"}
        for path in ("/messages", "/messages/count_tokens"):
            answer = await client.post(path, json=BODY | {"messages": [QUESTION, later]})
            error = answer.json()["error"]
            assert (answer.status_code, error["details"]) == (400, {"error_code": "template"})
            assert "the role 'system' is not supported there" in error["message"]
        await ask(client, QUESTION, system="# Environment")

    tokenizer = tokenizer_of_trl("qwen3_6")
    t = played(agent, Scripted(["a"], tokenizer), tokenizer)
    assert len(t.turns) == len(t.segments) == 1


@pytest.mark.parametrize("name", ["byte", "qwen3", "qwen3_5_think"])
def test_counted_tokens_are_those_of_the_prompt(name):
    """Also for messages that the policy did not write. A count changes nothing."""
    tokenizer = TOKENIZER if name == "byte" else tokenizer_of_trl(name)
    foreign = {"role": "assistant", "content": "Mine."}

    async def agent(client, session):
        attempt = session._attempt

        async def count_and_ask(*messages, **fields):
            before = [*map(len, (attempt.turn_ids, attempt.foreign, attempt.messages))]
            fields |= {"thinking": {"type": "enabled"}}
            body = BODY | {"messages": messages, **fields}
            del body["max_tokens"]
            counted = (await client.post("/messages/count_tokens", json=body)).json()
            after = [*map(len, (attempt.turn_ids, attempt.foreign, attempt.messages))]
            assert before == after
            message = await ask(client, *messages, **fields)
            assert counted == {"input_tokens": message["usage"]["input_tokens"]}
            return {"role": "assistant", "content": message["content"]}

        more = {"role": "user", "content": "More."}
        first = await count_and_ask(QUESTION, foreign, more, system="S")
        history = [QUESTION, foreign, more, first]
        results = [result(b["id"], "12") for b in first["content"] if b["type"] == "tool_use"]
        history += [{"role": "user", "content": results}, foreign, more]
        await count_and_ask(*history, system="S")
        await count_and_ask(*history[2:], system="S")
        await count_and_ask({"role": "user", "content": "Other"}, tools=[])
        assert [event.kind for event in session.events] == ["first", "clean", "branch", "spawn"]

    turns = [f"{THOUGHT}Hm.\n{CALC}", "one", "two", "three"]
    assert len(played(agent, Scripted(turns, tokenizer), tokenizer).turns) == 4


def stateless(turns, tokenizer=TOKENIZER):
    config = without_budgets(Config())
    template = make_template(tokenizer, config)
    runtime = Runtime(Scripted(turns, tokenizer), template, LocalToolbox(), config)
    return StatelessSession(runtime, temperature=1.0)


def test_a_server_without_episodes_answers_and_counts():
    def script(prompt, turn):
        return "It is 12." if "tool_response" in prompt else f"Hm.\n{CALC}"

    session = stateless(script)

    async def send_all():
        transport = httpx.ASGITransport(serve.create_app(lambda key: session))
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            first = await ask(client, QUESTION, temperature=0)
            assert first["stop_reason"] == "tool_use"
            answer = {"role": "assistant", "content": first["content"]}
            results = [result(first["content"][1]["id"], "12")]
            history = [QUESTION, answer, {"role": "user", "content": results}]
            body = BODY | {"messages": history}
            counted = (await client.post("/messages/count_tokens", json=body)).json()
            second = await ask(client, *history)
            assert second["content"] == [text("It is 12.")]
            assert counted["input_tokens"] == second["usage"]["input_tokens"]
            assert len(session._turns) == 2

    asyncio.run(send_all())


# -- HTTP -----------------------------------------------------------------------------------------


def test_errors_have_the_shape_of_the_api():
    async def agent(client, session):
        transport = httpx.ASGITransport(serve.create_app(lambda key: session))
        direct = httpx.AsyncClient(transport=transport, base_url="http://test/v1")

        async def error(method, path, status, kind, client=client, **options):
            answer = await client.request(method, path, **options)
            data = answer.json()
            assert (answer.status_code, data["type"], data["error"]["type"]) == (
                status, "error", kind
            ), data  # fmt: skip
            assert answer.headers["x-should-retry"] == "false"
            return data["error"]["message"]

        await error("POST", "/messages", 400, "invalid_request_error", content=b"{")
        wrong = {"headers": {"x-api-key": "wrong"}, "json": BODY}
        why = await error("POST", "/messages", 401, "authentication_error", **wrong)
        assert "ANTHROPIC_API_KEY" in why
        await error("POST", "/messages/count_tokens", 401, "authentication_error", **wrong)
        for method, path in (("POST", "/messages/batches"), ("GET", "/messages")):
            why = await error(method, path, 404, "not_found_error", json={})
            assert f"there is no {method} /v1{path}" in why and "POST /v1/messages" in why
        long = {"content": b" " * (guard.MAX_LONG_BODY + 1)}
        await error("POST", "/messages", 413, "request_too_large", client=direct, **long)
        answer = await client.post("/nothing")
        assert "code" in answer.json()["error"]  # Other paths keep OpenAI's shape.
        bearer = {"authorization": f"Bearer {client.headers.pop('x-api-key')}"}
        client.headers.update(bearer)
        await ask(client, QUESTION)

    played(agent, Scripted(["a"], TOKENIZER))


def test_a_bug_of_count_tokens_is_an_error_of_the_api_and_ends_the_episode(monkeypatch):
    monkeypatch.setattr(EpisodeControl, "count_tokens", lambda *_: 1 // 0)

    async def agent(client, session):
        answer = await client.post("/messages/count_tokens", json=BODY)
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        assert answer.json()["type"] == "error" and answer.json()["error"] == {
            "type": "api_error",
            "message": "ZeroDivisionError: integer division or modulo by zero",
            "details": {"error_code": "bug"},
        }
        assert session.over.is_set()

    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        played(agent, Scripted([], TOKENIZER))


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


async def events_of(client):
    """Return the names and the data of the events of a stream."""
    async with client.stream("POST", "/messages", json=BODY | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("event: ") for line in lines[::2])
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in zip(lines[::2], lines[1::2], strict=True)
    ]


def test_pings_are_events(hasty):
    async def agent(client, session):
        events = await events_of(client)
        pings = [data for name, data in events if name == "ping"]
        assert len(pings) > 2 and pings[0] == {"type": "ping"}
        assert [name for name, _ in events][len(pings)] == "message_start"

    played(agent, Slow(["a"], TOKENIZER))


def test_an_error_after_the_headers_is_an_event(hasty):
    async def agent(client, session):
        *_, (name, data) = await events_of(client)
        assert name == "error" and data["error"]["type"] == "api_error"
        answer = await client.post("/messages", json=BODY)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"] == {"error_code": "episode_over"}

    with pytest.raises(EngineError, match="is down"):
        played(agent, SlowToFail([], failures=1))


def test_a_request_that_is_sent_again_gets_the_same_answer():
    async def agent(client, session):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/messages", json=BODY, timeout=0.05)
        first, again = [
            (await client.post("/messages", json=BODY, headers=headers)).json()["content"]
            for headers in ({}, {"x-stainless-retry-count": "1"})
        ]
        assert first == again == [text("one")]
        assert (await ask(client, QUESTION))["content"] == [text("two")]
        kinds = [event.kind for event in session.events]
        assert kinds == ["first", "retry", "retry", "branch"]

    assert len(played(agent, Slow(["one", "two"], TOKENIZER)).turns) == 2


def test_a_tools_schema_is_that_of_chat_completions():
    function = {"name": "calc", "description": "d", "parameters": {"type": "object"}}
    data = {"messages": [QUESTION], "tools": [{"type": "function", "function": function}]}
    chat = ChatCompletions().read(json.dumps(data).encode(), {}, AnswerMemory())
    assert [*read().tools] == [*chat.tools] and read().messages == chat.messages
