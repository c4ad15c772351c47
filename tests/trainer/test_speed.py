"""The measured speed of an engine."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agentrl.chat import ChatTemplate
from agentrl.engine.local import LocalEngine
from agentrl.trainer.speed import describe_local_speed, measure_sampling
from agentrl.trajectory import Message


def test_an_engine_is_measured(tiny_model):
    """The speed of the tiny model lies within wide bounds."""
    template = ChatTemplate.load(tiny_model)
    prompts = [template.prompt([Message("user", f"How much is {i}*4?")]) for i in range(3)]
    engine = LocalEngine.load(str(tiny_model), template.tokenizer, device="cpu")
    try:
        speed = asyncio.run(measure_sampling(engine, prompts, rows=5))
    finally:
        engine.close()
    assert 10 < speed < 1e6


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_run_on_a_gpu_is_told_of_a_server(tmp_path, is_installed):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    python = tmp_path / "python"
    more = f"PYTHONPATH={tmp_path} " if is_installed else ""
    python.write_text(f'#!/bin/sh\n{more}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = describe_local_speed(41999.6, 256, str(python))
    start = "the local engine samples 42,000 tokens/s in 256 rows. If generation takes most of a"
    assert line.startswith(f"{start} step, try rollout.name=sglang, which is ")
    assert line.endswith("which is installed") == is_installed
