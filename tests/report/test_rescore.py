"""Stored episodes, scored again."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from agentrl.cli import main
from agentrl.config import Config
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Sample, Scored, Segment, Trajectory, Turn
from agentrl.trajectory import float_array as floats
from agentrl.trajectory import token_array as tokens

MY = """
from agentrl import reward

def strict(trajectory, limit=2):
    return float(len(trajectory.final_text) > limit)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "turns": extra_info["num_turns"]}

@reward("ranks_rescore", group=True)
def ranks(trajectories):
    return [float(t.rollout) for t in trajectories]

class Counter:
    def __call__(self, trajectory):
        return 1.0

def broken(trajectory):
    raise ValueError("no such column")
"""
ANSWERS = ("a", "bbb", "cc", "dddd")


def episode(row: str, rollout: int, answer: str, *, extra=None, stop: str = "done") -> Scored:
    """Return an episode with outcome 0.5, a turn reward of 0.25 and a tool reward of 1."""
    prompt = (Message("user", "Say."),)
    sample = Sample(row, prompt, ground_truth="bbb", extra=extra or {})
    turn = Turn(0, 0, 2, "stop", rewards={"turn": 0.25}, message_index=1)
    segment = Segment(tokens([1]), tokens([2, 3]), tokens([1, 1]), floats([-1, -1]), tokens([0, 0]))
    trajectory = Trajectory(
        sample,
        f"{row}-{rollout}",
        rollout,
        (segment,),
        (turn,),
        (*prompt, Message("assistant", answer)),
        {},
        stop,
        tool_reward=1.0,
    )
    rewards = {"outcome": 0.5, "turn": 0.25, "tool": 1.0}
    return Scored(trajectory, rewards, 0.5 + 0.5 * 0.25 + 2 * 1.0)


@pytest.fixture
def run(tmp_path):
    """A run with two groups of training and one of validation."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "my.py").write_text(MY)
    tree = {
        "reward": {"turn_weight": 0.5, "tool_weight": 2.0},
        "rollout": {"budget_policy": {"turns": "zero"}},
    }
    (folder / "config.yaml").write_text(Config.model_validate(tree).resolved_yaml())
    store = TrajectoryStore(folder / "trajectories")
    groups = [
        Group(e[0].trajectory.sample, e)
        for e in (
            tuple(episode("r", i, answer) for i, answer in enumerate(ANSWERS[:2])),
            tuple(episode("s", i, answer) for i, answer in enumerate(ANSWERS[2:])),
        )
    ]
    store.write(1, groups)
    store.write(1, groups[:1], split="val")
    return folder


def rescore(capsys, run: Path, reward: str, *words: str) -> tuple[int, str]:
    try:
        main(["rescore", str(run), "--reward", f"{run.parent}/my.py:{reward}", *words])
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def write(run: Path, *groups: Group) -> None:
    TrajectoryStore(run / "trajectories").write(2, groups)


def test_all_episodes_get_the_new_outcome(run, capsys, tmp_path):
    out = tmp_path / "scores.parquet"
    before = {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    code, printed = rescore(capsys, run, "strict", "--out", str(out))
    assert code == 0, printed
    rows = pq.read_table(out).to_pylist()
    assert [(r["split"], r["episode_id"], r["outcome"], r["new_outcome"]) for r in rows] == [
        ("train", "r-0", 0.5, 0.0), ("train", "r-1", 0.5, 1.0), ("train", "s-0", 0.5, 0.0),
        ("train", "s-1", 0.5, 1.0), ("val", "r-0", 0.5, 0.0), ("val", "r-1", 0.5, 1.0),
    ]  # fmt: skip
    assert [r["new_reward"] - r["new_outcome"] for r in rows] == [0.5 * 0.25 + 2.0] * 6
    assert "train         4    0.500        0.500        4   2.625       2.625" in printed, printed
    assert before == {f: f.read_bytes() for f in run.rglob("*") if f.is_file()}


def test_arguments_weights_and_budgets(run, capsys, tmp_path):
    out = tmp_path / "scores.parquet"
    write(run, Group(Sample("t", ()), (episode("t", 0, "eeeee", stop="turns"),)))
    words = ["reward.kwargs.limit=3", "reward.tool_weight=0", "--out", str(out)]
    assert rescore(capsys, run, "strict", *words)[0] == 0
    rows = {r["episode_id"]: r for r in pq.read_table(out).to_pylist() if r["split"] == "train"}
    assert [r["new_outcome"] for r in rows.values()] == [0, 0, 0, 1, 1]
    assert [r["new_reward"] for r in rows.values()] == [0.125, 0.125, 0.125, 1.125, 0.0]


def test_a_function_of_verl(run, capsys):
    code, printed = rescore(capsys, run, "compute_score")
    assert code == 0 and "train         4    0.500        0.250        4" in printed, printed


def test_a_reward_of_groups_gets_whole_groups(run, capsys):
    assert rescore(capsys, run, "ranks")[0] == 0
    write(run, Group(Sample("t", ()), (episode("t", 1, "a"),), dropped=1))
    code, printed = rescore(capsys, run, "ranks")
    assert code == 1 and "1 group lost rollouts: t in step 2" in printed, printed
    assert rescore(capsys, run, "strict")[0] == 0, "other rewards do not compare"


def test_a_row_that_json_cannot_hold_is_refused_by_name(run, capsys):
    lossy = episode("u", 0, "a", extra={"when": date(2026, 1, 1)})
    write(run, Group(lossy.trajectory.sample, (lossy,)))
    code, printed = rescore(capsys, run, "strict")
    assert code == 1 and "1 row of" in printed and "u (extra.when)" in printed, printed


@pytest.mark.parametrize(
    ("reward", "words", "expected"),
    [
        ("Counter", [], "Counter' is a class: its scores may depend on"),
        ("broken", [], "raised ValueError: no such column"),
        ("nothing", [], "no function 'nothing'"),
        ("strict", ["rollout.n=3"], "rollout.n=3: the record cannot be repeated"),
        ("strict", ["reward.kwargs.lim=3"], "lim"),
        ("strict", ["--out", "scores.csv"], "must end in .parquet"),
    ],
)
def test_mistakes_are_named(run, capsys, reward, words, expected):
    code, printed = rescore(capsys, run, reward, *words)
    assert code == 1 and expected in printed, printed


@pytest.mark.parametrize("key", ["files", "reward"])
def test_the_code_of_the_run_is_named_when_it_is_loaded(run, capsys, key):
    tree = Config.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    file = f"{run.parent}/{key}_of_run.py"
    Path(file).write_text(f"{MY}\nreward('of_run')(strict)" if key == "files" else MY)
    value = [file] if key == "files" else {"function": f"{file}:strict"}
    settings = Config.model_validate({**tree.model_dump(), key: value})
    (run / "config.yaml").write_text(settings.resolved_yaml())
    name = "of_run" if key == "files" else f"{file}:strict"
    with pytest.raises(SystemExit, match="0"):
        main(["rescore", str(run), "--reward", name])
    assert f"loads {file}: {run}/config.yaml names them" in capsys.readouterr().err


def test_the_folder_of_a_model_is_no_run(run, capsys):
    (run / "config.json").write_text("{}")
    code, printed = rescore(capsys, run, "strict")
    assert code == 1 and "it is the folder of a model" in printed


def test_a_folder_without_a_config(run, capsys):
    (run / "config.yaml").unlink()
    code, printed = rescore(capsys, run, "strict")
    assert code == 1 and "has no config.yaml" in printed
