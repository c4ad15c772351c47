"""A real SGLang server on a CPU as the teacher: it gives what the learner would."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.trainer_fixtures import config
from support.updates import publish, update
from transformers import AutoModelForCausalLM

from agentrl.chat import load_tokenizer
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.trainer import teacher as teacher_module
from agentrl.trajectory import Group, Sample, Scored, Segment, Trajectory, float_array, token_array

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def served(sglang_server, model):
    """The server with the weights of the tiny model."""
    engine = SGLangEngine(
        sglang_server.url,
        vocabulary=model.config.vocab_size,
        key=sglang_server.token,
        admin_key=sglang_server.admin_token,
    )
    publish(engine, update(((n, p.detach()) for n, p in model.named_parameters()), 0))
    return sglang_server


def test_a_server_scores_as_the_learner_does(served, tiny_model, monkeypatch):
    monkeypatch.setenv(teacher_module.TOKEN, served.token)
    tokenizer = load_tokenizer(tiny_model)
    server = teacher_module._connect(served.url, tokenizer, str(tiny_model))
    generator = torch.Generator().manual_seed(0)
    groups = []
    for n in (1, 20, 60):
        ids = torch.randint(0, len(tokenizer), (40 + n,), generator=generator).tolist()
        mask = [int(i % 7 < 4) for i in range(n)]
        segment = Segment(
            token_array(ids[:40]), token_array(ids[40:]), token_array(mask),
            float_array([0.0] * n), token_array([0 if m else -1 for m in mask]),
        )  # fmt: skip
        sample = Sample(str(n), ())
        trajectory = Trajectory(sample, str(n), 0, (segment,), (), (), {}, "done")
        groups.append(Group(sample, (Scored(trajectory, {}, 0.0),)))
    batch = collate(groups)
    scores = asyncio.run(teacher_module._score(server, batch))
    learner = Learner(tiny_model, config(), total_steps=1)
    expected = learner.teacher_logprobs(batch, str(tiny_model))
    assert batch.response_mask.any(1).all() and not scores[~batch.response_mask].any()
    torch.testing.assert_close(scores, expected, rtol=0, atol=5e-5)
    assert (scores - expected).abs()[batch.response_mask].mean() < 1e-5
