"""What a run saves, and when. A full disk loses no step that was trained."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.forked_python import ForkedPython, run_python

from agentrl import load_run
from agentrl.chat import load_tokenizer
from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, EngineError, RunStopped
from agentrl.learner.learner import Learner
from agentrl.observers import curve as curve_module
from agentrl.record import read_metrics
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trainer import checkpoint as checkpoint_module
from agentrl.trainer import clock as clock_module
from agentrl.trainer import run as run_module
from agentrl.trainer import saving as saving_module
from agentrl.trainer.best import Best
from agentrl.trainer.checkpoint import find_steps

ENV = """
from agentrl import reward

@reward("letters_saving")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""
METRIC = "val/reward/mean@1"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, random_model):
    """The words of the command `agentrl train` of a short run, less its output folder."""
    folder = tmp_path_factory.mktemp("saving")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(5)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"data.train={folder / 'rows.jsonl'}", f"data.val={folder / 'rows.jsonl'}",
        f"model.path={random_model}", f"files=[{folder / 'env.py'}]",
        "trainer.total_steps=4", "trainer.test_freq=2", "data.batch_size=2", "rollout.n=2",
        "rollout.max_turn_tokens=8", "optim.lr=0.01", "trainer.device=cpu",
        "tools.transport=in_process", "reward.function=letters_saving",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def start(arguments):
    def run(output, *overrides):
        config = load_config(None, [*arguments, f"trainer.output={output}", *overrides])
        trainer = Trainer(config)
        trainer.run()
        return trainer

    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory) -> tuple:
    """The record of a run that nothing stops."""
    output = tmp_path_factory.mktemp("straight") / "run"
    start(output)
    return record(output)


def timeless(output: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (step, {k: v for k, v in data.items() if not k.startswith(("timing_s/", "perf/"))})
        for step, data in read_metrics(output / "metrics.jsonl")
    ]


def played(output: Path) -> list[tuple]:
    return [
        (s.step, s.split, s.scored.trajectory.sample.row, s.scored.trajectory.rollout,
         s.scored.reward, s.scored.trajectory.segments)
        for s in TrajectoryStore(output / "trajectories").read()
    ]  # fmt: skip


def record(output: Path) -> tuple:
    weights = (output / "model/model.safetensors").read_bytes()
    return timeless(output), played(output), hashlib.sha256(weights).hexdigest()


def shards(output: Path) -> list[str]:
    return sorted(f.stem.replace("-0000000", "-") for f in (output / "trajectories").iterdir())


# --- when ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_at_each_validation(start, tmp_path, monkeypatch, capsys):
    """A large one is announced. Without checkpoints, the model is still the same."""
    monkeypatch.setattr(saving_module, "LARGE_CHECKPOINT", 10**5)
    start(tmp_path / "auto", "trainer.keep=0")
    assert find_steps(tmp_path / "auto") == [2, 4]
    start(tmp_path / "end", "trainer.keep=0", "trainer.save_freq=0")
    assert find_steps(tmp_path / "end") == [4]
    for name, timed in (("auto", [3]), ("end", [])):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        values = {s: data.get("timing_s/save_checkpoint") for s, data in lines}
        assert [step for step, value in values.items() if value is not None and value > 0] == timed
    printed = capsys.readouterr().out
    assert printed.count("checkpoint of step 4: writing 0.0 GB (weights and optimizer state)") == 2
    assert printed.count("Ctrl-C waits for it; a second Ctrl-C stops at once") == 3
    start(tmp_path / "never", "trainer.save_freq=never")
    assert find_steps(tmp_path / "never") == [] and "Ctrl-C" not in capsys.readouterr().out
    assert record(tmp_path / "auto") == record(tmp_path / "end") == record(tmp_path / "never")
    with pytest.raises(ConfigError, match=r"never holds a finished run without a checkpoint"):
        start(tmp_path / "never", "trainer.save_freq=never")


def test_a_checkpoint_is_saved_every_thirty_minutes(start, tmp_path, monkeypatch):
    """Steps of 700 s: two of them fit into 30 minutes, the third does not."""
    now, real = [0.0], Learner.update
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(saving_module, "time", clock)
    monkeypatch.setattr(clock_module, "time", clock)

    def update(self, *args, **kwargs):
        now[0] += 700
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "update", update)
    often = ("trainer.keep=0", "trainer.test_freq=0", "trainer.total_steps=7")
    start(tmp_path, *often)
    assert find_steps(tmp_path) == [2, 4, 6, 7]


