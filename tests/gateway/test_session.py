"""How a session matches requests, in exact small worlds."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest
from support.any_template import tokenizer_of_trl
from support.failing_engine import FailingEngine

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.play import play
from agentrl.chat import load_tokenizer
from agentrl.config import Config, RolloutConfig
from agentrl.engine.local import LocalEngine
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.gateway.check import CheckedEpisode, CheckReport
from agentrl.gateway.dialects import ChatCompletions
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Refusal
from agentrl.gateway.session import VOLATILE, Session
from agentrl.registry import load_file, tools
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
QUESTION = {"role": "user", "content": "How much is 3*4?"}
GO_ON = {"role": "user", "content": "Go on."}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
DIALECT = ChatCompletions()
CALC = call("calc", x="1", y=2)


class Client:
    """Sends requests to a session as an HTTP client would."""

    def __init__(self, session: Session):
        self.session = session

    async def ask(self, messages, *, retry=0, **fields):
        """Return the assistant's message."""
        body = json.dumps({"messages": messages, "tools": [TOOL], **fields}).encode()
        request = DIALECT.read(body, {"x-stainless-retry-count": str(retry)}, AnswerMemory())
        answer = await self.session.answer(request)
        choice = json.loads(DIALECT.write(answer, request))["choices"][0]
        return choice["message"] | {"finish_reason": choice["finish_reason"]}


def played(agent, turns, *, engine=None, sample=None, **rollout):
    """Play an agent (`async def agent(client)`); return trajectory and session."""
    sessions = []

    @agent_loop("session_test", uses_tools=False, uses_interaction=False)
    async def loop(ep):
        sessions.append(Session(ep))
        try:
            await agent(Client(sessions[0]))
        finally:
            await sessions[0].close()
        if sessions[0].failure:
            raise sessions[0].failure

    sample = sample or Sample("s", (Message("user", QUESTION["content"]),))
    sample = Sample(sample.id, sample.prompt, agent_name="session_test")
    config = Config(rollout=RolloutConfig(**rollout))
    t = play(sample, engine or Scripted(turns, TOKENIZER), TOKENIZER, config=config)
    return t, sessions[0]


def kinds(session):
    return [event.kind for event in session.events]


def result(message, i=0, text="12"):
    return {"role": "tool", "tool_call_id": message["tool_calls"][i]["id"], "content": text}


def prompt_of(t, i):
    return TOKENIZER.decode(t.segments[i].prompt_ids)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda m: m,
        lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
        lambda m: m | {"content": f" {m['content']}\n"},
        lambda m: m | {"tool_calls": [{**c, "function": {
            "name": "calc", "arguments": '{ "y": 2.0, "x": "1"}'}} for c in m["tool_calls"]]},
    ],
    ids=["same", "no thinking", "white space", "JSON"],
)  # fmt: skip
def test_a_turn_that_is_written_differently_continues_its_row(rewrite):
    async def agent(client):
        m = await client.ask([QUESTION])
        assert m["finish_reason"] == "tool_calls" and m["content"] == "Hm."
        m2 = await client.ask([QUESTION, rewrite(m), result(m)])
        assert (m2["content"], m2["finish_reason"]) == ("done", "stop")

    t, session = played(agent, [f"Hm.\n{CALC}", "done"])
    assert len(t.segments) == 1 and kinds(session)[1] in ("clean", "realigned")
    assert [r.content for r in t.turns[0].tool_results] == ["12"]
    assert t.turns[0].tool_seconds > 0 and "tools" in [s.name for s in t.spans]


def test_results_are_in_the_order_of_their_calls():
    async def agent(client):
        m = await client.ask([QUESTION])
        await client.ask([QUESTION, m, result(m, 1, "second"), result(m, 0, "first")])

    t, _ = played(agent, [f"{CALC}\n{CALC}", "done"])
    assert [r.content for r in t.turns[0].tool_results] == ["first", "second"]
    assert [m.content for m in t.messages if m.role == "tool"] == ["first", "second"]


