"""A run that is killed goes on as if nothing had happened: the real command, bit for bit."""

import json
import os
import signal
import time
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support.forked_python import ForkedPython, run_python

from agentrl import registry
from agentrl.agent_loops import AgentLoop
from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.store import TrajectoryStore, load_trajectories
from agentrl.tools import LocalToolbox

ROOT = Path(__file__).parents[2]
STEPS = 4
NOT_LEARNED = ("timing_s/", "perf/", "workers/")
"""Prefixes of metrics that depend on the time, or on the number of processes that play."""


@pytest.fixture(scope="module")
def command(tiny_model, tmp_path_factory):
    """The command of a short run over two files with weights, less its output folder."""
    folder = tmp_path_factory.mktemp("rows")
    for name, source, first, count in (
        ("few", "train", 0, 4),
        ("many", "train", 4, 60),
        ("val", "val", 0, 4),
    ):
        table = pq.read_table(ROOT / "datasets" / f"arithmetic_{source}.parquet")
        pq.write_table(table.slice(first, count), folder / f"{name}.parquet")
    few, many = folder / "few.parquet", folder / "many.parquet"
    return [
        "-m", "agentrl", "train",
        f"data.train=[{{path: {few}, weight: 5.5}}, {{path: {many}, weight: 0.1}}]",
        "--val-dataset", str(folder / "val.parquet"),
        "--model", "tiny",
        f"trainer.total_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=2",
        "data.batch_size=4", "rollout.n=4", "algorithm.ppo_epochs=2",
    ]  # fmt: skip


def run(command, output):
    done = run_python([*command, "--output", output])
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(output):
    """Steps and all numbers of what was played and learned."""
    # The run may be writing the next line.
    written = (output / "metrics.jsonl").read_text().rpartition("\n")[0]
    lines = [json.loads(line) for line in written.splitlines()]
    return [
        (
            line["step"],
            {k: v for k, v in line["data"].items() if not k.startswith(NOT_LEARNED)},
        )
        for line in lines
    ]


def played(output):
    """Every trajectory on disk, less what names the attempt and the time it took."""
    return [
        (s.trajectory.sample.id, s.trajectory.rollout, s.reward, s.trajectory.segments)
        for s in load_trajectories(output / "trajectories")
    ]


def learned(output):
    """What each step learned, less the ids of episodes, which are those of the trajectories."""
    store, tables = TrajectoryStore(output / "trajectories"), {}
    assert len(list(store.learned.iterdir())) == len(store.steps("train")) == STEPS
    for step in store.steps("train"):
        table = store.read_learned(step)
        rows = [
            (s.scored.trajectory.episode_id, i, len(segment.response_ids))
            for s in store.read(step, "train")
            for i, segment in enumerate(s.scored.trajectory.segments)
        ]
        lengths = pc.list_value_length(table["old_logprobs"])
        columns = (table["episode_id"], table["segment"], lengths)
        assert rows == list(zip(*(c.to_pylist() for c in columns), strict=True))
        tables[step] = table.drop_columns(["episode_id"])
    return tables


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight") / "run"
    run(command, output)
    return output


@pytest.mark.parametrize(
    ("killed_after", "changed"),
    [
        pytest.param(1, [], marks=pytest.mark.slow),
        (3, []),
        pytest.param(3, ["rollout.workers=3"], marks=pytest.mark.slow),
    ],
)
def test_kill_9_and_the_same_command_again(command, straight, tmp_path, killed_after, changed):
    output = tmp_path / "run"
    process = ForkedPython([*command, "--output", output])
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) <= killed_after:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    output_text = run([*command, *changed], output)
    assert ("resuming from step 2" in output_text) == (killed_after == 3)
    assert metrics(output) == metrics(straight)
    assert [step for step, _ in metrics(output)] == list(range(STEPS + 1))
    weights = "model/model.safetensors"
    assert (output / weights).read_bytes() == (straight / weights).read_bytes()
    assert played(output) == played(straight)
    assert learned(output) == learned(straight)


