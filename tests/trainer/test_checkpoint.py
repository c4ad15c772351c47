"""A checkpoint is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.learner.state import read_state
from agentrl.trainer.checkpoint import (
    LATEST,
    find_checkpoint,
    find_steps,
    recover,
    remove_later_checkpoints,
    run_lock,
    save_checkpoint,
)


def write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.bin").write_bytes(bytes(1000))


def names(root: Path) -> list[str]:
    return sorted(f.name for f in root.iterdir())


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_saved_checkpoint_is_found(tmp_path):
    root = tmp_path / "runs" / "demo"
    assert find_checkpoint(root, "auto") is None
    folder = save_checkpoint(root, 10, write, {"rng": [1, 2], "kl": 0.1})
    assert folder.name == "global_step_00000010"
    checkpoint = find_checkpoint(root, "auto")
    assert checkpoint is not None
    assert (checkpoint.folder, checkpoint.step, checkpoint.skipped) == (folder, 10, ())
    assert checkpoint.meta == {"rng": [1, 2], "kl": 0.1}
    assert (checkpoint.folder / "actor" / "model.safetensors").read_bytes() == b"weights"
    assert (root / LATEST).read_text() == "10"
    assert find_checkpoint(root, "never") is None


def test_the_newest_two_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 100):
        save_checkpoint(tmp_path, step, write, {})
    assert names(tmp_path) == ["global_step_00000010", "global_step_00000100", LATEST]


@pytest.mark.parametrize(
    ("keep", "pinned", "kept"),
    [
        (1, None, [100]),
        (3, None, [9, 10, 100]),
        (0, None, [1, 2, 9, 10, 100]),
        (1, 2, [2, 100]),
        (2, 10, [10, 100]),
        (9, 1, [1, 2, 9, 10, 100]),
    ],
)
def test_as_many_as_asked_are_kept_and_the_pinned_one(tmp_path, keep, pinned, kept):
    for step in (1, 2, 9, 10, 100):
        save_checkpoint(tmp_path, step, write, {}, keep=keep, pinned=pinned)
    assert find_steps(tmp_path) == kept
    remove_later_checkpoints(tmp_path, 1)
    assert find_steps(tmp_path) == [step for step in kept if step == 1], "the pinned one too"


def test_a_step_saved_again_replaces_the_first(tmp_path):
    save_checkpoint(tmp_path, 1, write, {"take": 1})
    save_checkpoint(tmp_path, 1, write, {"take": 2})
    checkpoint = find_checkpoint(tmp_path, "auto")
    assert checkpoint is not None and checkpoint.meta == {"take": 2}
    assert names(tmp_path) == ["global_step_00000001", LATEST]


def test_names_without_padding_are_read_too(tmp_path):
    for step in (9, 10):
        save_checkpoint(tmp_path, step, write, {})
        (tmp_path / f"global_step_{step:08d}").rename(tmp_path / f"global_step_{step}")
    checkpoint = find_checkpoint(tmp_path, "auto")
    assert checkpoint is not None and checkpoint.step == 10


def truncate(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(bytes(999))


def flip(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(bytes(999) + b"\1")


def lose(folder: Path) -> None:
    (folder / "optimizer.bin").unlink()


def lose_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def break_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"step": 2')


def nest_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("[" * 100_000)


def link_meta(folder: Path) -> None:
    (folder / "meta.json").rename(folder.parent / "elsewhere.json")
    (folder / "meta.json").symlink_to(folder.parent / "elsewhere.json")


def pipe_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")


def name_step(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"step": "two"}))


def link(folder: Path) -> None:
    (folder / "optimizer.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "optimizer.bin").symlink_to(folder.parent / "elsewhere.bin")


def climb(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"]["../x"] = meta["files"]["optimizer.bin"]
    shutil.copy(folder / "optimizer.bin", folder.parent / "x")
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "optimizer.bin has changed since it was saved"),
        (flip, "optimizer.bin has changed since it was saved"),
        (lose, "optimizer.bin: No such file"),
        (lose_meta, "has no meta.json"),
        (break_meta, "cannot be read"),
        (nest_meta, "cannot be read"),
        (link_meta, "cannot be read"),
        (pipe_meta, "cannot be read"),
        (name_step, "cannot be read"),
        (link, "optimizer.bin is outside"),
        (climb, "../x is outside"),
    ],
)
def test_a_damaged_one_is_skipped_with_the_reason(tmp_path, damage, reason):
    save_checkpoint(tmp_path, 1, write, {})
    newest = save_checkpoint(tmp_path, 2, write, {})
    damage(newest)
    checkpoint = find_checkpoint(tmp_path, "auto")
    assert checkpoint is not None and checkpoint.step == 1
    assert len(checkpoint.skipped) == 1 and reason in checkpoint.skipped[0]
    assert "global_step_00000002" in checkpoint.skipped[0]
    with pytest.raises(ConfigError, match=r"trainer\.resume"):
        find_checkpoint(tmp_path, newest)


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    flip(save_checkpoint(tmp_path, 1, write, {}))
    with pytest.raises(
        ConfigError, match=r"(?s)no checkpoint .*has changed since it was saved.*resume=never"
    ):
        find_checkpoint(tmp_path, "auto")


def test_resume_by_path(tmp_path):
    folder = save_checkpoint(tmp_path / "a", 3, write, {})
    for path in (str(folder), tmp_path / "a"):
        checkpoint = find_checkpoint(tmp_path / "b", path)
        assert checkpoint is not None and checkpoint.step == 3
    with pytest.raises(ConfigError, match=r"no such folder.*global_step_00000003"):
        find_checkpoint(tmp_path / "a", "global_step_9")


def test_drop_after_removes_later_checkpoints(tmp_path):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, write, {})
    remove_later_checkpoints(tmp_path, 10)
    assert names(tmp_path) == ["global_step_00000010", LATEST]
    assert (tmp_path / LATEST).read_text() == "10"
    remove_later_checkpoints(tmp_path, 0)
    assert names(tmp_path) == []
    remove_later_checkpoints(tmp_path / "missing", 0)


def test_recover_removes_incomplete_checkpoints_and_publishes_complete_ones(tmp_path):
    pid = dead_pid()
    save_checkpoint(tmp_path, 1, write, {})
    complete = save_checkpoint(tmp_path, 2, write, {"late": True})
    complete.rename(tmp_path / f".tmp-2-{pid}")
    (tmp_path / f".tmp-3-{pid}").mkdir()
    (tmp_path / f".tmp-3-{pid}" / "half").write_bytes(b"x")
    (tmp_path / f".tmp-4-{os.getpid()}").mkdir()  # a reused process id
    (tmp_path / f".tmp-latest-{pid}").write_text("2")
    (tmp_path / f".old-global_step_00000000-{pid}").mkdir()
    (tmp_path / f".tmp-5-{os.getppid()}").mkdir()  # alive: not ours to remove
    recover(tmp_path)
    assert names(tmp_path) == [
        f".tmp-5-{os.getppid()}",
        "global_step_00000001",
        "global_step_00000002",
        LATEST,
    ]
    checkpoint = find_checkpoint(tmp_path, "auto")
    assert checkpoint is not None and checkpoint.meta == {"late": True}
    recover(tmp_path / "missing")


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, write, {})

    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        with open("/dev/full", "wb") as f:
            f.write(bytes(100_000))

    with pytest.raises(RunStopped, match="No space left") as error:
        save_checkpoint(tmp_path, 2, full, {})
    assert error.value.__cause__.errno == errno.ENOSPC  # type: ignore[union-attr]
    assert str(tmp_path) in str(error.value)
    assert "step 1 is intact" in str(error.value)
    assert names(tmp_path) == ["global_step_00000001", LATEST]
    assert find_checkpoint(tmp_path, "auto") is not None


FULL_DISK = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from agentrl.errors import RunStopped
from agentrl.trainer.checkpoint import find_checkpoint, save_checkpoint
root = Path(sys.argv[1]) / "run"
w = torch.zeros(600_000)
save_checkpoint(root, 1, lambda folder: save_file({"w": w}, folder / "model.safetensors"), {})
for write in (
    lambda folder: save_file({"w": w}, folder / "model.safetensors"),
    lambda folder: torch.save({"w": w}, folder / "optimizer.pt"),
    lambda folder: (folder / "rng.bin").write_bytes(bytes(2_400_000)),
):
    try:
        save_checkpoint(root, 2, write, {})
    except RunStopped as e:
        assert str(root) in str(e) and "step 1 is intact" in str(e), e
        assert find_checkpoint(root, "auto").step == 1
        print("stopped", sorted(p.name for p in root.iterdir()))
"""