def test_a_malformed_call_stays_text_and_counts():
    bad = '<tool_call>\n{"name": "calc", "arguments"\n</tool_call>'

    async def agent(client):
        m = await client.ask([QUESTION])
        assert len(m["tool_calls"]) == 1 and '"arguments"' in m["content"]
        await client.ask([QUESTION, m, result(m)])

    t, session = played(agent, [f"{CALC}\n{bad}", "done"])
    assert [r.error for r in t.turns[0].tool_results] == ["", "bad_call"]
    assert kinds(session) == ["first", "clean"]


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (lambda h: [{**QUESTION, "content": "Other"}, *h[1:]], "messages were removed"),
        (lambda h: [h[0], {**h[1], "content": "rewritten"}, *h[2:]], "assistant message changed"),
        (lambda h: [*h[:2], {**GO_ON, "content": "Stop."}, *h[3:]], "user message changed"),
        (lambda h: h[2:], "messages were removed"),
        (lambda h: [*h[:2], *h[3:]], "messages were removed"),
    ],
    ids=["question", "answer", "user", "beginning", "middle"],
)
def test_an_edited_history_begins_a_row(edit, cause):
    """The turns that stay are in the prompt of the new row, as they were sampled."""

    async def agent(client):
        history = [QUESTION]
        for _ in range(2):
            history += [await client.ask(history), GO_ON]
        await client.ask(edit(history))

    t, session = played(agent, ["one", "two", "three"])
    assert kinds(session)[:2] == ["first", "clean"] and session.events[2].kind == "branch"
    assert session.events[2].cause in (cause, "user message changed")
    assert len(t.segments) == 2 and {turn.thread for turn in t.turns} == {0}
    assert "two<|im_end|>" in prompt_of(t, 1) and t.final_text == "three"


def test_an_agent_that_goes_on_from_an_earlier_sample_is_told_so():
    """Not that a message changed: it continues the first of two answers to the same request."""

    async def agent(client):
        first = await client.ask([QUESTION])
        await client.ask([QUESTION])
        await client.ask([QUESTION, first, GO_ON])

    t, session = played(agent, ["one", "two", "three"])
    event = session.events[2]
    assert event.kind == "branch" and (event.before, event.after) == ("", "")
    assert event.cause == "the conversation goes on from another answer than its last"
    assert "one<|im_end|>" in prompt_of(t, 2) and "two<|im_end|>" not in prompt_of(t, 2)


def test_a_changed_tool_begins_a_row():
    async def agent(client):
        m = await client.ask([QUESTION])
        other = {"type": "function", "function": {"name": "other", "parameters": {}}}
        await client.ask([QUESTION, m, GO_ON], tools=[TOOL, other])

    t, session = played(agent, ["one", "two"])
    assert session.events[1].cause == "the tools changed" and len(t.segments) == 2
    assert '"other"' in prompt_of(t, 1) and '"other"' not in prompt_of(t, 0)


def test_a_foreign_message_has_mask_0_in_the_same_row():
    async def agent(client):
        m = await client.ask([QUESTION])
        foreign = {"role": "assistant", "content": "I wrote this."}
        await client.ask([QUESTION, m, GO_ON, foreign, GO_ON])

    t, session = played(agent, ["one", "two"])
    (segment,) = t.segments
    ids = zip(segment.response_ids, segment.response_mask, strict=True)
    assert TOKENIZER.decode([i for i, m in ids if m]) == "one<|im_end|>two<|im_end|>"
    assert "assistant\nI wrote this.<|im_end|>" in TOKENIZER.decode(segment.response_ids)
    assert kinds(session) == ["first", "clean"]


def test_the_same_request_again_is_a_new_sample():
    async def agent(client):
        one = await client.ask([QUESTION])
        two = await client.ask([QUESTION])
        assert (one["content"], two["content"]) == ("one", "two")
        await client.ask([QUESTION, one, GO_ON])  # goes on from the first sample

    t, session = played(agent, ["one", "two", "three"])
    assert kinds(session) == ["first", "branch", "branch"] and len(t.segments) == 3
    assert "one<|im_end|>" in prompt_of(t, 2) and "two" not in prompt_of(t, 2)


