"""The door nemo-gym.

The quick tests talk to `PlainServer`, a plain FastAPI server with the routes of a resources server.
Those that are marked `doors` talk to resources servers of the package `nemo-gym`, which its own
Python starts (`nemo_server.py`), with the rows that the package ships.
"""

import asyncio
import copy
import json
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from support.small_server import serving

from agentrl import Message, ToolCall, load_config, load_samples, play
from agentrl.data import write_rows
from agentrl.doors import nemo_gym
from agentrl.errors import ConfigError, DataError, Infrastructure, UserCodeError, UserError
from agentrl.http.client import fetch_json
from agentrl.http.pool import pool_of_loop
from agentrl.preflight import make_plan
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox

pytestmark = pytest.mark.usefixtures("no_tools")
TOKENIZER = byte_tokenizer()

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add to the sum.",
    "parameters": {"type": "object", "properties": {"amount": {"type": "number"}}},
    "strict": True,
}
CRASH, BUSY, HANG = ({**ADD, "name": name} for name in ("crash", "busy", "hang"))
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Add up to 5."}],
        "tools": [ADD, CRASH, BUSY, HANG],
    },
    "expected": 5,
    "first": 1,
    "note": None,
    "agent_ref": {"type": "responses_api_agents", "name": "sums_simple_agent"},
}
CHAT = {
    "responses_create_params": {"input": "Say 5.", "tools": [ADD]},
    "expected": 0,
    "first": 0,
}
CHAT["responses_create_params"]["tool_choice"] = "none"


# -- a plain server of the same API ----------------------------------------------------------------


class Amount(BaseModel):
    amount: int


class PlainServer:
    """A sum for each session; a cookie identifies it. `extra` is added to answers of /verify."""

    def __init__(self, **extra):
        self.app, self.extra = FastAPI(), extra
        self.sums, self.closed, self.verified, self.status = {}, [], [], 200
        self.text = ""
        for path in ("seed_session", "add", "crash", "busy", "hang", "verify", "close_session"):
            self.app.post(f"/{path}")(getattr(self, path))
        self.paths = []
        self.app.middleware("http")(self.record)

    async def record(self, request: Request, call_next):
        self.paths.append(request.url.path)
        return await call_next(request)

    async def seed_session(self, request: Request, body: dict = Body()):
        assert not request.cookies
        session = uuid.uuid4().hex
        self.sums[session] = body["first"]
        answer = JSONResponse({})
        answer.set_cookie("other", "1")
        answer.set_cookie("session", session, httponly=True)
        return answer

    async def add(self, request: Request, body: Amount):
        assert request.cookies["other"] == "1"
        self.sums[request.cookies["session"]] += body.amount
        return {"sum": self.sums[request.cookies["session"]]}

    async def crash(self):
        return JSONResponse("ZeroDivisionError()", 500)

    async def busy(self):
        return JSONResponse("busy", 503)

    async def hang(self):
        await asyncio.sleep(30)

    async def verify(self, request: Request, body: dict = Body()):
        self.verified.append(body)
        if self.text:
            return Response(self.text)
        total = self.sums[request.cookies["session"]]
        answer = {**body, "reward": float(body["expected"] == total), "sum": total}
        return JSONResponse({**answer, "mask_sample": False, **self.extra}, self.status)

    async def close_session(self, request: Request, body: dict | None = Body(None)):
        self.closed.append(request.cookies["session"])


def samples_of(tmp_path, *rows, alias="sums"):
    """Return the samples of rows of NeMo Gym, read as a run reads them."""
    source, target = tmp_path / f"{uuid.uuid4().hex}.jsonl", tmp_path / "agentrl.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_rows(target, nemo_gym.rows(f"nemo-gym:{source}?environment={alias}"))
    return load_samples(str(target))


def load_rows(tmp_path, url, *rows, alias="sums", **options):
    """Register the server as an environment with the schemas of rows."""
    file = tmp_path / f"{uuid.uuid4().hex}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = "".join(f"&{name}={value}" for name, value in options.items())
    nemo_gym.load(alias, f"nemo-gym:{url.removeprefix('http:')}?rows={file}{more}")


