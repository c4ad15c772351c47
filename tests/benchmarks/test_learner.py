"""The learner's benchmark measures one thing in all of its arms, and its script goes on."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from torch.testing import assert_close
from transformers import AutoConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def run_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_the_default_workload_is_the_reference_workload():
    from workload.models import SHAPES
    from workload.rows import draw, long_tailed

    rollouts = draw(64, 8, 400, long_tailed(1500.0), SHAPES["0.5b"][5])
    assert (rollouts.tokens, rollouts.trained) == (121_761, 53_721)
    batch = rollouts.batch(SHAPES["0.5b"][5])
    assert int(batch.action_mask.sum()) == rollouts.trained
    assert int((batch.prompt_lengths + batch.response_lengths).sum()) == rollouts.tokens


def test_flops_are_those_of_the_weights_and_the_scores():
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from workload.rows import Rollouts, Row

    config = Qwen2Config(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    rollouts = Rollouts([Row([1, 2], [3, 4, 5], [1, 0, 1])], [1.0], 1)
    # Queries with keys and weights with values, half of the square each: 2 products of 5 x 5 / 2.
    scores = 2 * 2 * 8 * 5 * 5 / 2
    weights = 5 * matrices + 2 * 50 * 8
    assert rollouts.flops(config, frozen=False) == 6 * (weights + scores)
    assert rollouts.flops(config, frozen=True) == 4 * weights + 6 * scores


def test_packs_are_full_but_never_over():
    from workload.rows import bins

    lengths = [5, 9, 2, 4, 7, 1, 12]
    packs = bins(lengths, 10)
    assert sorted(k for pack in packs for k in pack) == list(range(7))
    totals = [sum(lengths[k] for k in pack) for pack in packs]
    assert totals == [12, 10, 9, 9]  # what is longer than a pack goes alone
    assert all(a >= b for pack in packs for a, b in pairwise(lengths[k] for k in pack))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loop_by_hand_has_the_gradient_of_the_learner(models, recompute):
    from workload.models import random_model
    from workload.packed import Packed
    from workload.rows import draw, long_tailed

    from agentrl.config import Config
    from agentrl.learner.algorithms import make_targets
    from agentrl.learner.learner import Learner

    folder = random_model(models, "small", device="cpu")
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    batch = draw(6, 3, 8, long_tailed(60.0), vocabulary).batch(vocabulary)
    config = Config.model_validate({"optim": {"micro_batch_tokens": 200, "recompute": recompute}})
    targets = make_targets(batch, config, None, None, None)
    mine = Learner(folder, config, total_steps=9).update(batch, targets, 1)[0]["actor/grad_norm"]
    how = {"device": "cpu", "compiled": False, "recompute": recompute, "rank": 0}
    its = Packed(folder, batch, targets, 200, **how).update()
    assert its == pytest.approx(mine, rel=1e-4)
    assert mine > 0.1


def test_only_adapters_of_the_loop_by_hand_learn(models):
    from workload.models import random_model
    from workload.packed import Packed
    from workload.rows import draw, long_tailed

    from agentrl.config import Config
    from agentrl.learner.algorithms import make_targets
    from agentrl.learner.learner import Learner

    folder = random_model(models, "small", device="cpu")
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    batch = draw(4, 2, 8, long_tailed(40.0), vocabulary).batch(vocabulary)
    config = Config.model_validate({"model": {"lora_rank": 3}})
    targets = make_targets(batch, config, None, None, None)
    learner = Learner(folder, config, total_steps=9)
    how = {"device": "cpu", "compiled": False, "recompute": False, "rank": 3}
    packed = Packed(folder, batch, targets, 200, **how)
    assert learner.rank is not None
    names = learner.rank.policy.parameters("default")
    assert sum(p.numel() for p in packed.learns) == sum(p.numel() for p in names.values())
    before = packed.blocks[0].qkv.weight.clone()
    assert packed.update() > 0
    assert_close(packed.blocks[0].qkv.weight, before, rtol=0, atol=0)
    assert all(up.abs().max() > 0 for up in packed.blocks[0].qkv.up)


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_next_one_runs(models, tmp_path):
    env = os.environ | {
        "SMALL": "1",
        "OUT": str(tmp_path),
        "MODELS": str(models),
        "PYTHON": sys.executable,
    }
    script = BENCHMARKS / "learner_h200.sh"
    ended = subprocess.run(
        [script, "nonsense", "0.5b", "shared"], env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "failed: nonsense"
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").open()]
    values = {figure["name"]: figure["value"] for figure in figures}
    assert set(values) == {
        f"learner/{n}" for n in ("hand", "agentrl", "over_hand", "shared_prompt")
    }
    assert values["learner/over_hand"] == pytest.approx(
        values["learner/agentrl"] / values["learner/hand"], rel=0.01
    )
    fewer = figures[-1]["context"]
    assert fewer["run_tokens"]["shared"] < fewer["run_tokens"]["apart"]


@pytest.mark.slow
def test_the_modes_of_rows_are_compared(models, monkeypatch, capsys):
    arguments = (
        "--case modes --shape small --trajs 8 --group 4 --prompt 30 --mean 40 --steps 1 --threads 1"
    )
    script = str(BENCHMARKS / "learner.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments.split(), "--models", str(models)])
    runpy.run_path(script, run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]
    figures = {line["name"]: line for line in lines}
    tokens = {name: figure["context"]["run_tokens"] for name, figure in figures.items()}
    assert tokens["learner/packed"] < tokens["learner/packed_whole"]
    assert tokens["learner/packed_whole"] == tokens["learner/rows_alone"]
    assert tokens["learner/rows_padded"] > tokens["learner/rows_alone"]
    assert figures["learner/rows_alone"]["context"]["passes"] == 8
    assert figures["learner/packed"]["value"] == 1.0