def test_a_full_file_system(tmp_path):
    command = ["unshare", "-rm", "true"]
    if not shutil.which("unshare") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs user namespaces to mount a small file system")
    script = 'mount -t tmpfs -o size=4m none "$0" && exec "$1" -c "$2" "$0"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(tmp_path), sys.executable, FULL_DISK],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"stopped ['global_step_00000001', '{LATEST}']\n" * 3


def test_an_exception_of_the_writer_is_raised_unchanged(tmp_path):
    def broken(folder: Path) -> None:
        raise KeyError("optimizer")

    with pytest.raises(KeyError):
        save_checkpoint(tmp_path, 1, broken, {})
    assert names(tmp_path) == []

    def linked(folder: Path) -> None:
        (folder / "model").symlink_to("/etc/hosts")

    with pytest.raises(ValueError, match="regular files"):
        save_checkpoint(tmp_path, 1, linked, {})
    assert names(tmp_path) == []


SAVERS = """
import os, sys
from pathlib import Path
from agentrl.trainer.checkpoint import find_checkpoint, recover, save_checkpoint

def write(folder):
    for i in range(8):
        (folder / f"{i}.bin").write_bytes(os.urandom(300_000))

def save_forever(root):
    os.write(1, b"0\\n")
    recover(root)
    found = find_checkpoint(root, "auto")
    step = found.step if found else 0
    while True:
        step += 1
        save_checkpoint(root, step, write, {"step": step})
        os.write(1, b"%d\\n" % step)

for line in sys.stdin:  # each line starts a process that saves until it is killed
    pid = os.fork()
    if pid == 0:
        save_forever(Path(line.strip()))
    os.setpgid(pid, pid)
    os.write(1, b"pid %d\\n" % pid)  # in one piece: two processes write
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


RANKS = """
import os, sys, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from agentrl.trainer.checkpoint import find_checkpoint, recover, save_checkpoint
from agentrl.learner.state import write_state

