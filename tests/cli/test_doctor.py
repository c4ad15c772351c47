"""`agentrl doctor` says what works, by trying."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.needs import needs_sandbox
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.sandbox.cgroup import find_parent


def run_doctor(*words):
    return CliRunner().invoke(app, ["doctor", *words])


@needs_sandbox
def test_doctor_runs_a_program_and_prints_versions(tmp_path):
    began = time.monotonic()
    done = run_doctor("--output", str(tmp_path / "runs"))
    assert done.exit_code == 0, done.output
    assert time.monotonic() - began < 20
    lines = done.output.splitlines()
    for start in ("ok      python: 3.", "ok      torch: ", "ok      transformers: ",
                  "ok      bwrap: 0."):  # fmt: skip
        assert any(line.startswith(start) for line in lines), (start, done.output)
    assert lines[-2] == (
        "ok      sandbox bubblewrap: a program ran without access to network, files and processes,"
        " as uid 65534"
    )
    parent = find_parent()
    assert lines[-1] == (
        f"ok      sandbox memory: each program gets a cgroup in {parent.folder}"
        if parent
        else "note    sandbox memory: cannot create cgroups: only the container's memory limit"
        " container bounds a program"
    )


@needs_sandbox
def test_doctor_may_be_the_first_process_of_a_container():
    """The first process of the sandbox has the same id, and is no process outside of it."""
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    words += [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    done = subprocess.run(
        [*words, sys.executable, "-m", "agentrl", "doctor"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "ok      sandbox bubblewrap" in done.stdout, done


def test_doctor_reports_another_project_of_the_same_name(tmp_path, monkeypatch):
    info = tmp_path / "AgentRL-0.0.18.dist-info"  # as PyPI's package names it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: AgentRL\nVersion: 0.0.18\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_doctor("--sandbox", "unsafe-subprocess")
    assert done.exit_code == 0
    line = next(line for line in done.output.splitlines() if "AgentRL" in line)
    checkout = Path(__file__).parents[2]
    assert line == (
        "note    AgentRL: the package AgentRL 0.0.18 is not this one, which is agentrl-toolkit."
        " Remove it, then install this one again: pip uninstall AgentRL && "
        f'pip install -e "{checkout}"'
    )


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ((), 0, "missing sandbox bubblewrap: needed by tools and rewards that run programs, no"),
        (("--sandbox", "bubblewrap"), 1, "failed  sandbox bubblewrap: bubblewrap is not installed"),
    ],
)
def test_doctor_fails_without_bwrap_if_it_is_named(tmp_path, monkeypatch, words, code, line):
    (tmp_path / "setpriv").symlink_to(shutil.which("setpriv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_doctor(*words)
    assert done.exit_code == code
    assert line in done.output
    assert "apt-get install bubblewrap" in done.output


def test_doctor_reports_that_unsafe_subprocess_isolates_nothing():
    done = run_doctor("--sandbox", "unsafe-subprocess")
    assert done.exit_code == 0, done.output
    assert "note    sandbox unsafe-subprocess: a program ran as uid" in done.output
    assert done.output.splitlines()[-1].endswith("reached: network, files, processes")
    assert f"uid {os.getuid()}" in done.output


def test_an_unknown_backend_is_refused():
    done = run_doctor("--sandbox", "jail")
    assert done.exit_code == 1 and "sandbox.backend" in str(done.exception)


def test_a_folder_that_cannot_be_written_fails(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may write everywhere
        may = os.access
        monkeypatch.setattr(
            "os.access", lambda path, mode: path != tmp_path / "closed" and may(path, mode)
        )
    done = run_doctor(
        "--sandbox", "unsafe-subprocess", "--output", str(tmp_path / "closed" / "runs")
    )
    assert done.exit_code == 1, done.output
    assert f"failed  runs: {tmp_path / 'closed'} is not writable" in done.output
    done = run_doctor("--sandbox", "unsafe-subprocess", "--output", str(tmp_path / "runs"))
    assert done.exit_code == 0, done.output
