"""The Responses API: items, ids, earlier responses and events."""

from __future__ import annotations

import json

import httpx
import pytest
from support.any_template import tokenizer_of_trl
from support.failing_engine import FailingEngine
from support.wires import WIRES, ResponsesWire

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.play import play
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.gateway import serve
from agentrl.gateway.dialects import Responses
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatCall, ChatMessage, Refusal
from agentrl.gateway.session import Session
from agentrl.testing import byte_tokenizer, call
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
DIALECT = Responses()
QUESTION = {"role": "user", "content": "Q"}
GO_ON = {"role": "user", "content": "Go on."}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
CALC = call("calc", x=1)
SAMPLE = Sample("s", (Message("user", "Q"),), agent_name="responses_test")


def played(agent, turns, tokenizer=TOKENIZER, engine=None):
    """Play an agent (`async def agent(client)`) over HTTP; return trajectory and session."""
    sessions = []

    @agent_loop("responses_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        sessions.append(Session(ep))
        gateway = serve.Gateway()
        async with gateway.session(sessions[0]) as (url, key), httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}
        ) as client:  # fmt: skip
            await agent(client)
            await sessions[0].close()
        if sessions[0].failure:
            raise sessions[0].failure

    return play(SAMPLE, engine or Scripted(turns, tokenizer), tokenizer), sessions[0]


async def ask(client, **body):
    response = await client.post("/responses", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client, **body):
    response = await client.post("/responses", json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def events_of(client, **body):
    """Return the events of a stream."""
    async with client.stream("POST", "/responses", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        events = []
        async for line in response.aiter_lines():
            name, _, data = line.partition(": ")
            if name == "event":
                events.append(data)
            elif name == "data":
                events[-1] = json.loads(data) | {"event": events[-1]}
    assert all(event["event"] == event["type"] for event in events)
    return events


def read(items, memory=None, **fields):
    body = json.dumps({"input": items, **fields}).encode()
    return DIALECT.read(body, {}, memory or AnswerMemory())


def messages_of(items):
    """Return the messages of items in short: the text, the names of the calls, the thinking."""
    return [
        (m.role, m.text, *(c.id for c in m.calls), *([m.reasoning] if m.reasoning else []))
        for m in read(items).messages
    ]


def thought(text="hm", **fields):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **fields}


def text(content, **fields):
    part = {"type": "output_text", "text": content, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **fields}


def made_call(call_id, **fields):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "calc",
        "arguments": "{}",
        **fields,
    }


def result(id):
    return {"type": "function_call_output", "call_id": id, "output": "12"}


ONE, TWO = "aaaaaaaaaaaaaaaa_1", "aaaaaaaaaaaaaaaa_2"


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([thought(), text("a"), made_call("x"), made_call("y")], [("a", "x", "y", "hm")]),
        ([text("a"), text("b")], [("a",), ("b",)]),
        ([text("a"), made_call("x"), text("b")], [("a", "x"), ("b",)]),
        ([made_call("x"), thought(), made_call("y")], [("", "x"), ("", "y", "hm")]),
        ([thought("one"), thought("two"), text("a")], [("a", "onetwo")]),
        (
            [text("a", id=f"msg_{ONE}"), made_call(f"call_{TWO}_0")],
            [("a",), ("", f"call_{TWO}_0")],
        ),
        (
            [made_call(f"call_{ONE}_0"), made_call(f"call_{TWO}_0")],
            [("", f"call_{ONE}_0"), ("", f"call_{TWO}_0")],
        ),
        (
            [made_call(f"call_{ONE}_0", id=f"fc_{ONE}_0"), text("a", id=f"msg_{ONE}")],
            [("a", f"call_{ONE}_0")],
        ),
        ([text("a"), made_call(f"call_{ONE}_0")], [("a", f"call_{ONE}_0")]),
        ([{"role": "assistant", "content": "a"}, made_call("x")], [("a", "x")]),
    ],
)
def test_the_items_of_an_answer_are_one_message(items, messages):
    expected = [("user", "Q"), *(("assistant", *m) for m in messages), ("user", "Go on.")]
    assert messages_of([QUESTION, *items, GO_ON]) == expected


