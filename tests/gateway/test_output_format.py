"""Structured outputs: the prompt states the schema, and invalid answers are counted."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest
from support.wires import WIRES

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.gateway.check import example_of
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.output_format import STATEMENT
from agentrl.gateway.requests import Refusal
from agentrl.gateway.session import Session
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
CHAT = WIRES["chat_completions"]
QUESTION = {"role": "user", "content": "Q"}
GO_ON = {"role": "user", "content": "Go on."}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OTHER = {"type": "object", "required": ["y"]}
VALID, INVALID = '{"x": 4}', '{"x": "four"}'


def read(messages, wire=CHAT, schema=None, **fields):
    fields |= wire.output_format(schema) if schema else {}
    return wire.dialect.read(wire.body(messages, [TOOL], **fields), {}, AnswerMemory())


async def ask(session, messages, wire=CHAT, schema=None, **fields):
    """Return the assistant's message, as chat completions write it."""
    request = read(messages, wire, schema, **fields)
    counted = session.count_tokens(request)
    answer = await session.answer(request)
    assert counted == answer.prompt_tokens
    return wire.message(wire.dialect.write(answer, request))


def played(agent, turns):
    """Play an agent (`async def agent(session)`); return trajectory and session."""
    sessions = []

    @agent_loop("format_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        sessions.append(Session(ep))
        await agent(sessions[0])
        await sessions[0].close()
        if sessions[0].failure:
            raise sessions[0].failure

    sample = Sample("s", (Message("user", "Q"),), agent_name="format_test")
    return play(sample, Scripted(turns, TOKENIZER), TOKENIZER), sessions[0]


def row_of(segment):
    return TOKENIZER.decode([*segment.prompt_ids, *segment.response_ids])


def kinds(session):
    return [event.kind for event in session.events]


def schema_form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def stated(schema=SCHEMA):
    return STATEMENT + json.dumps(schema, separators=(",", ":"))


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_the_schema_is_stated_once_and_the_row_grows(wire):
    async def agent(session):
        history = [QUESTION]
        for _ in range(3):
            message = await ask(session, history, wire, SCHEMA)
            calls = message.get("tool_calls", ())
            history += [message, *(
                {"role": "tool", "tool_call_id": c["id"], "content": "12"} for c in calls
            )]  # fmt: skip
            if not calls:
                history.append(GO_ON)

    t, session = played(agent, [call("calc"), VALID, VALID])
    assert kinds(session) == ["first", "clean", "clean"] and len(t.segments) == 1
    assert row_of(t.segments[0]).count(STATEMENT) == 1
    assert f"user\nQ{stated()}<|im_end|>" in TOKENIZER.decode(t.segments[0].prompt_ids)
    assert "gateway/invalid_output" not in t.counts


def test_a_schema_belongs_to_the_last_message_of_its_request():
    async def agent(session):
        history = [QUESTION]
        for schema in (None, SCHEMA, None, OTHER, SCHEMA):
            history += [await ask(session, history, schema=schema), GO_ON]

    t, session = played(agent, ["a", VALID, "b", '{"y": 1}', VALID])
    assert kinds(session) == ["first", *["clean"] * 4] and len(t.segments) == 1
    go_on = "user\nGo on."
    assert row_of(t.segments[0]).replace("<|im_start|>", "").split("<|im_end|>\n")[1:] == [
        "user\nQ", "assistant\na", go_on + stated(), f"assistant\n{VALID}", go_on, "assistant\nb",
        go_on + stated(OTHER), 'assistant\n{"y": 1}', go_on + stated(), f"assistant\n{VALID}"
        "<|im_end|>",
    ]  # fmt: skip
    assert "gateway/invalid_output" not in t.counts


def test_an_invalid_answer_is_returned_and_counted():
    async def agent(session):
        answers = [await ask(session, [QUESTION], schema=SCHEMA) for _ in range(5)]
        assert [a["content"] for a in answers[:4]] == [VALID, INVALID, "So: {}", ""]
        assert answers[4]["tool_calls"]  # This is not the final answer.
        assert (await ask(session, [QUESTION]))["content"] == "text"
        form = {"type": "json_object"}
        await ask(session, [QUESTION], response_format=form)
        await ask(session, [QUESTION], WIRES["responses"], text={"format": form})

    turns = [VALID, INVALID, "So: {}", "", call("calc"), "text", "{}", "[]"]
    t, _ = played(agent, turns)
    assert t.counts["gateway/invalid_output"] == 4 and len(t.turns) == len(turns)


def test_the_same_messages_with_and_without_a_schema():
    async def agent(session):
        await ask(session, [QUESTION])
        await ask(session, [QUESTION], schema=SCHEMA)
        await ask(session, [QUESTION], schema=OTHER)
        await ask(session, [QUESTION])

    t, session = played(agent, ["a", VALID, '{"y": 1}', "b"])
    assert kinds(session) == ["first", "branch", "branch", "branch"]
    prompts = [TOKENIZER.decode(s.prompt_ids) for s in t.segments]
    assert [p.partition("user\nQ")[2].partition("<|im_end|>")[0] for p in prompts] == [
        "", stated(), stated(OTHER), "",
    ]  # fmt: skip


def test_a_changed_message_states_the_schema_again():
    async def agent(session):
        one = await ask(session, [QUESTION], schema=SCHEMA)
        await ask(session, [{**QUESTION, "content": "R"}, one, GO_ON], schema=SCHEMA)

    t, session = played(agent, [VALID, VALID])
    assert kinds(session) == ["first", "branch"]
    last = TOKENIZER.decode(t.segments[1].prompt_ids)
    assert "user\nR<|im_end|>" in last and f"Go on.{stated()}" in last


@pytest.mark.parametrize("schemas", [(SCHEMA, SCHEMA, SCHEMA), (None, SCHEMA, OTHER)])
def test_a_served_policy_reads_what_it_has_read_in_training(schemas):
    async def agent(session):
        history = [QUESTION]
        for schema in schemas:
            history += [await ask(session, history, schema=schema), GO_ON]

    turns = [VALID, INVALID, '{"y": 1}']

    def script(prompt, turn):
        return turns[prompt.count("<|im_start|>assistant") - 1]

    t, _ = played(agent, turns)
    config = without_budgets(Config())
    engine = Scripted(script, TOKENIZER)
    template = make_template(TOKENIZER, config)
    with closing(Runtime(engine, template, LocalToolbox(), config)) as runtime:
        asyncio.run(agent(StatelessSession(runtime, 1.0)))
    row = [*t.segments[0].prompt_ids, *t.segments[0].response_ids]
    lengths = [len(t.segments[0].prompt_ids) + turn.start for turn in t.turns]
    assert [[*r.prompt_ids] for r in engine.requests] == [row[:n] for n in lengths]


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"type": "xml"}, "of type text, json_object, or json_schema"),
        ("json", "of type text, json_object, or json_schema"),
        ({"type": "json_schema"}, "json_schema with a schema"),
        ({"type": "json_schema", "json_schema": 5}, "json_schema with a schema"),
        (schema_form({"type": "thing"}), "the schema is refused: it is not a valid JSON schema"),
        (schema_form({"$ref": "#"}), "the schema is refused: a \\$ref points to itself"),
        (schema_form({"$ref": "http://127.0.0.1/s"}), "points outside the schema"),
    ],
)
def test_a_wrong_format_is_refused(form, error):
    with pytest.raises(Refusal, match=error) as e:
        read([QUESTION], response_format=form)
    assert e.value.status == 400 and e.value.field == "response_format"
    if isinstance(form, dict) and isinstance(form.get("json_schema", {}), dict):
        form = {**form.pop("json_schema", {}), **form}
    fields = {"responses": {"text": {"format": form}},
              "messages": {"output_config": {"format": form}}}  # fmt: skip
    for name, field in fields.items():
        with pytest.raises(Refusal, match=error):
            read([QUESTION], WIRES[name], **field)


def test_the_older_field_of_anthropics_api():
    form = {"type": "json_schema", "schema": SCHEMA}
    request = read([QUESTION], WIRES["messages"], output_format=form)
    assert request.output_format == read([QUESTION], schema=SCHEMA).output_format
    assert (
        read([QUESTION], WIRES["messages"], output_config={"effort": "low"}).output_format is None
    )


def test_an_example_of_a_schema_with_references():
    step = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {
        "anyOf": [{"$ref": "#/$defs/Step"}, {"type": "null"}]}}}  # fmt: skip
    schema = {"type": "object", "$defs": {"Step": step}, "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}}}}  # fmt: skip
    assert example_of(schema) == {"steps": [{"n": 1, "next": None}]}
