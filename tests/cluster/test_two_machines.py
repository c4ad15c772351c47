"""A run over two machines that share one folder and nothing else.

The machines are namespaces of this one: each has a network with an address of its own, its own
processes, and its own /tmp. The name of both resolves to 127.0.0.1, as on many real machines.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.forked_python import run_agentrl

from agentrl.record import read_metrics
from agentrl.store import load_trajectories

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
RUN = [
    "--model", "tiny", "trainer.device=cpu", "trainer.total_steps=2", "trainer.save_freq=1",
    "data.batch_size=4", "rollout.n=4", "trainer.test_freq=0", "tools.transport=http",
]  # fmt: skip
WAIT = """
import ray, time
ray.init(address="auto", logging_level=40)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.3)
"""
ON_EACH_MACHINE = """
import sys, ray
from agentrl.cli import main
from agentrl.cluster import engines

def slots(ranks, config, *, cpu):
    nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
    return [engines._slot_on(node["NodeID"], (), config) for node in nodes]

engines.colocated_slots = slots
main(sys.argv[1:])
"""
"""Runs agentrl as with GPUs: without them, all servers are on the machine of the run."""
FIRST = """
ray start --head --node-ip-address=10.77.0.1 --port=6379 --num-cpus=1 \\
    --include-dashboard=false --disable-usage-stats
python -c {wait}
{commands}
code=$?
ls -A /tmp > {shared}/left
exit $code
"""
SECOND = """
until ray start --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --num-cpus=1 \\
    --disable-usage-stats
do sleep 0.5; done
sleep 600
"""


def needs_namespaces() -> None:
    """Skip where this user may not make network namespaces."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("may not make network namespaces")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network():
    """Two network namespaces, joined by a cable."""
    needs_namespaces()
    names = {machine: f"agentrl-{os.getpid()}-{machine}" for machine in ADDRESSES}
    try:
        for name in names.values():
            ip("netns", "add", name)
        ends = [("netns", name) for name in names.values()]
        ip("link", "add", "wire", *ends[0], "type", "veth", "peer", "name", "wire", *ends[1])
        for machine, name in names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[machine]}/24", "dev", "wire")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "wire", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(namespace: str, script: str, shared: Path, log: Path) -> subprocess.Popen[bytes]:
    """Run a script on a machine: all of its processes end with the first one."""
    # The shared folder stays visible at its path although /tmp is the machine's own.
    enter = f"""
        set -e
        mount --bind {shared} /mnt
        mount -t tmpfs tmpfs /tmp
        mkdir -p {shared}
        mount --bind /mnt {shared}
        umount /mnt
        set +e
        {script}
    """
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = ["ip", "netns", "exec", namespace, *unshare, "bash", "-c", enter]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
        "TMPDIR": "/tmp",
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd="/"
        )


def run_first(network: dict[str, str], shared: Path, commands: str) -> str:
    """Run commands on the first machine of a Ray cluster, and return what they print."""
    first = FIRST.format(wait=shlex.quote(WAIT), commands=commands, shared=shared)
    machines = [
        start(network["a"], first, shared, shared / "a.log"),
        start(network["b"], SECOND, shared, shared / "b.log"),
    ]
    try:
        code = machines[0].wait(350)
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    output = (shared / "a.log").read_text()
    assert code == 0, output + (shared / "b.log").read_text()
    left = (shared / "left").read_text().split()
    assert not [name for name in left if "agentrl" in name], left
    return output


@pytest.fixture
def shared(tmp_path):
    """A folder that both machines see, with rows."""
    folder = tmp_path / "shared"
    folder.mkdir()
    shutil.copy(ROOT / "datasets/arithmetic_train.parquet", folder / "rows.parquet")
    return folder


TWO = ["trainer.ray_address=auto", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


def test_ranks_on_two_machines_learn_what_one_process_learns(network, shared):
    rows = ["--dataset", str(shared / "rows.parquet")]
    run = shlex.join([*rows, "--output", str(shared / "two"), *RUN, *TWO])
    output = run_first(network, shared, f"agentrl train {run}")
    assert "on 2 ranks" in output
    one = run_agentrl("train", *rows, "--output", shared / "one", *RUN)
    assert one.returncode == 0, one.stderr
    weights = [load_file(shared / run / "model/model.safetensors") for run in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=2e-4)
    assert (shared / "two/global_step_00000002").is_dir()


MACHINE = """
from pathlib import Path
from agentrl import reward

@reward("correct_and_where")
def correct_and_where(trajectory):
    here = Path("/proc/net/fib_trie").read_text()
    right = str(trajectory.sample.ground_truth) in trajectory.final_text
    return {"score": float(right), "on_b": float("10.77.0.2\\n" in here)}
"""


def test_rollout_workers_on_two_machines_play_what_one_process_plays(network, shared):
    (shared / "where.py").write_text(MACHINE)
    run = [
        "--dataset", str(shared / "rows.parquet"), "--file", "shelf:calculator",
        "--file", str(shared / "where.py"), *RUN, "reward.function=correct_and_where",
    ]  # fmt: skip
    keys = ["trainer.ray_address=auto", "rollout.workers=2", "--output", str(shared / "two")]
    folder = shared / "passed"
    folder.mkdir()
    one, two = (shlex.join([*run, *more]) for more in (["--output", str(shared / "one")], keys))
    run_first(network, shared, f"agentrl train {one} && TMPDIR={folder} agentrl train {two}")
    folders = {name: shared / name / "trajectories" for name in ("one", "two")}
    played = {name: [*load_trajectories(folder)] for name, folder in folders.items()}
    rows = {name: [s.trajectory.segments for s in scored[:16]] for name, scored in played.items()}
    assert rows["one"] == rows["two"]  # Later ones differ by the rounding of the rank's sums.
    where = {name: {s.metrics["on_b"] for s in scored} for name, scored in played.items()}
    assert where == {"one": {0.0}, "two": {0.0, 1.0}}


@pytest.mark.sglang
def test_servers_on_two_machines_get_the_weights(network, shared, sglang_python):
    """Through files in TMPDIR, if both machines see it; the canary checks each server."""
    keys = ["rollout.name=sglang", "rollout.engines=2", f"rollout.python={sglang_python}"]
    rows = ["--dataset", str(shared / "rows.parquet")]
    train = ["python", "-c", ON_EACH_MACHINE, "train", *rows, *RUN, *TWO, *keys, "--output"]
    refused, run = (shlex.join([*train, str(shared / name)]) for name in ("refused", "run"))
    folder = shared / "passed"
    folder.mkdir()
    output = run_first(network, shared, f"{refused}\nTMPDIR={folder} {run}")
    assert "10.77.0.2 does not see /tmp/" in output
    assert not [*folder.glob("agentrl-*")]
    steps = [m for step, m in read_metrics(shared / "run/metrics.jsonl") if step]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["canary/mismatch"] < 1e-5 < metrics["canary/drift"]
        assert metrics["rollout_corr/logprob_diff_max"] < 1e-4
