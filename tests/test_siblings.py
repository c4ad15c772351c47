"""A user file imports the modules of its folder, in every process that loads it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from agentrl import registry
from agentrl.config import ToolsConfig
from agentrl.errors import UserError
from agentrl.siblings import find_siblings
from agentrl.tools.toolbox import open_toolbox
from agentrl.trajectory import Sample, ToolCall

FILES = {
    "env.py": """
        import os

        from agentrl import tool
        from sibling_words import GREETING
        import sibling_parts.names as names

        @tool
        def greet() -> str:
            '''Greet.'''
            import sibling_late
            return f"{GREETING}, {names.NAME}{sibling_late.END} {os.getpid()}"

        @tool(process=True)
        def shout() -> str:
            '''Greet loudly.'''
            return GREETING.upper()
        """,
    "sibling_words.py": "from sibling_more import WORD\nGREETING = WORD",
    "sibling_more.py": "WORD = 'hello'",
    "sibling_late.py": "END = '!'",
    "sibling_parts/names.py": "NAME = 'Ann'",  # without __init__.py
    "sibling_unused.py": "raise AssertionError('nobody imports this')",
}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch, no_tools):
    """Forget the folders and the modules that a test imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("sibling_", "verl")):
            del sys.modules[name]


def write(folder: Path, **files: str) -> str:
    """Write files, `a__b` as `a/b.py`; return the path of env.py."""
    names = {name: name.replace("__", "/", 1) for name in files}
    return write_files(folder, {f"{names[name]}.py": text for name, text in files.items()})


def write_files(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    return str(folder / "env.py")


def test_imports_of_the_folder_are_found_now_and_later(tmp_path):
    path, before = write_files(tmp_path, FILES), list(sys.path)
    module = registry.load_file(path)
    assert module.greet().startswith("hello, Ann! ")
    assert sys.path == [*before, str(tmp_path)], "last, so no other import finds another module"
    assert {f.name for f in find_siblings(tmp_path / "env.py")} == {
        "sibling_words.py", "sibling_more.py", "sibling_late.py", "names.py"
    }  # fmt: skip


def test_a_file_that_imports_nothing_of_its_folder_leaves_the_path_alone(tmp_path):
    path = write(tmp_path, env="import json\nimport yaml", sibling_other="", datasets="")
    before = list(sys.path)
    registry.load_file(path)
    assert sys.path == before


@pytest.mark.parametrize("transport", ["in_process", "http"])
def test_tools_use_modules_of_the_folder_in_every_process(tmp_path, transport):
    path = write_files(tmp_path, FILES)
    registry.load_file(path)

    async def results(toolbox) -> list[str]:
        sample = Sample("a", (), tools=("greet", "shout"))
        await toolbox.open("a", sample)
        calls = [ToolCall("greet", {}), ToolCall("shout", {})]
        answers = await toolbox.run(calls, "a", 0, ())
        await toolbox.close("a")
        return [answer.content for answer in answers]

    config = ToolsConfig(transport=transport)
    with open_toolbox(config, [path]) as toolbox:
        greeting, shouted = asyncio.run(results(toolbox))
    assert greeting.startswith("hello, Ann! ") and shouted == "HELLO"


def test_two_projects_with_a_module_of_the_same_name(tmp_path):
    """Python has one module of a name, so the second file would get the other project's module."""
    first = write(tmp_path / "a", env="import sibling_same", sibling_same="X = 1")
    second = write(tmp_path / "b", env="import sibling_same", sibling_same="X = 2")
    assert registry.load_file(first).sibling_same.X == 1
    with pytest.raises(UserError) as refused:
        registry.load_file(second)
    message = str(refused.value)
    assert f"{second}: `import sibling_same` finds {tmp_path}/a/sibling_same.py" in message
    assert f"not {tmp_path}/b/sibling_same.py. Give the file" in message
    # A file of its own folder may use it, as may another file of the first project.
    more = write(tmp_path / "a", other="import sibling_same").replace("env.py", "other.py")
    assert registry.load_file(more).sibling_same.X == 1


@pytest.mark.parametrize("name", ["yaml", "numbers", "httpx"])
def test_a_module_with_the_name_of_an_installed_one_is_refused(tmp_path, name):
    path = write(tmp_path, env=f"def late():\n    from {name} import x", **{name: "x = 1"})
    with pytest.raises(UserError, match=rf"`import {name}` finds .*, not {tmp_path}/{name}\.py"):
        registry.load_file(path)


def test_a_package_without_code_is_not_meant(tmp_path):
    """A folder `wandb` with runs, or `datasets` with rows, is no module."""
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml/rows.jsonl").write_text("{}")
    assert registry.load_file(write(tmp_path, env="import yaml")).yaml.safe_load("1") == 1


def test_a_clone_of_agentrl_or_verl_in_the_folder_is_not_imported(tmp_path):
    path = write(
        tmp_path,
        env="import agentrl\nfrom verl.tools.base_tool import BaseTool",
        agentrl____init__="raise AssertionError",
        verl__setup="raise AssertionError",
        verl____init__="raise AssertionError",
    )
    before = list(sys.path)
    assert find_siblings(Path(path)) == []
    assert registry.load_file(path).BaseTool.__module__.startswith("agentrl.compat.verl")
    assert sys.path == before


def test_an_error_in_a_module_of_the_folder_names_it(tmp_path):
    path = write(tmp_path, env="\nimport sibling_bad", sibling_bad="x = 1\nx = = 2")
    message = r"env\.py:2 cannot be loaded: SyntaxError: .*sibling_bad\.py, line 2"
    with pytest.raises(UserError, match=message):
        registry.load_file(path)


def test_an_error_that_a_module_of_the_folder_raises_names_its_line(tmp_path):
    path = write(tmp_path, env="import sibling_raises", sibling_raises="x = 1\nx / 0")
    message = rf"env\.py:1 cannot be loaded: Zero.* \({tmp_path}/sibling_raises\.py:2\)"
    with pytest.raises(UserError, match=message):
        registry.load_file(path)


def test_relative_imports_work_too(tmp_path):
    path = write(tmp_path, env="from .sibling_near import X", sibling_near="X = 3")
    assert registry.load_file(path).X == 3
    assert [f.name for f in find_siblings(Path(path))] == ["sibling_near.py"]
