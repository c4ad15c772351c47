"""`agentrl serve`: the policy at an OpenAI-style URL."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import httpx
import pytest
from support.forked_python import run_agentrl
from typer.testing import CliRunner

from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.chat import load_tokenizer
from agentrl.cli import app
from agentrl.cli.options import config_of_run
from agentrl.config import Config, RolloutConfig
from agentrl.demo.arithmetic import questions, rows, split_rows
from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.errors import UserError
from agentrl.gateway.dialects import DIALECTS
from agentrl.gateway.serve import create_app
from agentrl.gateway.stateless import StatelessSession
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

PROMPT = (
    Message("system", "Use the tools. Answer with ####."),
    Message("user", "Zoe has 7 boxes of 9 stamps and 6 break. How many stamps in all?"),
)
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


def ask(engine, tokenizer, bodies, config=None, path="/v1/chat/completions"):
    """Send requests at the same time to the application; return the responses."""
    config = config or Config()
    runtime = Runtime(engine, make_template(tokenizer, config), LocalToolbox(), config)
    session = StatelessSession(runtime, temperature=1.0)

    async def send_all():
        transport = httpx.ASGITransport(create_app(lambda key: session))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(send_all())


def test_a_greedy_answer_is_that_of_an_episode(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    body = {"messages": [m.as_dict() for m in PROMPT], "temperature": 0, "max_tokens": 40}
    with closing(LocalEngine.load(tiny_model, tokenizer)) as engine:
        answers = [r.json() for r in ask(engine, tokenizer, [body] * 3)]
        config = Config(rollout=RolloutConfig(max_turn_tokens=40))
        sampler = GreedySampler(engine)
        t = play(Sample("s", PROMPT), sampler, tokenizer, config=config)
    expected = t.final_text
    contents = {a["choices"][0]["message"]["content"] for a in answers}
    assert contents == {expected.strip()} and answers[0]["usage"]["completion_tokens"] > 1


class GreedySampler:
    """Passes the requests of an episode to an engine, at temperature 0."""

    is_concurrent = False

    def __init__(self, engine):
        self.engine, self.max_length = engine, engine.max_length
        self.begin, self.end = engine.begin, engine.end

    async def generate(self, prompt_ids, sampling, **others):
        greedy = Sampling(0.0, max_tokens=sampling.max_tokens, stop_ids=sampling.stop_ids)
        return await self.engine.generate(prompt_ids, greedy, **others)


def test_calls_are_parsed_and_fields_are_used():
    engine = Scripted([call("calc", x=1)], byte_tokenizer())
    body = {"messages": [{"role": "user", "content": "Q"}], "tools": [TOOL], "top_p": 0.5}
    (response,) = ask(engine, byte_tokenizer(), [body])
    (made,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "calc", "arguments": '{"x": 1}'}
    assert engine.requests[0].sampling.top_p == 0.5 and not engine.playing


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("temperature", "x"), ("top_p", 0), ("top_k", True)]
)
def test_wrong_fields_are_refused(field, value):
    body = {"messages": [{"role": "user", "content": "Q"}], field: value}
    (response,) = ask(Scripted(["a"], byte_tokenizer()), byte_tokenizer(), [body])
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_it_takes_no_rewards():
    engine = Scripted([], byte_tokenizer())
    (response,) = ask(engine, byte_tokenizer(), [{"reward": 1}], path="/v1/reward")
    assert response.status_code == 404 and "trains nothing" in response.text


def test_other_paths_are_named():
    (response,) = ask(Scripted([], byte_tokenizer()), byte_tokenizer(), [{}], path="/v1/other")
    message = response.json()["error"]["message"]
    paths = ", ".join(f"POST /v1{dialect.path}" for dialect in DIALECTS)
    assert response.status_code == 404 and "/v1/messages" in paths
    assert message == (f"there is no POST /v1/other: this API has {paths} and GET /v1/models")


def test_a_token_that_is_not_set_is_refused(tiny_model):
    command = ["serve", "--model", str(tiny_model), "--token-env", "NO_SUCH_TOKEN"]
    assert "NO_SUCH_TOKEN" in str(CliRunner().invoke(app, command).exception)
    command = ["serve", "--model", str(tiny_model), "--host", "0.0.0.0"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, UserError) and "lets other machines use your policy" in str(error)


def test_a_check_without_rows_names_the_key(tiny_model):
    error = CliRunner().invoke(app, ["serve", "--model", str(tiny_model), "--check", "3"]).exception
    assert str(error) == "--check 3 needs rows: add data.val=FILE, .parquet or .jsonl"


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({"host": "localhost:8000"}, 200, ""),
        ({"host": "evil.example"}, 403, "unknown host name 'evil.example'"),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, 403, "web pages"),
    ],
)
def test_web_pages_cannot_use_a_server_without_a_key(headers, status, text):
    """A browser on this machine sends them: by DNS rebinding, or as a form."""
    tokenizer, config = byte_tokenizer(), Config()
    engine = Scripted(["hello"], tokenizer)
    runtime = Runtime(engine, make_template(tokenizer, config), LocalToolbox(), config)
    session = StatelessSession(runtime, temperature=1.0)
    hosts = frozenset({"localhost", "127.0.0.1"})

    async def send():
        transport = httpx.ASGITransport(create_app(lambda key: session, hosts))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    response = asyncio.run(send())
    assert response.status_code == status and text in response.text


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(tiny_model):
    command = ["-m", "agentrl", "serve", "--model", str(tiny_model), "--port", "0"]
    environment = os.environ | {"KEY": "secret"}
    with subprocess.Popen(
        [sys.executable, *command, "--token-env", "KEY"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout
        url = re.search(r"http://\S+/v1", process.stdout.readline())[0]  # type: ignore[index]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for key, status in (("wrong", 401), ("\xe9", 401), ("secret", 200)):
            headers = {"authorization": f"Bearer {key}".encode("latin-1")}
            for _ in range(50):  # The socket is bound, but the server may not accept yet.
                response = httpx.post(f"{url}/chat/completions", json=body, headers=headers)
                if response.status_code == status:
                    break
            assert response.status_code == status, response.text
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130, -2)
    assert json.loads(response.text)["object"] == "chat.completion"


def ask_and_score(url, problems):
    """Ask problems at the same time, and score each answer; return the mean score."""

    async def ask(client, row):
        messages = [m.as_dict() for m in row.sample.prompt]
        body = {"messages": messages, "max_tokens": 20}
        answer = (await client.post(f"{url}/chat/completions", json=body)).json()
        text = answer["choices"][0]["message"]["content"]
        score = float(text.rpartition("####")[2].strip() == row.sample.ground_truth)
        feedback = {"id": answer["id"], "score": score}
        assert (await client.post(f"{url}/feedback", json=feedback)).status_code == 200
        return score

    async def ask_all():
        headers = {"authorization": "Bearer ann"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            scores = await asyncio.gather(*(ask(client, row) for row in problems))
            return sum(scores) / len(scores)

    return asyncio.run(ask_all())


@pytest.mark.slow
def test_a_policy_learns_from_its_users(tiny_model, tmp_path):
    """The server is killed each time, so that its last lines may be incomplete."""
    means, model = [], "tiny"
    environment = os.environ | {"KEYS": "ann,bob"}
    for seed in range(2):
        command = ["-m", "agentrl", "serve", model, "--port", "0", "--record", "served"]
        with subprocess.Popen(
            [sys.executable, *command, "--token-env", "KEYS"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        ) as process:
            assert process.stdout
            lines = iter(process.stdout.readline, "")
            url = next(re.search(r"http://\S+/v1", li)[0] for li in lines if "serving" in li)  # type: ignore[index]
            next(line for line in lines if "recording" in line)
            held_out = questions(split_rows("val"))
            problems = islice(rows(90 + seed, held_out, ("single_turn",)), 256)
            means.append(ask_and_score(url, [*problems]))
            process.kill()
        if not seed:
            with (tmp_path / "served/answers.jsonl").open("a") as file:
                file.write('{"answer": {"id": ')
            run_agentrl("train", "--from", "served", cwd=tmp_path)
            model = "runs/served"
    assert means[1] > means[0] + 0.2, means


VAL = Path(__file__).parent.parent.parent / "datasets/arithmetic_val.parquet"


def check(*words):
    result = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.splitlines()


def test_served_answers_are_those_of_an_evaluation(tiny_model, shipped_registries):
    code, lines = check("--model", tiny_model, "--check", 9, f"data.val={VAL}",
                        "files=[shelf:calculator]")  # fmt: skip
    assert code == 0 and lines[0].endswith("the first 9 of 240 rows, greedy")
    assert lines[-1].startswith("9 of 9 rows equal (")


@pytest.mark.parametrize("name", ["", "global_step_00000002", "best", "model", "other"])
def test_a_run_brings_its_config(tmp_path, capsys, name):
    """A checkpoint does not, because anybody may publish a folder of that name."""
    file, model = tmp_path / "config.yaml", str(tmp_path / name)
    assert config_of_run(model) is None and config_of_run(None) is None
    file.touch()
    assert config_of_run(model) is None
    (tmp_path / "metrics.jsonl").touch()
    capsys.readouterr()
    assert config_of_run(model) == (None if name else file)
    assert (f"To use it, with the code and the commands that it names: -c {file}"
            in capsys.readouterr().err) == (name not in ("", "other"))  # fmt: skip


@pytest.mark.parametrize("command", ["play chat", "serve"])
@pytest.mark.parametrize("name", ["", "model", "best", "global_step_00000001"])
def test_a_model_runs_no_code_of_its_config(tmp_path, command, name):
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nraise ValueError('ran')")
    (tmp_path / "config.yaml").write_text(f"files: [{tmp_path}/evil.py]")
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    words = [*command.split(), "--model", str(tmp_path / name), "rollout.n=0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code and not mark.exists() and "is not used" in result.stderr
    (tmp_path / name / "config.json").unlink()
    result = CliRunner().invoke(app, [*command.split(), "--model", str(tmp_path)])
    assert result.exit_code and mark.exists()
    loads = f"loads {tmp_path}/evil.py: {tmp_path}/config.yaml names them"
    assert loads in result.stderr


@pytest.mark.slow
def test_a_model_is_trained_exported_served_and_checked(tmp_path, shipped_registries):
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}]}
    chats.write_text("\n".join([json.dumps(row)] * 8))
    tuned, run, plain = tmp_path / "tuned", tmp_path / "run", tmp_path / "plain"
    options = ["--steps", 2, "--batch-size", 4, "--lr", 1e-4]
    run_agentrl("sft", "--dataset", chats, "--model", "tiny", "--output", tuned, *options)
    rows = ["--dataset", VAL, "--val-dataset", VAL, "--file", "shelf:calculator"]
    budgets = ["rollout.n=4", "data.batch_size=8", "trainer.total_steps=2", "optim.lr=1e-3"]
    run_agentrl("train", "--model", tuned, *rows, "--output", run, *budgets)
    run_agentrl("export", run, plain)
    for words in (["--model", run], ["-c", run / "config.yaml", "--model", plain]):
        code, lines = check(*words, "--check", 40)
        assert code == 0 and lines[-1].startswith("40 of 40 rows equal ("), lines
