"""The keys of the section `sandbox`, and that a run uses them before it loads a model."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from support.needs import needs_sandbox

from agentrl import sandbox
from agentrl.config import SandboxConfig, load_config
from agentrl.errors import ConfigError, SandboxError
from agentrl.preflight import describe_run, make_plan
from agentrl.sandbox.settings import open_sandbox

UNSAFE = "sandbox.backend=unsafe-subprocess"


@pytest.fixture
def folder():
    """One that everybody can read: programs run as users of their own, where we are root."""
    with tempfile.TemporaryDirectory(prefix="agentrl-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(autouse=True)
def default_settings():
    yield
    sandbox.configure(SandboxConfig())


async def ran(code, *keys):
    place = open_sandbox(load_config(None, [UNSAFE, *keys]).sandbox)
    try:
        return await place.run(code)
    finally:
        await place.aclose()


async def test_each_key_changes_the_environment_of_programs():
    for backend, name in (
        ("sandbox.backend=bubblewrap", "bubblewrap"),
        ("sandbox.backend=unsafe-subprocess", "unsafe-subprocess"),
        ("sandbox.backend=http://127.0.0.1:9/", "SandboxFusion at http://127.0.0.1:9"),
    ):
        place = open_sandbox(load_config(None, [backend]).sandbox)
        assert place.name == name
        await place.aclose()
    slots = [open_sandbox(load_config(None, [UNSAFE, s]).sandbox).slots
             for s in ("sandbox.slots=3", "sandbox.slots=0")]  # fmt: skip
    assert slots == [3, 2 * len(os.sched_getaffinity(0))]
    assert (await ran("while True: pass", "sandbox.timeout_s=0.5")).ended_by == "time"
    large = "x = bytearray(300 << 20); print('had it')"
    assert (await ran(large, "sandbox.memory_mb=1024")).ok
    assert "MemoryError" in (await ran(large, "sandbox.memory_mb=256")).stderr
    program = "import sys; print(sys.executable)"
    assert (await ran(program, "sandbox.python=/usr/bin/python3")).stdout == "/usr/bin/python3\n"
    assert (await ran(program, f"sandbox.python={sys.executable}")).stdout == f"{sys.executable}\n"


@needs_sandbox
async def test_a_custom_python_environment_is_visible_inside(folder):
    home = folder / "env"
    packages = home / "lib" / Path("/usr/bin/python3").resolve().name / "site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "only_here.py").write_text("x = 6 * 7")
    code = "import only_here, sys; print(only_here.x, sys.prefix)"
    place = open_sandbox(load_config(None, [f"sandbox.python={home}/bin/python"]).sandbox)
    assert (await place.run(code)).stdout == f"42 {home}\n"
    assert "ModuleNotFoundError" in (await open_sandbox(load_config().sandbox).run(code)).stderr


async def test_a_python_in_a_home_directory_does_not_expose_that_directory(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    place = open_sandbox(load_config(None, [f"sandbox.python={tmp_path}/bin/python"]).sandbox)
    with pytest.raises(SandboxError, match="neither a Python environment nor an installation"):
        await place.run("1")
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SandboxError, match="would show your whole home directory"):
        await place.run("1")


ENV = """
from agentrl import reward, tool
from agentrl.sandbox import Sandbox

@tool
async def compute(code: str, sandbox: Sandbox) -> str:
    '''Run a program.

    Args:
        code: the program
    '''
    return (await sandbox.run(code)).stdout

@reward("runs_code", sandbox=True)
async def runs_code(trajectory) -> float:
    return 0.0

@reward("runs_nothing")
def runs_nothing(trajectory) -> float:
    return 0.0
"""


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "env.py").write_text(ENV)

    def write(tools, reward, *keys):
        row = {"prompt": "How much is 3*4?", "tools": tools, "agent_name": "tool_agent"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        flags = {"data.train": str(tmp_path / "rows.jsonl"), "files": [str(tmp_path / "env.py")],
                 "reward.function": reward}  # fmt: skip
        return load_config(None, list(keys), flags)

    return write


@pytest.mark.parametrize(
    ("tools", "reward", "who"),
    [(["compute"], "runs_nothing", "the tool compute"), ([], "runs_code", "the reward runs_code")],
)
def test_a_run_that_cannot_isolate_programs_is_refused_before_its_model(
    tools, reward, who, rows, monkeypatch, tmp_path
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/setpriv").symlink_to(shutil.which("setpriv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match=f"{who} of these rows run programs") as refused:
        make_plan(rows(tools, reward))
    assert "apt-get install bubblewrap" in str(refused.value)
    make_plan(rows([], "runs_nothing"))


def test_missing_isolation_is_in_the_description_of_a_run(rows, caplog):
    plan = make_plan(rows(["compute"], "runs_code", UNSAFE))
    assert (
        "programs of the tool compute, the reward runs_code run NOT ISOLATED, with your rights"
        " (sandbox.backend=unsafe-subprocess)"
    ) in describe_run(plan)
    assert "runs as you" in caplog.text
    assert "programs of" not in describe_run(make_plan(rows([], "runs_nothing", UNSAFE)))


def test_sandbox_settings_do_not_matter_for_tools_of_a_server(rows):
    keys = ["tools.transport=http://127.0.0.1:9", "sandbox.python=/no/python"]
    make_plan(rows(["compute"], "runs_nothing", *keys))
