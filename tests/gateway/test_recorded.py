"""`agentrl serve --record`: what is stored of answers and of their scores."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from contextlib import closing, contextmanager

import httpx
import orjson
import pytest
from support.wires import WIRES

from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.config import Config
from agentrl.data import recorded
from agentrl.data.recorded import FILE, Recorder, identify_records, read_records
from agentrl.errors import DataError, UserError
from agentrl.gateway.dialects import DIALECTS
from agentrl.gateway.serve import create_app
from agentrl.gateway.stateless import sessions_of_keys, without_budgets
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox

TOKENIZER = byte_tokenizer()
POLICY = {"model": "m", "run": "", "step": 7, "vocabulary": "v"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "Q"}


class Client:
    """A client of a server that records in a folder, with a key."""

    def __init__(self, http):
        self._http = http

    async def post(self, path, body, key="alpha", **headers):
        headers = {"authorization": f"Bearer {key}", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await self._http.post(path, content=content, headers=headers)

    async def ask(self, *messages, key="alpha", **fields):
        """Return the id and the message of an answer."""
        body = {"messages": messages, **fields}
        response = await self.post("/v1/chat/completions", body, key)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["id"], answer["choices"][0]["message"]

    async def score(self, id, score, key="alpha", **headers):
        response = await self.post("/v1/feedback", {"id": id, "score": score}, key, **headers)
        return response.status_code, response.json()


def serve(folder, use, turns=lambda prompt, turn: "a", policy=POLICY):
    """Serve a script to `async def use(client)`; return its result and what was recorded."""
    config = without_budgets(Config())
    engine = Scripted(turns, TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)

    async def run():
        with closing(Recorder(folder, policy)) as recorder:
            app = create_app(sessions_of_keys("alpha, beta", runtime, 1.0, recorder))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await use(Client(http))

    return asyncio.run(run()), read_records(folder)


def test_an_answer_is_stored_as_it_was_sampled(tmp_path):
    async def use(client):
        id, message = await client.ask(QUESTION, temperature=0.5, top_p=0.9, max_tokens=9)
        await client.ask(QUESTION, message, QUESTION, key="alpha")
        return id

    id, records = serve(tmp_path, use)
    first, second = records.answers.values()
    assert first.id == id and first.parent == "" and second.parent == id
    assert TOKENIZER.decode(first.sampled).startswith("a") and len(first.logprobs) == 2
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert second.prompt[len(first.prompt) :][: len(first.sampled)] == first.sampled
    used = {name: first.sampling[name] for name in ("temperature", "top_p", "top_k", "max_tokens")}
    assert used == {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "max_tokens": 9}
    assert second.sampling["temperature"] == 1.0 and second.step == 7
    assert [(m.role, m.content) for m in second.messages] == [("user", "Q")]
    assert (first.text, first.finish_reason, records.policies[0]["model"]) == ("a", "stop", "m")
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kept", [1, 1024])
def test_a_line_has_only_the_tokens_that_its_prompt_adds(tmp_path, monkeypatch, kept):
    """A line has the whole prompt if the server has forgotten the tokens before it."""
    monkeypatch.setattr(recorded, "KEPT_ROWS", kept)
    seen = []

    async def use(client):
        talks = [[{"role": "user", "content": word * 100}] for word in ("one", "two")]
        for _ in range(4):
            for talk in talks:
                _, message = await client.ask(*talk)
                talk += [message, QUESTION]
        await client.ask(*talks[0][:-1], {"role": "user", "content": "a branch"})
        await client.ask(*talks[0])

    _, records = serve(tmp_path, use, lambda prompt, turn: seen.append(prompt) or "a")
    assert [TOKENIZER.decode(a.prompt) for a in records.answers.values()] == seen
    lines = [orjson.loads(line) for line in (tmp_path / FILE).read_bytes().splitlines()[1:]]
    shared = [line["answer"]["shared"] for line in lines]
    parents = [records.answers.get(a.parent) for a in records.answers.values()]
    rows = [len(p.prompt + p.sampled) if p else 0 for p in parents]
    assert shared[:8] == (rows[:8] if kept > 1 else [0] * 8) and all(rows[2:])
    assert shared[9] == 0  # The branch has taken the tokens.


def test_all_apis_record_the_same_rows(tmp_path):
    def script(prompt, turn):
        return "It is 3." if "tool_response" in prompt else f"Wait. {call('calc', x=1)}"

    async def converse(client, wire, streams):
        history = [{"role": "system", "content": "S"}, QUESTION]
        for _ in range(2):
            body = wire.body(history, [TOOL], stream=streams)
            path = f"/v1{wire.dialect.path}"
            answer = (await client.post(path, body)).content
            if streams:
                events = [e for e in answer.split(b"\n\n") if e]
                message = wire.streamed(events)
            else:
                message = wire.message(answer)
            history.append(message)
            if calls := message.get("tool_calls"):
                history.append({"role": "tool", "content": "3", "tool_call_id": calls[0]["id"]})

    rows = []
    for i, (wire, streams) in enumerate((w, s) for w in WIRES.values() for s in (False, True)):
        _, records = serve(tmp_path / str(i), lambda c: converse(c, wire, streams), script)  # noqa: B023
        first, second = records.answers.values()
        assert second.parent == first.id
        rows.append(
            [(a.prompt, a.sampled, a.logprobs, a.messages, a.text) for a in (first, second)]
        )
    assert len(rows) == 6 and all(row == rows[0] for row in rows)


def test_ids_of_all_apis_can_be_scored(tmp_path):
    async def use(client):
        results = []
        for score, wire in enumerate(WIRES.values()):
            body = wire.body([{"role": "user", "content": str(score)}])
            id = (await client.post(f"/v1{wire.dialect.path}", body)).json()["id"]
            results.append((id.split("_")[0].split("-")[0], *await client.score(id, score)))
        return results

    results, records = serve(tmp_path, use)
    assert results == [("chatcmpl", 200, {}), ("msg", 200, {}), ("resp", 200, {})]
    assert records.scores == dict(zip(records.answers, (0.0, 1.0, 2.0), strict=True))


def test_the_first_score_of_the_user_that_got_the_answer_counts(tmp_path):
    async def use(client):
        (id, _), (other, _) = [await client.ask(QUESTION, key=k) for k in ("alpha", "beta")]
        assert id != other
        foreign, unknown = await client.score(other, 1), await client.score("chatcmpl-0-0", 1)
        assert foreign == unknown and foreign[0] == 404  # Nobody learns whose ids exist.
        assert await client.score(id, 0.25) == (200, {})
        status, body = await client.score(id, 1)
        assert status == 409 and "has the score 0.25 already" in body["error"]["message"]
        status, body = await client.score(id, 1, **{"anthropic-version": "2023-06-01"})
        assert status == 409 and body["type"] == "error"
        assert (await client.score(id, 1, key="gamma"))[0] == 401
        return id

    id, records = serve(tmp_path, use)
    assert records.scores == {id: 0.25} and not records.damaged

    async def again(client):
        return await client.score(id, 1)

    assert serve(tmp_path, again)[0][0] == 409  # Another server knows the answer, too.


@pytest.mark.parametrize(
    "score", ["1", None, True, [1], {}, 1001, -1e300, pytest.param(10**400, id="huge")]
)
def test_what_is_no_score_is_refused(tmp_path, score):
    async def use(client):
        id, _ = await client.ask(QUESTION)
        body = json.dumps({"id": id, "score": score}).encode()
        bodies = [body, b'{"score": 1}', b"[]", b"x", b'{"id": "%s", "score": NaN}' % id.encode()]
        return [await client.post("/v1/feedback", body) for body in bodies]

    responses, records = serve(tmp_path, use)
    assert [r.status_code for r in responses] == [400] * 5 and not records.scores
    assert 'send {"id": ID, "score": NUMBER}' in responses[0].json()["error"]["message"]


def test_users_do_not_share_conversations(tmp_path):
    async def use(client):
        body = {"input": "Q"}
        id = (await client.post("/v1/responses", body)).json()["id"]
        body |= {"previous_response_id": id}
        mine = await client.post("/v1/responses", body)
        return mine.status_code, (await client.post("/v1/responses", body, "beta")).status_code

    statuses, records = serve(tmp_path, use)
    assert statuses == (200, 400) and [bool(a.parent) for a in records.answers.values()] == [0, 1]


def test_edited_histories_and_branches(tmp_path):
    async def use(client):
        first, one = await client.ask(QUESTION)
        await client.ask(QUESTION, one, {"role": "user", "content": "left"})
        await client.ask(QUESTION, one, {"role": "user", "content": "right"})
        edited = {"role": "assistant", "content": "other"}
        await client.ask({"role": "user", "content": "X"}, one, QUESTION)
        await client.ask(QUESTION, edited, QUESTION)
        last = QUESTION, one, {"role": "user", "content": "right"}, edited, QUESTION
        await client.ask(*last)
        return first

    first, records = serve(tmp_path, use)
    assert [a.parent for a in records.answers.values()] == ["", first, first, "", "", first]
    *_, last = records.answers.values()
    assert [m.content for m in last.messages] == ["right", "other", "Q"]


def test_a_line_that_a_kill_cut_short_is_removed(tmp_path):
    async def use(client):
        return (await client.ask(QUESTION))[0]

    id, _ = serve(tmp_path, use)
    whole = (tmp_path / FILE).read_bytes()
    with (tmp_path / FILE).open("ab") as file:
        file.write(whole.splitlines()[1][:50])
    assert [*read_records(tmp_path).answers] == [id]
    other, records = serve(tmp_path, use)
    assert [*records.answers] == [id, other] and not records.damaged
    assert (tmp_path / FILE).read_bytes().startswith(whole)


def test_a_folder_belongs_to_one_server_and_one_vocabulary(tmp_path):
    first = Recorder(tmp_path, POLICY)
    with pytest.raises(UserError, match="another server records there"):
        Recorder(tmp_path, POLICY)
    first.close()
    Recorder(tmp_path, POLICY | {"step": 9, "model": "n"}).close()
    with pytest.raises(UserError, match="another vocabulary, that of n"):
        Recorder(tmp_path, POLICY | {"vocabulary": "w"})
    Recorder(tmp_path, POLICY).close()  # The refused one does not hold the folder.


@contextmanager
def full_disk(size):
    """Let no file of this process grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_fails_no_answer(tmp_path, caplog):
    caplog.set_level(logging.ERROR)

    async def use(client):
        id, message = await client.ask(QUESTION)
        await client.score("unknown", 1)  # Now the answer is written.
        with full_disk(os.path.getsize(tmp_path / FILE) + 20):
            lost, second = await client.ask(QUESTION, message, QUESTION)
            await client.ask(QUESTION)
            status = [(await client.score(i, 1))[0] for i in (id, lost)]
        third = await client.ask(QUESTION, message, QUESTION, second, QUESTION)
        return status, id, third[0], (await client.score(id, 1))[0]

    (status, id, third, after), records = serve(tmp_path, use)
    assert status == [503, 404] and after == 200
    assert sum("answers are not recorded" in r.message for r in caplog.records) == 1
    assert [*records.answers] == [id, third] and not records.damaged
    assert records.answers[third].parent == ""


