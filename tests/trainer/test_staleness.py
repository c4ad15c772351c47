"""Whole runs whose rollouts go on while the learner computes (`trainer.max_staleness`)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.forked_python import ForkedPython, run_agentrl
from transformers import AutoModelForCausalLM

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.data import RowOrder
from agentrl.demo import TINY_SETTINGS
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, EngineError, RunStopped, UserCodeError
from agentrl.learner.learner import Learner
from agentrl.record import read_metrics
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trainer import run as run_module

DATA = Path(__file__).parents[2] / "datasets"
ENV = """
import asyncio
import random
from agentrl import Message, agent_loop, reward

@agent_loop("pausing_staleness")
async def pausing(ep):
    for _ in range(3):
        await ep.generate(stop=("a", "e", " "))
        await asyncio.sleep(0.01 * random.lognormvariate(0, 1))
        ep.observe(Message("user", "Go on."))

@reward("letters_staleness")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@reward("raises_staleness")
def raises(trajectory) -> float:
    if trajectory.sample.ground_truth == "5":
        raise ZeroDivisionError
    return float(trajectory.rollout)
"""
ROWS, BATCH, N, STEPS = 7, 2, 3, 6


@pytest.fixture(scope="module")
def keys(tmp_path_factory, random_model):
    """The arguments of `agentrl train` for a run of a few seconds, less its output folder."""
    folder = tmp_path_factory.mktemp("staleness")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": str(i)} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"trainer.total_steps={STEPS}", "trainer.save_freq=1", f"data.batch_size={BATCH}",
        f"rollout.n={N}", "rollout.max_turn_tokens=16", "optim.lr=0.01", "trainer.device=cpu",
        "tools.transport=in_process", "reward.function=letters_staleness",
        "data.agent_name=pausing_staleness", f"data.train={folder / 'rows.jsonl'}",
        f"model.path={random_model}", f"files=[{folder / 'env.py'}]",
    ]  # fmt: skip


@pytest.fixture
def start(keys):
    def run(output, *overrides):
        trainer = Trainer(load_config(None, [*keys, f"trainer.output={output}", *overrides], {}))
        trainer.run()
        return trainer

    return run


def check_record(output: Path, staleness: int, steps: int = STEPS) -> None:
    """Check that each step has its own draws, each of them once, and no token is too old."""
    record = [(step, data) for step, data in read_metrics(output / "metrics.jsonl") if step]
    assert [step for step, _ in record] == list(range(1, steps + 1))
    assert all(data["staleness/max"] <= staleness for _, data in record)
    rows = defaultdict(list)
    for stored in TrajectoryStore(output / "trajectories").read(split="train"):
        trajectory = stored.scored.trajectory
        rows[stored.step].append((trajectory.sample.row, trajectory.rollout))
        versions = [v for s in trajectory.segments for v in s.versions if v >= 0]
        assert all(0 <= stored.step - 1 - version <= staleness for version in versions)
    order = RowOrder(ROWS, 0)
    for step in range(1, steps + 1):
        drawn = order.take(BATCH * (step - 1), BATCH)
        assert rows[step] == [(row, rollout) for row in drawn for rollout in range(N)]
    assert [*rows] == list(range(1, steps + 1))


@pytest.mark.parametrize("staleness", [1, 2])
def test_each_logprob_is_that_of_the_version_that_its_token_names(
    start, random_model, tmp_path, monkeypatch, staleness
):
    published, real = {}, LocalEngine.publish

    def publish(self, update):
        weights = {name: tensor.detach().clone() for name, tensor in update.weights()}
        published[update.version] = weights
        return real(self, update)

    monkeypatch.setattr(LocalEngine, "publish", publish)
    start(tmp_path, f"trainer.max_staleness={staleness}")
    check_record(tmp_path, staleness)
    assert [*published] == list(range(STEPS + 1))
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    stored = TrajectoryStore(tmp_path / "trajectories").read(split="train")
    segments = [s for scored in stored for s in scored.scored.trajectory.segments]
    names, worst, mixed = 0, 0.0, 0
    for version, weights in published.items():
        model.load_state_dict(weights, strict=False)
        for s in segments:
            at = [i for i, v in enumerate(s.versions) if v == version]
            if not at:
                continue
            ids = torch.tensor([*s.prompt_ids, *s.response_ids])
            with torch.no_grad():
                logprobs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
            for i in at:
                place = len(s.prompt_ids) + i
                worst = max(worst, abs(float(logprobs[place - 1, ids[place]]) - s.logprobs[i]))
                names += 1
    mixed = sum(len({v for v in s.versions if v >= 0}) > 1 for s in segments)
    assert worst < 1e-4 and names == sum(sum(s.response_mask) for s in segments)
    assert mixed > 0, "no weights arrived while an episode was played"
    ages = [data["staleness/mean"] for step, data in read_metrics(tmp_path / "metrics.jsonl")]
    assert ages[0] == 0 and max(ages) > 0.2


def test_while_a_validation_runs_rollouts_go_on_and_nothing_is_published(
    start, keys, tmp_path, monkeypatch
):
    events: list[str] = []
    evaluate, publish, generate = (
        run_module.evaluate,
        LocalEngine.publish,
        LocalEngine.generate,
    )

    def recorded_evaluate(*args):
        events.append("validation begins")
        result = evaluate(*args)
        events.append("validation ends")
        return result

    def recorded_publish(self, update):
        events.append("publish")
        return publish(self, update)

    async def recorded_generate(self, *args, **kwargs):
        events.append(kwargs["episode_id"].partition("-")[0])
        return await generate(self, *args, **kwargs)

    monkeypatch.setattr(run_module, "evaluate", recorded_evaluate)
    monkeypatch.setattr(LocalEngine, "publish", recorded_publish)
    monkeypatch.setattr(LocalEngine, "generate", recorded_generate)
    rows = next(key for key in keys if key.startswith("data.train=")).partition("=")[2]
    start(tmp_path, "trainer.max_staleness=1", f"data.val={rows}", "trainer.test_freq=2")
    ends = [i for i, event in enumerate(events) if event == "validation ends"]
    begins = [i for i, event in enumerate(events) if event == "validation begins"]
    during = [events[a:b] for a, b in zip(begins, ends, strict=True)]
    assert len(during) == 4 and all("publish" not in part for part in during)
    assert any("train" in part for part in during[1:-1])
    check_record(tmp_path, 1)


def test_a_signal_in_an_update_saves_the_step_and_the_run_resumes(start, tmp_path, monkeypatch):
    real, calls = Learner.update, []

    def update(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, "trainer.max_staleness=2", "trainer.save_freq=0")
    assert [f.name[-1] for f in tmp_path.glob("global_step_*")] == ["3"]
    start(tmp_path, "trainer.max_staleness=2", "trainer.save_freq=0")
    check_record(tmp_path, 2)


def test_a_signal_while_the_learner_waits_ends_the_rollouts(start, tmp_path, monkeypatch):
    generate, running = LocalEngine.generate, set()

    async def hanging(self, *args, **kwargs):
        if kwargs["episode_id"].startswith("train-p2-"):
            os.kill(os.getpid(), signal.SIGINT)
        running.add(kwargs["episode_id"])
        try:
            return await generate(self, *args, **kwargs)
        finally:
            running.discard(kwargs["episode_id"])

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", hanging)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, "trainer.max_staleness=2")
    assert not running and time.monotonic() - begin < 30
    start(tmp_path, "trainer.max_staleness=2")
    check_record(tmp_path, 2)


def test_an_outage_in_the_background_ends_the_step_that_takes_the_draws(
    start, tmp_path, monkeypatch
):
    generate = LocalEngine.generate

    async def failing(self, *args, **kwargs):
        _, *of_episode = kwargs["episode_id"].split("-")  # none at the start of the run
        if of_episode and int(of_episode[0][1:]) >= 3 * BATCH:
            raise EngineError("the engine is down")
        return await generate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", failing)
        with pytest.raises(RunStopped, match=r"6 of 6 rollouts were[^$]*saved after step 3"):
            start(tmp_path, "trainer.max_staleness=2", "trainer.save_freq=0")
    start(tmp_path, "trainer.max_staleness=2", "trainer.save_freq=0")
    check_record(tmp_path, 2)


def test_a_reward_that_raises_in_the_background_stops_the_run(start, tmp_path):
    at = RowOrder(ROWS, 0).take(0, ROWS).index(5) // BATCH
    with pytest.raises(UserCodeError, match="raises_staleness"):
        start(tmp_path, "trainer.max_staleness=1", "reward.function=raises_staleness")
    last = [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")][-1:]
    assert last == [at] or (last == [] and at == 0)


@pytest.mark.slow
def test_a_recorded_step_is_replayed_bit_for_bit(start, tmp_path, capsys):
    start(tmp_path, "trainer.max_staleness=2")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path), "--step", str(STEPS)])
    assert ended.value.code == 0
    assert f"step {STEPS} equals the record bit for bit" in capsys.readouterr().out
    # Another version that the limit allows changes the recorded age.
    file = tmp_path / f"trajectories/train-{STEPS:08d}.parquet"
    table = pq.read_table(file)
    rows = table["versions"].to_pylist()
    place = next(
        (row, k, i)
        for row, segments in enumerate(rows)
        for k, segment in enumerate(segments)
        for i, version in enumerate(segment)
        if 0 <= version < STEPS - 1
    )
    rows[place[0]][place[1]][place[2]] += 1
    at = table.schema.get_field_index("versions")
    column = pa.array(rows, table.schema.field(at).type)
    pq.write_table(table.set_column(at, "versions", column), file)
    with pytest.raises(SystemExit):
        main(["replay", str(tmp_path), "--step", str(STEPS)])
    assert "\n  staleness/mean: recorded " in capsys.readouterr().err


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rollout.name=vllm", "rollout.name=vllm needs LoRA"),
        ("rollout.sleep=all", "rollout.sleep=all with trainer.max_staleness=1"),
        ("rollout.deterministic=true", "depend on when new weights arrive"),
        ("algorithm.tis_cap=0", "Set algorithm.tis_cap=2"),
        ("trainer.max_staleness=-1", "max_staleness"),
    ],
)
def test_what_does_not_work_with_older_tokens_is_refused(keys, tmp_path, key, message):
    base = [*keys, f"trainer.output={tmp_path}"]
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*base, "trainer.max_staleness=1", key], {})
    if not key.startswith("trainer"):
        load_config(None, [*base, key], {})


def test_a_local_engine_on_the_learners_gpu_is_refused(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    base = [*keys, f"trainer.output={tmp_path}", "trainer.device=auto"]
    with pytest.raises(ConfigError, match="both use one GPU"):
        Trainer(load_config(None, [*base, "trainer.max_staleness=1"], {}))
    Trainer(load_config(None, base, {}))


# -- kill -9 --------------------------------------------------------------------------------------


def kill_often(keys: list[str], output: Path, kills: int, steps: int) -> None:
    """Start a run and kill it at random moments, then let it end."""
    rng, seen = random.Random(kills), set()
    keys = [*keys, f"trainer.output={output}", f"trainer.total_steps={steps}"]
    metrics = output / "metrics.jsonl"
    while kills:
        with ForkedPython(["-m", "agentrl", "train", *keys], merge_outputs=True) as process:
            done = len(read_metrics(metrics)) if metrics.exists() else 0
            made, deadline = rng.randrange(0, 4), time.monotonic() + 120
            while process.poll() is None and made:
                now = len(read_metrics(metrics)) if metrics.exists() else 0
                if now >= done + made or now >= steps - 1:
                    break
                assert time.monotonic() < deadline, process.read()
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() * 0.15)
            code = process.poll()
        assert code in (None, 0), process.read()
        if code == 0:
            break
        kills -= 1
        seen.add(max((step for step, _ in read_metrics(metrics)), default=0))
    done = run_agentrl("train", *keys)
    assert done.returncode == 0, done.stderr
    assert len(seen) > 1, "the kills did not hit the training"
    check_record(output, 2, steps)


@pytest.mark.slow
def test_kill_9_loses_no_draw_and_repeats_none(keys, tmp_path):
    kill_often([*keys, "trainer.max_staleness=2"], tmp_path, kills=2, steps=6)


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(keys, tmp_path):
    kill_often([*keys, "trainer.max_staleness=2", "trainer.save_freq=3"], tmp_path, 10, steps=40)


# -- learning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("engine", "seed", "most"),
    [
        *(("local", seed, 2) for seed in range(3)),
        # On two cores, a run takes four minutes with a server.
        pytest.param("sglang", 0, 1, marks=pytest.mark.sglang),
    ],
)
def test_the_demo_learns_as_much_from_older_tokens(
    tiny_model, tmp_path, request, engine, seed, most
):
    last = {}
    keys = [f"rollout.name={engine}", "trainer.device=cpu"]
    if engine == "sglang":
        keys.append(f"rollout.python={request.getfixturevalue('sglang_python')}")
    for staleness in range(most + 1):
        folder = tmp_path / str(staleness)
        config = load_config(
            None,
            [
                *keys,
                f"trainer.max_staleness={staleness}",
                f"trainer.seed={seed}",
                "trainer.val_before_train=false",
            ],
            {
                "data.train": str(DATA / "arithmetic_train.parquet"),
                "model.path": str(tiny_model),
                "trainer.output": str(folder),
            },
            preset=TINY_SETTINGS,
        )
        Trainer(config).run()
        rewards = [data["critic/score/mean"] for _, data in read_metrics(folder / "metrics.jsonl")]
        last[staleness] = sum(rewards[-10:]) / 10
    assert [*last.values()] == pytest.approx([last[0]] * len(last), abs=0.05)
