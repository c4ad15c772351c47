"""Training over a cluster for real: ranks that are processes of Ray, gloo between them."""

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.forked_python import ForkedPython

pytest.importorskip("ray")

from agentrl import load_run
from agentrl.cluster import open_placement
from agentrl.config import load_config
from agentrl.errors import RunStopped
from agentrl.record import read_metrics
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer
from agentrl.trainer.checkpoint import find_checkpoint

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_other_names"),
]

ROOT = Path(__file__).parents[2]
ENV = """
from agentrl import reward


@reward("letters_of_cluster")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""
STEPS = 3
RUN = [
    f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "trainer.device=cpu",
    "data.batch_size=4", "rollout.n=4", "rollout.max_turn_tokens=12", "optim.lr=0.01",
    "optim.micro_batch_tokens=64", "tools.transport=in_process",
    "reward.function=letters_of_cluster",
]  # fmt: skip
KINDS = {"grpo with LoRA": ["model.lora_rank=4"], "ppo": ["algorithm.name=ppo"]}
ROUNDING = 1e-4
"""The largest difference of the weights after all steps, relative to their change by training:
ranks add float32 numbers in another order."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "data.train": str(folder / "rows.jsonl"),
        "model.path": str(random_model),
        "files": [str(folder / "env.py")],
    }


def train(flags, output, *overrides, ranks, kill_in=""):
    """Train until the run ends. Then none of its ranks is left.

    In the last step, rank 1 is killed before the first call of the method `kill_in`.
    """
    keys = [*RUN, *overrides, f"trainer.n_gpus_per_node={ranks}"]
    config = load_config(None, keys, {**flags, "trainer.output": str(output)})
    pids = []
    try:
        with open_placement(config) if ranks > 1 else contextlib.nullcontext() as placement:
            if placement:
                start_ranks = placement.start_ranks

                def recorded(*args, **kwargs):
                    group = start_ranks(*args, **kwargs)
                    pids.extend(worker.pid for worker in group.workers)
                    if kill_in:
                        kill_before(group, kill_in, pids[1], output)
                    return group

                placement.start_ranks = recorded
            Trainer(config, placement=placement).run()
    finally:
        assert len(pids) == (ranks if ranks > 1 else 0)
        ended(pids)


def kill_before(group, method, pid, output):
    """Kill a process before a method of its group is called in the last step."""
    real = getattr(group, method)

    def call(*args, **kwargs):
        if [step for step, _ in read_metrics(output / "metrics.jsonl")][-1:] == [STEPS - 1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(group, method, call)


def ended(pids, seconds=15.0):
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < end, "left behind"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rollouts(output, step):
    """Tokens of a step, by row and rollout."""
    return {
        (s.trajectory.sample.id, s.trajectory.rollout): [
            segment.response_ids for segment in s.trajectory.segments
        ]
        for s in load_trajectories(output / "trajectories", step)
    }


def metrics(output):
    return {
        step: {
            key: value for key, value in data.items() if not key.startswith(("timing_s/", "perf/"))
        }
        for step, data in read_metrics(output / "metrics.jsonl")
    }


def learned(output, flags):
    """All that the policy's weights moved by, as one vector."""
    [file] = (output / "model").glob("*.safetensors")
    weights = load_file(file)
    if file.name == "model.safetensors":
        before = load_file(Path(flags["model.path"]) / file.name)
        return torch.cat([(weights[n] - before[n]).flatten() for n in sorted(before)])
    parts = sorted(n.removesuffix("lora_A.weight") for n in weights if "lora_A" in n)
    return torch.cat(
        [(weights[f"{n}lora_B.weight"] @ weights[f"{n}lora_A.weight"]).flatten() for n in parts]
    )


def assert_same_steps(one, other, steps):
    """The numbers are equal except for rounding."""
    ours, theirs = metrics(one), metrics(other)
    for step in steps:
        assert rollouts(one, step) == rollouts(other, step)
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4, abs=1e-5)


@pytest.fixture(
    scope="module", params=["ppo", pytest.param("grpo with LoRA", marks=pytest.mark.slow)]
)
def pair(request, cluster, flags, tmp_path_factory):
    """The same run in one process, and by two ranks, of which one is killed in the last step.

    The run of two ranks has a profile of step 2. The value has the folder of both, the keys of the
    run and the error of the second.
    """
    folder = tmp_path_factory.mktemp("runs")
    keys = KINDS[request.param]
    train(flags, folder / "1", *keys, ranks=1)
    with pytest.raises(RunStopped) as stopped:
        train(flags, folder / "2", *keys, "trainer.profile_steps=[2]", ranks=2, kill_in="score")
    return folder, keys, str(stopped.value)


@pytest.mark.slow
def test_two_ranks_learn_as_one_process_does(pair):
    folder, overrides, _ = pair
    assert_same_steps(folder / "1", folder / "2", range(1, STEPS))
    assert len(rollouts(folder / "1", 1)) == 16
    # So are the numbers of every token, and the same ones are known.
    one, two = (
        load_run(folder / ranks, steps=[1]).tokens.drop_columns(["episode_id"]).to_pandas()
        for ranks in "12"
    )
    pd.testing.assert_frame_equal(one, two, rtol=1e-4, atol=1e-4)
    trained = one[one["mask"] & (one["split"] == "train")]
    known = ["old_logprob", "advantage", "entropy", "clipped", "importance_weight"]
    known += ["value", "return"] if overrides is KINDS["ppo"] else []
    assert trained[known].notna().all(axis=None)