@contextmanager
def served(tmp_path, *rows, options=(), **extra):
    plain = PlainServer(**extra)
    with serving(plain.app) as url:
        load_rows(tmp_path, url, *(rows or [ROW, CHAT]), **dict(options))
        yield plain


def play_turns(sample, *turns):
    return play(sample, Scripted(list(turns), TOKENIZER), TOKENIZER)


def test_rows_become_prompts_and_keep_everything(tmp_path):
    messages = [
        {"role": "developer", "content": "Be brief.", "type": "message"},
        {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"text": "2"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "3", "annotations": []}],
            "id": "msg",
        },
        {"role": "user", "content": "4"},
    ]
    long = {"responses_create_params": {"input": messages, "instructions": "Count."}, "a": None}
    chat, plain, full = samples_of(tmp_path, CHAT, ROW, long)
    assert chat.prompt == (Message("user", "Say 5."),)
    assert [(m.role, m.content) for m in full.prompt] == [
        ("system", "Count.\n\nBe brief."),
        ("user", "12"),
        ("assistant", "3"),
        ("user", "4"),
    ]
    assert plain.environment == "sums" and plain.data_source == "nemo-gym/sums"
    assert [s.environment_kwargs["row"] for s in (chat, plain, full)] == [CHAT, ROW, long]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "with input_image"),
        ({"input": [{"type": "function_call", "name": "x"}]}, r"input\[0\] has .* function_call"),
        ({"input": []}, "an empty input"),
        ({"tools": [{"type": "web_search"}]}, "the built-in tool web_search"),
        ({"metadata": {"audio_path": "a.wav"}}, "metadata.audio_path"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{**ADD, "name": "../verify"}]}, "a tool with the name '../verify'"),
        ({"tools": [{**ADD, "name": "verify"}]}, "a tool with the name 'verify'"),
        ({"tools": [{**ADD, "name": "a\r\nb"}]}, "a tool with the name"),
    ],
)
def test_rows_that_agentrl_cannot_play_are_refused_by_name(tmp_path, changes, problem):
    row = {"responses_create_params": {**ROW["responses_create_params"], **changes}}
    with pytest.raises(DataError, match=rf"\.jsonl, row 1.*{problem}"):
        samples_of(tmp_path, ROW, row)


def test_other_rows_and_options_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 0: no row of NeMo Gym: no responses_create_params"):
        samples_of(tmp_path, {"prompt": "x"})
    with pytest.raises(ConfigError, match=r"no option env\. Options: environment"):
        nemo_gym.rows("nemo-gym:x.jsonl?env=sums")
    with pytest.raises(DataError, match=r"none\.jsonl"):
        nemo_gym.rows(f"nemo-gym:{tmp_path}/none.jsonl?environment=sums")


def test_addresses_in_a_config(tmp_path):
    address = f"nemo-gym:{tmp_path}/train.jsonl?environment=sums"  # It has `:/`, as a URL has.
    environments = {"sums": "nemo-gym://localhost:8000?rows=train.jsonl"}
    config = load_config(None, [], {"data.train": address, "environments": environments})
    assert config.all_files == [
        f"environment+{address}#",
        "environment+nemo-gym://localhost:8000?rows=train.jsonl#sums",
    ]


def test_an_address_without_a_resources_server_is_refused(tmp_path):
    nemo_gym.load("nemo-gym", "nemo-gym:rows.jsonl")  # Rows register nothing.
    with pytest.raises(UserError, match=r"environments\.sums: http://127\.0\.0\.1:1 does not answ"):
        nemo_gym.load("sums", "nemo-gym://127.0.0.1:1")
    with serving(FastAPI()) as url, pytest.raises(UserError, match=r"needs POST /seed_session"):
        load_rows(tmp_path, url, ROW)
    no_paths = FastAPI(openapi_url=None)
    no_paths.get("/openapi.json")(lambda: {"paths": None})
    with serving(no_paths) as url, pytest.raises(UserError, match=r"It has: \[\]"):
        load_rows(tmp_path, url, ROW)
    other = copy.deepcopy(ROW)
    other["responses_create_params"]["tools"][0]["description"] = "Add."
    with (
        serving(PlainServer().app) as url,
        pytest.raises(DataError, match=r"row 1: another schema of the tool add than"),
    ):
        load_rows(tmp_path, url, ROW, other)


