"""Whole runs with `data.curriculum`: the rows that they draw, and that a resume repeats them."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.data import POOLS
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.learner import Learner
from agentrl.preflight import describe_run, make_plan
from agentrl.record import read_metrics
from agentrl.report import load_run
from agentrl.report.page import make_report
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer

ENV = """
from agentrl import reward

@reward("difficulty")
def difficulty(trajectory):
    share = float(trajectory.sample.ground_truth)
    score = 1.0 + trajectory.rollout * (share == 0.5)  # other groups have no signal
    return {"score": score, "acc": float(trajectory.rollout < 2 * share)}
"""
ROWS, BATCH, STEPS = 12, 2, 12
SHARES = [0.0] * 4 + [1.0] * 4 + [0.5] * 4
CURRICULUM = "data.curriculum={low: 0.2, high: 0.8}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("curriculum")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": str(share)} for i, share in enumerate(SHARES)]
    for name, part in (("all", rows), ("a", rows[:6]), ("b", rows[6:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return [
        f"trainer.total_steps={STEPS}", "trainer.save_freq=1", f"data.batch_size={BATCH}",
        "trainer.keep=3", "rollout.n=2", "rollout.max_turn_tokens=4", "trainer.device=cpu",
        "tools.transport=in_process", "reward.function=difficulty", f"model.path={random_model}",
        f"data.train={folder / 'all.jsonl'}", f"files=[{folder / 'env.py'}]",
    ]  # fmt: skip


@pytest.fixture
def start(keys):
    def run(output, *overrides):
        config = load_config(None, [*keys, f"trainer.output={output}", CURRICULUM, *overrides], {})
        Trainer(config, observers=()).run()

    return run


def rows_of(output: Path) -> dict[int, list[int]]:
    """Return the rows that each step has played, those of evicted groups included."""
    rows = defaultdict(list)
    for split in ("train", "evicted"):
        for stored in TrajectoryStore(output / "trajectories").read(split=split):
            if stored.scored.trajectory.rollout == 0:
                rows[stored.step].append(stored.scored.trajectory.sample.row)
    return dict(rows)


def pools_of(output: Path) -> list[dict[str, float]]:
    record = read_metrics(output / "metrics.jsonl")
    return [{pool: data[f"curriculum/{pool}"] for pool in POOLS} for step, data in record if step]


def state_of(output: Path) -> dict[str, list]:
    with np.load(output / f"global_step_{STEPS:08d}/curriculum.npz") as state:
        return {name: state[name].tolist() for name in state}


KINDS = {
    "filtered": ["algorithm.filter_groups=true", "data.gen_batch_size=3"],
    "sync": [],
    "ahead": ["trainer.max_staleness=2"],
    "mixture": ["data.train=[{{path: {a}, weight: 2}}, {{path: {b}, weight: 0.5}}]"],
}


@pytest.mark.parametrize(
    "kind", ["filtered", *(pytest.param(k, marks=pytest.mark.slow) for k in [*KINDS][1:])]
)
def test_a_run_that_was_killed_draws_the_same_rows(kind, keys, start, tmp_path, monkeypatch):
    folder = Path(
        next(key for key in keys if key.startswith("data.train=")).partition("=")[2]
    ).parent
    names = {name: folder / f"{name}.jsonl" for name in ("a", "b")}
    settings = [setting.format(**names) for setting in KINDS[kind]]
    start(tmp_path / "whole", *settings)
    update, calls = Learner.update, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 9:
            raise RunStopped("the machine is gone")
        return update(self, *args, **kwargs)

    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", failing)
        with pytest.raises(RunStopped, match="the machine is gone"):
            start(killed, *settings)
    shutil.rmtree(killed / "global_step_00000008")  # the kill came before this checkpoint
    start(killed, *settings)
    rows = rows_of(tmp_path / "whole")
    assert rows_of(killed) == rows and [*rows] == [*range(1, STEPS + 1)]
    assert pools_of(killed) == pools_of(tmp_path / "whole")
    assert state_of(killed) == state_of(tmp_path / "whole")


def test_rows_in_the_band_are_drawn_more_often(start, tmp_path, capsys):
    """The success is `acc`, not the reward, which is at least 1."""
    start(tmp_path, "trainer.total_steps=18")
    rows = rows_of(tmp_path)
    epoch = [row for step in range(1, 7) for row in rows[step]]
    assert sorted(epoch) == [*range(ROWS)], "first each row once"
    later = Counter(row for step in range(7, 19) for row in rows[step])
    # Of 4.8 draws in an interval of length 1, 4 are of rows in the band.
    assert sum(later[row] for row in range(8, 12)) >= 18 and all(later[r] <= 1 for r in range(8))
    pools = pools_of(tmp_path)
    assert pools[5] == {"not_played": 0, "too_hard": 4, "in_band": 4, "too_easy": 4} == pools[-1]
    assert pools[0]["not_played"] == 10
    summary = dict(make_report(load_run(tmp_path), []).summary)
    line = "0 not played, 4 too hard, 4 in band, 4 too easy (rows, after step 18)"
    assert summary["curriculum"] == line
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert f"\ncurriculum: {line}\n" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_curriculum_and_a_fork_may_change_it(start, tmp_path):
    start(tmp_path / "run", "trainer.total_steps=6")
    with pytest.raises(ConfigError, match=r"data\.curriculum: .*\nTo resume, use the values"):
        start(tmp_path / "run", "data.curriculum={low: 0.6}")
    checkpoint = f"trainer.resume={tmp_path / 'run/global_step_00000006'}"
    start(tmp_path / "off", checkpoint, "data.curriculum=null", "trainer.total_steps=7")
    assert not (tmp_path / "off/global_step_00000007/curriculum.npz").exists()
    start(
        tmp_path / "wide", checkpoint, "data.curriculum={low: 0, high: 1}", "trainer.total_steps=7"
    )
    assert pools_of(tmp_path / "wide")[-1]["in_band"] == ROWS, "the success of rows is kept"
    off = f"trainer.resume={tmp_path / 'off/global_step_00000007'}"
    start(tmp_path / "on", off, "trainer.total_steps=8")
    assert pools_of(tmp_path / "on")[-1]["not_played"] == ROWS - BATCH
    start(tmp_path / "seed", checkpoint, "trainer.seed=1", "trainer.total_steps=7")
    assert pools_of(tmp_path / "seed")[-1]["not_played"] == ROWS - BATCH, "the order is another one"


def test_a_curriculum_says_nothing_of_rows_that_are_left_out(keys):
    settings = [*keys, "trainer.total_steps=0", "data.drop_last=true", "data.batch_size=5"]
    assert "leaves out" in describe_run(make_plan(load_config(None, settings, {})))
    assert "leaves" not in describe_run(make_plan(load_config(None, [*settings, CURRICULUM], {})))


def test_recorded_answers_have_no_curriculum():
    keys = ["data.train=recorded:answers", "algorithm.name=reinforce_plus_plus", "rollout.n=1"]
    with pytest.raises(ConfigError, match="recorded answers are used in their order"):
        load_config(None, [*keys, CURRICULUM], {})
