"""`agentrl tools`: what people see of tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import AgentRLError, RegistryError, UserError
from agentrl.http import fetch_json

ZOO = str(Path(__file__).parents[1] / "support" / "tool_zoo.py")
CALCULATOR = "shelf:calculator"


@pytest.fixture(autouse=True)
def nothing_loaded(no_tools, monkeypatch):
    """Files load anew, into an empty registry."""
    loaded = [m for m in sys.modules if m.startswith("agentrl_user_")]
    for module in loaded:
        monkeypatch.delitem(sys.modules, module)
    yield
    for module in [m for m in sys.modules if m.startswith("agentrl_user_")]:
        del sys.modules[module]


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output; a user's mistake is raised."""
    result = CliRunner().invoke(app, ["tools", *arguments])
    if isinstance(result.exception, AgentRLError):
        raise result.exception
    return result.exit_code, result.output


def test_list():
    assert run("list", CALCULATOR) == (
        0,
        "calculator  (function, 5 s)\n"
        "  calculator(expression: string)  Evaluate an arithmetic expression.\n",
    )
    assert run("list", "-f", CALCULATOR) == run("list", CALCULATOR)
    _, output = run("list", ZOO)
    assert "narrow  (function, 30 s, at most 2 calls at once)" in output
    assert "notebook  (one object per episode, 30 s, gets sample)" in output
    assert "  write(line: string, seconds: number = 0.0)  Write a line." in output


def test_show():
    code, output = run("show", "calculator", "--file", CALCULATOR)
    shown = json.loads(output)
    assert (code, shown["function"]["name"]) == (0, "calculator")
    assert shown["function"]["parameters"]["required"] == ["expression"]
    both = json.loads(run("show", "notebook", "-f", ZOO)[1])
    assert [s["function"]["name"] for s in both] == ["write", "truth"]
    assert json.loads(run("show", "truth", "-f", ZOO)[1]) == both[1]


def test_call():
    expression = '{"expression": "3*4"}'
    assert run("call", "calculator", expression, "--file", CALCULATOR) == (0, "12\n")
    code, output = run("call", "calculator", '{"expression": "1/0"}', "-f", CALCULATOR)
    assert (code, output) == (1, "Error: division by zero\n")
    code, output = run("call", "calculator", "{}", "-f", CALCULATOR)
    assert (code, "'expression' is required" in output) == (1, True)
    line = '{"line": "x"}'
    assert run("call", "write", line, "-f", ZOO, "--create-kwargs", '{"capacity": 0}') == (
        1,
        "Error: full: 0 lines\n",
    )
    assert run("call", "stuck", '{"text": "hi"}', "-f", ZOO) == (0, "hi\n")


MISTAKES = [
    (("show", "calculatr", "-f", CALCULATOR), RegistryError, "Did you mean 'calculator'"),
    (("show", "calculator"), UserError, "no @tool in no files.*shelf:calculator"),
    (("list", "nope.py"), UserError, "no such file: nope.py"),
    (("list", __file__ + "x"), UserError, "no such file"),
    (("call", "calculator", "{", "-f", CALCULATOR), UserError, "ARGUMENTS: not JSON: {"),
    (("call", "calculator", "3", "-f", CALCULATOR), UserError, "ARGUMENTS: not a JSON object"),
    (("call", "notebook", "-f", ZOO), UserError, "several functions: call write or truth"),
    (
        ("call", "truth", "-f", ZOO, "--create-kwargs", '{"x": 1}'),
        UserError,
        "^--create-kwargs: the constructor of the tool 'notebook': unknown argument 'x'",
    ),
    (
        ("call", "calculator", "-f", CALCULATOR, "--create-kwargs", '{"x": 1}'),
        UserError,
        "^--create-kwargs: the tool 'calculator' is a function, not a class",
    ),
    (("serve", CALCULATOR, "--host", "0.0.0.0"), UserError, "so a token is required"),
    (
        ("serve", CALCULATOR, "--host", "0.0.0.0", "--workers", "2"),
        UserError,
        "so a token is required",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(arguments, error, message, monkeypatch):
    monkeypatch.delenv("AGENTRL_TOOLS_TOKEN", raising=False)
    with pytest.raises(error, match=message):
        run(*arguments)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_without_a_token_says_so_once(workers):
    command = ["-m", "agentrl", "tools", "serve", CALCULATOR, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, *command, "--workers", workers, "--token-env", "MY_TOKEN"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "MY_TOKEN"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("1 tool at http://127.0.0.1:")
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert errors.count("needs no token") == errors.count("warning") == 1
    assert "variable MY_TOKEN" in errors


def test_serve():
    """Served until Ctrl-C, with the token of the environment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "tools", "serve", CALCULATOR, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGENTRL_TOOLS_TOKEN": "t"},
        # A shell lets what it runs in the background ignore Ctrl-C, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("1 tool at http://127.0.0.1:")
    url = line.split()[3].rstrip(":")
    assert fetch_json(url, "/tools", timeout=5)[0] == 401
    status, answer = fetch_json(url, "/tools", token="t", timeout=5)
    assert (status, answer["tools"][0]["name"]) == (200, "calculator")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors and "token" not in errors