def test_the_same_request_at_the_same_time_are_samples_with_different_seeds():
    seeds = []

    class Seeds(Scripted):
        is_concurrent = True

        async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline):
            seeds.append(seed)
            await asyncio.sleep(0.01)
            return await super().generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )

    async def agent(client):
        await asyncio.gather(*(client.ask([QUESTION]) for _ in range(4)))

    t, _ = played(agent, [], engine=Seeds(["a", "b", "c", "d"], TOKENIZER))
    assert len(t.turns) == len(t.segments) == len(set(seeds)) == 4
    assert sorted(m.content for m in t.answers) == ["a", "b", "c", "d"]


class Slow(Scripted):
    """Answers concurrent requests, each after a while."""

    is_concurrent = True

    async def generate(self, *args, **kwargs):
        await asyncio.sleep(0.02)
        return await super().generate(*args, **kwargs)


def test_a_client_that_sends_its_request_again_does_not_get_the_answer_of_its_twin():
    async def agent(client):
        lost, twin = (asyncio.create_task(client.ask([QUESTION])) for _ in range(2))
        await asyncio.sleep(0.01)
        lost.cancel()
        await asyncio.sleep(0)
        again = await client.ask([QUESTION], retry=1)
        assert {again["content"], (await twin)["content"]} == {"one", "two"}

    t, session = played(agent, [], engine=Slow(["one", "two", "three"], TOKENIZER))
    assert kinds(session) == ["first", "spawn", "retry"] and len(t.turns) == 2


def test_the_end_of_a_session_ends_all_requests_in_flight():
    async def agent(client):
        await client.ask([QUESTION])
        twins = [asyncio.create_task(client.ask([GO_ON])) for _ in range(3)]
        await asyncio.sleep(0.01)
        await client.session.close()
        for error in await asyncio.gather(*twins, return_exceptions=True):
            assert isinstance(error, Refusal) and error.code == "episode_over"

    t, _ = played(agent, [], engine=Slow(["one", "two", "three", "four"], TOKENIZER))
    assert len(t.turns) == 1


def test_equal_sub_agents_with_equal_answers_stay_clean():
    """Each goes on in one of the two conversations, and none is edited."""

    async def agent(client):
        histories = [[QUESTION], [QUESTION]]
        for answer, history in zip(
            await asyncio.gather(*map(client.ask, histories)), histories, strict=True
        ):
            history += [answer, GO_ON]
        for _ in range(2):
            for history in histories:
                history += [await client.ask(history), GO_ON]

    t, session = played(agent, [], engine=Slow(lambda prompt, turn: "same", TOKENIZER))
    assert kinds(session) == ["first", "spawn", *["clean"] * 4]
    assert [len([turn for turn in t.turns if turn.segment == i]) for i in (0, 1)] == [3, 3]


def test_a_retry_gets_the_same_answer():
    async def agent(client):
        one = await client.ask([QUESTION])
        assert await client.ask([QUESTION], retry=1) == one
        lost = asyncio.create_task(client.ask([QUESTION, one, GO_ON]))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert (await client.ask([QUESTION, one, GO_ON]))["content"] == "two"

    t, session = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "retry", "clean", "retry"] and len(t.turns) == 2


def test_the_order_of_keys_makes_no_other_request():
    """Codex writes the keys of its metadata in any order if it sends a request again."""
    bodies = (
        {"messages": [QUESTION], "metadata": {"a": 1, "b": [2]}},
        {"metadata": {"b": [2], "a": 1}, "messages": [QUESTION]},
        {"metadata": {"b": [2], "a": 3}, "messages": [QUESTION]},
    )
    one, same, other = (
        DIALECT.read(json.dumps(body).encode(), {}, AnswerMemory()).body for body in bodies
    )
    assert one == same != other


