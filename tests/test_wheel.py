"""The wheel, installed in an environment of its own, runs the demo without the checkout.

pip builds it in isolation, so it needs the package registry for hatchling. The packages that
agentrl needs are those of this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """The `bin` of an environment with the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    packages = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    # The checkout is not on the path: Python reads no .pth files of a folder that one names.
    (Path(packages.strip()) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_the_wheel_has_all_files_of_the_package_the_shipped_tools_and_the_documentation(wheel):
    assert wheel.name.startswith("agentrl_toolkit-")
    listed = run("git", "ls-files", "agentrl", cwd=ROOT).split()
    more = {f"agentrl/_shelf/{path.name}" for path in (ROOT / "tools_registry").glob("*.py")}
    more |= {f"agentrl/_docs/{path.name}" for path in (ROOT / "docs").iterdir()}
    more.add("agentrl/_assistants.md")
    with zipfile.ZipFile(wheel) as archive:
        contents = set(archive.namelist())
    assert {f for f in listed if (ROOT / f).exists()} | more <= contents
    assert not [f for f in contents if not f.startswith(("agentrl/", "agentrl_toolkit-"))]


def test_the_demo_runs_outside_of_the_checkout(scripts, tmp_path, tiny_model):
    (tmp_path / "datasets").mkdir()
    run(scripts / "python", "-m", "agentrl.demo", cwd=tmp_path)
    for name in ("arithmetic_train.parquet", "arithmetic_val.parquet"):
        assert (tmp_path / "datasets" / name).read_bytes() == (
            ROOT / "datasets" / name
        ).read_bytes()
    command = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "arithmetic" in line
    )
    words = command.split()[1:]  # without $(BIN)/agentrl
    output = run(
        scripts / "agentrl", *words, "trainer.total_steps=2", "data.batch_size=4",
        "trainer.val_before_train=false", cwd=tmp_path,
    )  # fmt: skip
    assert "done: 2 steps" in output
    assert (tmp_path / "runs/demo/model/config.json").exists()


def test_commands_find_what_is_in_the_wheel(scripts, tmp_path):
    where = "import agentrl; print(agentrl.__file__)"
    assert str(scripts.parent) in run(scripts / "python", "-c", where, cwd=tmp_path)
    assert "calculator" in run(
        scripts / "agentrl", "tools", "list", "shelf:calculator", cwd=tmp_path
    )
    run(scripts / "agentrl", "init", "mine", cwd=tmp_path)
    assert (tmp_path / "mine/env.py").exists()
    hint = "from agentrl.installation import *; print(install_command('search'))"
    said = run(scripts / "python", "-c", hint, cwd=tmp_path)
    assert said == 'pip install "agentrl-toolkit[search]"\n'
