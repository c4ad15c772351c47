"""Which state a run starts from, which keys may change there, and what is recorded."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
from support.forked_python import ForkedPython, run_agentrl

from agentrl.config import FIELDS, Config, load_config
from agentrl.errors import ConfigError, DataError, RunStopped
from agentrl.record import read_metrics
from agentrl.report.run import Run
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trainer import run as run_module
from agentrl.trainer.checkpoint import find_checkpoint, save_checkpoint
from agentrl.trainer.resume import (
    CHANGEABLE_KEYS,
    FIXED_KEYS,
    UNRECORDED_KEYS,
    Change,
    find_start,
    write_config,
    write_fork,
)

ENV = """
from agentrl import reward

@reward("letters_resume")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""


# --- the decision, over checkpoints without weights ----------------------------------------------


def config(folder: Path, resume: str | Path = "auto", **sections) -> Config:
    trainer = {"output": str(folder), "resume": str(resume), "total_steps": 9}
    sections["trainer"] = trainer | sections.get("trainer", {})
    return Config.model_validate(sections)


def save(folder: Path, step: int, rows: str = "abc", **sections) -> Path:
    """Save a checkpoint as a run does, with weights that are a few random bytes."""

    def write(staging: Path) -> None:
        (staging / "actor").mkdir()
        (staging / "actor" / "weights").write_bytes(os.urandom(8))

    saved = config(folder, **sections).model_dump(mode="json")
    meta = {"config": saved, "rows": rows, "position": 16 * step, "order_start": 0, "changes": []}
    return save_checkpoint(folder, step, write, meta)


def start(folder: Path, resume: str | Path = "auto", rows: str = "abc", **sections):
    return find_start(config(folder, resume, **sections), rows, 9)


def begin(folder: Path, resume: str | Path, **sections):
    """Begin a fork as a run does until its state is loaded."""
    found = start(folder, resume, **sections)
    folder.mkdir(exist_ok=True)
    write_fork(folder, found)
    return found


def test_keys_that_may_change_in_place():
    for key in CHANGEABLE_KEYS | FIXED_KEYS | UNRECORDED_KEYS:
        assert any(fnmatch(field, key) for field in FIELDS), key
    learned = {k for k in CHANGEABLE_KEYS if k.split(".")[0] in ("model", "optim", "algorithm")}
    assert learned == {
        f"optim.{leaf}"
        for leaf in ("compile", "critic_lr", "lr", "lr_final", "lr_warmup_steps",
                     "micro_batch_tokens", "offload", "recompute")
    }  # fmt: skip


def test_a_change_in_place_is_recorded_once_however_often_it_starts(tmp_path):
    save(tmp_path, 3)
    changed = {"optim": {"lr": 1e-5}, "trainer": {"total_steps": 20}}
    for _ in range(3):
        found = start(tmp_path, **changed)
        write_config(tmp_path, config(tmp_path, **changed), found)
    lines = [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 3, "key": "optim.lr", "old": 1e-6, "new": 1e-5},
        {"step": 3, "key": "trainer.total_steps", "old": 9, "new": 20},
    ]
    assert (found.position, found.order_start, found.first_step, found.is_new_fork) == (
        48, 0, 0, False,
    )  # fmt: skip
    write_config(tmp_path, config(tmp_path), start(tmp_path))
    assert not (tmp_path / "changes.jsonl").exists(), "nothing was trained with the other values"


def test_changes_of_a_checkpoint_stay(tmp_path):
    folder = save(tmp_path, 3, optim={"lr": 1e-5})
    meta = json.loads((folder / "meta.json").read_text())
    meta["meta"]["changes"] = [{"step": 1, "key": "optim.lr", "old": 1e-6, "new": 1e-5}]
    (folder / "meta.json").write_text(json.dumps(meta))
    first = Change(1, "optim.lr", 1e-6, 1e-5)
    assert start(tmp_path, optim={"lr": 1e-5}).changes == (first,)
    found = start(tmp_path, optim={"lr": 2e-5})
    assert found.changes == (first, Change(3, "optim.lr", 1e-5, 2e-5))
    assert found.describe()[-1] == "changed after step 3: optim.lr: 1e-05 -> 2e-05"


