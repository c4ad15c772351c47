"""Runs as tasks of a cluster: which devices, variables and folders they get, and how they end."""

import json

import pytest

pytest.importorskip("ray")

from support.forked_python import ForkedPython

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

PROGRAM = """
import json, os, ray, sys, time
from pathlib import Path
from agentrl.cluster.runs import train_runs

def train(name):
    names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MARK"
    facts = {n: os.environ.get(n) for n in names} | {"folder": os.getcwd()}
    print(json.dumps(facts), flush=True)
    if name == "dies":
        os._exit(1)
    if name == "raises":
        raise ValueError("of the task")
    Path("out", f"{name}.began").touch()
    end = time.monotonic() + 150
    while name in "ab" and not all(Path("out", f"{x}.began").exists() for x in "ab"):
        assert time.monotonic() < end, "the other run does not run at the same time"
        time.sleep(0.01)
    return 7 if name == "fails" else 0

ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False)
keys = {"trainer.n_gpus_per_node": 1, "trainer.placement": "colocated", "trainer.ray_address": ""}
keys |= {"rollout.urls": [], "rollout.engines": 1, "rollout.tensor_parallel_size": 1}
runs = {name: keys | {"trainer.device": "cuda"} for name in ("a", "b", "fails", "raises", "dies")}
runs["cpu"] = keys | {"trainer.device": "cpu"}
print("CODES", json.dumps(dict(train_runs("local", runs, train, Path("out")))))
"""


@pytest.mark.slow
def test_each_run_has_devices_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MARK", "of the command")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "out").mkdir()
    process = ForkedPython(["program.py"], cwd=tmp_path)
    assert process.wait(380) == 0, process.read()
    [line] = [x for x in process.read()[0].splitlines() if x.startswith("CODES")]
    codes = json.loads(line.removeprefix("CODES"))
    assert codes == {"a": 0, "b": 0, "fails": 7, "raises": 1, "dies": 1, "cpu": 0}
    logs = {name: (tmp_path / f"out/{name}.log").read_text() for name in codes}
    facts = {name: json.loads(text.splitlines()[0]) for name, text in logs.items()}
    assert {f["MARK"] for f in facts.values()} == {"of the command"}
    assert {f["folder"] for f in facts.values()} == {str(tmp_path)}
    assert facts["cpu"]["OMP_NUM_THREADS"] == "1" and facts["a"]["OMP_NUM_THREADS"] is None
    assert {facts[name]["CUDA_VISIBLE_DEVICES"] for name in ("a", "b")} == {"0", "1"}
    errors = process.read()[1]
    assert "raises: " in errors and "ValueError: of the task" in errors and "dies: " in errors