def test_results_between_the_calls_of_an_answer_do_not_separate_them():
    first, second = (f"call_{ONE}_{i}" for i in (0, 1))
    items = [made_call(first), result(first), made_call(second), result(second)]
    tools = [("tool", "12"), ("tool", "12")]
    assert messages_of([QUESTION, *items])[1:] == [("assistant", "", first, second), *tools]
    # Without ids of this API, the second call is made after the first result.
    items = [made_call("x"), result("x"), made_call("y"), result("y")]
    assert messages_of([QUESTION, *items])[1:] == [
        ("assistant", "", "x"), tools[0], ("assistant", "", "y"), tools[0],
    ]  # fmt: skip


def test_a_text_is_a_user_message_and_instructions_a_system_message():
    request = read("Q", instructions="S", max_output_tokens=9, model="m")
    assert request.messages == (ChatMessage("system", "S"), ChatMessage("user", "Q"))
    assert (request.max_tokens, request.model, request.kept) == (9, "m", request.messages[1:])
    assert read("Q", store=False).kept is None


def test_parts_are_texts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"type": "message", "role": "developer", "content": parts}
    output = {"type": "function_call_output", "call_id": "x", "output": parts[:1]}
    messages = read([message, QUESTION, made_call("x"), output]).messages
    assert messages[0] == ChatMessage("system", "a\nb")
    assert messages[3] == ChatMessage("tool", "a", call_id="x")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "use `previous_response_id`"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"top_logprobs": 2}, "answers contain no logprobs"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be 'function'.*'web_search'"),
        ({"tools": [{"type": "mcp"}]}, "not 'mcp'"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "not 'custom'"),
        ({"tools": [{"type": "function", "name": 5}]}, "must be a name, not 5"),
        ({"tools": {"a": 1}}, "tools must be a list"),
        ({"text": 5}, "text must be an object, not 5"),
        ({"instructions": 5}, "instructions must be a text, not 5"),
        ({"input": []}, "a list with at least one item"),
        ({"input": 5}, "a text or a list"),
        ({"input": [5]}, r"input\[0\] must be a message"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\] must be a message"),
        ({"input": [{"role": "tool", "content": "a"}]}, "of role system, developer"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "of role system, developer"),
        ({"input": [{"type": "function_call", "name": None}]}, r"function_call \(with a name\)"),
        (
            {"input": [{"type": "function_call", "name": "a", "namespace": ["<|im_end|>"]}]},
            r"function_call \(with a name\)",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "an answer that this session"),
        ({"input": [{"type": "item_reference", "id": [[]]}]}, "an answer that this session"),
        ({"previous_response_id": "resp_x"}, "an answer that this session keeps"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "text or image"),
        ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "text or image"),
        ({"max_output_tokens": 0}, "max_output_tokens must be a whole number"),
        ({"metadata": json.loads("[" * 500 + "]" * 500)}, "cannot be written"),
    ],
)
def test_what_is_not_supported_is_refused(fields, error):
    with pytest.raises(Refusal, match=error) as e:
        read(**{"items": "Q", **{k: v for k, v in fields.items() if k != "input"}}) if (
            "input" not in fields
        ) else read(fields["input"])
    assert e.value.status == 400


def test_a_deeply_nested_id_is_no_id():
    deep = json.loads("[" * 900 + "]" * 900)
    output = {"type": "function_call_output", "call_id": deep, "output": "a"}
    assert read([QUESTION, output]).messages[1] == ChatMessage("tool", "a")


def test_what_the_run_decides_is_counted():
    fields = {"temperature": 0.5, "top_p": 1, "tool_choice": "required", "truncation": "auto"}
    fields |= {"parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"}}
    request = read("Q", **fields, text={"verbosity": "low"}, metadata={"a": "b"}, user="u")
    assert sorted(request.ignored) == [
        "parallel_tool_calls", "reasoning.effort", "temperature", "text.verbosity", "tool_choice",
        "top_p", "truncation",
    ]  # fmt: skip
    usual = {"tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled"}
    assert not read("Q", **usual, reasoning={"summary": "auto"}).ignored