def test_an_automatic_checkpoint_may_fail(start, tmp_path, monkeypatch, capsys):
    real, disk = checkpoint_module.flush, {"full": True}

    def fsync(path):
        if disk["full"] and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    usage, free = shutil.disk_usage, itertools.count(10**12, -(10**9))  # Others fill the disk, too.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=next(free)))
    monkeypatch.setattr(checkpoint_module, "flush", fsync)
    with pytest.raises(
        RunStopped, match=r"cannot write the checkpoint of step 2.*No space left"
    ) as error:
        start(tmp_path / "explicit", "trainer.save_freq=2")
    assert str(error.value).count("cannot write the checkpoint") == 1

    real_update = Learner.update

    def update(self, batch, targets, step, *args, **kwargs):
        disk["full"] = step < 4
        return real_update(self, batch, targets, step, *args, **kwargs)

    monkeypatch.setattr(Learner, "update", update)
    start(tmp_path / "auto")
    printed = capsys.readouterr().err
    assert printed.count("warning: cannot write the checkpoint of step 2") == 1
    assert "The run goes on (trainer.save_freq=auto)" in printed
    assert find_steps(tmp_path / "auto") == [4]


# --- the best, and the end -----------------------------------------------------------------------


def scores(monkeypatch, values):
    """Let validations after steps 0, 1, ... score these values, whatever they sample."""
    real, values = run_module.evaluate, iter(values)

    def evaluate(*args):
        result = real(*args)
        return replace(result, metrics={**result.metrics, METRIC: next(values)})

    monkeypatch.setattr(run_module, "evaluate", evaluate)


def test_the_best_is_kept_and_the_run_ends_early(start, tmp_path, monkeypatch, capsys):
    scores(monkeypatch, [0.1, 0.5, 0.9, 0.3, 0.9, 0.2, 0.3, 0.4, 0.8, 0.1, 0.2])
    keys = ("trainer.test_freq=1", "trainer.total_steps=7", "trainer.keep=1",
            f"trainer.keep_best={METRIC}")  # fmt: skip
    start(tmp_path, *keys, "trainer.patience=3")
    assert find_steps(tmp_path) == [2, 5]
    printed = capsys.readouterr().out
    assert f"{METRIC} has not risen above 0.9 (step 2) in 3 validations" in printed
    assert f"best checkpoint ({METRIC}): step 2 in {tmp_path}" in printed
    steps = timeless(tmp_path)
    assert [step for step, data in steps if "training/early_stop" in data] == [5]
    assert (tmp_path / "model").is_dir()

    start(tmp_path, *keys, "trainer.patience=3")
    assert timeless(tmp_path) == steps, "the same command trains no further"
    start(tmp_path, *keys, "trainer.patience=0")
    assert [step for step, _ in timeless(tmp_path)] == list(range(8)), "another patience does"
    assert find_steps(tmp_path) == [2, 7]

    best = f"trainer.resume={tmp_path / 'best'}"
    start(tmp_path, *keys, best, "trainer.total_steps=3")
    assert find_steps(tmp_path) == [2, 3], "the run continues from its best checkpoint"
    assert [step for step, _ in timeless(tmp_path)] == [0, 1, 2, 3]
    start(tmp_path, *keys, "trainer.resume=never", "trainer.total_steps=1")
    assert find_steps(tmp_path) == [1], "starting over removes the best one, too"


def test_a_new_best_is_saved_between_two_checkpoints(start, tmp_path, monkeypatch):
    scores(monkeypatch, [0.1, 0.9, 0.2, 0.3, 0.4])
    start(tmp_path, "trainer.test_freq=1", "trainer.save_freq=3", f"trainer.keep_best={METRIC}")
    assert find_steps(tmp_path) == [1, 3, 4]


def test_a_metric_that_no_validation_has(start, tmp_path):
    with pytest.raises(RunStopped, match=r"(?s)no metric val/reward/mean\. Did you mean.*They hav"):
        start(tmp_path, "trainer.keep_best=val/reward/mean")


