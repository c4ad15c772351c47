"""Fixtures for the tests of verl's classes, files and configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed_verl import VERSIONS, InstalledVerl

from agentrl import play
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trajectory import Message, Sample

FIXTURES = Path(__file__).parents[1] / "fixtures" / "verl"
TAG = "v0.7.0"
"""The last release of verl that has interactions and their tests."""


@pytest.fixture(autouse=True)
def no_leftovers(no_tools):
    """Remove registered names, imported files and the finder of verl's names after each test."""
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    yield
    for name in set(sys.modules) - modules:
        file = str(getattr(sys.modules[name], "__file__", None) or "")
        is_users = "pytest-" in file or file.startswith(str(FIXTURES))
        if is_users or name.startswith(("verl", "agentrl_user_")):
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders


@pytest.fixture(scope="session")
def verl(tmp_path_factory):
    """The folder of verl's own files, from the clone that AGENTRL_VERL names."""
    clone = os.environ["AGENTRL_VERL"]
    folder = tmp_path_factory.mktemp("verl")
    archive = subprocess.run(
        ["git", "-C", clone, "archive", TAG, "examples", "tests", "verl"],
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(turns, **row):
    """Play an episode whose assistant turns are given."""
    tokenizer = byte_tokenizer()
    sample = Sample("s", (Message("user", "Go."),), "tool_agent", **row)
    return play(sample, Scripted(turns, tokenizer), tokenizer)


def yaml_of(folder: Path, text: str, **modules: str) -> str:
    """Write a YAML file, and Python modules in its folder; return the path of the YAML file."""
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "file.yaml").write_text(text)
    return str(folder / "file.yaml")


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request):
    """Each version of verl that `make verl` installs."""
    verl = InstalledVerl(request.param)
    yield verl
    verl.close()
