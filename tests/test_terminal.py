"""Texts of rows, tools, models and agents that are printed."""

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from support.recorded import HOSTILE
from typer.testing import CliRunner

import agentrl
from agentrl.callbacks import Event
from agentrl.cli import app, main
from agentrl.observers.console import Console
from agentrl.observers.json_log import JsonConsole
from agentrl.observers.live import LiveConsole
from agentrl.terminal import echo

PACKAGE = Path(agentrl.__file__).parent
PRINTING = ("terminal.py", "watchdog.py", "demo/__main__.py")
"""Files that may call `print`: those that escape what they print, and generators of files."""
ELSEWHERE = ("sandbox/inside/", "cli/starter/", "workers/parent_watch.py", "trainer/interrupt.py",
             "interactions/person.py")  # fmt: skip
"""Files that print constants, or in another process."""


def is_clean(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_everything_is_printed_by_echo():
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if name in PRINTING or name.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("print", "typer.echo", "click.echo"), f"{name}:{node.lineno}"


@pytest.mark.parametrize("err", [False, True])
def test_what_is_not_printable_is_escaped(capsys, err):
    echo("\x1b[2J\u202ea\tb\n\r\x9bé", err=err)
    assert capsys.readouterr()[err] == "\\x1b[2J\\u202ea\tb\n\\r\\x9bé\n"


def test_warnings_are_escaped(capsys):
    record = logging.LogRecord("agentrl", logging.WARNING, "", 1, "row %s", (HOSTILE,), None)
    assert logging.lastResort
    logging.lastResort.handle(record)
    assert "row <script>" in (text := capsys.readouterr().err) and is_clean(text)


def test_the_output_of_a_run_is_escaped():
    metrics = {f"val/{HOSTILE}/reward/mean@1": 0.5, f"val-core/{HOSTILE}/acc/mean@1": 0.5}
    for kind in (Console, LiveConsole):
        out = io.StringIO()
        with kind(out) as console:
            console.note(HOSTILE)
            console.on_validation(Event(1, 1, metrics, Path()))
        assert "\\x1b[31mred" in out.getvalue() and is_clean(out.getvalue()), kind


def test_the_output_as_json_is_escaped_and_exact():
    out = io.StringIO()
    with JsonConsole(out) as console:
        console.note(HOSTILE)
    assert is_clean(out.getvalue())
    assert json.loads(out.getvalue().splitlines()[0])["text"] == HOSTILE


TOOLS = f'''
from agentrl import tool

@tool
def look(place: str = "") -> str:
    """Look."""
    print("")
    return {HOSTILE!r}
'''


def test_commands_escape_their_texts(tmp_path, tiny_model, shipped_registries):
    (tmp_path / "look.py").write_text(TOOLS)
    row = {"prompt": f"Say {HOSTILE}", "agent_name": "single_turn", "data_source": "openai/gsm8k",
           "ground_truth": HOSTILE}  # fmt: skip
    rows = tmp_path / f"rows{chr(27)}[31m.jsonl"
    rows.write_text(json.dumps(row))
    row_words = ["--dataset", str(rows), "--model", str(tiny_model)]
    agent = f"import sys; sys.stderr.write({HOSTILE!r}); sys.exit(3)"
    for words in (
        ["tools", "call", "look", "-f", f"{tmp_path}/look.py"],
        ["play", *row_words, "rollout.max_turn_tokens=4", "reward.function=gsm8k"],
        ["check", *row_words, "reward.function=gsm8k"],
        ["check", "agent", "--", sys.executable, "-c", agent],
    ):
        result = CliRunner().invoke(app, words)
        assert "\\x1b[31m" in result.output and is_clean(result.output), (words, result.output)


def test_errors_are_escaped(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["data", "convert", str(tmp_path / f"{chr(27)}[31mrows.json"), "out.jsonl"])
    assert "\\x1b[31mrows" in (text := capsys.readouterr().err) and is_clean(text)