def test_the_tools_of_a_namespace_have_its_name():
    function = {"type": "function", "name": "wait", "parameters": {"type": "object"}}
    tools = [function, {"type": "namespace", "name": "agents", "tools": [function]}]

    async def agent(client):
        one = await ask(client, input="Q", tools=tools)
        calls = [(item["name"], item.get("namespace")) for item in one["output"]]
        assert calls == [("wait", None), ("wait", "agents")]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
            for item in one["output"]
        ]
        items = [{"role": "user", "content": "Q"}, *one["output"], *results]
        await ask(client, input=items, tools=tools)

    t, session = played(agent, [call("wait") + "\n" + call("agents__wait"), "done"])
    assert [e.kind for e in session.events] == ["first", "clean"]
    names = [tool["function"]["name"] for tool in read("Q", tools=tools).tools]
    assert names == ["wait", "agents__wait"] and len(t.segments) == 1
    assert not read("Q", tools=False).tools
    for wrong in ([], [tools[1]], [{"type": "web_search"}], [{"type": "function"}], ["wait"], 5):
        with pytest.raises(Refusal) as e:
            read("Q", tools=[{"type": "namespace", "name": "agents", "tools": wrong}])
        assert e.value.status == 400


HISTORY = [
    {"role": "system", "content": "S"},
    QUESTION,
    {"role": "assistant", "content": "shot"},
    GO_ON,
    {
        "role": "assistant",
        "id": ONE,
        "content": "Hm.",
        "reasoning_content": "think",
        "tool_calls": [
            {"id": f"call_{ONE}_{i}", "function": {"name": "calc", "arguments": '{"x": 1}'}}
            for i in (0, 1)
        ],
    },
    {"role": "tool", "tool_call_id": f"call_{ONE}_1", "content": "12"},
    {"role": "tool", "tool_call_id": f"call_{ONE}_0", "content": "13"},
    {"role": "assistant", "id": TWO, "content": "", "reasoning_content": "more"},
    {"role": "assistant", "id": "aaaaaaaaaaaaaaaa_3", "content": "b"},
    GO_ON,
]


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_conversation_is_the_same_as_in_chat_completions(has_ids):
    wires = WIRES["chat_completions"], ResponsesWire(has_ids)
    chat, request = (
        wire.dialect.read(wire.body(HISTORY, [TOOL]), {}, AnswerMemory()) for wire in wires
    )
    assert request.messages == chat.messages and request.tools == chat.tools


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_the_rows_are_those_of_chat_completions(name, has_ids):
    tokenizer = tokenizer_of_trl(name)
    turns = ["<think>\nhm\n</think>\n\nSo.\n" + CALC, CALC + CALC, "<think>\nhm\n</think>\n\nend"]
    turns = turns if name == "qwen3" else ["So.", "Well.", "end"]

    def agent_of(wire):
        async def agent(client):
            history = [{"role": "system", "content": "S"}, QUESTION]
            for _ in turns:
                body = wire.body(history, [TOOL])
                response = await client.post(wire.dialect.path, content=body)
                assert response.status_code == 200, response.text
                message = wire.message(response.content)
                calls = message.get("tool_calls", ())
                history += [message, *(
                    {"role": "tool", "tool_call_id": c["id"], "content": "12"} for c in calls
                )]  # fmt: skip
                if not calls:
                    history.append(GO_ON)

        return agent

    wires = WIRES["chat_completions"], ResponsesWire(has_ids)
    (one, _), (two, session) = (played(agent_of(wire), turns, tokenizer) for wire in wires)
    assert one.segments == two.segments and len(one.turns) == 3
    assert [e.kind for e in session.events] == ["first", "clean", "clean"]