@pytest.mark.slow
def test_a_finished_run_can_be_extended(command, tmp_path):
    """As if it had been that long from the beginning, where no rate depends on the length."""
    steady = [*command, "optim.lr_final=1", "trainer.val_before_train=false", "trainer.test_freq=0"]
    steady += ["data.batch_size=2", "rollout.n=2", "val.n=1"]
    run([*steady, "trainer.total_steps=2"], tmp_path / "longer")
    assert "resuming from step 2" in run([*steady, "trainer.total_steps=3"], tmp_path / "longer")
    run([*steady, "trainer.total_steps=3"], tmp_path / "straight")
    longer, straight = (dict(metrics(tmp_path / name)) for name in ("longer", "straight"))
    assert longer.keys() == straight.keys() == {1, 2, 3}
    assert longer[3] == straight[3] and longer[1] == straight[1]
    model = "model/model.safetensors"
    assert (tmp_path / "longer" / model).read_bytes() == (
        tmp_path / "straight" / model
    ).read_bytes()


def test_the_trainer_agrees_with_the_engine_at_the_first_update(straight):
    first = dict(metrics(straight))[1]
    assert first["training/rollout_ratio_error_mean"] < 1e-6
    assert first["training/rollout_ratio_error_max"] < 1e-4


def test_every_row_is_its_conversation(straight, tiny_model):
    """The trained row is the rendered conversation; the masks cover the turns and nothing else."""
    registry.load_file("shelf:calculator")
    template = ChatTemplate(load_tokenizer(tiny_model))
    scored = list(load_trajectories(straight / "trajectories"))
    assert len(scored) > 60 and {s.trajectory.sample.agent_name for s in scored} == {
        "single_turn",
        "tool_agent",
        "react",
    }
    for s in scored:
        t = s.trajectory
        loop: AgentLoop = registry.agent_loops.get(t.sample.agent_name)
        _, schemas = loop.opening(t.sample, LocalToolbox().schemas(t.sample.tools))
        messages = list(t.messages)
        while messages[-1].role != "assistant":  # observed, but nothing was sampled after it
            messages.pop()
        [segment] = t.segments
        row = template.decode(segment.prompt_ids + segment.response_ids)
        rendered = template.decode(template.trace(messages, schemas)[0])
        assert rendered.startswith(row)
        turns = [i for turn in t.turns for i in range(turn.start, turn.end)]
        assert [i for i, m in enumerate(segment.response_mask) if m] == turns


def test_a_finished_run_prints_its_result_again(command, straight):
    before = (straight / "metrics.jsonl").read_bytes()
    output_text = run(command, straight)
    assert f"done: {STEPS} steps" in output_text and "next:" in output_text
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_another_config_in_the_same_folder_is_refused(command, straight):
    done = run_python([*command, "--output", straight, "algorithm.clip_high=0.5"])
    assert done.returncode == 1
    assert "algorithm.clip_high: 0.2 -> 0.5" in done.stderr
    assert "another --output" in done.stderr and "trainer.resume=never" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_one_signal_saves_and_leaves_no_process(command, tmp_path, number):
    """Until then, no other run can use its folder."""
    output = tmp_path / "run"
    endless = ["trainer.total_steps=1000", "trainer.save_freq=0"]
    process = ForkedPython([*command, "--output", output, *endless], start_new_session=True)
    deadline = time.monotonic() + 120
    while not (output / ".lock").exists() or not (output / ".lock").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    second = run_python([*command, "--output", output], timeout=60)
    assert second.returncode == 1
    assert f"process {process.pid}" in second.stderr
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert "the same command resumes from there" in out
    [checkpoint] = output.glob("global_step_*")
    meta = json.loads((checkpoint / "meta.json").read_text())["meta"]
    reached = metrics(output)[-1][0] + (meta["unfinished"] is not None)
    assert int(checkpoint.name.split("_")[-1]) == reached
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
