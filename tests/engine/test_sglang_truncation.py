"""`rollout.top_p` and `rollout.top_k` with a real SGLang server on a CPU."""

from __future__ import annotations

import copy
import json
import time
from array import array
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from support.trainer_fixtures import config, in_float64
from support.updates import publish, update
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.config.tiny import TINY_SETTINGS
from agentrl.engine.base import Sampling
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import ConfigError
from agentrl.learner.batch import collate
from agentrl.learner.learner import Learner
from agentrl.record import read_metrics
from agentrl.store import load_trajectories
from agentrl.trainer import Trainer
from agentrl.trajectory import Group, Sample, Scored, Segment, Trajectory, token_array

pytestmark = pytest.mark.sglang
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def connect(server, vocabulary: int) -> SGLangEngine:
    return SGLangEngine(
        server.url, vocabulary=vocabulary, key=server.token, admin_key=server.admin_token,
        returns_kept=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(sglang_server, model):
    engine = connect(sglang_server, model.config.vocab_size)
    publish(engine, update(((n, p.detach()) for n, p in model.named_parameters()), 0))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "cut",
    [
        {"top_p": 0.8},
        {"top_k": 5},
        {"top_p": 0.9, "top_k": 20},
        {"top_k": 3, "temperature": 2.0},
    ],
)
async def test_the_learner_has_the_servers_logprobs(engine, model, tiny_model, cut):
    """Over the kept tokens: of both, and of the model in float64."""
    sampling = Sampling(max_tokens=48, returns_kept=True, **cut)
    temperature = sampling.temperature
    segments = []
    for k in range(4):
        turn = await engine.generate(
            array("i", PROMPT[k:]), sampling, episode_id="e", seed=k, deadline=time.monotonic() + 60
        )
        n = len(turn.token_ids)
        segments.append(Segment(
            token_array(PROMPT[k:]), turn.token_ids, token_array([1] * n), turn.logprobs,
            turn.versions, turn.kept_ids, turn.kept_counts,
        ))  # fmt: skip
    counts = [count for s in segments for count in s.kept_counts]
    assert max(counts) <= cut.get("top_k", 10**6) and max(counts) > 1
    assert "top_p" not in cut or min(counts) < max(counts)
    sample = Sample("s", ())
    trajectories = [
        Trajectory(sample, str(k), 0, (s,), (), (), {}, "done") for k, s in enumerate(segments)
    ]
    batch = collate([Group(sample, tuple(Scored(t, {}, 0.0) for t in trajectories))])
    learner = Learner(tiny_model, config(rollout__temperature=temperature), total_steps=1)
    actual = learner.logprobs(batch)
    assert (actual - batch.rollout_logprobs).abs().max() < 1e-5
    whole = learner.logprobs(replace(batch, kept=None))
    assert (whole < actual - 1e-3).any() and not (whole > actual + 1e-6).any()
    exact = in_float64(AutoModelForCausalLM.from_pretrained(tiny_model))
    for row, s in zip(actual, segments, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
            logits = exact(input_ids=ids).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        ends = [0, *accumulate(s.kept_counts)]
        kept = [s.kept_ids[a:b].tolist() for a, b in pairwise(ends)]
        for z, token, ids, logprob in zip(logits, s.response_ids, kept, row, strict=False):
            expected = z[token] - z[ids].logsumexp(0)
            assert logprob.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_run_trains_over_the_tokens_that_the_server_kept(
    engine, sglang_server, tiny_model, tmp_path, monkeypatch
):
    """Two mini-batches: old logprobs are computed before the update. Each step has new weights."""
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", sglang_server.token)
    monkeypatch.setenv("AGENTRL_ENGINE_ADMIN_TOKEN", sglang_server.admin_token)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Compute {k} + {k}."}) for k in range(4)))
    (tmp_path / "env.py").write_text(
        "from agentrl import reward\n\n"
        '@reward("digits_truncation")\n'
        "def digits(trajectory):\n"
        "    return sum(c.isdigit() for c in trajectory.assistant_text) / 10\n"
    )
    run = load_config(
        None,
        ["rollout.name=sglang", f"rollout.urls=[{sglang_server.url}]", "trainer.device=cpu",
         "rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=1.5", "data.batch_size=4",
         "rollout.n=4", "trainer.total_steps=3", "trainer.save_freq=0", "trainer.test_freq=0",
         "optim.lr=0.001", "optim.lr_final=1", "reward.function=digits_truncation",
         "rollout.max_turn_tokens=32", "algorithm.mini_batch_size=8", "algorithm.kl_loss_coef=0.1"],
        {"data.train": str(rows), "model.path": str(tiny_model),
         "files": [str(tmp_path / "env.py")], "trainer.output": str(tmp_path / "run")},
        preset=TINY_SETTINGS,
    )  # fmt: skip
    Trainer(run).run()
    steps = [m for step, m in read_metrics(tmp_path / "run/metrics.jsonl") if step]
    assert len(steps) == 3
    for step, m in enumerate(steps):
        assert m["rollout_corr/logprob_diff_max"] < 1e-5, step
    stored = load_trajectories(tmp_path / "run/trajectories", 2, "train")
    counts = [c for s in stored for segment in s.trajectory.segments for c in segment.kept_counts]
    assert 1 < max(counts) <= 20 and min(counts) < max(counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_k": 50, "top_p": 0.7}, {"top_k": 6, "top_p": 0.6}]
)
async def test_equally_likely_tokens_at_the_boundary(engine, model, cut):
    """Each token has three that are as likely. The logprobs are those of the sampler all the same.

    SGLang returns one token too many where it finds others of these tokens than it sampled from.
    """
    tied = copy.deepcopy(model)
    weight = tied.lm_head.weight.data
    weight.copy_(weight[torch.arange(len(weight)) // 4 * 4])
    named = [(n, p.detach()) for n, p in tied.named_parameters()]
    publish(engine, update(named, engine.version + 1))
    sampling = Sampling(max_tokens=60, temperature=1.5, returns_kept=True, **cut)
    top_k, top_p = cut["top_k"], cut.get("top_p", 1.0)
    is_cut_apart = []
    for k in range(6):
        turn = await engine.generate(
            array("i", PROMPT[k:]), sampling, episode_id="e", seed=k, deadline=time.monotonic() + 60
        )
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT[k:], *turn.token_ids]])
            logits = tied(input_ids=ids).logits[0, len(PROMPT[k:]) - 1 : -1].double() / 1.5
        ends = pairwise([0, *accumulate(turn.kept_counts)])
        for p, token, (a, b), logprob in zip(
            logits.softmax(-1), turn.token_ids, ends, turn.logprobs, strict=True
        ):
            kept = turn.kept_ids[a:b].tolist()
            likely = p.sort(descending=True).values[:top_k]
            mass_before = likely.cumsum(0) - likely
            if (mass_before - top_p).abs().min() < 1e-5:
                continue  # Rounding decides how many tokens are kept.
            n = int((mass_before < top_p).sum())
            assert token in kept and len({*kept}) == len(kept) == n
            torch.testing.assert_close(p[kept], likely[:n], rtol=1e-4, atol=1e-7)
            expected = (p[token] / likely[:n].sum()).log()
            assert logprob == pytest.approx(expected.item(), abs=1e-5)
            is_cut_apart.append(n % 4 != 0 and kept[-1] == token)
    named = [(n, p.detach()) for n, p in model.named_parameters()]
    publish(engine, update(named, engine.version + 1))
    assert any(is_cut_apart)


def test_a_sampling_backend_that_does_not_return_ties_is_refused(sglang_server, model, monkeypatch):
    """SGLang's other backend needs a GPU, so its name is put into the server's answer."""
    real = AdminClient.ask

    def ask(self, path, *args, **kwargs):
        answer = real(self, path, *args, **kwargs)
        return answer | {"sampling_backend": "flashinfer"} if path == "/server_info" else answer

    monkeypatch.setattr(AdminClient, "ask", ask)
    with pytest.raises(ConfigError, match=r"With flashinfer.*Start it with --sampling-backend pyt"):
        connect(sglang_server, model.config.vocab_size)


def test_an_sglang_that_does_not_return_the_kept_tokens_is_refused(
    sglang_server, model, monkeypatch
):
    """An older version ignores the field of the request, which is left out here."""
    real = SGLangEngine._body

    def body(self, *args, **kwargs):
        return {k: v for k, v in real(self, *args, **kwargs).items() if "mask" not in k}

    monkeypatch.setattr(SGLangEngine, "_body", body)
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.\d+ does not return the tokens"):
        connect(sglang_server, model.config.vocab_size)
