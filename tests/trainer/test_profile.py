"""Profiles of steps: files that Perfetto opens, and a run that is the same with and without."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from agentrl.config import load_config
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner import profile
from agentrl.record import read_metrics
from agentrl.trainer import Trainer
from agentrl.trainer import step as step_module

ENV = """
from agentrl import ToolCall, agent_loop, reward, tool

@tool
def wait_of_profile() -> str:
    "Wait."
    return "done"

@agent_loop("waiting_profile")
async def waiting(ep):
    await ep.generate(stop=("a", "e", " "), parse=lambda text: [ToolCall("wait_of_profile", {})])
    await ep.call_tools()
    await ep.generate(stop=("a", "e", " "))

@reward("letters_profile")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("profile")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "tools": ["wait_of_profile"]} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(output, *overrides):
        base = [
            "trainer.total_steps=2", "data.batch_size=2", "rollout.n=2", "trainer.test_freq=1",
            "rollout.max_turn_tokens=40", "optim.lr=0.01", "trainer.device=cpu",
            "tools.transport=in_process", "reward.function=letters_profile",
            "data.agent_name=waiting_profile", "algorithm.kl_loss_coef=0.1",
            "algorithm.mini_batch_size=2", "trainer.val_before_train=false",
        ]  # fmt: skip
        flags = {
            "data.train": str(folder / "rows.jsonl"),
            "data.val": str(folder / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(output),
            "files": [str(folder / "env.py")],
        }
        Trainer(load_config(None, [*base, *overrides], flags)).run()

    return run


def read(file: Path) -> dict:
    with gzip.open(file) as opened:
        return json.load(opened)


def slices(trace: dict) -> dict[str, list[tuple[float, float]]]:
    """Start and end of each slice in microseconds, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def record(output: Path) -> tuple:
    """All numbers of a run that do not tell the time, and its weights."""
    steps = [
        (step, {k: v for k, v in data.items() if not k.startswith(("timing_s/", "perf/"))})
        for step, data in read_metrics(output / "metrics.jsonl")
    ]
    weights = (output / "model/model.safetensors").read_bytes()
    return steps, hashlib.sha256(weights).hexdigest()


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory):
    """A run without profiles, and the same run with a profile of step 2."""
    folder = tmp_path_factory.mktemp("runs")
    start(folder / "plain")
    start(folder / "profiled", "trainer.profile_steps=[2, 2]")
    return folder


def test_a_profile_does_not_change_the_run(runs):
    assert record(runs / "profiled") == record(runs / "plain")
    assert not (runs / "plain/profile").exists()


def test_only_the_named_step_is_profiled(runs):
    files = sorted(
        str(f.relative_to(runs / "profiled/profile"))
        for f in (runs / "profiled/profile").rglob("*")
        if f.is_file()
    )
    assert files == ["step_00000002/controller.json.gz", "step_00000002/rank_0.json.gz"]
    assert not profile.recorders
    assert not [o for o in gc.get_objects() if isinstance(o, torch.profiler.profile)]


def test_the_parts_of_a_step_are_ranges_in_both_files(runs):
    folder = runs / "profiled/profile/step_00000002"
    step, rank = (read(folder / f"{name}.json.gz") for name in ("controller", "rank_0"))
    parts, operations = slices(step), slices(rank)
    for name in (
        "gen", "store", "metrics", "collate", "ref", "values", "old_log_prob", "adv",
        "update_actor", "publish", "update_weights", "canary", "testing", "save_checkpoint",
        "reference_logprobs", "old_logprobs", "score",
    ):  # fmt: skip
        assert len(parts[name]) == len(operations[name]) == 1, name
    for name in ("forward", "backward", "optimizer"):
        assert len(parts[name]) == len(operations[name]) == 2, name  # two mini-batches
    seconds = read_metrics(runs / "profiled/metrics.jsonl")[-1][1]
    for name in ("gen", "update_actor", "update_weights"):
        start, end = parts[name][0]
        assert (end - start) / 1e6 == pytest.approx(seconds[f"timing_s/{name}"], rel=0.1, abs=0.02)
    assert any(name.startswith("aten::mm") for name in operations)


def test_the_files_have_the_same_clock(runs):
    folder = runs / "profiled/profile/step_00000002"
    step, rank = (read(folder / f"{name}.json.gz") for name in ("controller", "rank_0"))
    assert step["baseTimeNanoseconds"] == rank["baseTimeNanoseconds"]
    for mine, theirs in zip(slices(step)["forward"], slices(rank)["forward"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e5)  # microseconds


def test_episodes_have_tracks_and_counts(runs):
    trace = read(runs / "profiled/profile/step_00000002/controller.json.gz")
    events = trace["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    assert names == {"step": 1, "episodes": 2, "validation": 3}
    played = [e for e in events if e["pid"] == 2]
    episodes = [e for e in played if "episode_id" in e.get("args", {})]
    assert len(episodes) == 4 and len({e["tid"] for e in episodes}) <= 4
    assert {e["args"]["agent_name"] for e in episodes} == {"waiting_profile"}
    waits = [e for e in played if e["ph"] == "X" and e not in episodes]
    assert {e["name"] for e in waits} == {"open", "generate", "tools", "reward"}
    gen = slices(trace)["gen"][0]
    slack = 1e5  # microseconds: episodes read the clock at another moment than the step's parts
    assert all(gen[0] - slack <= e["ts"] and e["ts"] + e["dur"] <= gen[1] + slack for e in waits)
    for track in {e["tid"] for e in played if e["ph"] == "X"}:
        ends = 0.0
        for e in sorted((e for e in waits if e["tid"] == track), key=lambda e: e["ts"]):
            assert e["ts"] >= ends - 1  # microseconds
            ends = e["ts"] + e["dur"]
    counts = [e["args"] for e in played if e["ph"] == "C"]
    assert max(c["generate"] for c in counts) >= 2
    assert set(counts[-1].values()) == {0} and min(min(c.values()) for c in counts) == 0


def test_a_profile_that_cannot_be_written_is_one_warning(start, tmp_path, capsys):
    output = tmp_path / "run"
    output.mkdir()
    (output / "profile").write_text("a file, not a folder")
    start(output, "trainer.profile_steps=[1,2]")
    printed = capsys.readouterr()
    assert printed.err.count("no profile of step") == 1 and "rank_0.json.gz" in printed.err
    assert "profile of step" not in printed.out and "step 2/2" in printed.out


def test_a_full_disk_leaves_no_file(tmp_path):
    rank = profile.RankProfile(gpu=False)
    for _ in range(1000):
        torch.zeros(2) + 1
    rank.stop()
    # As on a full disk, torch raises nothing.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        problem = rank.write(tmp_path / "rank_0.json.gz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "torch could not write the trace" in problem
    assert not [*tmp_path.iterdir()]


def test_a_step_that_fails_leaves_no_recorder(start, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RunStopped("the update fails")

    monkeypatch.setattr(step_module, "learn", fail)
    with pytest.raises(RunStopped, match="the update fails"):
        start(tmp_path / "run", "trainer.profile_steps=[1]")
    assert not profile.recorders
    assert not (tmp_path / "run/profile").exists()


def test_steps_that_the_run_does_not_make_are_refused(start, tmp_path):
    with pytest.raises(ConfigError, match=r"profile_steps=\[3\]: the run ends after step 2"):
        start(tmp_path / "run", "trainer.profile_steps=[1,3]")
    epochs = ["trainer.total_steps=0", "trainer.total_epochs=1", "trainer.profile_steps=[3]"]
    with pytest.raises(ConfigError, match=r"profile_steps=\[3\]: the run ends after step 2"):
        start(tmp_path / "run", *epochs)
    with pytest.raises(ConfigError, match="a list of numbers of steps, from 1 on"):
        start(tmp_path / "run", "trainer.profile_steps=[0]")


@pytest.mark.slow
def test_a_resumed_run_counts_steps_from_the_beginning(start, runs, tmp_path):
    output = shutil.copytree(runs / "profiled", tmp_path / "run")
    before = read(output / "profile/step_00000002/controller.json.gz")
    start(output, "trainer.total_steps=3", "trainer.profile_steps=[2,3]")
    assert read(output / "profile/step_00000002/controller.json.gz") == before
    assert slices(read(output / "profile/step_00000003/rank_0.json.gz"))["optimizer"]
    start(output, "trainer.resume=never", "trainer.total_steps=1")
    assert not [*(output / "profile").iterdir()]
