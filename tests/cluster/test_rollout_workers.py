"""Rollout workers as Ray actors play what one process plays."""

import os
import signal

import pytest
from support.failing_engine import SAMPLING, TOKENIZER, FailingEngine, rows

pytest.importorskip("ray")

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.cluster.workers import RayWorker
from agentrl.config import Config
from agentrl.rewards import Scorer
from agentrl.rollout import open_rollouts
from agentrl.testing import call

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_other_names"),
]


@pytest.mark.slow
def test_actors_play_what_one_process_plays_and_are_replaced(cluster):
    registry.load_file("shelf:calculator")
    played, pids = [], []
    for workers, start in ((1, None), (2, RayWorker)):
        engine = FailingEngine([call("calculator", expression="3*4"), "#### 12"])
        config = Config.model_validate(
            {
                "files": ["shelf:calculator"],
                "tools": {"transport": "in_process"},
                "rollout": {"workers": workers},
            }
        )
        options = {"start": start} if start else {}
        template, scorer = ChatTemplate(TOKENIZER), Scorer(config.reward)
        with open_rollouts(config, engine, template, scorer, **options) as rollouts:
            for step in (0, 1):
                groups = rollouts.collect(rows(6), n=4, sampling=SAMPLING, step=step)
                segments = [[s.trajectory.segments for s in g.scored] for g in groups]
                played.append([[s.reward for s in g.scored] for g in groups] + segments)
                if start and not step:
                    pids = [worker.pid for worker in rollouts._players._workers]
                    os.kill(pids[0], signal.SIGKILL)
        assert sorted(engine.begun) == sorted(engine.ended)
    assert played[:2] == played[2:] and len({*pids, os.getpid()}) == 3