def test_answers_of_a_version_without_shared_are_read(tmp_path):
    async def use(client):
        _, message = await client.ask(QUESTION)
        await client.score((await client.ask(QUESTION, message, QUESTION))[0], 1)

    _, records = serve(tmp_path / "new", use)
    lines = [*map(orjson.loads, (tmp_path / "new" / FILE).read_bytes().splitlines())]
    for answer in (line["answer"] for line in lines if "answer" in line):
        del answer["shared"]
        answer["prompt"] = records.answers[answer["id"]].prompt.tolist()
    (tmp_path / FILE).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    old = read_records(tmp_path)
    assert (old.answers, old.scores, old.damaged) == (records.answers, records.scores, 0)


def test_a_damaged_first_line_is_no_crash(tmp_path):
    async def use(client):
        await client.score((await client.ask(QUESTION))[0], 1)

    serve(tmp_path, use)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    address = f"recorded:{tmp_path}"
    (tmp_path / FILE).write_bytes(b"".join([b"garbage\n", *lines]))
    assert identify_records(address) == orjson.loads(lines[0])["policy"]["id"]
    (tmp_path / FILE).write_bytes(b"".join([b"garbage\n", *lines[1:]]))
    with pytest.raises(DataError, match=r"no recorded answers in .* \(1 damaged line\)"):
        identify_records(address)