def tensor(mesh, step):
    return DTensor.from_local(torch.full((50_000,), float(step)), mesh, [Shard(0)])

def write(folder, step, mesh):
    dist.broadcast_object_list([str(folder), step])
    write_state(folder / "actor", {"x": tensor(mesh, step)})

def save_forever(root, store):
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    while rank == 1:
        asked = [None, None]
        dist.broadcast_object_list(asked)
        write_state(Path(asked[0]) / "actor", {"x": tensor(mesh, asked[1])})
    os.write(1, b"0\\n")
    recover(root)
    found = find_checkpoint(root, "auto")
    step = found.step if found else 0
    while True:
        step += 1
        save_checkpoint(root, step, lambda folder: write(folder, step, mesh), {"step": step})
        os.write(1, b"%d\\n" % step)

torch.set_num_threads(1)
for line in sys.stdin:
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            save_forever(Path(line.strip()), folder + "/store")
        os.setpgid(pid, pid)
        os.write(1, b"pid %d\\n" % pid)
        os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


def kill_while_saving(root: Path, kills: int, script: str = SAVERS) -> None:
    rng = random.Random(kills)
    savers = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert savers.stdin is not None and savers.stdout is not None
    promised = leftovers = 0
    for _ in range(kills):
        print(root, file=savers.stdin, flush=True)
        lines: list[str] = []
        pid, awaited = 0, {"0"} if promised else {"0", "1"}  # it begins; the first one has saved
        while not pid or not awaited <= {*lines}:
            lines.append(savers.stdout.readline().strip())
            if lines[-1].startswith("pid "):
                pid = int(lines[-1].removeprefix("pid "))
        time.sleep(rng.random() * 0.2)
        os.killpg(pid, signal.SIGKILL)
        while lines[-1] != "dead":
            lines.append(savers.stdout.readline().strip())
        promised = max([promised, *(int(line) for line in lines if line.isdigit())])
        leftovers += any(root.glob(".tmp-*"))
        recover(root)
        checkpoint = find_checkpoint(root, "auto")
        assert checkpoint is not None, "unusable after a kill"
        assert checkpoint.step >= promised, "a saved checkpoint was lost"
        assert checkpoint.skipped == (), "a broken one was published"
        assert checkpoint.meta == {"step": checkpoint.step}
        assert not [name for name in names(root) if name.startswith((".tmp", ".old"))]
    savers.stdin.close()
    savers.stdout.close()
    savers.wait()
    assert leftovers > kills / 4, "the kills did not hit the saving"
    save_checkpoint(root, promised + 100, write, {})
    assert len(list(root.glob("global_step_*"))) == 2


