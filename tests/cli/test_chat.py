"""`agentrl chat`: the person at the terminal is the user."""

import pytest
from typer.testing import CliRunner

from agentrl import registry
from agentrl.cli import app


@pytest.fixture
def chat(tiny_model):
    def run(text, *options):
        command = ["chat", "--model", str(tiny_model), "rollout.max_turn_tokens=48", *options]
        # Without the tools of other tests. A file is loaded once, so its tool is kept.
        with registry.tools.isolated(keep=("calculator",) if options else ()):
            result = CliRunner().invoke(app, command, input=text)
        assert result.exception is None, result.exception
        return result.output

    return run


def test_a_conversation_with_a_tool(chat):
    system = ("--system", "Use the tools. Answer with ####.", "--file", "shelf:calculator")
    question = "Zoe has 7 boxes of 9 stamps and 6 break. How many stamps in all?"
    text = chat(f"{question}\nAre you sure?\n", *system)
    assert text.startswith("tools: calculator; sampled at T=1.0")
    assert text.count("assistant> ") >= 2 and "tool> " in text and "user> " not in text


@pytest.mark.parametrize("text", ["", "/exit\nHi\n", "Hi\n/exit\nHi\n", "Hi\n/reset\n"])
def test_it_ends(chat, text):
    assert chat(text).count("assistant> ") == text.startswith("Hi")


def test_reset_begins_a_new_conversation(chat):
    assert chat("Hi\n/reset\nHi\n").count("assistant> ") == 2


def test_a_loop_without_an_interaction_is_refused(tiny_model):
    command = ["chat", "--model", str(tiny_model), "--agent", "single_turn"]
    result = CliRunner().invoke(app, command)
    assert "use tool_agent" in str(result.exception)