def test_sub_agents_are_conversations_of_the_same_rollout():
    async def agent(client):
        system = {"role": "system", "content": "You help."}
        m = await client.ask([QUESTION])
        subs = [[system, {"role": "user", "content": name}] for name in ("ada", "bob")]
        answers = await asyncio.gather(*map(client.ask, subs))
        assert {a["content"] for a in answers} == {"ada", "bob"}
        for sub, a in zip(subs, answers, strict=True):
            await client.ask([*sub, a, GO_ON])
        await client.ask([QUESTION, m, GO_ON])

    def answer(prompt, turn):
        return next((n for n in ("ada", "bob") if n in prompt), "main")

    t, session = played(agent, answer)
    assert kinds(session) == ["first", "spawn", "spawn", "clean", "clean", "clean"]
    assert len(t.segments) == 3 and t.final_text == "main"
    main = [turn for turn, m in zip(t.turns, t.answers, strict=True) if m.content == "main"]
    assert [turn.thread for turn in main] == [0, 0]


def test_a_sub_agent_may_begin_with_a_message_of_the_main_agent():
    """They share no answer. A conversation with answers whose beginning changed is a branch."""

    async def agent(client):
        system, folder = ({"role": r, "content": "/home"} for r in ("system", "user"))
        main = [system, folder, QUESTION]
        main += [await client.ask(main), GO_ON]
        sub = [system, folder, {"role": "user", "content": "How much is 4*3?"}]
        sub += [await client.ask(sub), GO_ON]
        await client.ask(sub)
        main += [await client.ask(main), GO_ON]
        await client.ask([system, {"role": "user", "content": "/tmp"}, *main[2:]])

    t, session = played(agent, ["one", "two", "three", "four", "five"])
    assert kinds(session) == ["first", "spawn", "clean", "clean", "branch"]
    assert session.events[-1].cause == "user message changed"
    assert [turn.thread for turn in t.turns] == [0, 1, 1, 0, 0] and len(t.segments) == 3


def test_a_volatile_line_is_not_compared():
    async def agent(client):
        system = {"role": "system", "content": "Help.\nToday's date is 2026-01-01\nYes."}
        m = await client.ask([system, QUESTION])
        system["content"] = system["content"].replace("01-01", "01-02")
        await client.ask([system, QUESTION, m, GO_ON])

    t, session = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "realigned"] and len(t.segments) == 1
    assert session.counts["volatile"] == 1 and "01-01" in prompt_of(t, 0)


VOLATILE_LINES = """Today's date: 2026-01-01
Current time is 3:04 p.m.
The current date and time is Monday, January 5, 2026 at 3:04 PM (UTC+1)
Current datetime: 2026-01-01T12:00:00.123+00:00
Current date: Thu Nov 26 20:54:09 UTC 2026
Current date: 5th of Jan, 2026
Current time: 14:30 (Europe/Berlin)
x-anthropic-billing-header: cc_version=1; a=b"""
COMPARED_LINES = """Current time step 3: you are at (3,3)
Current time: 3
Current time: 12:30 (3,3)
Current time: 12:30, you have 3 coins
Current date: 2026-01-01, balance 300
Current time left: 12:30
Current date: may 5 apples
Today's date of delivery: 2026-01-01"""


def test_only_a_date_a_time_or_a_billing_header_is_volatile():
    assert VOLATILE.findall(f"{VOLATILE_LINES}\n{COMPARED_LINES}") == VOLATILE_LINES.splitlines()


def test_a_line_with_more_than_a_time_is_sent_as_it_is_now():
    async def agent(client):
        system = {"role": "system", "content": "Current time step 1: you are at (1,1)"}
        m = await client.ask([system, QUESTION])
        system["content"] = "Current time step 3: you are at (3,3)"
        await client.ask([system, QUESTION, m, GO_ON])

    t, session = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "branch"] and "(3,3)" in prompt_of(t, 1)


def test_the_line_that_is_replaced_is_shown():
    """Also if the client writes a later turn differently."""

    async def agent(client):
        text = "Help.\nCurrent time: 12:30\nToday's date: 2026-01-01\nYes."
        system = {"role": "system", "content": text}
        m = await client.ask([system, QUESTION])
        system["content"] = text.replace("12:30", "12:31")
        await client.ask([system, QUESTION, m, GO_ON])

    t, session = played(agent, ["one", "two"])
    event = session.events[1]
    assert (event.before, event.after) == ("Current time: 12:30", "Current time: 12:31")
    report = CheckReport([CheckedEpisode(session.events, [], session.counts.copy(), t)])
    text = "\n".join(report.lines())
    assert "the policy keeps seeing the first one" in text and "decided by the run" not in text
    assert "message 0 was  'Current time: 12:30'" in text and "now  'Current time: 12:31'" in text


