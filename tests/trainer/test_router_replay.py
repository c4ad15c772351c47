"""Runs with `rollout.router_replay`: experts are stored, sent, replayed and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.letter_runs import check_resume, check_workers, letter_runs, metrics, segments
from support.moe import moe_model, own_experts
from transformers import AutoModelForCausalLM

from agentrl.agent_loops.context import TokenRow
from agentrl.cli import main
from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, EngineError, RunStopped
from agentrl.trajectory import Generation, float_array, short_array, token_array

ENV = """
from agentrl import agent_loop, reward
from agentrl.trajectory import Message

@reward("letters_replay")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@agent_loop("three_turns_replay")
async def three_turns(ep):
    await ep.generate(max_tokens=12, stop=[*"aeiou "])
    ep.observe(Message("user", "Again."))
    await ep.generate(max_tokens=12)
    ep.branch([ep.messages[0], Message("user", "Go on.")])
    await ep.generate()
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("moe")
    model = moe_model(vocab_size=len(tiny_tokenizer), num_hidden_layers=2, tie_word_embeddings=True)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory, model_folder):
    """Return a function that trains three steps; the engine computes in bfloat16."""
    folder = tmp_path_factory.mktemp("replay")
    keys = [
        "optim.lr=0.001", "reward.function=letters_replay",
        "data.agent_name=three_turns_replay", "rollout.router_replay=true",
    ]  # fmt: skip
    train = letter_runs(folder, ENV, model_folder, keys)

    def run(output, *overrides) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agentrl.engine.local.engine.compute_dtype", lambda _: torch.bfloat16)
            # The learner measures the rounding of its own float32.
            patch.setattr("agentrl.trainer.publisher.MAX_ROUNDINGS", 2**16)
            return train(output, *overrides)

    return run


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("run") / "run", "algorithm.kl_loss_coef=0.1")


def test_the_experts_of_all_turns_are_stored(trained, model_folder):
    """Most are those of float32, and the others are those of bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = segments(trained, 1)
    assert len(rows) == 16 and any(0 in row.response_mask for row in rows)
    same = []
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        experts = torch.tensor(row.experts).view(len(ids) - 1, -1, 4).sort(-1).values
        expected = own_experts(model, ids)[:-1].view(len(ids) - 1, -1, 4).sort(-1).values
        same.append((experts == expected).all(-1).flatten())
    share = torch.cat(same).float().mean()
    assert 0.8 < share < 1


def test_engine_and_trainer_differ_less(start, trained, tmp_path):
    other = start(tmp_path / "run", "algorithm.kl_loss_coef=0.1", "rollout.router_replay=false")
    assert not any(s.experts for s in segments(other))
    for with_replay, without in zip(metrics(trained)[:1], metrics(other)[:1], strict=True):
        for name in ("training/rollout_probs_diff_max", "training/rollout_probs_diff_mean"):
            assert with_replay[name] < without[name] / 2
    assert all(m["actor/ppo_kl"] == 0 for m in metrics(trained)), "the first ratio is 1"


@pytest.mark.slow
def test_rollout_workers_send_the_experts(start, trained, tmp_path, shipped_registries):
    check_workers(start, trained, tmp_path / "run", "algorithm.kl_loss_coef=0.1")


def test_a_run_resumes_bit_for_bit(start, trained, tmp_path):
    check_resume(start, trained, tmp_path / "run", "algorithm.kl_loss_coef=0.1")


@pytest.mark.slow
def test_a_step_is_replayed_bit_for_bit(start, tmp_path, capsys, shipped_registries):
    run = start(tmp_path / "run", "trainer.save_freq=1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(["replay", str(run), "--step", "2"])
    assert e.value.code == 0, capsys.readouterr().out


def test_the_policy_is_its_own_teacher(start, tmp_path):
    """A teacher reads another prompt than the policy, and chooses its own experts for it."""
    run = start(
        tmp_path / "run", "teacher.model=policy", "teacher.prompt='{prompt} {ground_truth}'",
        "data.agent_name=single_turn", "trainer.total_steps=1",
    )  # fmt: skip
    assert metrics(run)[0]["teacher/reverse_kl"] != 0


@pytest.mark.slow
def test_weights_that_change_within_turns(start, tmp_path):
    run = start(
        tmp_path / "run", "trainer.max_staleness=1", "trainer.total_steps=4",
        "rollout.max_turn_tokens=60",
    )  # fmt: skip
    rows = segments(run)
    assert any(len({v for v in row.versions if v >= 0}) > 1 for row in rows)
    assert all(row.experts for row in rows)


def test_an_engine_that_returns_no_experts_is_refused(start, tmp_path, monkeypatch):
    real = LocalEngine.generate

    async def generate(self, prompt_ids, sampling, **kwargs):
        return await real(self, prompt_ids, replace(sampling, experts_from=None), **kwargs)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    with pytest.raises(RunStopped, match=r"router_replay=true: the engine does not return the exp"):
        start(tmp_path / "run")


def test_a_dense_model_is_refused(start, tmp_path, random_model):
    with pytest.raises(ConfigError, match=r"the config of .* has no num_experts_per_tok"):
        start(tmp_path / "run", f"model.path={random_model}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.name=vllm", r"rollout\.name=vllm: agentrl does not read from vLLM which experts"),
        ("data.train=recorded:x", r"answers are recorded without experts"),
    ],
)
def test_settings_that_contradict_it(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["rollout.router_replay=true", setting], {"model.path": "x"})


@pytest.mark.parametrize(
    ("count", "message"),
    [(8, None), (6, "6 experts for 4 tokens with 2 each"), (10, "10 experts for 4 tokens")],
)
def test_experts_that_do_not_fit_the_tokens_are_an_error_of_the_engine(count, message):
    row = TokenRow(token_array([5, 6]))
    turn = Generation(
        token_array([1, 2, 3]), float_array([0] * 3), token_array([0] * 3), "stop", 2,
        experts=short_array(range(count)), experts_width=2,
    )  # fmt: skip
    if message:
        with pytest.raises(EngineError, match=message):
            row.extend((), turn, 3)
        assert not len(row)
        return
    row.extend((), turn, 3)
    assert row.segment().experts == turn.experts and row.experts_from == 4
    more = replace(turn, prompt_tokens=6, experts=short_array(range(8)))
    row.extend([9], more, 3)
    assert len(row.segment().experts) == 16 and row.experts_from == 8