def test_the_best_of_the_checkpoints_that_exist():
    best = Best(METRIC, 2, 1)
    values = {0: 0.9, 10: 0.1, 20: 0.3, 30: float("nan"), 40: 0.2}
    assert [best.add(step, {METRIC: value}) for step, value in values.items()] == [
        True, False, False, False, False,
    ]  # fmt: skip
    assert not best.add(50, {}), "no validation"
    assert best.is_over and best.best_of([10, 20, 30, 40, 50]) == 20
    assert best.best_of([30, 50]) is None
    assert Best("", 2, 4).best_of([10]) is None


def test_the_folder_of_a_run_has_its_tokenizer(start, tmp_path, monkeypatch, capsys):
    first = ("trainer.total_steps=1", "trainer.test_freq=0")
    trained = load_tokenizer(start(tmp_path, *first).config.model.path)
    files = {f: (f.stat().st_ino, f.read_bytes()) for f in (tmp_path / "tokenizer").iterdir()}
    tokenizer = load_run(tmp_path).tokenizer
    text = "Say 3. <|im_end|> Ü"
    assert tokenizer(text)["input_ids"] == trained(text)["input_ids"]
    assert tokenizer.chat_template == trained.chat_template
    start(tmp_path, "trainer.total_steps=2", "trainer.test_freq=0")
    assert files == {f: (f.stat().st_ino, f.read_bytes()) for f in files}, "not written again"
    config = tmp_path / "tokenizer/tokenizer_config.json"
    content = config.read_bytes()
    config.write_text("{}")
    start(tmp_path, "trainer.total_steps=3", "trainer.test_freq=0")
    assert config.read_bytes() == content
    # A tokenizer that cannot be written does not stop the run.
    shutil.rmtree(tmp_path / "tokenizer")
    (tmp_path / "tokenizer").write_text("a file")
    capsys.readouterr()
    start(tmp_path, "trainer.total_steps=4", "trainer.test_freq=0")
    printed = capsys.readouterr().err
    assert printed.count(f"warning: cannot write {tmp_path / 'tokenizer'}: ") == 1
    assert not list(tmp_path.glob(".tmp-*"))


# --- trajectories --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept", "size"),
    [
        # In other tests all trajectories of the steps are read.
        pytest.param("all", [1, 2, 3, 4], "720.9 kB for 4 steps", marks=pytest.mark.slow),
        ("last:2", [3, 4], "360.4 kB for 2 steps"),
        ("every:3", [3], "180.2 kB for 1 step"),
    ],
)
def test_the_trajectories_that_are_kept(start, tmp_path, capsys, keep, kept, size):
    start(tmp_path, f"trainer.keep_trajectories={keep}", "algorithm.name=remax")
    train = [f"{split}-{step}" for split in ("baseline", "train") for step in kept]
    validated = [f"{split}-{step}" for split in ("greedy", "val") for step in (0, 2, 4)]
    assert shards(tmp_path) == sorted(train + validated)
    printed = capsys.readouterr().out
    assert f"trajectories of training: up to {size} of epi" in printed
    assert re.search(
        r"^threads: the learner uses \d+ of \d+ cores \(.+\), the local engine 1 of ", printed, re.M
    )


def test_each_part_of_a_step_is_timed(start, tmp_path):
    start(tmp_path, "trainer.total_steps=1")
    _, (_, data) = read_metrics(tmp_path / "metrics.jsonl")
    parts = ("gen", "store", "metrics", "collate", "ref", "values", "old_log_prob", "adv",
             "update_actor")  # fmt: skip
    assert 0 < sum(data[f"timing_s/{part}"] for part in parts) <= data["timing_s/step"]


def test_trajectories_are_written_during_the_update_and_before_the_checkpoint(
    start, tmp_path, monkeypatch
):
    """A file is written only when the update of its step has begun; a checkpoint waits for it."""
    updating = {step: threading.Event() for step in range(1, 5)}
    real_write, real_update = TrajectoryStore.write, Learner.update
    real_save, saved = saving_module.save_checkpoint, []

    def write(self, step, groups, split="train"):
        if split == "train":
            assert updating[step].wait(60)
            time.sleep(0.1)
        return real_write(self, step, groups, split)

    def update(self, batch, targets, step, *args, **kwargs):
        updating[step].set()
        return real_update(self, batch, targets, step, *args, **kwargs)

    def save(root, step, *args, **kwargs):
        saved.append([name for name in shards(root) if name.startswith("train")])
        return real_save(root, step, *args, **kwargs)

    monkeypatch.setattr(TrajectoryStore, "write", write)
    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(saving_module, "save_checkpoint", save)
    start(tmp_path, "trainer.save_freq=2", "trainer.test_freq=0")
    assert saved == [["train-1", "train-2"], [f"train-{step}" for step in range(1, 5)]]


