"""Whole runs of a model that knows nothing: what stands around the update of a step."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.trainer_fixtures import tensors_in

from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.errors import EngineError, RunStopped
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trainer import step as step_module

ENV = """
from agentrl import reward

@reward("letter_trainer")
def letter(trajectory, letters="ae") -> float:
    return float(any(letter in trajectory.assistant_text for letter in letters))

@reward("half_trainer")
def half(trajectory) -> float:
    return 0.5

@reward("letters_trainer")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@reward("first_row_trainer")
def first_row(trajectory) -> float:
    return letters(trajectory) if trajectory.sample.row == 0 else 0.5
"""
STEPS = 4


@pytest.fixture(scope="module")
def start(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(5)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(output, *overrides):
        base = [
            f"trainer.total_steps={STEPS}", "trainer.save_freq=0", "data.batch_size=2",
            "rollout.n=2", "rollout.max_turn_tokens=8", "optim.lr=0.01", "trainer.device=cpu",
            "tools.transport=in_process", "reward.function=letter_trainer",
        ]  # fmt: skip
        flags = {
            "data.train": str(folder / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(output),
            "files": [str(folder / "env.py")],
        }
        trainer = Trainer(load_config(None, [*base, *overrides], flags))
        trainer.run()
        return trainer

    return run


def metrics(output: Path) -> list[tuple[int, dict[str, float]]]:
    """Steps and all numbers that do not tell the time."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        (
            line["step"],
            {k: v for k, v in line["data"].items() if not k.startswith(("timing_s/", "perf/"))},
        )
        for line in lines
    ]


def series(output: Path, name: str) -> list[float]:
    return [data[name] for _, data in metrics(output)]


def played(output: Path, split: str | None = None) -> list[tuple]:
    """Every rollout on disk, less what names the attempt and the time it took."""
    return [
        (s.step, s.split, s.scored.trajectory.sample.row, s.scored.trajectory.rollout,
         s.scored.reward, s.scored.trajectory.segments)
        for s in TrajectoryStore(output / "trajectories").read(split=split)
    ]  # fmt: skip


def record(output: Path) -> tuple:
    weights = (output / "model/model.safetensors").read_bytes()
    return metrics(output), played(output), hashlib.sha256(weights).hexdigest()


def interrupted(start, output, monkeypatch, step, *overrides):
    """A run that an outage stops within a step, and the same command again."""
    real = LocalEngine.generate

    async def generate(self, *args, **kwargs):
        if kwargs["episode_id"].startswith(f"train-{step}-"):
            raise EngineError("the engine is down")
        return await real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", generate)
        with pytest.raises(RunStopped, match=rf"is down[^$]*saved after step {step}"):
            start(output, *overrides)
    return start(output, *overrides)


FILTER = ("algorithm.filter_groups=true", "data.gen_batch_size=3", "algorithm.max_gen_batches=3")


def test_a_filtered_run_resumes_bit_for_bit(start, tmp_path, monkeypatch):
    straight = start(tmp_path / "straight", *FILTER)
    resumed = interrupted(start, tmp_path / "resumed", monkeypatch, 2, *FILTER)
    assert record(tmp_path / "resumed") == record(tmp_path / "straight")
    rounds = series(tmp_path / "straight", "training/filter_groups/rounds")
    assert len(set(rounds)) > 1, "a step's rows do not follow from its number"
    assert straight.state.position == resumed.state.position == 3 * sum(rounds)
    assert series(tmp_path / "straight", "training/epoch")[-1] == straight.state.position / 5
    trained = played(tmp_path / "straight", "train")
    for step, live in enumerate(series(tmp_path / "straight", "training/filter_groups/live"), 1):
        rewards = [reward for s, _, _, _, reward, _ in trained if s == step]
        groups = [sum(rewards[i : i + 2]) for i in range(0, len(rewards), 2)]
        assert live and groups == [1.0] * min(2, int(live)), "one of the two was right"
    evicted = sum(series(tmp_path / "straight", "training/filter_groups/evicted_samples"))
    assert len(played(tmp_path / "straight", "evicted")) == evicted > 0


def test_with_every_group_dead_nothing_is_learned(start, tmp_path, random_model):
    trainer = start(
        tmp_path, *FILTER, "reward.kwargs={letters: ''}", "trainer.total_steps=2",
        "optim.weight_decay=0.5",
    )  # fmt: skip
    assert trainer.state.position == 2 * 3 * 3
    assert series(tmp_path, "training/filter_groups/live") == [0, 0]
    assert series(tmp_path, "training/filter_groups/dead") == [9, 9]
    assert series(tmp_path, "training/filter_groups/evicted_samples") == [14, 14]
    assert series(tmp_path, "actor/grad_norm") == [0, 0]
    assert series(tmp_path, "waste/dead_step") == [1, 1]
    before, after = load_file(random_model / "model.safetensors"), weights(tmp_path)
    assert all(after[name].equal(before[name]) for name in before)


