"""`agentrl eval` of several models and of a URL: one table, one set of rows, resumed after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time

import pytest
from fastapi import FastAPI, Request, Response
from support.forked_python import ForkedPython
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
        self.app, self.requests = FastAPI(), []
        self.faults: list[Response] = []
        self.pause = 0.0

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request):
            body = await request.json()
            self.requests.append((body, request.headers.get("authorization")))
            await asyncio.sleep(self.pause)
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
    [line] = [x for x in output.splitlines() if x.startswith("caller - guesser")]
    # Four rows of 8 rise from 0 to 1: s = sqrt(2/7), t(0.975, 7) = 2.364624.
    half = 2.364624 * (2 / 7) ** 0.5 / 8**0.5
    assert f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]" in line and line.split()[-2:] == ["4", "0"]
    assert "caller - guesser, gained rows: 0, 2, 4, 6" in output
    numbers = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert [v["reward"]["mean"] for v in numbers["validations"]] == [0.5, 1.0]
    assert numbers["differences"][0]["gained"] == ["0", "2", "4", "6"]
    assert (tmp_path / "both" / "compare.svg").exists()
    body, authorization = api.requests[-1]
    assert authorization == f"Bearer {KEY}"
    assert KEY not in "".join(f.read_text() for f in tmp_path.rglob("*.json"))
    stored = [r.scored.trajectory for r in TrajectoryStore(tmp_path / "both/caller/trajectories").read()]
    assert all(not s.prompt_ids and not s.response_ids for t in stored for s in t.segments)
    assert [m.role for m in stored[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert stored[0].turns[0].tool_calls[0].arguments == {"expression": "0+1"}
    assert stored[0].turns[0].tool_results[0].content == "1"
    seeds = [[b["seed"] for b, _ in api.requests if b["model"] == m and len(b["messages"]) == 1] for m in ("guesser", "caller")]
    assert sorted(seeds[0]) == sorted(seeds[1]) and len(set(seeds[0])) == 8
