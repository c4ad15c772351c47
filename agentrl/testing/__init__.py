"""Helpers for tests of your own environment, without a model, a GPU or a network.

In a test file, or once in conftest.py::

    pytest_plugins = ["agentrl.testing.fixtures"]

    def test_the_notebook_keeps_lines(play_scripted):
        episode = play_scripted(sample, call("write", line="a"), "done")
        assert episode.final_text == "done"
"""

from __future__ import annotations

import json
from typing import Any

from agentrl.engine.scripted import Scripted
from agentrl.testing.tokenizer import byte_tokenizer

__all__ = ["Scripted", "byte_tokenizer", "call", "react_call"]


def call(name: str, /, **arguments: Any) -> str:
    """Return an assistant turn that calls a tool, in the Hermes / Qwen format."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def react_call(name: str, /, **arguments: Any) -> str:
    """Return an assistant turn that calls a tool, in the format of the `react` loop."""
    return f"Action: {name}\nAction Input: {json.dumps(arguments)}\nObservation:"
