"""Pytest fixtures: `pytest_plugins = ["agentrl.testing.fixtures"]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl.agent_loops.play import play
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trajectory import Sample, Trajectory


@pytest.fixture(scope="session")
def scripted_tokenizer() -> Any:
    """Return a byte-level tokenizer with a ChatML template, which round-trips any text."""
    return byte_tokenizer()


@pytest.fixture
def play_scripted(scripted_tokenizer: Any) -> Callable[..., Trajectory]:
    """Return a function that plays an episode with scripted assistant turns.

    `play_scripted(sample, *answers, config=None)` returns the trajectory. Tools, interaction and
    agent loop are the real ones and run in this process; only the policy is scripted.
    """

    def run(sample: Sample, *answers: str, config: Config | None = None) -> Trajectory:
        engine = Scripted(list(answers), scripted_tokenizer)
        return play(sample, engine, scripted_tokenizer, config=config)

    return run