def test_the_changes_of_a_fork_are_a_table_and_lead_back_to_the_config(tmp_path):
    before = {
        "reward": {"functions": {"my.rewards.py:f": 1.0, "exact": 2.0}, "kwargs": {"a": None}},
        "rollout": {"n": 8, "budget_policy": {"turns": "zero"}},
        "files": ["a.py"],
    }
    after = {
        "reward": {"function": "g.py:f", "kwargs": {"a": {"b": [1, "c"]}, "d.e": True}},
        "rollout": {"n": 16, "budget_policy": {"turns": 0.5, "time": "mask"}},
        "data": {"train": [{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"], "shuffle": False},
    }
    save(tmp_path / "a", 3, **before)
    found = begin(tmp_path / "b", tmp_path / "a", rows="abd", **after)
    write_config(tmp_path / "b", config(tmp_path / "b", tmp_path / "a", **after), found)
    run = Run(tmp_path / "b")
    changes = {c["key"]: (c["old"], c["new"]) for c in run.changes.to_pylist()}
    assert changes == {
        "data.shuffle": ("true", "false"),
        "data.train": ('""', '[{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"]'),
        "files": ('["a.py"]', "[]"),
        "reward.function": ('""', '"g.py:f"'),
        "reward.functions": ('{"my.rewards.py:f": 1.0, "exact": 2.0}', "{}"),
        "reward.kwargs": ('{"a": null}', '{"a": {"b": [1, "c"]}, "d.e": true}'),
        "rollout.budget_policy": ('{"turns": "zero"}', '{"turns": 0.5, "time": "mask"}'),
        "rollout.n": ("8", "16"),
        "rows": ('"abc"', '"abd"'),
    }
    old = run.config_at(3)
    assert {s: getattr(old, s) for s in ("reward", "rollout", "files", "data")} == {
        s: getattr(config(tmp_path, **before), s) for s in ("reward", "rollout", "files", "data")
    }
    assert run.config_at(4) == config(tmp_path / "b", tmp_path / "a", **after)


def test_a_fork_of_a_run_with_a_key_that_no_longer_exists(tmp_path):
    (tmp_path / "config.yaml").write_text("rollout:\n  n: 4\n")
    change = {"step": 3, "key": "optim.long_gone", "old": 3, "new": None}
    (tmp_path / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert Run(tmp_path).config_at(4).rollout.n == 4
    with pytest.raises(DataError, match=r"does not read the config of step 3: optim\.long_gone"):
        Run(tmp_path).config_at(3)


def test_a_key_that_changes_what_is_learned_needs_a_fork(tmp_path):
    folder = save(tmp_path / "a", 3)
    with pytest.raises(ConfigError) as error:
        start(tmp_path / "a", rows="abd", rollout={"n": 16}, optim={"lr": 1.0})
    lines = str(error.value).splitlines()
    assert lines[1:3] == [
        "  rollout.n: 8 -> 16",
        "  data.train has other rows, or files with other weights or in another order",
    ]
    assert "optim.lr" not in str(error.value)
    assert f"trainer.resume={folder} with another --output" in lines[-1]
    assert "trainer.resume=never: this deletes" in lines[-1]
    found = start(tmp_path / "b", folder, rows="abd", rollout={"n": 16}, optim={"lr": 1.0})
    assert [c.key for c in found.changes] == ["optim.lr", "rollout.n", "rows"]
    assert found.is_new_fork and found.first_step == 3


@pytest.mark.parametrize(
    ("rows", "sections", "restarts"),
    [
        ("abc", {"rollout": {"n": 16}}, False),
        ("abc", {"data": {"train": "moved.parquet"}}, False),
        ("abd", {}, True),
        ("abc", {"trainer": {"seed": 1}}, True),
        ("abc", {"data": {"shuffle": False}}, True),
    ],
)
def test_a_fork_restarts_the_rows_if_their_order_is_another(tmp_path, rows, sections, restarts):
    save(tmp_path / "a", 3)
    found = start(tmp_path / "b", tmp_path / "a", rows=rows, **sections)
    assert found.restarts_rows == restarts
    assert (found.position, found.order_start) == ((0, 3) if restarts else (48, 0))
    assert any("first row" in line for line in found.describe()) == restarts


def test_epochs_count_from_the_first_row_of_the_order(tmp_path):
    epochs = {"trainer": {"total_steps": 0, "total_epochs": 2}}
    save(tmp_path / "a", 7, **epochs)
    assert start(tmp_path / "a", **epochs).total_steps == 9
    fork = start(tmp_path / "b", tmp_path / "a", rows="abd", **epochs)
    assert fork.total_steps == 7 + 9
    steps = start(tmp_path / "b", tmp_path / "a", rows="abd")
    assert steps.total_steps == 9, "trainer.total_steps is absolute"


def test_a_run_does_not_end_before_its_checkpoint(tmp_path):
    save(tmp_path / "a", 9)
    assert start(tmp_path / "a").total_steps == 9, "a finished run"
    with pytest.raises(ConfigError, match=r"total_steps=9: .* step 9 already.* to 10 or more"):
        start(tmp_path / "b", tmp_path / "a")
    save(tmp_path / "a", 12)
    with pytest.raises(ConfigError, match=r"total_steps=9: .* step 12 already.* to 12 or more"):
        start(tmp_path / "a")


def test_a_fork_keeps_what_its_tensors_are(tmp_path):
    lora = {"model": {"path": "base", "lora_rank": 8}}
    save(tmp_path / "a", 3, **lora)
    other = {"model": {"path": "other", "lora_rank": 16}, "optim": {"name": "adamw_8bit"}}
    with pytest.raises(ConfigError) as error:
        start(tmp_path / "b", tmp_path / "a", **other)
    assert str(error.value).splitlines()[1:4] == [
        "  model.lora_rank: 8 -> 16",
        '  model.path: "base" -> "other"',
        '  optim.name: "adamw" -> "adamw_8bit"',
    ]
    assert "agentrl export --merge" in str(error.value)
    assert start(tmp_path / "b", tmp_path / "a", **lora).is_new_fork
    with pytest.raises(ConfigError, match=r"adv_estimator=gae needs a critic, and .* has none"):
        start(tmp_path / "b", tmp_path / "a", **lora, algorithm={"name": "ppo"})


def test_the_same_command_begins_a_fork_again_and_then_continues_it(tmp_path):
    parent = save(tmp_path / "a", 3)
    fork = tmp_path / "b"
    begin(fork, tmp_path / "a", rollout={"n": 16})
    assert json.loads((fork / "fork.json").read_text())["checkpoint"] == str(parent)
    (fork / "metrics.jsonl").touch()
    save(tmp_path / "a", 4)
    for resume in (tmp_path / "a", parent, "auto"):
        again = start(fork, resume, rollout={"n": 16})
        assert again.is_new_fork and again.checkpoint.step == 3, "not the newer one"
    (fork / "metrics.jsonl").write_text('{"step": 4, "data": {}}\n')
    assert start(fork, tmp_path / "a", rollout={"n": 16}).is_new_fork
    save(fork, 5, rollout={"n": 16})
    shutil.rmtree(tmp_path / "a")
    for resume in (tmp_path / "a", parent, "auto"):
        found = start(fork, resume, rollout={"n": 16})
        assert (found.checkpoint.step, found.is_new_fork, found.first_step) == (5, False, 3)
    assert start(fork, "never").checkpoint is None


def test_a_start_from_the_best_checkpoint(tmp_path):
    parent, fork = tmp_path / "a", tmp_path / "b"
    keep = {"trainer": {"keep_best": "val/acc/mean@1"}}

    def validate(step, value):
        save(parent, step, **keep)
        with (parent / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": {"val/acc/mean@1": value}}) + "\n")

    for step, value in ((1, 0.1), (2, 0.3)):
        validate(step, value)
    best = parent / "best"
    assert begin(fork, best, **keep).checkpoint.step == 2
    validate(3, 0.2)
    assert start(fork, best, **keep).checkpoint.step == start(parent, best, **keep).checkpoint.step
    validate(4, 0.4)
    assert start(tmp_path / "c", best, **keep).checkpoint.step == 4
    shutil.copytree(parent / "global_step_00000004", parent / "global_step_00000002")
    with pytest.raises(ConfigError, match="has been replaced since"):
        start(fork, best, **keep)
    save(fork, 5, **keep)
    found = start(fork, best, **keep)
    assert (found.checkpoint.step, found.is_new_fork) == (5, False)
    assert not start(parent, best, **keep).is_new_fork
    with pytest.raises(
        ConfigError, match=r"no such folder; .*/a has global_step_00000004.*RUN/best"
    ):
        start(tmp_path / "c", parent / "latest", **keep)
    with pytest.raises(ConfigError, match=r"resume=.*/d/best: .*/d is not the folder of a run"):
        start(tmp_path / "c", tmp_path / "d" / "best")


def test_a_fork_whose_checkpoint_is_gone_does_not_start_from_the_base_model(tmp_path):
    parent = save(tmp_path / "a", 3)
    begin(tmp_path / "b", parent)
    shutil.rmtree(parent)
    for resume in ("auto", parent):
        with pytest.raises(ConfigError, match=r"b is a fork of .*no such folder.*another --output"):
            start(tmp_path / "b", resume)
    save(tmp_path / "a", 3)
    with pytest.raises(ConfigError, match="has been replaced since"):
        start(tmp_path / "b")
    assert start(tmp_path / "b", "never").checkpoint is None


def test_a_fork_does_not_take_the_folder_of_another_run(tmp_path):
    for name in "ab":
        save(tmp_path / name, 3)
    with pytest.raises(ConfigError, match=r"already holds the record of a run.*resume=auto"):
        start(tmp_path / "b", tmp_path / "a")
    fork = tmp_path / "c"
    begin(fork, tmp_path / "a")
    assert begin(fork, tmp_path / "b").is_new_fork, "it has no record yet"
    save(fork, 4)
    with pytest.raises(ConfigError, match=r"already holds a fork of .*b/global_step_00000003\."):
        start(fork, tmp_path / "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    with pytest.raises(ConfigError, match="already holds the record of a run"):
        start(tmp_path / "d", tmp_path / "a")


def test_a_checkpoint_of_an_older_version_counts_missing_keys_as_defaults(tmp_path):
    folder = save(tmp_path / "a", 3, algorithm={"name": "dapo"})
    meta = json.loads((folder / "meta.json").read_text())
    saved = meta["meta"]["config"]
    for section, key in (("algorithm", "clip_high"), ("trainer", "nnodes"), ("optim", "name")):
        del saved[section][key]
    (folder / "meta.json").write_text(json.dumps(meta))
    found = start(tmp_path / "a", algorithm={"name": "dapo"})
    assert found.changes == ()
    saved["optim"]["long_gone"] = 3
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"optim\.long_gone: 3 -> not set"):
        start(tmp_path / "a", algorithm={"name": "dapo"})
    found = start(tmp_path / "b", tmp_path / "a", algorithm={"name": "dapo"})
    assert Change(3, "optim.long_gone", 3, None) in found.changes


def test_starting_over_removes_the_record_of_the_fork(tmp_path):
    save(tmp_path / "a", 3)
    begin(tmp_path / "b", tmp_path / "a")
    (tmp_path / "b" / "changes.jsonl").touch()
    never = config(tmp_path / "b", "never")
    write_config(tmp_path / "b", never, find_start(never, "abc", 9))
    assert os.listdir(tmp_path / "b") == ["config.yaml"]
    assert start(tmp_path / "b").checkpoint is None


# --- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory, random_model):
    """Return the config keys of a run of two steps."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "env.py").write_text(ENV)
    for name, count in (("rows", 8), ("other", 6)):
        rows = [{"prompt": f"{name} {i}.", "ground_truth": "1"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def command(output, *overrides, rows="rows"):
        return [
            "trainer.total_steps=2", "trainer.save_freq=1", "data.batch_size=2", "rollout.n=2",
            "rollout.max_turn_tokens=4", "val.greedy=false", "optim.lr=0.01", "trainer.device=cpu",
            "tools.transport=in_process", "reward.function=letters_resume",
            f"data.train={folder}/{rows}.jsonl", f"data.val={folder}/other.jsonl",
            f"model.path={random_model}", f"files=[{folder}/env.py]", f"trainer.output={output}",
            *overrides,
        ]  # fmt: skip

    return command


@pytest.fixture(scope="module")
def run(command):
    def run(output, *overrides, rows="rows"):
        trainer = Trainer(load_config(None, command(output, *overrides, rows=rows)))
        trainer.run()
        return trainer

    return run


@pytest.fixture(scope="module")
def parent(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("parent") / "a"
    run(output)
    return output


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rates(output: Path) -> dict[int, float]:
    data = {line["step"]: line["data"] for line in lines(output / "metrics.jsonl")}
    return {step: numbers["actor/lr"] for step, numbers in data.items() if "actor/lr" in numbers}


def trained_rows(output: Path) -> list[tuple[int, str, int]]:
    read = TrajectoryStore(output / "trajectories").read(split="train")
    rollouts = ((s.step, s.scored.trajectory) for s in read)
    return [(step, t.sample.prompt[0].content, t.rollout) for step, t in rollouts]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


def scheduled(step: int, peak: float, warmup: int, final: float, total: int) -> float:
    """The learning rate as docs/run_folder.md defines it."""
    if step <= warmup:
        return peak * step / (warmup + 1)
    share = (min(step, total) - warmup - 1) / max(1, total - warmup - 1)
    return peak * (1 - share) + peak * final * share


@pytest.mark.slow
def test_a_changed_schedule_is_that_of_a_run_which_always_had_it(run, tmp_path):
    first = ["optim.lr_warmup_steps=1", "optim.lr_final=0.5", "trainer.total_steps=3"]
    then = ["optim.lr_warmup_steps=4", "optim.lr_final=0.1", "trainer.total_steps=7"]
    run(tmp_path / "a", *first)
    run(tmp_path / "a", *then, "optim.lr=0.02")
    want = {s: scheduled(s, 0.01, 1, 0.5, 3) for s in (1, 2, 3)}
    want |= {s: scheduled(s, 0.02, 4, 0.1, 7) for s in (4, 5, 6, 7)}
    assert rates(tmp_path / "a") == pytest.approx(want)
    assert want[4] == pytest.approx(0.016) and want[7] == pytest.approx(0.002)
    changed = [(c["step"], c["key"]) for c in lines(tmp_path / "a" / "changes.jsonl")]
    keys = ("optim.lr", "optim.lr_final", "optim.lr_warmup_steps", "trainer.total_steps")
    assert changed == [(3, key) for key in keys]
    newest = find_checkpoint(tmp_path / "a", "auto")
    assert newest.meta["changes"] == lines(tmp_path / "a" / "changes.jsonl")


def test_a_fork_without_changes_learns_what_the_run_would_have(run, parent, tmp_path):
    run(tmp_path / "straight", "trainer.total_steps=4")
    run(tmp_path / "fork", "trainer.total_steps=4", f"trainer.resume={parent}")
    model = "model/model.safetensors"
    assert (tmp_path / "fork" / model).read_bytes() == (tmp_path / "straight" / model).read_bytes()
    assert [line["step"] for line in lines(tmp_path / "fork/metrics.jsonl")] == [2, 3, 4]
    straight = trained_rows(tmp_path / "straight")
    assert trained_rows(tmp_path / "fork") == [row for row in straight if row[0] > 2]


def test_a_fork_with_other_rows_begins_with_the_first(run, parent, tmp_path, capsys):
    before = files_of(parent)
    changed = ["optim.lr=0.03", "rollout.n=3", "trainer.total_steps=4"]
    trainer = run(tmp_path / "fork", f"trainer.resume={parent}", *changed, rows="other")
    printed = capsys.readouterr().out
    assert f"fork of {parent}/global_step_00000002: weights and optimizer" in printed
    assert "changed after step 2: rollout.n: 2 -> 3" in printed
    assert "first row of the new order, and ends after step 4" in printed
    assert files_of(parent) == before
    run(tmp_path / "fresh", "rollout.n=3", rows="other")
    fresh = [(step + 2, *rest) for step, *rest in trained_rows(tmp_path / "fresh")]
    assert trained_rows(tmp_path / "fork") == fresh, "the rows of steps 1 and 2"
    assert trainer.state.position == 4 and rates(tmp_path / "fork") == {3: 0.03, 4: 0.03}
    keys = [line["key"] for line in lines(tmp_path / "fork/changes.jsonl")]
    assert keys == ["data.train", "optim.lr", "rollout.n", "rows", "trainer.total_steps"]


def test_an_interrupted_fork_begins_again_and_says_so(run, parent, tmp_path, monkeypatch, capsys):
    fork = [f"trainer.resume={parent}", "trainer.total_steps=4", "rollout.n=3"]
    run(tmp_path / "straight", *fork)

    def fail(*_):
        raise RunStopped("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate", fail)
        with pytest.raises(RunStopped, match=r"luck\nnothing was saved; the same command starts the"
                           rf" fork of {parent}/global_step_00000002 again"):  # fmt: skip
            run(tmp_path / "fork", *fork)
    assert not list((tmp_path / "fork").glob("global_step_*"))
    run(tmp_path / "fork", "trainer.total_steps=4", "rollout.n=3")
    assert "fork of" in capsys.readouterr().out
    model = "model/model.safetensors"
    assert (tmp_path / "fork" / model).read_bytes() == (tmp_path / "straight" / model).read_bytes()
    assert trained_rows(tmp_path / "fork") == trained_rows(tmp_path / "straight")


def test_a_refused_command_changes_no_file(run, parent, tmp_path):
    before = files_of(parent)
    for overrides in (["rollout.n=4"], ["trainer.total_steps=1"]):
        with pytest.raises(ConfigError):
            run(parent, *overrides)
    assert files_of(parent) == before
    with pytest.raises(ConfigError):
        run(tmp_path / "fork", f"trainer.resume={parent}")
    assert not files_of(tmp_path / "fork")


def test_a_fork_sets_a_new_weight_of_the_kl(run, tmp_path):
    kl = ["algorithm.kl_target=0.1", "algorithm.kl_horizon=100"]
    trainer = run(tmp_path / "a", *kl, "algorithm.kl_reward_coef=0.5")
    adapted = trainer.state.kl.coef
    assert adapted != 0.5
    run_on = [*kl, f"trainer.resume={tmp_path / 'a'}", "trainer.total_steps=3", "optim.lr=0.03"]
    weights = []
    for name, coef in (("same", 0.5), ("other", 0.25)):
        run(tmp_path / name, *run_on, f"algorithm.kl_reward_coef={coef}")
        [line] = [line["data"] for line in lines(tmp_path / name / "metrics.jsonl")][-1:]
        weights.append(line["actor/reward_kl_penalty_coeff"])
    assert weights == [adapted, 0.25]


# --- kill -9 -------------------------------------------------------------------------------------


def start_process(keys: list[str]) -> ForkedPython:
    return ForkedPython(["-m", "agentrl", "train", *keys], merge_outputs=True)


def finish(keys: list[str]) -> str:
    done = run_agentrl("train", *keys)
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(output: Path) -> tuple:
    """Everything that a run leaves but times and the ids of episodes."""
    records = [
        (
            line["step"],
            {k: v for k, v in line["data"].items() if not k.startswith(("timing_s/", "perf/"))},
        )
        for line in lines(output / "metrics.jsonl")
    ]
    played = [
        (s.step, s.split, s.scored.trajectory.sample.row, s.scored.trajectory.rollout,
         s.scored.reward, s.scored.trajectory.segments)
        for s in TrajectoryStore(output / "trajectories").read()
    ]  # fmt: skip
    weights = (output / "model/model.safetensors").read_bytes()
    return records, played, weights, lines(output / "changes.jsonl")


@pytest.mark.slow
def test_kill_9_of_a_fork_before_its_first_checkpoint(command, run, parent, tmp_path):
    changed = ["trainer.total_steps=4", "trainer.save_freq=0", "rollout.n=3"]
    changed.append(f"trainer.resume={parent}")
    run(tmp_path / "straight", *changed)
    keys = command(tmp_path / "fork", *changed)
    deadline = time.monotonic() + 120
    with start_process(keys) as process:
        record = tmp_path / "fork" / "metrics.jsonl"
        while not record.exists() or not record.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, process.read()
            time.sleep(0.01)
    assert not list((tmp_path / "fork").glob("global_step_*"))
    assert f"fork of {parent}/global_step_00000002" in finish(keys)
    assert result(tmp_path / "fork") == result(tmp_path / "straight")


def kill_often(keys: list[str], output: Path, straight: Path, kills: int, make) -> None:
    """Start a run and kill it at random moments. When it has ended, start it in a new folder.

    Each run that ends must be equal to the one that was never killed.
    """
    rng, steps = random.Random(kills), set()
    while kills:
        made = rng.randrange(-2, 10)  # how many steps the process makes; below 0: it may not begin
        with start_process(keys) as process:
            while process.poll() is None and process.read()[0].count("\nstep ") < made:
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() * (0.1 if made >= 0 else 3))
            code = process.poll()
        if code is None:
            kills -= 1
            steps.add(max((step for step, _ in read_metrics(output / "metrics.jsonl")), default=0))
            continue
        assert code == 0, process.read()
        assert result(output) == result(straight)
        shutil.rmtree(output)
        make(output)
    finish(keys)
    assert result(output) == result(straight)
    assert len(steps) > 4, "the kills did not hit the training"


LONG = ("trainer.total_steps=40", "trainer.save_freq=5", "trainer.test_freq=20")


@pytest.mark.slow
def test_kills_of_a_fork_at_random_moments(command, parent, tmp_path):
    before = files_of(parent)
    changed = [*LONG, "optim.lr=0.02", "rollout.n=3", f"trainer.resume={parent}"]
    finish(command(tmp_path / "straight", *changed, rows="other"))
    keys = command(tmp_path / "fork", *changed, rows="other")
    kill_often(keys, tmp_path / "fork", tmp_path / "straight", 10, lambda folder: None)
    assert files_of(parent) == before


@pytest.mark.slow
def test_kills_at_random_moments_after_a_changed_learning_rate(command, parent, tmp_path):
    changed = [*LONG, "optim.lr=0.02", "optim.lr_final=0.1", "optim.lr_warmup_steps=3"]
    for name in ("straight", "run"):
        shutil.copytree(parent, tmp_path / name)
    finish(command(tmp_path / "straight", *changed))
    keys = command(tmp_path / "run", *changed)
    make = partial(shutil.copytree, parent)
    kill_often(keys, tmp_path / "run", tmp_path / "straight", 10, make)
    want = {s: scheduled(s, 0.02, 3, 0.1, 40) for s in range(3, 41)} | {1: 0.01, 2: 0.01}
    assert rates(tmp_path / "run") == pytest.approx(want)