def test_an_episode_with_a_plain_server(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    with served(tmp_path) as plain:
        turns = call("add", amount=1), f"<think>2</think>Now 3.{call('add', amount=3)}", "5 it is."
        right = play_turns(sample, *turns)
        wrong = play_turns(sample, call("add", amount=2), "5")
        assert (right.scores.outcome, wrong.scores.outcome) == (1.0, 0.0)
        assert right.scores.metrics == {"sum": 5.0}  # `expected` and `first` are the row's.
        results = [m.content for m in right.messages if m.role == "tool"]
        assert results == ['{"sum":2}', '{"sum":5}']
        body = plain.verified[0]
        assert {k: v for k, v in body.items() if k != "response"} == ROW
        assert len({*plain.closed}) == len(plain.closed) == 2
        assert [i["type"] for i in body["response"]["output"]] == [
            *("function_call", "function_call_output", "reasoning", "message", "function_call"),
            *("function_call_output", "message"),
        ]
        first, result, thought, text, second, *_ = body["response"]["output"]
        assert (first["name"], first["arguments"]) == ("add", '{"amount":1}')
        assert result["call_id"] == first["call_id"] != second["call_id"]
        assert result["output"] == '{"sum":2}'
        assert thought["summary"][0]["text"] == "2" and text["content"][0]["text"] == "Now 3."


def test_examples_in_a_prompt_are_not_in_the_response(tmp_path):
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))
    ]
    [sample] = samples_of(tmp_path, {**CHAT, "responses_create_params": {"input": messages}})
    with served(tmp_path) as plain:
        play_turns(sample, "4")
    [item] = plain.verified[0]["response"]["output"]
    assert item["content"][0]["text"] == "4"


def test_a_session_that_a_cookie_does_not_close(tmp_path):
    class NeedsIds(PlainServer):
        async def close_session(self, body: dict = Body()):
            raise NotImplementedError

    [sample] = samples_of(tmp_path, CHAT)
    plain = NeedsIds()
    with serving(plain.app) as url:
        load_rows(tmp_path, url, CHAT)
        assert play_turns(sample, "5").scores.outcome == 1.0
    assert plain.paths == ["/openapi.json", "/seed_session", "/verify"]


def test_a_row_offers_its_own_tools(tmp_path):
    [chat] = samples_of(tmp_path, CHAT)
    with served(tmp_path) as plain:
        trajectory = play_turns(chat, call("add", amount=1))
        assert [turn.tool_calls for turn in trajectory.turns] == [()]
        response = plain.verified[0]["response"]
        assert response["tool_choice"] == "none"
        assert '"add"' in response["output"][0]["content"][0]["text"]