FIRST_ROW = "reward.function=first_row_trainer"


@pytest.fixture
def sends(monkeypatch):
    """Collect the version of each update that a local engine got, and the bytes that were sent."""
    collected, publish = [], LocalEngine.publish

    def recorded(self, update):
        collected.append((update.version, publish(self, update)))
        return collected[-1][1]

    monkeypatch.setattr(LocalEngine, "publish", recorded)
    return collected


@pytest.mark.parametrize("keys", [(), ("model.lora_rank=2",), ("trainer.max_staleness=1",)])
def test_a_step_without_an_update_sends_only_the_version(start, tmp_path, sends, keys):
    start(tmp_path, FIRST_ROW, *keys)
    dead = series(tmp_path, "waste/dead_step")
    assert set(dead) == {0, 1}
    if "lora_rank" in "".join(keys):
        assert sends.pop(0)[1], "the perturbed adapter, by which the noise is measured"
    assert [version for version, _ in sends] == list(range(STEPS + 1))
    assert [size > 0 for _, size in sends] == [True, *(not d for d in dead)]
    assert len({size for _, size in sends if size}) == 1
    moved = [drift > 0 for drift in series(tmp_path, "canary/drift")]
    assert moved == [not d for d in dead]
    versions = {
        step: {v for s in segments for v in s.versions if v >= 0}
        for step, *_, segments in played(tmp_path, "train")
    }
    staleness = int("trainer.max_staleness=1" in keys)
    ages = {step - 1 - version for step, several in versions.items() for version in several}
    assert ages == {*range(staleness + 1)}


def test_a_run_resumes_bit_for_bit_after_a_step_without_an_update(
    start, tmp_path, monkeypatch, sends
):
    start(tmp_path / "straight", FIRST_ROW)
    dead = series(tmp_path / "straight", "waste/dead_step").index(1) + 1
    sends.clear()
    interrupted(start, tmp_path / "resumed", monkeypatch, dead, FIRST_ROW)
    assert record(tmp_path / "resumed") == record(tmp_path / "straight")
    again = [size for version, size in sends if version == dead]
    assert again[0] == 0 and again[1] > 0, "a new process sends the weights"


def test_the_canary_of_a_local_engine_in_float32_is_short(start, tmp_path, monkeypatch):
    scored, sampled, score, continue_row = [], [], LocalEngine.scores, LocalEngine.continue_row

    async def recorded_score(self, token_ids):
        scored.append(len(token_ids))
        return await score(self, token_ids)

    async def recorded_continue_row(self, token_ids, tokens, timeout_s):
        sampled.append((len(token_ids), tokens))
        return await continue_row(self, token_ids, tokens, timeout_s)

    monkeypatch.setattr(LocalEngine, "scores", recorded_score)
    monkeypatch.setattr(LocalEngine, "continue_row", recorded_continue_row)
    start(tmp_path, "reward.function=letters_trainer")
    assert scored == [64] * (1 + STEPS), "one at the start, and one after each update"
    assert sampled == [(64, 16)]


EQUAL = "reward.function=half_trainer"
MASKED = ("reward.function=letters_trainer", "rollout.max_turn_tokens=1",
          "rollout.budget_policy={turn_tokens: mask}")  # fmt: skip
KL_LOSS = ("algorithm.kl_loss_coef=0.1", "algorithm.kl_type=k2")
KL_REWARD = ("algorithm.kl_reward_coef=0.1", "algorithm.kl_type=k1")
CASES = {
    "equal": ((EQUAL,), "equal in 100% of the groups", STEPS),
    "a KL in the loss": ((EQUAL, *KL_LOSS), "100%", STEPS),
    "a KL in the reward": ((EQUAL, *KL_REWARD), "100%", STEPS),
    "masked": (MASKED, "the most frequent stop reason is 'turn_tokens' (", STEPS),
    "remax": ((EQUAL, "algorithm.name=remax"), "100%", STEPS),
    "a critic of nothing": (("reward.kwargs={letters: ''}", "algorithm.name=ppo"), "100%", STEPS),
    "a critic": ((EQUAL, "algorithm.name=ppo"), None, 0),
    "rewards that differ": (("reward.function=letters_trainer",), None, 0),
}  # fmt: skip