def test_damaged_lines_are_counted(tmp_path):
    async def use(client):
        id, message = await client.ask(QUESTION)
        await client.ask(QUESTION, message, QUESTION)
        await client.score(id, 1)
        return id

    id, _ = serve(tmp_path, use)
    policy, first, second, score = map(orjson.loads, (tmp_path / FILE).read_bytes().splitlines())
    answer = first["answer"]
    bad = [
        {"answer": answer},  # twice
        {"answer": answer | {"id": "a", "logprobs": [None, 0.0]}},
        {"answer": answer | {"id": "b", "logprobs": [0.0]}},
        {"answer": answer | {"id": "c", "sampled": [-1, 0]}},
        {"answer": answer | {"id": "d", "sampled": [2**40, 0]}},
        {"answer": answer | {"id": "e", "messages": [{"role": "boss", "content": ""}]}},
        {"answer": answer | {"id": "f", "parent": "unknown"}},
        {"answer": second["answer"] | {"id": "g", "user": "another"}},
        {"answer": second["answer"] | {"id": "h", "shared": "5"}},
        {"score": score["score"] | {"score": 0}},
        {"score": score["score"] | {"id": second["answer"]["id"], "user": "another"}},
        {"score": score["score"] | {"id": second["answer"]["id"], "score": 1e9}},
        {},
        [],
    ]
    lines = [policy, first, second, score, *bad]
    (tmp_path / FILE).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    records = read_records(tmp_path)
    assert records.damaged == len(bad)
    assert len(records.answers) == 2 and records.scores == {id: 1.0}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: type(d).__name__)
def test_a_bug_in_a_dialect_is_answered_in_its_form(tmp_path, monkeypatch, caplog, dialect):
    def fail(*args):
        raise ZeroDivisionError("1/0")

    monkeypatch.setattr(type(dialect), "_read", fail)

    async def use(client):
        return await client.post(f"/v1{dialect.path}", {})

    response, _ = serve(tmp_path, use)
    assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
    assert "ZeroDivisionError: 1/0" in response.json()["error"]["message"]
    assert any("a bug" in r.message and r.exc_info for r in caplog.records)
