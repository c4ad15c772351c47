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
    """A byte-level tokenizer with a ChatML template: whatever text, it round-trips."""
    return byte_tokenizer()


@pytest.fixture
def play_scripted(scripted_tokenizer: Any) -> Callable[..., Trajectory]:
    """`play_scripted(sample, *answers, config=None)`: an episode in which these texts are said.

    Tools, interaction and loop are the real ones, in process; only the policy is a script.
    """

    def run(sample: Sample, *answers: str, config: Config | None = None) -> Trajectory:
        engine = Scripted(list(answers), scripted_tokenizer)
        return play(sample, engine, scripted_tokenizer, config=config)

    return run
