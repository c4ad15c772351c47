"""Training with `rollout.top_p` and `rollout.top_k`: the trainer learns over the kept tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support.exact_rank import EXACT, ExactRank
from support.letter_runs import check_resume, check_workers, letter_runs, metrics, segments
from support.processes import Processes
from support.trainer_fixtures import (
    VOCABULARY,
    config,
    in_float64,
    random_groups,
    scored,
    tiny_folder,
    tiny_model,
)
from transformers import AutoModelForCausalLM

from agentrl.agent_loops.context import TokenRow
from agentrl.cli import main
from agentrl.engine.local import LocalEngine
from agentrl.errors import EngineError, RunStopped
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import KeptTokens, collate
from agentrl.learner.learner import Learner
from agentrl.learner.rank import LocalRankGroup
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Generation, Group, Sample, Segment, float_array, token_array

ENV = """
from agentrl import agent_loop, reward
from agentrl.trajectory import Message

@reward("letters_truncation")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@agent_loop("two_turns_truncation")
async def two_turns(ep):
    await ep.generate(stop=[*"aeiou "])
    ep.observe(Message("user", "Again."))
    await ep.generate()
"""
CUT = ("rollout.top_p=0.7", "rollout.top_k=6", "rollout.temperature=0.8")


@pytest.fixture(scope="module")
def start(tmp_path_factory, random_model):
    """Return a function that trains two steps, whose episodes have two turns."""
    folder = tmp_path_factory.mktemp("truncation")
    keys = [
        "optim.lr=0.01", "reward.function=letters_truncation",
        "data.agent_name=two_turns_truncation", *CUT,
    ]  # fmt: skip
    return letter_runs(folder, ENV, random_model, keys)


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("run") / "run", "algorithm.kl_loss_coef=0.1")


def kept_of(segment: Segment) -> list[list[int]]:
    """The kept tokens of each response token."""
    ends = [0, *accumulate(segment.kept_counts)]
    return [segment.kept_ids[a:b].tolist() for a, b in pairwise(ends)]


def exact_logprobs(model, segment: Segment, temperature: float) -> list[float]:
    """The logprobs of the sampled tokens over the kept ones, in float64; 0 elsewhere."""
    ids = torch.tensor([*segment.prompt_ids, *segment.response_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(segment.prompt_ids) - 1 :] / temperature
    return [
        (row[token] - row[kept].logsumexp(0)).item() if kept else 0.0
        for row, token, kept in zip(logits, segment.response_ids, kept_of(segment), strict=False)
    ]


def test_engine_and_trainer_agree_over_the_kept_tokens(trained, random_model):
    """Both compute the same logprobs in two turns with an observation between, in each step."""
    model = in_float64(AutoModelForCausalLM.from_pretrained(random_model))
    rows = segments(trained, 1)
    sizes = set()
    for row in rows:
        kept = kept_of(row)
        assert [bool(k) for k in kept] == [bool(m) for m in row.response_mask]
        assert max(map(len, kept)) <= 6
        sizes |= {len(k) for k in kept if k}
        expected = exact_logprobs(model, row, 0.8)
        assert row.logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    assert any(0 in row.response_mask for row in rows)
    assert len(sizes) > 1, "top_p cuts some tokens further than top_k"
    learned = TrajectoryStore(trained / "trajectories").read_learned(1)
    for row, old in zip(rows, learned["old_logprobs"].to_pylist(), strict=True):
        mine = [x for x in old if x is not None]
        expected = exact_logprobs(model, row, 0.8)
        theirs = [x for x, m in zip(expected, row.response_mask, strict=True) if m]
        assert mine == pytest.approx(theirs, abs=1e-6)
    for data in metrics(trained):
        assert data["training/rollout_probs_diff_max"] < 1e-6
        assert data["actor/ppo_kl"] == 0, "the first ratio is 1"
    first, *_, last = metrics(trained)
    assert abs(first["actor/kl_loss"]) < 1e-12 and last["actor/kl_loss"] > 1e-6
    assert first["actor/entropy"] < math.log(6)


def test_the_gradient_is_that_of_the_enumerated_truncated_distribution(tmp_path):
    """One rollout for each kept token, weighted by its probability: the gradient of E[reward]."""
    prompt, kept, temperature = [3, 1, 4], [5, 9, 2, 6], 0.7
    rewards = torch.tensor([1.0, -0.5, 2.0, 0.25])
    model = in_float64(tiny_model())
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature
    log_p = logits[kept].log_softmax(0)
    entropy = -(log_p.exp() * log_p).sum()
    expected = -(log_p.exp() * rewards).sum() - 0.1 * entropy
    expected.backward()
    cfg = config(
        rollout__temperature=temperature, rollout__top_k=4, algorithm__entropy_coef=0.1,
        algorithm__name="grpo", algorithm__tis_cap=0,
    )  # fmt: skip
    group: Any = LocalRankGroup(ExactRank(tiny_folder(tmp_path / "model")))
    group.begin(cfg)
    learner = Learner("", cfg, total_steps=1, group=group)
    rows = [
        Segment(
            token_array(prompt), token_array([token]), token_array([1]),
            float_array([p]), token_array([0]), token_array(kept), token_array([4]),
        )
        for token, p in zip(kept, log_p.tolist(), strict=True)
    ]  # fmt: skip
    batch = collate([Group(Sample("s", ()), tuple(scored([row], 0.0) for row in rows))])
    torch.testing.assert_close(learner.logprobs(batch)[:, 0], log_p.detach(), atol=EXACT, rtol=0)
    targets = replace(
        make_targets(batch, cfg, None, None, None),
        advantages=rewards.double()[:, None],
        weights=log_p.detach().exp()[:, None],
    )
    actual = learner.gradient(batch, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, atol=EXACT, rtol=EXACT, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_two_ranks_learn_over_the_kept_tokens(tmp_path, n):
    """Over gloo, also if one of them has no row. A seventh of the tokens was sampled from all."""
    batch = collate(random_groups(5, groups=n, n=n, dead=[]))
    ids, counts = [], torch.zeros(batch.response_mask.shape, dtype=torch.int32)
    for i, (b, t) in enumerate(batch.response_mask.nonzero().tolist()):
        if i % 7:
            token = int(batch.response_ids[b, t])
            ids += [token, *((token + j) % VOCABULARY for j in range(1, i % 7))]
            counts[b, t] = i % 7
    batch = replace(batch, kept=KeptTokens(torch.tensor(ids, dtype=torch.int32), counts))
    folder = tiny_folder(tmp_path / "model")
    cfg = config(
        algorithm__name="reinforce_plus_plus", algorithm__kl_loss_coef=0.1,
        algorithm__entropy_coef=0.01, optim__micro_batch_tokens=40, model__lora_rank=2,
    )  # fmt: skip

    def run(ranks: Any):
        ranks.begin(cfg)
        learner = Learner("", cfg, total_steps=1, group=ranks)
        old, reference = learner.logprobs(batch), learner.reference_logprobs(batch)
        learner.update(batch, make_targets(batch, cfg, old, None, reference), 1)
        return reference, learner.logprobs(batch), ranks.weights()

    results = []
    for ranks in (LocalRankGroup(ExactRank(folder)), Processes(2, ExactRank, folder)):
        try:
            results.append(run(ranks))
        finally:
            ranks.close()
    (reference, scores, weights), (_, of_two, weights_of_two) = results
    model, ends = in_float64(tiny_model()), counts.flatten().cumsum(0).view(counts.shape)
    for b, t in batch.response_mask.nonzero().tolist():
        prompt = batch.prompt_ids[b, -int(batch.prompt_lengths[b]) :]
        with torch.no_grad():
            row = torch.cat([prompt, batch.response_ids[b, :t]])
            logits = model(input_ids=row[None]).logits[0, -1]
        kept = ids[ends[b, t] - counts[b, t] : ends[b, t]] or range(VOCABULARY)
        expected = logits[batch.response_ids[b, t]] - logits[[*kept]].logsumexp(0)
        assert reference[b, t].item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(of_two, scores, rtol=0, atol=2e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rollout_workers_send_the_kept_tokens(start, trained, tmp_path, shipped_registries):
    check_workers(start, trained, tmp_path / "run", "algorithm.kl_loss_coef=0.1")


def test_a_run_resumes_bit_for_bit(start, trained, tmp_path):
    check_resume(start, trained, tmp_path / "run", "algorithm.kl_loss_coef=0.1")


def test_an_engine_that_does_not_return_the_kept_tokens_is_refused(start, tmp_path, monkeypatch):
    real = LocalEngine.generate

    async def generate(self, prompt_ids, sampling, **kwargs):
        return await real(self, prompt_ids, replace(sampling, returns_kept=False), **kwargs)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    with pytest.raises(RunStopped, match=r"top_p=0\.7 and rollout.top_k=6: the engine does not"):
        start(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["play", "generate"])
def test_commands_sample_as_they_say(
    random_model, tmp_path, monkeypatch, capsys, command, shipped_registries
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say 1.", "ground_truth": "1"}')
    (tmp_path / "env.py").write_text(ENV)
    samplings, real = [], LocalEngine.generate

    async def generate(self, prompt_ids, sampling, **kwargs):
        samplings.append(sampling)
        return await real(self, prompt_ids, sampling, **kwargs)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    section = "rollout" if command == "play" else "val"
    output = [] if command == "play" else ["--output", f"{tmp_path}/answers.jsonl"]
    with pytest.raises(SystemExit) as e:
        main([
            command, "--dataset", f"{tmp_path}/rows.jsonl", "--model", str(random_model), "--file",
            f"{tmp_path}/env.py", *output, "reward.function=letters_truncation",
            "trainer.device=cpu", "rollout.max_turn_tokens=4", f"{section}.top_k=6",
            f"{section}.top_p=0.7", f"{section}.temperature=0.8",
        ])  # fmt: skip
    assert e.value.code == 0
    assert "(sampled at T=0.8, top_k=6, top_p=0.7)" in capsys.readouterr().out
    assert {(s.temperature, s.top_k, s.top_p, s.returns_kept) for s in samplings} == {
        (0.8, 6, 0.7, False)
    }


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        ([1, 2, 3], [1, 2], None),
        ([1, 3, 3], [1, 2], "sampled the token 2, but did not keep it"),
        ([1, 2], [1, 2], r"2 kept tokens, and 2 counts of them with the sum 3, for 2"),
        ([1], [1], r"1 kept tokens, and 1 counts of them with the sum 1, for 2"),
    ],
)
def test_kept_tokens_that_do_not_fit_the_sampled_ones_are_an_error_of_the_engine(
    ids, counts, message
):
    row = TokenRow(token_array([5]))
    turn = Generation(
        token_array([1, 2]), float_array([0, 0]), token_array([0, 0]), "stop", 1,
        kept_ids=token_array(ids), kept_counts=token_array(counts),
    )  # fmt: skip
    if message is None:
        row.extend((), turn, 2)
        assert row.segment().kept_ids.tolist() == ids
        return
    with pytest.raises(EngineError, match=message):
        row.extend((), turn, 2)
    assert not len(row)