def test_a_response():
    async def agent(client):
        r = await ask(client, input="Q", tools=[{"type": "function", "name": "calc"}],
                      include=["reasoning.encrypted_content"], metadata={"a": "b"})  # fmt: skip
        tag = r["id"].removeprefix("resp_")
        assert (r["object"], r["status"], r["error"]) == ("response", "completed", None)
        assert (r["tool_choice"], r["parallel_tool_calls"], r["metadata"]) == (
            "auto", True, {"a": "b"},
        )  # fmt: skip
        assert r["tools"] == [{"type": "function", "name": "calc"}] and "input" not in r
        thinking, said, made = r["output"]
        assert thinking["summary"] == [{"type": "summary_text", "text": "hm"}]
        assert thinking["id"] == f"rs_{tag}" and thinking["encrypted_content"]
        assert said["content"] == [
            {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
        ]
        assert (said["id"], said["status"]) == (f"msg_{tag}", "completed")
        assert (made["id"], made["call_id"]) == (f"fc_{tag}_0", f"call_{tag}_0")
        assert (made["name"], made["arguments"]) == ("calc", '{"x": 1}')
        usage = r["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
        cut = await ask(client, input=[QUESTION, *r["output"], result(made["call_id"])],
                        max_output_tokens=2)  # fmt: skip
        assert cut["status"] == cut["output"][0]["status"] == "incomplete"
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}

    played(agent, [f"<think>\nhm\n</think>\n\nSo.\n{CALC}", "a long answer"],
           tokenizer_of_trl("qwen3"))  # fmt: skip


def test_an_answer_without_text_and_calls_has_an_empty_message():
    async def agent(client):
        r = await ask(client, input=[QUESTION])
        (item,) = r["output"]
        assert item["content"][0]["text"] == ""
        await ask(client, input=[QUESTION, item, GO_ON])

    _, session = played(agent, ["", "a"])
    assert [e.kind for e in session.events] == ["first", "clean"]


def test_the_events_of_a_stream():
    async def agent(client):
        events = await events_of(client, input="Q", tools=[{"type": "function", "name": "calc"}])
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        kinds = [e["type"].removeprefix("response.") for e in events]
        assert kinds == [
            "created", "in_progress",
            "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
            "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        first, last = events[0]["response"], events[-1]["response"]
        assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == last["output"] and first["id"] == last["id"]
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        assert [a.get("summary", a.get("content", a.get("arguments"))) for a in added] == [
            [], [], "",
        ]  # fmt: skip
        deltas = [e["delta"] for e in events if e["type"].endswith("delta")]
        assert deltas == ["hm", "So.", '{"x": 1}']
        assert [e["output_index"] for e in events if e["type"].endswith("delta")] == [0, 1, 2]
        again = await events_of(client, input="Q", max_output_tokens=1)
        assert again[-1]["type"] == "response.incomplete"

    played(agent, [f"<think>\nhm\n</think>\n\nSo.\n{CALC}", "long"], tokenizer_of_trl("qwen3"))


def test_a_previous_response_is_the_whole_conversation():
    async def agent(client):
        tools = [{"type": "function", "name": "calc"}]
        one = await ask(client, input="Q", instructions="S", tools=tools)
        output = result(one["output"][-1]["call_id"])
        two = await ask(client, input=[output], instructions="S", tools=tools,
                        previous_response_id=one["id"])  # fmt: skip
        assert two["previous_response_id"] == one["id"]
        events = await events_of(client, input="Go on.", instructions="S", tools=tools,
                                 previous_response_id=two["id"])  # fmt: skip
        # The instructions of earlier requests do not apply.
        await ask(client, input="And now?", previous_response_id=events[-1]["response"]["id"])

    t, session = played(agent, [f"Hm.\n{CALC}", "two", "three", "four"])
    assert [e.kind for e in session.events] == ["first", "clean", "clean", "branch"]
    assert session.events[3].cause == "messages were removed"
    prompt = TOKENIZER.decode(t.segments[1].prompt_ids)
    assert prompt.startswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nHm.\n")
    assert "three<|im_end|>" in prompt and prompt.count("And now?") == 1


def test_items_are_named_by_their_ids():
    async def agent(client):
        one = await ask(client, input="Q", tools=[{"type": "function", "name": "calc"}])
        names = [{"type": "item_reference", "id": item["id"]} for item in one["output"]]
        await ask(client, tools=[{"type": "function", "name": "calc"}],
                  input=[QUESTION, *names, result(one["output"][-1]["call_id"])])  # fmt: skip

    t, session = played(
        agent, [f"<think>\nhm\n</think>\n\nSo.\n{CALC}{CALC}", "a"], tokenizer_of_trl("qwen3")
    )
    assert [e.kind for e in session.events] == ["first", "clean"] and len(t.segments) == 1


def test_a_response_that_is_not_kept_is_not_found():
    async def agent(client):
        one = await ask(client, input="Q", store=False)
        for id in (one["id"], "resp_00000000_7", "other"):
            error = await refused(client, input="Go on.", previous_response_id=id)
            assert error["code"] == "previous_response_not_found"
            assert (error["param"], error["type"]) == (
                "previous_response_id", "invalid_request_error",
            )  # fmt: skip
        two = await ask(client, input="Q")
        other = Session.__new__(Session)  # another key
        other.memory = AnswerMemory()
        with pytest.raises(Refusal, match="this session keeps"):
            read("Go on.", other.memory, previous_response_id=two["id"])

    played(agent, ["one", "two"])


def test_the_memory_of_a_session_is_bounded():
    memory, ids = AnswerMemory(limit=10_000), [f"chatcmpl-aaaaaaaaaaaaaaaa-{i}" for i in range(12)]

    def known():
        return [i for i, id in enumerate(ids) if memory.find(id)]

    for i in range(9):
        memory.keep(read(f"{i}" * 1500), Answer(ids[i], "a", calls=(ChatCall("c", "f", "{}"),)))
    assert known() == [4, 5, 6, 7, 8]
    memory.keep(read("x" * 50_000), Answer(ids[9], "a"))
    assert known() == [9]


def test_a_conversation_counts_until_it_is_forgotten():
    """Its first answer, with the long message, is forgotten long before it."""
    memory, last, ids = AnswerMemory(limit=100_000), {}, []
    for number in range(1, 20):
        for i in range(number):
            known = last.get(i) and memory.find(last[i])
            items = (
                {"previous_response_id": f"resp_{last[i][9:].replace('-', '_')}"} if known else {}
            )
            last[i] = f"chatcmpl-aaaaaaaaaaaaaaaa-{len(ids)}"
            ids.append(last[i])
            memory.keep(
                read("Q" if known else f"{i}" * 10_000, memory, **items), Answer(last[i], "a")
            )
    kept = {id(m): m for found in map(memory.find, ids) for m in found or ()}
    assert 60_000 < sum(len(m.text) for m in kept.values()) <= 100_000


def test_a_growing_conversation_is_kept_once():
    """Clients that send all items refer to old answers, too."""
    memory, items = AnswerMemory(limit=100_000), [QUESTION]
    for i in range(60):
        items += [text(f"{i}" * 50), {"role": "user", "content": f"{i}" * 50}]
        memory.keep(read(items), Answer(f"chatcmpl-aaaaaaaaaaaaaaaa-{i}", f"{i + 1}" * 50))
    kept = [memory.find(f"chatcmpl-aaaaaaaaaaaaaaaa-{i}") for i in range(60)]
    assert all(kept) and kept[59][:-2] == kept[58]
    assert all(a is b for a, b in zip(kept[59], kept[58], strict=False))


def test_a_retry_gets_the_same_response():
    async def agent(client):
        one = await ask(client, input="Q")
        response = await client.post(
            "/responses", json={"input": "Q"}, headers={"x-stainless-retry-count": "1"}
        )
        assert response.json()["id"] == one["id"]
        assert (await ask(client, input="Q"))["id"] != one["id"]

    t, session = played(agent, ["one", "two"])
    assert [e.kind for e in session.events] == ["first", "retry", "branch"] and len(t.turns) == 2


class SlowToFail(FailingEngine):
    async def generate(self, *args, **kwargs):
        import asyncio

        await asyncio.sleep(0.2)
        return await super().generate(*args, **kwargs)


def test_an_error_after_the_headers_is_an_event(monkeypatch):
    monkeypatch.setattr(serve, "FIRST_WAIT_SECONDS", 0.02)

    async def agent(client):
        (event,) = await events_of(client, input="Q")
        assert (event["type"], event["code"], event["sequence_number"]) == ("error", "engine", 0)
        assert event["error"]["message"] == event["message"]
        error = await refused(client, input="Q")
        assert error["code"] == "episode_over"

    with pytest.raises(EngineError, match="is down"):
        played(agent, [], engine=SlowToFail([], failures=1))