def fill_disk_at(monkeypatch, name, wait=lambda: None):
    """Let the file of this name meet a full disk, when `wait` has returned."""
    real = TrajectoryStore.write

    def write(self, step, groups, split="train"):
        if f"{split}-{step}" == name:
            wait()
            with open("/dev/full", "wb", buffering=0) as full:
                try:
                    full.write(b"x")
                except OSError as e:
                    raise RunStopped(f"cannot write the trajectories to {name}: {e}") from e
        return real(self, step, groups, split)

    monkeypatch.setattr(TrajectoryStore, "write", write)


@pytest.mark.parametrize("lost", ["train-3", "val-2", "train-4"])
def test_a_step_whose_trajectories_cannot_be_written_is_saved(
    start, straight, tmp_path, monkeypatch, lost
):
    with monkeypatch.context() as patch:
        fill_disk_at(patch, lost)
        stopped = r"(?s)cannot write the trajectories.*No space left.*saved after step (\d)"
        with pytest.raises(RunStopped, match=stopped) as error:
            start(tmp_path / "resumed")
    assert str(error.value).count("No space left") == 1
    step = int(lost[-1])
    assert find_steps(tmp_path / "resumed")[-1] in (step, step + 1), "no step was thrown away"
    trained, real = [], Learner.update

    def update(self, batch, targets, step, *args, **kwargs):
        trained.append(step)
        return real(self, batch, targets, step, *args, **kwargs)

    monkeypatch.setattr(Learner, "update", update)
    saved = find_steps(tmp_path / "resumed")[-1]
    start(tmp_path / "resumed")
    assert trained == list(range(saved + 1, 5)), "nothing is trained twice"
    metrics, rollouts, weights = record(tmp_path / "resumed")
    expected_metrics, expected, expected_weights = straight
    assert (metrics, weights) == (expected_metrics, expected_weights)
    missing = {f"{r[1]}-{r[0]}" for r in expected} - {f"{r[1]}-{r[0]}" for r in rollouts}
    assert missing <= {lost}


def test_the_first_cause_is_not_hidden(start, tmp_path, monkeypatch):
    """Neither by trajectories that were being written nor by Ctrl-C while the state is saved."""
    real, down = LocalEngine.generate, threading.Event()

    async def generate(self, *args, **kwargs):
        if kwargs["episode_id"].startswith("train-2-"):
            down.set()
            raise EngineError("the engine is down")
        return await real(self, *args, **kwargs)

    def save(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalEngine, "generate", generate)
    monkeypatch.setattr(saving_module, "save_checkpoint", save)
    fill_disk_at(monkeypatch, "train-2", down.wait)
    with pytest.raises(RunStopped) as error:
        start(tmp_path, "trainer.save_freq=0", "trainer.test_freq=0")
    cause, _, after = str(error.value).partition("the engine is down")
    assert cause.startswith("4 of 4 rollouts were dropped")
    rest = after.splitlines()
    assert any(line.startswith("cannot write the trajectories to train-2") for line in rest)
    assert any(line == "the step could not be saved: KeyboardInterrupt: " for line in rest)
    assert rest[-1] == "nothing was saved; the same command starts from the beginning"


def test_a_picture_that_cannot_be_written_is_a_warning(
    start, tmp_path, curves, monkeypatch, caplog
):
    def write_curve(metrics, svg):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(curve_module, "write_curve", write_curve)
    start(tmp_path, "trainer.total_steps=1")
    (warning,) = [r.getMessage() for r in caplog.records if "curve.svg" in r.getMessage()]
    assert "curve.svg raised OSError: [Errno 28] No space left on device" in warning


# --- a real disk, real kills, a long run ---------------------------------------------------------