@pytest.mark.parametrize("line", ["Current time in {}?", "Current time in {} is 1:00"])
def test_a_new_row_contains_volatile_lines_as_they_are_now(line):
    async def agent(client):
        for city in ("Paris", "Tokyo"):
            await client.ask([{"role": "user", "content": line.format(city)}])

    t, _ = played(agent, ["one", "two"])
    assert line.format("Paris") in prompt_of(t, 0) and line.format("Tokyo") in prompt_of(t, 1)


def test_a_limit_of_the_client_cuts_a_turn():
    async def agent(client):
        m = await client.ask([QUESTION], max_tokens=2)
        assert (m["content"], m["finish_reason"]) == ("on", "length")
        await client.ask([QUESTION, m, GO_ON], stop=["w"])

    t, _ = played(agent, ["one", "two"])
    assert t.stop_reason == "done" and len(t.segments) == 1


def test_a_stop_text_is_sampled_but_not_shown():
    async def agent(client):
        m = await client.ask([QUESTION], stop=["STOP"])
        assert m["content"] == "so"
        await client.ask([QUESTION, m, GO_ON])

    t, session = played(agent, ["so STOP it", "two"])
    assert t.answers[0].content == "so STOP" and kinds(session) == ["first", "clean"]


@pytest.mark.parametrize("budget", [{"max_turns": 1}, {"max_turn_tokens": 2}])
def test_after_the_budget_requests_are_refused(budget):
    async def agent(client):
        m = await client.ask([QUESTION])
        assert m["content"] in ("one", "on")
        with pytest.raises(Refusal) as e:
            await client.ask([QUESTION, m, GO_ON])
        assert (e.value.status, e.value.code) == (400, "episode_over")

    t, session = played(agent, ["one", "two"], **budget)
    assert t.stop_reason in ("turns", "turn_tokens") and session.is_over_budget


def test_an_engine_failure_drops_the_rollout():
    async def agent(client):
        with pytest.raises(Refusal) as e:
            await client.ask([QUESTION])
        assert e.value.status == 503
        with pytest.raises(Refusal, match="the episode has ended"):
            await client.ask([QUESTION])

    with pytest.raises(EngineError, match="is down"):
        played(agent, [], engine=FailingEngine(["one"], failures=1))


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([QUESTION, {"role": "assistant", "content": "a"}], "last_message"),
        ([{"role": "tool", "content": "a", "tool_call_id": "x"}], "first_message"),
    ],
)
def test_conversations_that_cannot_be_continued(messages, code):
    async def agent(client):
        with pytest.raises(Refusal) as e:
            await client.ask(messages)
        assert e.value.code == code
        await client.ask([QUESTION])

    t, session = played(agent, ["one"])
    assert len(t.turns) == 1 and session.failure is None


@pytest.mark.parametrize("strip", [False, True], ids=["keep", "strip"])
def test_thinking_stays_or_a_row_begins(strip):
    tokenizer = tokenizer_of_trl("qwen3")
    thought = "<think>\nhm\n</think>\n\n"

    @agent_loop("session_test")
    async def loop(ep):
        session = Session(ep)
        client = Client(session)
        m = await client.ask([QUESTION])
        assert m["reasoning_content"] == "hm" and m["content"] == "one"
        del m["reasoning_content"]
        await client.ask([QUESTION, m, GO_ON])
        await session.close()

    config = Config(rollout=RolloutConfig(history_thinking="strip" if strip else "keep"))
    sample = Sample("s", (Message("user", QUESTION["content"]),), agent_name="session_test")
    engine = Scripted([f"{thought}one", f"{thought}two"], tokenizer)
    t = play(sample, engine, tokenizer, config=config)
    assert len(t.segments) == 1 + strip
    last = tokenizer.decode(t.segments[-1].prompt_ids)
    assert strip == ("one<|im_end|>" in last) and "hm" not in last


