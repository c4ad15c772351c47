"""The measured speed of an engine and a learner, and the time of a step that follows from it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.local import LocalEngine
from agentrl.trainer.speed import (
    LearningSpeed,
    SamplingSpeed,
    describe_local_speed,
    measure_learning,
    measure_sampling,
    step_seconds,
)
from agentrl.trajectory import Message


def test_the_time_of_a_step():
    """Two prompts of 40 tokens, four responses of 24 to each, in two optimizer steps."""
    config = Config.model_validate(
        {
            "data": {"batch_size": 2},
            "rollout": {"n": 4},
            "algorithm": {"mini_batch_size": 4, "ppo_epochs": 3},
        }
    )
    sampling, learning = SamplingSpeed(32, 0.5, 96.0), LearningSpeed(34.0, 0.25)
    generation = 2 * 0.5 + 8 * 24 / 96
    update = 3 * ((2 * 40 + 8 * 24) / 34 + 2 * 0.25)
    assert step_seconds(config, sampling, learning, 40, 24) == generation + update


def test_engine_and_learner_are_measured(tiny_model):
    """The speeds of the tiny model lie within wide bounds."""
    template = ChatTemplate.load(tiny_model)
    prompts = [template.prompt([Message("user", f"How much is {i}*4?")]) for i in range(3)]
    engine = LocalEngine.load(str(tiny_model), template.tokenizer, device="cpu")
    try:
        sampling = asyncio.run(measure_sampling(engine, prompts, rows=5))
    finally:
        engine.close()
    assert sampling.rows == 5 and sampling.first_seconds > 0
    assert 10 < sampling.tokens_per_s < 1e6
    config = Config.model_validate(
        {"model": {"path": str(tiny_model)}, "trainer": {"device": "cpu"}}
    )
    learning = measure_learning(config, prompts)
    assert 10 < learning.tokens_per_s < 1e7 and learning.step_seconds >= 0


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_run_on_a_gpu_is_told_of_a_server(tmp_path, is_installed):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    python = tmp_path / "python"
    more = f"PYTHONPATH={tmp_path} " if is_installed else ""
    python.write_text(f'#!/bin/sh\n{more}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = describe_local_speed(SamplingSpeed(256, 0.1, 41999.6), str(python))
    start = "the local engine samples 42,000 tokens/s in 256 rows. If generation takes most of a"
    assert line.startswith(f"{start} step, try rollout.name=sglang, which is ")
    assert line.endswith("which is installed") == is_installed
