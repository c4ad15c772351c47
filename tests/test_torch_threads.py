"""The number of CPU threads of each process, and that torch has it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

from agentrl import torch_threads
from agentrl.cli import app
from agentrl.torch_threads import MAX_THREADS, SMALL_MODEL, choose_threads, count_cores

LARGE = SMALL_MODEL


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cores(monkeypatch):
    def set_cores(count):
        monkeypatch.setattr(torch_threads, "count_cores", lambda: count)

    return set_cores


@pytest.mark.parametrize(
    ("machine", "processes", "weights", "spinning", "passive"),
    [
        (1, 1, None, 1, 1),
        (2, 1, None, 1, 2),
        (2, 2, None, 1, 1),
        (2, 1, LARGE, 1, 1),
        (4, 1, None, 3, 4),
        (4, 1, LARGE, 3, 3),
        (4, 1, LARGE - 1, 1, 1),
        (4, 3, None, 1, 1),
        (64, 1, None, 8, 8),
        (64, 4, None, 8, 8),
        (64, 16, None, 3, 4),
        (2, 5, None, 1, 1),
    ],
)
def test_processes_share_the_cores(
    cores, monkeypatch, machine, processes, weights, spinning, passive
):
    cores(machine)
    assert choose_threads(processes, weights=weights).count == spinning
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert choose_threads(processes, weights=weights).count == passive


@pytest.mark.parametrize("value", ["3", " 3 ", "3,2"])
def test_the_variable_wins(cores, monkeypatch, value):
    cores(2)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert str(choose_threads(2)) == "3 of 2 cores (OMP_NUM_THREADS)"
    assert choose_threads(weights=1).count == 3


@pytest.mark.parametrize("value", ["", "0", "many", "-1"])
def test_a_variable_that_openmp_ignores_counts_as_unset(cores, monkeypatch, value):
    cores(64)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert str(choose_threads()) == "8 of 64 cores (more do not help)"


def test_a_smaller_number_that_was_set_before_wins(cores, monkeypatch):
    cores(64)
    assert choose_threads(current=64).count == MAX_THREADS
    assert str(choose_threads(current=3)) == "3 of 64 cores (torch's own number)"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose_threads(current=3).count == 3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "800000 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_quota(tmp_path, monkeypatch, files, expected):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert count_cores(tmp_path) == expected


def test_torch_keeps_the_number_for_each_thread():
    """The local engine relies on it: its worker's number leaves the learner's as it is."""
    before, seen = torch.get_num_threads(), []

    def work():
        torch.set_num_threads(before + 1)
        seen.append(torch.get_num_threads())

    try:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert (seen, torch.get_num_threads()) == ([before + 1], before)
    finally:
        torch.set_num_threads(before)  # the number of threads that start later


def test_a_command_lets_waiting_threads_sleep_before_torch_is_imported():
    program = (
        "import os, sys; from agentrl.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )

    def wait_policy(**variables):
        environment = os.environ | variables
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.splitlines()[-1], done.stderr

    assert wait_policy() == ("False PASSIVE", "")
    assert wait_policy(OMP_WAIT_POLICY="ACTIVE") == ("False ACTIVE", "")


def test_doctor_prints_the_number(cores, monkeypatch):
    def line():
        done = CliRunner().invoke(app, ["doctor", "--sandbox", "unsafe-subprocess"])
        return next(line for line in done.output.splitlines() if " threads: " in line)

    cores(64)
    assert line() == (
        "ok      threads: a learner uses 8 of 64 cores (more do not help); OMP_NUM_THREADS sets"
        " another number"
    )
    cores(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert line().startswith("note    threads: a learner uses 8 of 2 cores (OMP_NUM_THREADS);")