def on_small_disk(folder: Path, mb: float, command: list) -> subprocess.CompletedProcess:
    """Run a command with a file system of `mb` megabytes at `folder`, and copy it to `kept`."""
    may_mount = ["unshare", "-rm", "true"]
    if not shutil.which("unshare") or subprocess.run(may_mount, capture_output=True).returncode:
        pytest.skip("needs user namespaces to mount a small file system")
    folder.mkdir()
    script = (
        f'mount -t tmpfs -o size={int(mb * 1024)}k none "$0" || exit 99\n"$@"\nended=$?\n'
        'cp -r "$0" "$0.kept"\nexit $ended'
    )
    words = ["unshare", "-rm", "sh", "-c", script, str(folder), sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0.1, 0.8, 2.2])
def test_a_run_on_a_disk_that_is_too_small(arguments, start, tmp_path, room):
    """The disk has room for `room` checkpoints. The run resumes, and ends as on a larger disk."""
    straight = tmp_path / "straight"
    start(straight, "trainer.total_steps=60", "trainer.keep=1")
    [checkpoint] = straight.glob("global_step_*")
    size = sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()) / 2**20
    disk, keys = tmp_path / "disk", ["trainer.total_steps=60", "trainer.keep=1"]
    command = ["-m", "agentrl", "train", *arguments, *keys, f"trainer.output={disk / 'run'}"]
    done = on_small_disk(disk, size * room, command)
    kept = Path(f"{disk}.kept") / "run"
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert "No space left" in done.stderr, done.stderr
    saved = find_steps(kept)
    if room < 1:
        assert not saved and "nothing was saved" in done.stderr
        assert "warning: cannot write the checkpoint of step 2" in done.stderr or room < 0.5
        return
    assert saved and "saved after step" in done.stderr
    trainer = start(kept, *keys)
    assert trainer.state.step == 60
    metrics, _, weights = record(kept)
    expected, _, expected_weights = record(straight)
    assert (metrics, weights) == (expected, expected_weights)


@pytest.mark.slow
def test_twenty_random_kills_lose_nothing(arguments, start, tmp_path):
    keys = ["trainer.total_steps=40", "trainer.keep_trajectories=every:1", "trainer.test_freq=3"]
    start(tmp_path / "straight", *keys)
    output = tmp_path / "killed"
    command = ["-m", "agentrl", "train", *arguments, *keys, f"trainer.output={output}"]
    rng, landed = random.Random(20), []
    for _ in range(20):
        before = len(list((output / "trajectories").glob("*"))) if output.exists() else 0
        process = ForkedPython(command)
        deadline, wanted = time.monotonic() + 120, rng.randrange(1, 4)
        while process.poll() is None and time.monotonic() < deadline:
            shards_now = len(list((output / "trajectories").glob("*"))) if output.exists() else 0
            if shards_now - before >= wanted:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        landed.append(len(read_metrics(output / "metrics.jsonl")))
    assert len(set(landed)) > 5, "the kills hit different steps"
    done = run_python(command)
    assert done.returncode == 0, done.stderr
    assert record(output) == record(tmp_path / "straight")


@pytest.mark.slow
def test_a_long_run_grows_by_nothing(start, tmp_path, monkeypatch):
    """500 steps: memory, descriptors and threads after the first 100 are those at the end."""
    seen = {}
    real = run_module.Run._complete

    def complete(self, *args):
        real(self, *args)
        if self.state.step % 100 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])  # resident
            megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            files = len(os.listdir("/proc/self/fd"))
            gc.collect()
            objects = sys.getallocatedblocks()
            seen[self.state.step] = (megabytes, files, threading.active_count(), objects)

    monkeypatch.setattr(run_module.Run, "_complete", complete)
    start(
        tmp_path, "trainer.total_steps=500", "trainer.test_freq=50", "trainer.keep_best=" + METRIC,
        "trainer.keep_trajectories=last:10",
    )  # fmt: skip
    assert sorted(seen) == [100, 200, 300, 400, 500]
    (memory, files, threads, objects), last = seen[100], seen[500]
    last_memory, last_files, last_threads, last_objects = last
    assert last_memory - memory < 32, seen
    # The metrics of a step are 100 objects. pytest itself keeps the log records of 40 a step.
    assert last_objects - objects < 400 * 80, seen
    assert last_files <= files + 2 and last_threads <= threads + 1, seen
    assert len([s for s in shards(tmp_path) if s.startswith("train")]) == 10