def test_the_same_script_gives_the_same_rows_as_our_own_loop(tiny_model):
    """With the local engine: ids, masks, logprobs and versions are those of `tool_agent`."""
    load_file("shelf:calculator")
    tokenizer = load_tokenizer(tiny_model)
    question = "Zoe has 7 boxes of 9 stamps and 6 break. How many stamps in all?"
    prompt = Message("system", "Use the tools. Answer with ####."), Message("user", question)
    toolbox = LocalToolbox()

    @agent_loop("session_test")
    async def agent(ep):
        session = Session(ep)
        schemas = toolbox.schemas(("calculator",))
        messages = [m.as_dict() for m in ep.sample.prompt]
        while True:
            body = json.dumps({"messages": messages, "tools": schemas}).encode()
            request = DIALECT.read(body, {}, AnswerMemory())
            try:
                answer = await session.answer(request)
            except Refusal:
                break
            message = json.loads(DIALECT.write(answer, request))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for c in message["tool_calls"]:
                arguments = json.loads(c["function"]["arguments"])
                text = tools.get("calculator").target(**arguments)
                messages.append({"role": "tool", "tool_call_id": c["id"], "content": str(text)})
        await session.close()

    def run(loop, seed):
        sample = Sample("s", prompt, agent_name=loop, tools=("calculator",))
        config = Config(rollout=RolloutConfig(max_turn_tokens=64))
        return play(sample, engine, tokenizer, config=config, seed=seed)

    with closing(LocalEngine.load(tiny_model, tokenizer)) as engine:
        for seed in range(3):
            ours, theirs = run("tool_agent", seed), run("session_test", seed)
            assert len(ours.turns) > 1 and ours.segments == theirs.segments


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


def calling(function):
    turn = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    return {"messages": [QUESTION, turn, GO_ON]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": ["user"]}]}, r"messages\[0\].role must be one of"),
        ({"stream": "false"}, "stream must be true or false, not 'false'"),
        ({"n": 2}, "send a request for each answer"),
        ({"stop": 5}, "stop must be a text or a list of texts"),
        ({"stop": {"a": 1}}, "stop must be a text or a list of texts"),
        ({"tools": [{"function": {}}]}, "name must be a name, not None"),
        ({"tools": [{"function": {"name": 5}}]}, "name must be a name, not 5"),
        ({"tools": [{"function": {"name": "a", "description": [1]}}]}, "description must be"),
        ({"tools": [{"function": {"name": "a", "parameters": "x"}}]}, "parameters must be"),
        ({"tools": [{"function": {"name": "a", "parameters": nested(300)}}]}, "cannot be written"),
        (calling({"name": None}), "must be a call of a function"),
        (calling({"name": "a", "arguments": nested(300)}), "cannot be written"),
        (calling({"name": "a", "arguments": "[" * 9000}), "are not a JSON object"),
        (calling({"name": "a", "arguments": json.dumps(nested(300))}), "are not a JSON object"),
        (calling({"name": "a", "arguments": '{"a": "\\ud800"}'}), "are not a JSON object"),
    ],
)
def test_a_hostile_request_is_refused_and_the_episode_goes_on(fields, message):
    async def agent(client):
        with pytest.raises(Refusal, match=message) as refused:
            await client.ask(**({"messages": [QUESTION]} | fields))
        assert refused.value.status == 400
        await client.ask([QUESTION])

    t, session = played(agent, ["a"])
    assert t.final_text == "a" and len(t.turns) == 1 and session.failure is None


def test_a_deeply_nested_request_is_refused():
    deep = b"[" * 1000 + b"]" * 1000
    for body in (deep, b"[" * 10**6):
        with pytest.raises(Refusal):
            DIALECT.read(b'{"messages": [%b]}' % body, {}, AnswerMemory())
    message = b'{"role": "tool", "content": "", "tool_call_id": %b}' % deep
    request = DIALECT.read(b'{"messages": [%b], "model": %b}' % (message, deep), {}, AnswerMemory())
    assert (request.model, request.messages[0].call_id) == ("policy", "")