SLOW_CASES = {"a KL in the reward", "rewards that differ"}
"""Other cases have a KL, and no warning."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW_CASES else c for c in CASES]
)
def test_a_run_that_cannot_learn_logs_a_warning(start, tmp_path, caplog, case):
    overrides, message, dead = CASES[case]
    start(tmp_path, *overrides)
    assert sum(series(tmp_path, "waste/dead_step")) == dead
    warnings = [r.getMessage() for r in caplog.records if "no learning signal" in r.getMessage()]
    if message is None:
        assert warnings == []
        return
    [warning] = warnings
    assert re.match(r"error: steps 1 to \d had no learning signal \(waste/dead_step; ", warning)
    assert message in warning
    assert "the most frequent stop reason is '" in warning


def test_a_resumed_run_warns_once(start, tmp_path, monkeypatch, caplog):
    interrupted(start, tmp_path, monkeypatch, 2, EQUAL)
    warnings = [r.getMessage() for r in caplog.records if "no learning signal" in r.getMessage()]
    assert len(warnings) == 1


def test_the_drift_of_small_steps_is_kept_after_a_kill(start, tmp_path, monkeypatch):
    """Of steps that move the policy by less than the noise: it adds up."""
    small = ("optim.lr=1e-7", "reward.function=letters_trainer")
    start(tmp_path / "straight", *small)
    interrupted(start, tmp_path / "resumed", monkeypatch, 3, *small)
    drift = series(tmp_path / "straight", "canary/drift")
    assert drift[-1] > drift[0] > 0
    assert record(tmp_path / "resumed") == record(tmp_path / "straight")


def weights(output: Path) -> dict:
    return load_file(output / "model/model.safetensors")


def test_remax_compares_with_the_greedy_rollout(start, tmp_path, monkeypatch):
    batches, real = [], step_module.make_targets

    def make_targets(batch, *args, **kwargs):
        targets = real(batch, *args, **kwargs)
        batches.append((batch, targets.advantages))
        return targets

    monkeypatch.setattr(step_module, "make_targets", make_targets)
    start(
        tmp_path, "algorithm.name=remax", "trainer.total_steps=2",
        "reward.function=letters_trainer",
    )  # fmt: skip
    for step, (batch, advantages) in enumerate(batches, 1):
        greedy = {row: reward for s, _, row, _, reward, _ in played(tmp_path, "baseline")
                  if s == step}  # fmt: skip
        mine = [(row, reward) for s, _, row, _, reward, _ in played(tmp_path, "train") if s == step]
        assert batch.baseline.tolist() == pytest.approx([greedy[row] for row, _ in mine])
        expected = [reward - greedy[row] for row, reward in mine]
        assert advantages[:, 0].tolist() == pytest.approx(expected) and any(expected)
    stored = list(TrajectoryStore(tmp_path / "trajectories").read(split="baseline"))
    assert len(stored) == 4
    assert {s.scored.trajectory.sampling["temperature"] for s in stored} == {0.0}
    assert len(played(tmp_path, "train")) == 8, "the greedy ones are not trained on"


def test_the_policy_does_not_change_during_critic_warmup(start, tmp_path, random_model):
    warm = ["algorithm.name=ppo", "algorithm.critic_warmup=2", "reward.function=letters_trainer"]
    before = load_file(random_model / "model.safetensors")
    more = ["trainer.total_steps=3", "trainer.save_freq=1", "optim.critic_lr=0.01"]
    start(tmp_path / "run", *warm, *more)
    for step, moved in ((2, False), (3, True)):
        saved = tensors_in(tmp_path / "run" / f"global_step_{step:08d}" / "actor")
        assert moved != all(saved[f"parameter.{n}"].equal(before[n]) for n in before)
    first, second, _ = series(tmp_path / "run", "critic/values/mean")
    assert first == 0 != second, "the critic moved"


def test_the_weight_of_the_kl_is_resumed(start, tmp_path, monkeypatch):
    steered = [
        "algorithm.kl_reward_coef=0.5", "algorithm.kl_target=0.02", "algorithm.kl_horizon=40",
        "algorithm.kl_type=k1", "reward.function=letters_trainer",
    ]  # fmt: skip
    weighed, real = [], step_module.make_targets

    def make_targets(*args, kl_coef, **kwargs):
        weighed.append(kl_coef)
        return real(*args, kl_coef=kl_coef, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "make_targets", make_targets)
        start(tmp_path / "straight", *steered)
    interrupted(start, tmp_path / "resumed", monkeypatch, 2, *steered)
    assert record(tmp_path / "resumed") == record(tmp_path / "straight")
    coefs = series(tmp_path / "straight", "actor/reward_kl_penalty_coeff")
    kls = series(tmp_path / "straight", "actor/reward_kl_penalty")
    assert coefs[0] == 0.5 and kls[0] == pytest.approx(0, abs=1e-4), "nothing has moved yet"
    for coef, kl, following in zip(coefs, kls, coefs[1:], strict=False):
        error = min(max(kl / 0.02 - 1, -0.2), 0.2)
        assert following == pytest.approx(coef * (1 + error * 4 / 40))
    assert len(set(coefs)) == STEPS and weighed == coefs
