"""`agentrl sweep`: the runs of a grid, one table, what continues after a kill, what is refused."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.forked_python import ForkedPython, run_agentrl

from agentrl.cli import main
from agentrl.cli.sweep import _name_of as name_of
from agentrl.cli.sweep import read_sweep
from agentrl.cluster.runs import _devices as devices_of
from agentrl.data import read_rows, write_rows
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = ("data.batch_size=2", "rollout.n=2", "trainer.total_steps=2", "trainer.save_freq=1")
SMALL = (*SMALL, "val.greedy=false", "data.val=val.jsonl", "trainer.val_before_train=false")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the recipes and a few rows."""
    for name in ("datasets", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows = read_rows(ROOT / "datasets/arithmetic_val.parquet")
    write_rows(tmp_path / "val.jsonl", [r for r in rows if r["agent_name"] == "tool_agent"][:6])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(folder, capsys):
    """Return the message with which a sweep is refused before a run starts."""

    def refuse(text, *words):
        Path("sweep.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["sweep", "sweep.yaml", *words])
        out, err = capsys.readouterr()
        assert ended.value.code == 1 and "run 1 of" not in out, out + err
        return err

    return refuse


# -- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kl", "tools"])
def test_the_recipes_are_nine_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, output, runs = read_sweep(Path(f"recipes/sweeps/{name}.yaml"))
    assert config and config.exists() and output == Path(f"runs/sweeps/{name}")
    assert len(runs) == 9 and {run["trainer.seed"] for run in runs} == {0, 1, 2}
    assert len({tuple(run.values()) for run in runs}) == 9


def test_each_of_runs_is_played_with_each_of_the_grid(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "output: out\nruns: [{optim.lr: 1e-5}, {optim.lr: 1e-4, data.val: a.jsonl}]\n"
        "grid: {trainer.seed: [0, 1]}\n"
    )
    assert read_sweep(file) == (
        None,
        Path("out"),
        [
            {"optim.lr": 1e-5, "trainer.seed": 0},
            {"optim.lr": 1e-5, "trainer.seed": 1},
            {"optim.lr": 1e-4, "data.val": "a.jsonl", "trainer.seed": 0},
            {"optim.lr": 1e-4, "data.val": "a.jsonl", "trainer.seed": 1},
        ],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: o\ngird: {optim.lr: [1]}", "no key 'gird.optim.lr'. Did you mean 'grid'"),
        ("grid: {optim.lr: [1]}", "no output"),
        ("output: [1]\ngrid: {optim.lr: [1]}", "output=[1] must be a path"),
        ("output: o", "no grid and no runs"),
        ("output: o\ngrid: {}", "grid={} must map"),
        ("output: o\ngrid: [1]", "grid=[1] must map"),
        ("output: o\ngrid: {optim.lr: []}", "grid.optim.lr=[] must be a list with at least one"),
        ("output: o\ngrid: {optim.lr: 1}", "grid.optim.lr=1 must be a list with at least one"),
        ("output: o\nruns: []", "runs=[] must be a list of mappings"),
        ("output: o\nruns: [1]", "runs=[1] must be a list of mappings"),
        ("output: o\ngrid: {a.b: [1]}\nruns: [{a.b: 2}]", "a.b is set by grid and by runs"),
        ("output: o\ngrid: {a.b: [1], a.b: [2]}", "a.b is set twice"),
        ("output: o\ngrid: {a.b: [1}", "YAML syntax"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, message):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_sweep(tmp_path / "sweep.yaml")


def test_all_configs_are_checked_before_the_first_run(refused, folder):
    base = "config: recipes/sweeps/run.yaml\noutput: out\n"
    error = refused(base + "grid: {optim.lrr: [1], trainer.seed: [0, 1]}")
    assert "lrr=1-seed=0, lrr=1-seed=1: 1 mistake" in error and "Did you mean optim.lr?" in error
    error = refused(base + "grid: {trainer.seed: [0, one]}")
    assert "trainer.seed=one" in error and "must be an integer" in error and "seed=0" not in error
    error = refused(base + "grid: {optim.lr: [1e-5, 0.00001], trainer.seed: [0]}")
    assert "the same run as" in error
    error = refused(base + "grid: {data.train: [datasets/arithmetic_val.parquet, missing.jsonl]}")
    assert "no such file: missing.jsonl" in error
    error = refused(base + "grid: {trainer.seed: [0]}", "data.val=null")
    assert "no validation rows" in error
    error = refused(base + "grid: {trainer.seed: [0]}", "trainer.output=x")
    assert "trainer.output is set by the sweep" in error
    assert not (folder / "out").exists()


def test_a_run_without_values_has_a_folder_of_its_own(tmp_path):
    """In the sweep's own folder, it would wait for the sweep that waits for it."""
    (tmp_path / "sweep.yaml").write_text("output: out\nruns: [{}, {optim.lr: 1e-5}]\n")
    runs = read_sweep(tmp_path / "sweep.yaml")[2]
    assert [name_of([f"{k}={v}" for k, v in run.items()]) for run in runs] == ["base", "lr=1e-05"]


def test_a_damaged_state_is_named(refused, folder):
    (folder / "out").mkdir()
    (folder / "out/sweep.json").write_text("{")
    text = "config: recipes/sweeps/run.yaml\noutput: out\ngrid: {trainer.seed: [0]}"
    assert "out/sweep.json is damaged" in refused(text)


# -- the runs -------------------------------------------------------------------------------------


def sweep(*words):
    return run_agentrl("sweep", *words, *SMALL, timeout=900)


@pytest.mark.slow
def test_a_grid_ends_with_a_table_over_seeds(tiny_model, folder):
    text = (ROOT / "recipes/sweeps/kl.yaml").read_text()
    text = text.replace("[0, 0.001, 0.1]", "[0, 0.1]").replace("[0, 1, 2]", "[0, 1]")
    (folder / "sweep.yaml").write_text(text)
    done = sweep("sweep.yaml")
    assert done.returncode == 0, done.stderr
    output = folder / "runs/sweeps/kl"
    names = [f"kl_loss_coef={kl}-seed={seed}" for kl in ("0", "0.1") for seed in (0, 1)]
    for name in names:
        assert (output / name / "report.html").exists() and (output / name / "model").is_dir()
    table = done.stdout.split("run 4 of 4")[1]
    assert re.search(r"^kl_loss_coef=0 \(2 seeds\) +2 +6 ", table, re.M)
    assert re.search(r"^kl_loss_coef=0.1 \(2 seeds\) - kl_loss_coef=0 \(2 seeds\) +6 ", table, re.M)
    numbers = json.loads((output / "compare.json").read_text())
    first = numbers["validations"][0]
    assert first["name"] == "kl_loss_coef=0 (2 seeds)" and len(first["seeds"]) == 2
    assert first["over_seeds"]["mean"] == pytest.approx(sum(first["seeds"]) / 2)
    assert (output / "compare.svg").exists()

    metrics = [(output / name / "metrics.jsonl").read_bytes() for name in names]
    again = sweep("sweep.yaml")
    assert again.returncode == 0 and again.stdout.count(" is finished") == 4
    assert metrics == [(output / name / "metrics.jsonl").read_bytes() for name in names]
    changed = sweep("sweep.yaml", "optim.lr=1e-3")
    assert changed.returncode == 1 and "optim.lr: 0.00025 before, 0.001 now" in changed.stderr
    (folder / "sweep.yaml").write_text(text.replace("[0, 1]", "[0, 2]"))
    changed = sweep("sweep.yaml")
    assert "kl_loss_coef=0-seed=2: not there before" in changed.stderr
    assert "kl_loss_coef=0-seed=1: not there now" in changed.stderr


def wait_for_steps(process: ForkedPython, metrics: Path, count: int) -> None:
    """Wait until a run of the sweep has made some steps."""
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, process.read()[1][-2000:]
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_sweep_continues(tiny_model, folder):
    """After SIGKILL, the finished run is not touched, and each step of the other is made once."""
    (folder / "sweep.yaml").write_text(
        "config: recipes/sweeps/run.yaml\noutput: out\ngrid: {trainer.seed: [0, 1]}\n"
    )
    words = ["-m", "agentrl", "sweep", "sweep.yaml", *SMALL, "trainer.total_steps=6"]
    process = ForkedPython(words, cwd=folder)
    second = folder / "out/seed=1/metrics.jsonl"
    wait_for_steps(process, second, 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = (folder / "out/seed=0/metrics.jsonl").read_bytes()
    process = ForkedPython(words, cwd=folder)
    assert process.wait() == 0, process.read()[1]
    out = process.read()[0]
    assert "run 1 of 2: seed=0 is finished" in out and "resuming from step" in out
    assert (folder / "out/seed=0/metrics.jsonl").read_bytes() == first
    assert [json.loads(line)["step"] for line in second.open()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tiny_model, folder):
    (folder / "sweep.yaml").write_text(
        "config: recipes/sweeps/run.yaml\noutput: out\ngrid: {trainer.seed: [0, 1, 2]}\n"
    )
    (folder / "fail.py").write_text(
        "import os, sys\nif 'out/seed=1' in sys.argv and not os.path.exists('fixed'): os._exit(7)\n"
    )
    words = ["sweep.yaml", "files=[shelf:calculator, fail.py]"]
    done = sweep(*words)
    assert done.returncode == 1 and "error: the run seed=1 failed (exit code 7)" in done.stderr
    assert "1 of 3 runs failed: seed=1. The same command tries them again" in done.stderr
    assert re.search(r"^seed=2 - seed=0 +6 ", done.stdout, re.M)
    (folder / "fixed").touch()
    done = sweep(*words)
    assert done.returncode == 0 and done.stdout.count("is finished") == 2
    assert re.search(r"^seed=1 - seed=0 +6 ", done.stdout, re.M)


@pytest.mark.slow
def test_a_signal_stops_the_sweep(tiny_model, folder):
    (folder / "sweep.yaml").write_text(
        "config: recipes/sweeps/run.yaml\noutput: out\ngrid: {trainer.seed: [0, 1]}\n"
    )
    words = ["-m", "agentrl", "sweep", "sweep.yaml", *SMALL, "trainer.total_steps=400"]
    process = ForkedPython(words, cwd=folder)
    wait_for_steps(process, folder / "out/seed=0/metrics.jsonl", 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert "run 2 of 2" not in process.read()[0] and not (folder / "out/seed=1").exists()


# -- on a Ray cluster -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ray
def test_runs_as_ray_tasks(tiny_model, folder):
    """They are the runs that are trained one after the other; a failed one is tried again."""
    text = "config: recipes/sweeps/run.yaml\noutput: OUT\ngrid: {trainer.seed: [0, 1, 2]}\n"
    (folder / "sweep.yaml").write_text(text.replace("OUT", "out"))
    (folder / "fail.py").write_text(
        "import os, sys\nif 'out/seed=1' in sys.argv and not os.path.exists('fixed'): os._exit(7)\n"
    )
    words = ["sweep.yaml", "--ray", "local", "trainer.device=cpu"]
    words += ["files=[shelf:calculator, fail.py]"]
    done = sweep(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: the run seed=1 failed (exit code 7)" in done.stderr
    assert "run 3 of 3: seed=2 is finished" in done.stdout
    assert "done: 2 steps" in (folder / "out/seed=2.log").read_text()
    assert (folder / "out/seed=2/report.html").exists()
    (folder / "fixed").touch()
    done = sweep(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is finished") == 3
    assert re.search(r"^seed=1 - seed=0 +6 ", done.stdout, re.M)

    (folder / "one.yaml").write_text(text.replace("OUT", "one").replace("[0, 1, 2]", "[2]"))
    alone = sweep("one.yaml", "trainer.device=cpu", words[-1])
    assert alone.returncode == 0, alone.stderr
    scores = [
        [
            json.loads(line)["data"]["critic/score/mean"]
            for line in Path(path).read_text().splitlines()
        ]
        for path in ("out/seed=2/metrics.jsonl", "one/seed=2/metrics.jsonl")
    ]
    assert scores[0] == scores[1] and len(scores[0]) == 2


@pytest.mark.slow
@pytest.mark.ray
def test_runs_that_are_no_tasks_are_refused(refused, folder):
    text = "config: recipes/sweeps/run.yaml\noutput: out\ngrid: {trainer.seed: [0, 1]}\n"
    error = refused(text, "--ray", "nowhere")
    assert "nowhere is neither auto nor HOST:PORT" in error
    error = refused(text, "--ray", "local", "trainer.ray_address=auto", "trainer.nnodes=2")
    assert "seed=0: trainer.ray_address=auto: a run is a task on one machine here" in error
    error = refused(text, "--ray", "local", "trainer.n_gpus_per_node=512", "trainer.device=cpu")
    assert "seed=0: no machine of the cluster has 512 CPUs" in error


@pytest.mark.parametrize(
    ("keys", "has_gpus", "expected"),
    [
        ({}, True, ("GPU", 2)),
        ({}, False, ("CPU", 2)),
        ({"trainer.device": "cpu"}, True, ("CPU", 2)),
        ({"trainer.device": "cuda"}, False, ("GPU", 2)),
        ({"trainer.placement": "separate"}, True, ("GPU", 2 + 3 * 4)),
        ({"trainer.placement": "separate", "rollout.urls": ["http://a"]}, True, ("GPU", 2)),
    ],
)
def test_the_devices_of_a_run(keys, has_gpus, expected):
    values = {"trainer.device": "auto", "trainer.n_gpus_per_node": 2, "rollout.urls": []}
    values |= {"trainer.placement": "colocated", "rollout.engines": 3}
    assert devices_of(values | {"rollout.tensor_parallel_size": 4} | keys, has_gpus) == expected