def test_rows_whose_tools_have_no_schemas_are_refused_before_they_are_played(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    rows = f"nemo-gym:{tmp_path}/rows.jsonl"
    with serving(PlainServer().app) as url:
        servers = {"bare": f"nemo-gym:{url.removeprefix('http:')}"}
        keys = {"data.train": f"{rows}?environment=bare", "environments": servers}
        with pytest.raises(DataError, match=r"row 0, environment_kwargs: .*'add'.*\?rows=FILE"):
            make_plan(load_config(None, [], keys))
    with pytest.raises(UserError, match=r"names no server of environments: add \?environment="):
        nemo_gym.rows(rows)


def test_a_row_with_an_unknown_tool_is_not_played(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    with served(tmp_path, CHAT), pytest.raises(UserCodeError, match=r"no tool 'add'.*\?rows=FILE"):
        play_turns(sample, "5")


def test_the_model_reads_what_the_server_answers_to_a_bad_call(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    with served(tmp_path) as plain:
        turns = call("add", amount=0.5), call("crash"), call("add", amount="x"), "5"
        trajectory = play_turns(sample, *turns)
        server, crash, schema = [t.tool_results[0] for t in trajectory.turns[:3]]
        assert "valid integer" in json.loads(server.content)["detail"][0]["msg"]
        assert crash.content == '"ZeroDivisionError()"'
        assert [r.error for r in (server, crash, schema)] == ["tool_error", "tool_error", "schema"]
        output = plain.verified[0]["response"]["output"]
        assert [i["type"] for i in output].count("function_call") == 3


def test_a_malformed_call_is_a_part_of_the_text():
    calls = ToolCall("", "{", error="not JSON", span=(0, 3)), ToolCall("add", {}, span=(4, 9))
    messages = [
        Message("assistant", "bad good", calls),
        Message("tool", "No."),
        Message("tool", "Y"),
    ]
    text, good, result = nemo_gym.response_of(messages, CHAT)["output"]
    assert text["content"][0]["text"] == "bad"
    assert (good["name"], result["output"]) == ("add", "Y")
    assert result["call_id"] == good["call_id"]
    [empty] = nemo_gym.response_of([Message("assistant", "")], CHAT)["output"]
    assert empty["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("extra", "status", "problem"),
    [
        ({}, 500, r"nemo-gym: the server at http://\S+ answered 500 to POST /verify"),
        ({}, 422, r"answered 422"),
        ({"mask_sample": True, "failure_kind": "judge_failed"}, 200, "no valid reward: judge_fail"),
        ({"reward": None}, 200, "no valid reward"),
        ("<html>", 200, "no valid reward: no JSON object: <html>"),
        ("[1]", 200, "no valid reward: no JSON object"),
        ('{"reward": NaN}', 200, "no valid reward: no JSON object"),
    ],
)
def test_no_reward_is_not_a_reward_of_0(tmp_path, extra, status, problem):
    [sample] = samples_of(tmp_path, ROW)
    text, extra = (extra, {}) if isinstance(extra, str) else ("", extra)
    with served(tmp_path, **extra) as plain, pytest.raises(Infrastructure, match=problem):
        plain.status, plain.text = status, text
        play_turns(sample, "5")


def test_a_failure_of_the_server_is_not_a_result(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    with served(tmp_path, options={"timeout": 1}):
        with pytest.raises(Infrastructure, match=r"answered 503 to POST /busy"):
            play_turns(sample, call("busy"))
        with pytest.raises(Infrastructure, match=r"/hang: no response before the deadline"):
            play_turns(sample, call("hang"))


async def test_a_server_that_ends_in_an_episode(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    toolbox = LocalToolbox()
    with served(tmp_path):
        await toolbox.open("e", sample)
        [result] = await toolbox.run([ToolCall("add", {"amount": 4})], "e", 0, ())
        assert result.content == '{"sum":5}'
    with pytest.raises(Infrastructure, match="/add"):
        await toolbox.run([ToolCall("add", {"amount": 4})], "e", 1, ())
    with pytest.raises(Infrastructure, match="/verify"):
        await toolbox.score("e", sample.prompt)
    await toolbox.aclose()


def test_metrics_do_not_flood(tmp_path):
    [sample] = samples_of(tmp_path, ROW)
    parts = {"reward_components": {"style": 0.5}, "text": "x", **{f"m{i}": i for i in range(30)}}
    with served(tmp_path, **{"right": True, **parts}):
        metrics = play_turns(sample, "5").scores.metrics
    assert len(metrics) == nemo_gym.MAX_METRICS
    assert metrics["right"] == 1.0 and "text" not in metrics and "mask_sample" not in metrics


async def play_counts(samples, tool, argument):
    """Play episodes at once; sample i calls the tool i times. Return the outcomes."""
    toolbox = LocalToolbox()

    async def one(i, sample):
        await toolbox.open(f"e{i}", sample)
        messages = [*sample.prompt]
        for turn in range(i % 3 + 1):
            made = ToolCall(tool, {argument: i})
            [result] = await toolbox.run([made], f"e{i}", turn, messages)
            messages += [Message("assistant", "", (made,)), Message("tool", result.content)]
        scores = await toolbox.score(f"e{i}", messages)
        await toolbox.close(f"e{i}")
        return scores.outcome

    outcomes = await asyncio.gather(*(one(i, s) for i, s in enumerate(samples)))
    connections = pool_of_loop().connection_count
    await toolbox.aclose()
    return outcomes, connections


async def test_200_episodes_at_once_have_sessions_of_their_own(tmp_path):
    right = [{**ROW, "first": i, "expected": i + (i % 3 + 1) * i} for i in range(200)]
    right[7]["expected"] += 1
    samples = samples_of(tmp_path, *right)
    with served(tmp_path) as plain:
        outcomes, connections = await play_counts(samples, "add", "amount")
    assert Counter(outcomes) == {1.0: 199, 0.0: 1} and outcomes[7] == 0.0
    assert connections <= 200 and len({*plain.closed}) == 200


# -- servers of the package ------------------------------------------------------------------------

PYTHON = str(Path(__file__).parents[2] / ".venv-doors/nemo-gym/bin/python")
needs_package = pytest.mark.skipif(
    not Path(PYTHON).exists(),
    reason=f"no {PYTHON}: `make doors`",
)
VALIDATE = """
import json, sys
from nemo_gym.base_resources_server import BaseVerifyRequest
for line in sys.stdin:
    parsed = BaseVerifyRequest.model_validate(json.loads(line)).response
    types = [type(item).__name__ for item in parsed.output]
    print(json.dumps([types, parsed.output_text]))
"""


@contextmanager
def gym_server(name, port):
    """Start a resources server of the package; yield its URL, its process and its example rows."""
    command = [PYTHON, str(Path(__file__).with_name("nemo_server.py")), name, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline, name
            try:
                fetch_json(url, "/openapi.json", timeout=5)
                break
            except Infrastructure:
                time.sleep(0.2)
        done = subprocess.run(
            [PYTHON, "-c", "import resources_servers as r; print(*r.__path__)"],
            capture_output=True,
            text=True,
            check=True,
        )
        folder = Path(done.stdout.split()[0])
        yield url, process, folder / name / "data" / "example.jsonl"
    finally:
        process.kill()
        process.wait()


def load_gym(url, rows, alias):
    nemo_gym.load(alias, f"nemo-gym:{url.removeprefix('http:')}?rows={rows}")


def gym_samples(tmp_path, rows, alias):
    file = tmp_path / f"{alias}.jsonl"
    write_rows(file, nemo_gym.rows(f"nemo-gym:{rows}?environment={alias}"))
    return load_samples(str(file))


def counter_turns(sample):
    """Return a solution of example_session_state_mgmt."""
    row = sample.environment_kwargs["row"]
    missing = row["expected_count"] - row["initial_count"]
    return call("increment_counter", count=missing), call("get_counter_value"), "Done."


@pytest.mark.proves("nemo-gym", "rows", "tools", "reward", "200 episodes at once")
@pytest.mark.doors
@needs_package
async def test_a_server_of_the_package_with_state(tmp_path, unused_tcp_port):
    with gym_server("example_session_state_mgmt", unused_tcp_port) as (url, process, rows):
        load_gym(url, rows, "counter")
        samples = gym_samples(tmp_path, rows, "counter")
        assert len(samples) == 5
        for sample in samples:
            right = await asyncio.to_thread(play_turns, sample, *counter_turns(sample))
            assert right.scores.outcome == 1.0
            count = sample.environment_kwargs["row"]["expected_count"]
            assert right.turns[1].tool_results[0].content == f'{{"count":{count}}}'
            turns = call("increment_counter", count=1e30), call("increment_counter", cnt=1), "Done."
            wrong = await asyncio.to_thread(play_turns, sample, *turns)
            assert wrong.scores.outcome == 0.0
            assert wrong.turns[1].tool_results[0].error == "schema"

        kwargs = samples[0].environment_kwargs["row"]
        made = [
            {**kwargs, "initial_count": i, "expected_count": i + (i % 3 + 1) * i}
            for i in range(200)
        ]
        made[7]["expected_count"] += 1
        many = samples_of(tmp_path, *made, alias="counter")
        outcomes, connections = await play_counts(many, "increment_counter", "count")
        assert Counter(outcomes) == {1.0: 199, 0.0: 1} and outcomes[7] == 0.0
        assert connections <= 200

        toolbox = LocalToolbox()
        await toolbox.open("e", samples[0])
        process.kill()
        process.wait()
        with pytest.raises(Infrastructure, match="/increment_counter"):
            await toolbox.run([ToolCall("increment_counter", {"count": 1})], "e", 0, ())
        await toolbox.aclose()


@pytest.mark.doors
@needs_package
def test_a_server_of_the_package_with_a_route_for_all_tools(tmp_path, unused_tcp_port):
    with gym_server("workplace_assistant", unused_tcp_port) as (url, _, rows):
        load_gym(url, rows, "work")
        sample = gym_samples(tmp_path, rows, "work")[0]
        truth = sample.environment_kwargs["row"]["ground_truth"]
        calls = [call(c["name"], **json.loads(c["arguments"])) for c in truth]
        assert play_turns(sample, *calls, "Done.").scores.outcome == 1.0
        bad = call("email_get_email_information_by_id", email_id="none", field="body")
        wrong = play_turns(sample, bad, "Done.")
        assert wrong.scores.outcome == 0.0
        assert wrong.turns[0].tool_results[0].content == '{"output":"Email not found."}'


@pytest.mark.doors
@needs_package
def test_a_verifier_of_the_package(tmp_path, unused_tcp_port):
    with gym_server("mcqa", unused_tcp_port) as (url, _, rows):
        nemo_gym.load("mcqa", f"nemo-gym:{url.removeprefix('http:')}")
        for sample in gym_samples(tmp_path, rows, "mcqa"):
            right = sample.environment_kwargs["row"]["expected_answer"]
            rewards = {
                letter: play_turns(sample, f"<think>Hm.</think>\\boxed{{{letter}}}").scores.outcome
                for letter in "ABCDEFGHIJ"
            }
            assert rewards == {letter: float(letter == right) for letter in "ABCDEFGHIJ"}


@pytest.mark.doors
@needs_package
def test_what_verifiers_get_is_valid_for_the_package(tmp_path):
    rows = [ROW, CHAT]
    with served(tmp_path) as plain:
        sample, chat = samples_of(tmp_path, *rows)
        turns = f"<think>2</think>Now.{call('add', amount=1)}", '<tool_call>\n{"name', call("crash")
        play_turns(sample, *turns, "Grüße")
        play_turns(sample, "<think>Only a thought.</think>")
        play_turns(chat, "")
    done = subprocess.run(
        [PYTHON, "-c", VALIDATE],
        input="\n".join(map(json.dumps, plain.verified)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    output = done.stdout.replace("NeMoGym", "").replace("Response", "")
    message, function, result = "OutputMessage", "FunctionToolCall", "FunctionCallOutput"
    first = ["ReasoningItem", message, function, result, message, function, result, message]
    assert [json.loads(line) for line in output.splitlines()] == [
        [first, 'Now.<tool_call>\n{"nameGrüße'],
        [["ReasoningItem"], ""],
        [[message], ""],
    ]


def run_agentrl(folder, url, rows, *words):
    """Run a command on rows in the folder, and return its output."""
    keys = (
        f"data.train=nemo-gym:{rows}?environment=gym",
        f"environments.gym=nemo-gym:{url.removeprefix('http:')}?rows={rows}",
    )
    command = [sys.executable, "-m", "agentrl", *words, *keys]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.doors
@needs_package
def test_check_environment_with_a_server_of_the_package(tmp_path, unused_tcp_port):
    with gym_server("example_multi_step", unused_tcp_port) as (url, _, rows):
        checked = run_agentrl(tmp_path, url, rows, "check", "environment")
    assert "0 of 20 checks failed" in checked
    for check in ("concurrent episodes do not affect each other", "no method raises"):
        assert f"passed       {check}" in checked


@pytest.mark.proves("nemo-gym", "training")
@pytest.mark.doors
@needs_package
def test_training_with_a_server_of_the_package(tmp_path, unused_tcp_port):
    words = ("trainer.total_steps=5", "data.batch_size=2", "rollout.n=4", "--output", "run")
    with gym_server("example_session_state_mgmt", unused_tcp_port) as (url, _, rows):
        run_agentrl(tmp_path, url, rows, "train", "--model", "tiny", *words)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert steps[-1]["step"] == 5
    played = [step["data"] for step in steps if "reward/outcome" in step["data"]]
    assert len(played) == 5 and {step["rollout/dropped"] for step in played} == {0.0}