def assert_says_who_was_killed(error, method):
    first, *rest = error.splitlines()
    assert re.match(rf"rank 1 of 2 \(process \d+ on .*\), in {method}: its process ended", first)
    assert rest[-1] == f"saved after step {STEPS - 1}; the same command resumes from there"
    is_after_the_update = method == "score"
    assert (f"checkpoint of step {STEPS}" in "".join(rest[:-1])) == is_after_the_update


def test_a_rank_that_is_killed(pair):
    """The cause is said first, though nothing can be saved; what was saved before is whole."""
    folder, _, error = pair
    assert_says_who_was_killed(error, "score")
    assert find_checkpoint(folder / "2", "auto").step == STEPS - 1
    assert not list((folder / "2").glob(".tmp-*"))


@pytest.mark.slow
def test_a_rank_that_is_killed_before_the_update(cluster, flags, tmp_path):
    with pytest.raises(RunStopped) as stopped:
        train(flags, tmp_path, ranks=2, kill_in="forward_backward")
    assert_says_who_was_killed(str(stopped.value), "forward_backward")
    assert find_checkpoint(tmp_path, "auto").step == STEPS - 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_ranks_and_ray_are_profiled(pair):
    profile = pair[0] / "2/profile/step_00000002"
    traces = {
        file.name: json.loads(gzip.decompress(file.read_bytes())) for file in profile.iterdir()
    }
    names = {f"{name}.json.gz" for name in ("controller", "rank_0", "rank_1", "ray")}
    assert traces.keys() == names
    times = {
        file: [(e["name"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"]
        for file, trace in traces.items()
    }
    for rank in ("rank_0.json.gz", "rank_1.json.gz"):
        found = {name for name, _ in times[rank]}
        assert {"forward", "backward", "optimizer", "send_weights", "score"} <= found
    begin, end = (f(at for _, at in times["controller.json.gz"]) for f in (min, max))
    calls = [at for name, at in times["ray.json.gz"] if "call" in name]
    assert calls and all(begin - 1e6 <= at <= end + 60e6 for at in calls)


@pytest.mark.parametrize(("saved", "ranks"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_a_run_resumes_with_another_number_of_ranks(pair, flags, tmp_path, saved, ranks, capsys):
    """It ends as the run of one process does: the other ranks have learned and saved the same."""
    folder, overrides, _ = pair
    output = tmp_path / "run"
    shutil.copytree(folder / str(saved), output)
    if saved == 1:
        shutil.rmtree(output / "model")
        shutil.rmtree(find_checkpoint(output, "auto").folder)
    assert find_checkpoint(output, "auto").step == STEPS - 1
    train(flags, output, *overrides, ranks=ranks)
    assert f"resuming from step {STEPS - 1}" in capsys.readouterr().out
    assert_same_steps(folder / "1", output, [STEPS])
    expected, actual = learned(folder / "1", flags), learned(output, flags)
    assert (actual - expected).norm() < ROUNDING * expected.norm()


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing_behind(flags, tmp_path):
    """Of the command itself, which starts a cluster of its own and ends it."""
    output, rows, env = tmp_path / "run", flags["data.train"], flags["files"][0]
    endless = [o for o in RUN if "_steps" not in o] + ["trainer.total_steps=100000"]
    command = ForkedPython(
        ["-m", "agentrl", "train", "--dataset", rows, "-f", env,
         "--model", flags["model.path"], "--output", str(output), *endless,
         "trainer.save_freq=0", "trainer.n_gpus_per_node=2"],
        start_new_session=True, merge_outputs=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    )  # fmt: skip
    try:
        end = time.monotonic() + 90
        while not read_metrics(output / "metrics.jsonl"):
            assert command.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        children = descendants(command.pid)
        assert len(children) > 3 and all(map(alive, children))
        [folder] = {Path(token).parent for pid in children if (token := token_of(pid))}
        assert folder.is_dir()
        os.killpg(command.pid, signal.SIGINT)
        printed, _ = command.communicate(timeout=60)
    finally:
        command.kill()
    assert command.returncode == 130, printed
    saved = find_checkpoint(output, "auto")
    assert f"saved after step {saved.step}; the same command resumes from there" in printed
    assert saved.step == read_metrics(output / "metrics.jsonl")[-1][0] > 0
    assert "Traceback" not in printed
    ended(children)
    assert not folder.exists()


def descendants(pid):
    """Of a process; what it started and what that did."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree - {pid}


def token_of(pid):
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RAY_AUTH_TOKEN_PATH="):
                return variable.partition(b"=")[2].decode()
    return None


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_ranks_and_a_server(cluster, flags, sglang_python, tiny_model, tmp_path):
    """All weights of two ranks, by the files that they write, to a server that the run starts."""
    rows = ROOT / "datasets/arithmetic_train.parquet"
    ours = flags | {
        "data.train": str(rows),
        "model.path": str(tiny_model),
        "files": ["shelf:calculator", *flags["files"]],
    }
    train(
        ours, tmp_path, "rollout.name=sglang", f"rollout.python={sglang_python}",
        "rollout.sync=disk", "rollout.max_turn_tokens=64", "trainer.save_freq=0",
        "optim.micro_batch_tokens=4096", "optim.lr=0.002", "trainer.total_steps=2", ranks=2,
    )  # fmt: skip
    history = [m for step, m in read_metrics(tmp_path / "metrics.jsonl") if step]
    assert len(history) == 2
    size = sum(tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values())
    for made in history:
        assert made["rollout_corr/logprob_diff_max"] < 1e-4
        assert made["canary/mismatch"] < 1e-5 < 1e-3 < made["canary/drift"]
        assert made["perf/update_weights_bytes"] == size
    for step in (1, 2):
        versions = {
            version
            for scored in load_trajectories(tmp_path / "trajectories", step)
            for segment in scored.trajectory.segments
            for version in segment.versions
            if version >= 0
        }
        assert versions == {step - 1}
