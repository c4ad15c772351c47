"""`agentrl eval` of several models and of URLs: one table, the same rows, resumed after a kill."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
from fastapi import FastAPI, Request, Response
from support.forked_python import ForkedPython, run_agentrl
from support.small_server import serving

from agentrl.cli import main
from agentrl.data import write_rows
from agentrl.store import TrajectoryStore

pytestmark = pytest.mark.usefixtures("shipped_registries")

CALCULATOR = """
from agentrl import tool

@tool
def calculator(expression: str) -> str:
    '''Evaluate an expression.

    Args:
        expression: such as 3*4.
    '''
    return str(eval(expression))
"""
KEY = "a-key-of-a-service-1"


class Api:
    """An OpenAI-compatible server whose model calls the calculator, if it has it.

    Without the calculator it answers even sums right, and odd ones wrong.
    """

    def __init__(self):
        self.app, self.requests, self.url = FastAPI(), [], ""
        self.faults: list[Response] = []
        self.pause = 0.0

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request):
            body = await request.json()
            self.requests.append((body, request.headers.get("authorization")))
            row = re.findall(r"(\d+)\+", body["messages"][0]["content"])[0]
            await asyncio.sleep(self.pause * int(row))
            if self.faults:
                return self.faults.pop(0)
            message = {"role": "assistant", **self.answer(body)}
            usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 5}
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}

    def answer(self, body):
        last = body["messages"][-1]
        if last["role"] == "tool":
            call = body["messages"][-2]["tool_calls"][0]
            assert last["tool_call_id"] == call["id"]
            return {"content": f"#### {last['content']}"}
        [(a, b)] = re.findall(r"(\d+)\+(\d+)", last["content"])
        if "tools" in body and body["model"] == "caller":
            arguments = json.dumps({"expression": f"{a}+{b}"})
            function = {"name": "calculator", "arguments": arguments}
            return {"content": None, "tool_calls": [{"id": "c1", "function": function}]}
        total = int(a) + int(b)
        return {"content": f"#### {total + total % 2}"}


@pytest.fixture
def api(monkeypatch, tmp_path):
    api = Api()
    rows = [
        {
            "prompt": f"How much is {i}+1?",
            "ground_truth": str(i + 1),
            "data_source": "openai/gsm8k",
            "agent_name": "tool_agent",
            "tools": ["calculator"],
        }
        for i in range(8)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE", KEY)
    with serving(api.app) as url:
        api.url = f"{url}/v1"
        yield api


@pytest.fixture
def run(capsys):
    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words)))
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, out + err
        return out + err

    return run


PLAY = (
    *("eval", "--dataset", "rows.jsonl", "-f", "calculator.py"),
    *("val.greedy=false", "tools.transport=in_process"),
)


def test_two_models_of_a_url_are_one_table(api, run, tmp_path):
    models = ["--model", f"{api.url}#guesser", "--model", f"{api.url}#caller"]
    output = run(*PLAY, *models, "--output", "both", "--token-env", "SERVICE")
    assert re.search(r"^guesser +0 +8  0.500 ± 0.189", output, re.M)
    assert re.search(r"^caller +0 +8  1.000 ± 0.000", output, re.M)
    line = next(x for x in output.splitlines() if x.startswith("caller - guesser"))
    # Four rows of 8 rise from 0 to 1: s = sqrt(2/7), t(0.975, 7) = 2.364624.
    half = 2.364624 * (2 / 7) ** 0.5 / 8**0.5
    assert f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]" in line
    assert line.split()[-2:] == ["4", "0"]
    assert "rows gained by caller - guesser: 0, 2, 4, 6" in output
    numbers = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert [v["reward"]["mean"] for v in numbers["validations"]] == [0.5, 1.0]
    assert numbers["differences"][0]["gained"] == ["0", "2", "4", "6"]
    assert (tmp_path / "both" / "compare.svg").exists()
    first = [body for body, _ in api.requests if len(body["messages"]) == 1]
    seeds = [[b["seed"] for b in first if b["model"] == m] for m in ("guesser", "caller")]
    assert sorted(seeds[0]) == sorted(seeds[1]) and len(set(seeds[0])) == 8
    assert {key for _, key in api.requests} == {f"Bearer {KEY}"}
    assert KEY not in "".join(f.read_text() for f in tmp_path.rglob("*.json"))


def test_an_episode_of_a_url_has_messages_and_no_tokens(api, run, tmp_path):
    run(*PLAY, "--model", f"{api.url}#caller", "--output", "a")
    stored = [r.scored.trajectory for r in TrajectoryStore(tmp_path / "a/trajectories").read()]
    assert all(not s.prompt_ids and not s.response_ids for t in stored for s in t.segments)
    messages, turns = stored[0].messages, stored[0].turns
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert turns[0].tool_calls[0].arguments == {"expression": "0+1"}
    assert turns[0].tool_results[0].content == "1" and turns[0].prompt_tokens == 10
    assert messages[3].content == "#### 1" and stored[0].stop_reason == "done"
    body = api.requests[0][0]
    assert body["tools"][0]["function"]["name"] == "calculator" and body["temperature"] == 1.0
    assert "authorization" not in body and api.requests[0][1] is None
    assert "#### 1" in run("show", "a", "--episode", stored[0].episode_id)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("{", "bad_call"),
        ("[1]", "bad_call"),
        pytest.param("[" * 100_000, "bad_call", id="deep"),
        ('{"x": 1}', "schema"),
    ],
)
def test_a_wrong_call_is_answered_with_an_error(api, run, tmp_path, arguments, error):
    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            assert body["messages"][-1]["content"].startswith("Error")
            assert body["messages"][-2]["tool_calls"][0]["function"]["arguments"] == arguments
            return {"content": "I give up"}
        function = {"name": "calculator", "arguments": arguments}
        return {"content": "", "tool_calls": [{"id": "c", "function": function}]}

    api.answer = answer
    run(*PLAY, "--model", f"{api.url}#m", "--output", "a")
    [trajectory, *_] = [
        r.scored.trajectory for r in TrajectoryStore(tmp_path / "a/trajectories").read()
    ]
    assert trajectory.turns[0].tool_results[0].error == error


def test_budgets_end_episodes_of_a_url(api, run, tmp_path):
    def answer(body):
        function = {"name": "calculator", "arguments": '{"expression": "1+1"}'}
        return {"content": "", "tool_calls": [{"id": "c", "function": function}]}

    api.answer = answer
    ends = {}
    for key in (
        "rollout.max_turns=2",
        "rollout.max_trajectory_tokens=20",
        "rollout.max_tool_calls=1",
    ):
        run(*PLAY, "--model", f"{api.url}#m", "--output", key, key)
        stored = TrajectoryStore(tmp_path / key / "trajectories").read()
        ends[key] = {r.scored.trajectory.stop_reason for r in stored}
    assert [*ends.values()] == [{"turns"}, {"trajectory_tokens"}, {"tool_calls"}]


FAULTS = {
    "busy": Response("{}", 429, media_type="application/json"),
    "error": Response('{"error": "boom"}', 500, media_type="application/json"),
    "page": Response("<html>gateway</html>", 200),
    "cut": Response('{"choices": [', 200, media_type="application/json"),
    "empty": Response('{"choices": []}', 200, media_type="application/json"),
    "null": Response("null", 200, media_type="application/json"),
    "odd": Response('{"choices": [{"message": {"tool_calls": [1]}}]}', 200),
    "parts": Response('{"choices": [{"message": {"content": [{"text": "#### 1"}]}}]}', 200),
    "counts": Response(
        '{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": "many"}}', 200
    ),
}


@pytest.mark.parametrize(
    "fault",
    # It is retried as `busy` is, which takes seconds.
    [pytest.param(f, marks=pytest.mark.slow) if f == "error" else f for f in FAULTS],
)
def test_a_fault_of_the_server_is_no_answer(api, run, monkeypatch, fault):
    monkeypatch.setattr("agentrl.player.RETRY_SECONDS", (0.01, 0.01))
    api.faults = [FAULTS[fault]]
    output = run(*PLAY, "--model", f"{api.url}#caller")
    assert re.search(r"sampled +8 +1.000", output)
    api.faults = [FAULTS[fault]] * 10**4
    output = run(*PLAY, "--model", f"{api.url}#caller", code=1)
    assert "8 of 8 rollouts were dropped" in output and api.url.split("//")[1] in output


@pytest.mark.parametrize("usage", ['{"prompt_tokens": null}', '{"prompt_tokens": "10"}', "null"])
def test_counts_of_tokens_may_be_missing(api, run, usage):
    answer = f'{{"choices": [{{"message": {{"content": "#### 1"}}}}], "usage": {usage}}}'
    api.faults = [Response(answer, 200)] * 8
    assert re.search(r"sampled +8 +0.125", run(*PLAY, "--model", f"{api.url}#caller"))


def test_a_refused_request_is_not_repeated(api, run):
    api.faults = [Response('{"error": "too long"}', 400, media_type="application/json")] * 8
    output = run(*PLAY, "--model", f"{api.url}#caller", code=1)
    assert "too long" in output and len(api.requests) == 8


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_fails_at_once(api, run, status):
    api.faults = [Response('{"error": "no"}', status, media_type="application/json")] * 99
    start = time.monotonic()
    output = run(*PLAY, "--model", f"{api.url}#caller", code=1)
    assert len(api.requests) == 8 and time.monotonic() - start < 15  # Two retries take 22 s.
    assert f"status {status}" in output and "the key (--token-env)" in output


@pytest.mark.slow
def test_json_of_several_models_has_a_note_before_the_objects_of_each(api):
    names = [f"{api.url}#guesser", f"{api.url}#caller"]
    models = [word for name in names for word in ("--model", name)]
    done = run_agentrl(*PLAY, *models, "--output", "both", "--log-format", "json")
    assert done.returncode == 0, done.stderr
    found = []
    for line in map(json.loads, done.stdout.splitlines()):  # nothing else is on standard output
        if line["event"] == "note" and line["text"][:-1] in names:
            found.append(line["text"][:-1])
        elif line["event"] == "validation":
            found.append(line["metrics"]["val/reward/mean@1"])
    assert found == [names[0], 0.5, names[1], 1.0]
    assert line["event"] == "end" and line["status"] == "finished"
    assert "caller - guesser" in done.stderr


def test_addresses_and_keys_are_checked_before_anything_is_played(api, run):
    assert "add the model's name" in run(*PLAY, "--model", api.url, code=1)
    assert "not a server's URL" in run(*PLAY, "--model", "https://u:p@h/v1#m", code=1)
    words = ["--model", f"{api.url}#m", "--token-env", "NOWHERE"]
    assert "no such environment variable" in run(*PLAY, *words, code=1)
    twice = ["--model", f"{api.url}#m", "--model", f"{api.url}#m", "--output", "a"]
    assert "names a model twice" in run(*PLAY, *twice, code=1)
    two = ["--model", f"{api.url}#a", "--model", f"{api.url}#b"]
    assert "several models need --output" in run(*PLAY, *two, code=1)
    assert "must be METRIC>=NUMBER" in run(*PLAY, *two[:2], "--expect", "val/x>1", code=1)
    assert not api.requests


# -- without tools --------------------------------------------------------------------------------


def test_what_the_tools_are_worth(api, run, tmp_path):
    words = [*PLAY, "--model", f"{api.url}#caller", "--without", "tools", "--output", "a"]
    output = run(*words, "--expect", "val/tool_dependence>=0")
    half = 2.364624 * (2 / 7) ** 0.5 / 8**0.5
    assert f"val/tool_dependence = 0.5, interval of 95 % [{0.5 - half:.3f}" in output
    assert re.search(r"without tools +8  0.500 ± 0.189 +0.500 ± 0.189 +0%", output)
    bare = [body for body, _ in api.requests if "tools" not in body]
    assert len(bare) == 8 and all(len(body["messages"]) == 1 for body in bare)
    run(*PLAY, "--model", f"{api.url}#guesser", "--output", "b")
    output = run("compare", "a", "b")
    assert f"a: tool_dependence     8  +0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]" in output
    assert re.search(r"^a without tools +0 +8  0.500", output, re.M)


def test_tool_value_compares_with_a_run_under_its_own_prompt(api, run, tmp_path):
    rows = [
        {"prompt": f"No tools. {i}+1", "ground_truth": str(i + 1), "data_source": "openai/gsm8k"}
        for i in range(8)
    ]
    write_rows(tmp_path / "bare.jsonl", rows)
    run(
        "eval",
        "--dataset",
        "bare.jsonl",
        "--model",
        f"{api.url}#guesser",
        "val.greedy=false",
        "--output",
        "bare",
    )
    run(*PLAY, "--model", f"{api.url}#caller", "--output", "tools")
    assert "--other-prompts" in run("compare", "bare", "tools", code=1)
    output = run("compare", "bare", "tools", "--other-prompts")
    assert re.search(r"^tools - bare \(tool_value\) +8  \+0.500", output, re.M)


def test_rows_without_tools_and_prompts_that_name_them(api, run, tmp_path, caplog):
    text = (tmp_path / "rows.jsonl").read_text()
    named = text.replace("How much is", "Use the calculator:", 2)
    (tmp_path / "named.jsonl").write_text(named)
    words = ["-f", "calculator.py", "val.greedy=false", "tools.transport=in_process"]
    words += ["--model", f"{api.url}#caller", "--without", "tools"]
    run("eval", "--dataset", "named.jsonl", *words)
    assert "the prompts of 2 rows name their tools (row 0: 'calculator')" in caplog.text
    plain = text.replace('["calculator"]', "[]")
    (tmp_path / "plain.jsonl").write_text(plain)
    assert "no row has tools" in run("eval", "--dataset", "plain.jsonl", *words, code=1)


# -- gates ----------------------------------------------------------------------------------------


def test_gates_exit_with_1(api, run):
    model = ["--model", f"{api.url}#guesser", "--output", "guesser"]
    output = run(*PLAY, *model, "--expect", "val/reward/mean@1>=0.2", code=1)
    assert "error: val/reward/mean@1 = 0.5, interval of 95 % [0.0531" in output
    assert "folder has all of it" in run(
        *PLAY, *model, "--expect", "val/reward/mean@1>=0.05"
    ).replace("guesser has", "folder has")
    output = run(*PLAY, *model, "--expect", "val/reward/mean@2>=0", code=1)
    assert "no metric 'val/reward/mean@2'" in output and "val/reward/mean@1" in output
    assert len(api.requests) == 8
    run(*PLAY, "--model", f"{api.url}#caller", "--output", "caller")
    run("compare", "guesser", "caller", "--fail-if-worse", "0.02")
    output = run("compare", "caller", "guesser", "--fail-if-worse", "0.02", code=1)
    assert "guesser - caller: is worse by more than 0.02: reward -0.500 [-0.947, -0.053]" in output
    output = run("compare", "caller", "guesser", "--fail-if-worse", "0.5", code=1)
    assert "may be worse by more than 0.5" in output


def test_equal_results_of_few_rows_are_no_evidence(api, run):
    """The bound is that of `--expect`: of 8 equal rows, 1 - 0.025^(1/8) = 37 % may be worse."""
    for name in ("a", "b"):
        run(*PLAY, "--model", f"{api.url}#caller", "--output", name)
    output = run("compare", "a", "b", "--fail-if-worse", "0.36", code=1)
    assert "b - a: may be worse by more than 0.36: reward +0.000 [-0.369, +0.000]" in output
    run("compare", "a", "b", "--fail-if-worse", "0.37")


# -- records --------------------------------------------------------------------------------------


def test_a_killed_evaluation_continues(api, tmp_path):
    """After SIGKILL, no row that was stored is played again, and the result has all rows."""
    api.pause = 0.5
    models = ["--model", f"{api.url}#guesser", "--model", f"{api.url}#caller"]
    command = ["-m", "agentrl", *PLAY, *models, "--output", "both"]
    child = ForkedPython(command, cwd=tmp_path)
    played = tmp_path / "both/caller/played"
    while child.poll() is None and len([*played.glob("val-*.parquet")]) < 3:
        time.sleep(0.01)
    child.kill()
    child.wait()
    stored = {r.scored.trajectory.episode_id for r in TrajectoryStore(played).read()}
    assert 3 <= len(stored) < 8, child.communicate()
    before = len(api.requests)
    child = ForkedPython(command, cwd=tmp_path)
    assert child.wait() == 0
    episodes = [
        r.scored.trajectory for r in TrajectoryStore(tmp_path / "both/caller/trajectories").read()
    ]
    assert sorted(t.sample.row for t in episodes) == [*range(8)]
    assert stored <= {t.episode_id for t in episodes} and not played.exists()
    assert {body["model"] for body, _ in api.requests[before:]} == {"caller"}
    assert len(api.requests) - before == 2 * (8 - len(stored))
    requests = len(api.requests)
    assert ForkedPython(command, cwd=tmp_path).wait() == 0 and len(api.requests) == requests


def test_results_of_other_rows_code_or_settings_are_not_mixed(api, run, tmp_path):
    words = [*PLAY, "--model", f"{api.url}#caller", "--output", "a"]
    run(*words)
    assert "val.temperature: 1.0 before, 0.5 now" in run(*words, "val.temperature=0.5", code=1)
    (tmp_path / "calculator.py").write_text(CALCULATOR + "\n# changed\n")
    assert "  code: " in run(*words, code=1)
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("7+1", "9+1"))
    output = run(*words, code=1)
    assert "  rows: " in output and "another --output" in output
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.json").write_text("{}")
    assert "has other results already" in run(*words[:-1], "b", code=1)
    assert len(api.requests) == 16


@pytest.mark.parametrize("name", ["settings.json", "metrics.json"])
def test_a_damaged_file_of_a_folder_is_named(api, run, tmp_path, name):
    words = [*PLAY, "--model", f"{api.url}#caller", "--output", "a"]
    run(*words)
    for text in ("", "{", "[]"):
        (tmp_path / "a" / name).write_text(text)
        output = run(*words, code=1)
        assert f"a/{name} is damaged, or of another program: use another folder, or del" in output


def test_dropped_rollouts_are_played_again(api, run, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.player.RETRY_SECONDS", (0.01, 0.01))
    answer = api.answer
    api.answer = lambda body: {"tool_calls": [1]} if "3+1" in str(body) else answer(body)
    words = [*PLAY, "--model", f"{api.url}#guesser", "--output", "a"]
    assert "1 of 8 rollouts was dropped" in run(*words, code=1)
    before, api.answer = len(api.requests), answer
    run(*words)
    assert len(api.requests) - before == 1