def test_random_kills_leave_none_unusable(tmp_path):
    kill_while_saving(tmp_path, 12)


@pytest.mark.slow
def test_sixty_random_kills_leave_none_unusable(tmp_path):
    kill_while_saving(tmp_path, 60)


@pytest.mark.slow
def test_random_kills_of_two_ranks_leave_none_unusable(tmp_path):
    kill_while_saving(tmp_path, 8, RANKS)
    folder = min(tmp_path.glob("global_step_*"))  # the last one is not theirs
    state = {"x": torch.zeros(100_000)}
    read_state(folder / "actor", state)
    assert set(state["x"].tolist()) == {float(folder.name[-8:])}


@pytest.mark.slow
def test_sixty_random_kills_of_two_ranks_leave_none_unusable(tmp_path):
    kill_while_saving(tmp_path, 60, RANKS)


HOLD = """
import sys
from pathlib import Path
from agentrl.trainer.checkpoint import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_used_by_one_process(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"in use by process {child.pid} .*--output"):
        run_lock(tmp_path).__enter__()
    child.kill()
    child.wait()
    with run_lock(tmp_path), pytest.raises(UserError, match=str(os.getpid())):
        run_lock(tmp_path).__enter__()
    with run_lock(tmp_path):
        pass
    child.stdin.close()
    child.stdout.close()


def test_a_folder_on_a_full_disk(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunStopped, match=r"\.lock: No space left on device. Free disk space"):
            run_lock(tmp_path).__enter__()
    with run_lock(tmp_path):
        pass


# --- who can read a run's folder -----------------------------------------------------------------


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def lock(folder: Path, caplog) -> str:
    """Take the lock of a folder; return what was logged."""
    caplog.clear()
    with run_lock(folder):
        pass
    return caplog.text


def test_a_run_folder_is_private(tmp_path, caplog):
    assert lock(tmp_path / "runs" / "a", caplog) == ""
    assert mode_of(tmp_path / "runs" / "a") == 0o700 and mode_of(tmp_path / "runs/a/.lock") == 0o600
    (tmp_path / "empty").mkdir(mode=0o755)
    assert lock(tmp_path / "empty", caplog) == ""
    assert mode_of(tmp_path / "empty") == 0o700


def test_a_run_folder_that_the_user_shares_keeps_its_mode(tmp_path, caplog):
    lock(tmp_path, caplog)
    tmp_path.chmod(0o750)
    assert lock(tmp_path, caplog) == ""
    assert mode_of(tmp_path) == 0o750


def test_a_folder_with_other_files_keeps_its_mode(tmp_path, caplog):
    (tmp_path / "thesis.tex").touch()
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in lock(tmp_path, caplog)
    assert lock(tmp_path, caplog) == ""
    assert mode_of(tmp_path) == 0o755
