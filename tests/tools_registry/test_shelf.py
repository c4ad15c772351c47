"""The shipped tools: each file loads on its own and does what its description says."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.needs import needs_sandbox
from typer.testing import CliRunner

from agentrl import registry
from agentrl.cli import app
from agentrl.registry import load_file, resolve_file, shelf_folder

SHELF = ("calculator", "python", "python_session", "search", "shell", "sql")
SANDBOXED = ("python", "python_session", "shell")
ROOT = Path(__file__).parents[2]

shelf = [pytest.param(s, marks=needs_sandbox if s in SANDBOXED else ()) for s in SHELF]


@pytest.mark.parametrize("name", shelf)
def test_the_example_of_the_docstring(name, shipped_registries, monkeypatch):
    """`$ [VARIABLE=VALUE] agentrl ...` and, behind it, what it prints."""
    monkeypatch.chdir(ROOT)
    with registry.tools.isolated():
        load_file("examples/orders/env.py")  # makes the databases
    for module in [m for m in sys.modules if m.startswith("agentrl_user_")]:
        monkeypatch.delitem(sys.modules, module)
    text = resolve_file(f"shelf:{name}").read_text().split('"""')[1].replace("\\\n", "")
    (command, printed) = re.findall(r"^    \$ (.*)\n((?:    .+\n)+)", text, re.MULTILINE)[0]
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "agentrl"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.output == re.sub("^    ", "", printed, flags=re.MULTILINE)


def test_all_files_of_the_shelf_are_documented():
    """In the guide, by file and by what rows name; and each file stands for itself."""
    on_shelf = {p.stem for p in shelf_folder().glob("*.py")}
    assert set(SHELF) <= on_shelf
    section = (ROOT / "docs" / "tools.md").read_text().split("## The shelf")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `shelf:(\w+)`", section, re.MULTILINE)) == on_shelf


@pytest.mark.parametrize("name", SHELF)
def test_rows_name_what_a_file_defines(name, shipped_registries, no_tools, monkeypatch):
    # Run anew, also where another test has loaded it.
    for module in [m for m in sys.modules if m.startswith(f"agentrl_user_{name}_")]:
        monkeypatch.delitem(sys.modules, module)
    load_file(f"shelf:{name}")
    names = registry.tools.names()
    assert name in names  # so that a row's unknown tool is found on the shelf
    section = (ROOT / "docs" / "tools.md").read_text().split("## The shelf")[1].split("\n## ")[0]
    (row,) = (line for line in section.splitlines() if line.startswith(f"| `shelf:{name}`"))
    listed = row.split("|")[2]
    assert re.findall(r"`(\w+)`", listed) == names
    functions = [f.name for n in names for f in registry.tools.get(n).functions]
    assert set(re.findall(r"`(\w+)`", row.split("|")[3])) >= set(functions)


def test_schemas_are_small(shipped_registries):
    """A model pays for what it is shown in every episode."""
    for name in SHELF:
        with registry.tools.isolated(keep=()):
            load_file(f"shelf:{name}")
            tools = [registry.tools.get(n) for n in registry.tools.names()]
        shown = [f.schema for tool in tools for f in tool.functions]
        assert len(json.dumps(shown)) < 2000, name
