"""Fixtures for the tests of verl's classes, files and configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


VERL = Path(__file__).parents[2] / ".venv-verl"
VERSIONS = ("0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""The versions of verl in `agentrl/config/verl_defaults.csv` and in .venv-verl."""


class InstalledVerl:
    """A version of verl in a process of its own, whose functions a test calls."""

    def __init__(self, version: str):
        self.folder = VERL / version
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [VERL / "bin" / "python", Path(__file__).parent / "programs" / "in_verl.py"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, name: str, *args, **kwargs):
        """Return what a function returns: MODULE:FUNCTION, or one of `in_verl.py`."""
        call = {"name": name, "args": args, "kwargs": kwargs}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        returned, error = json.loads(self._process.stdout.readline())
        assert not error, error
        return returned

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request):
    """Each version of verl that `make verl` installs."""
    assert VERL.exists(), "make verl installs verl's versions"
    verl = InstalledVerl(request.param)
    verl.version = request.param
    yield verl
    verl.close()
