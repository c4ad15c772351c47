"""The learner runs the experts that the engine chose (`rollout.router_replay`)."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.test_local import TOKENIZER
from support.exact_rank import AnyRank
from support.moe import moe_model, turns
from support.processes import Processes
from support.trainer_fixtures import config, group, scored, targets_of, tiny_folder, weights_of
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.agent_loops.context import TokenRow
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.batch import Batch, collate
from agentrl.learner.learner import Learner
from agentrl.learner.packing import Mode, has_new_prompt, make_micro_batch
from agentrl.learner.rank import LocalRankGroup
from agentrl.trajectory import Segment, token_array

NAMES = ("Qwen3-MoE", "GLM-4.5", "DeepSeek-V3")


def rollouts(model: PreTrainedModel, n: int = 4, tokens: int = 40) -> list[Segment]:
    """Return rows that the local engine samples from a model: four prompts, n of each."""
    r = random.Random(0)
    prompts = [p for _ in range(4) for p in [[r.randrange(1, 250) for _ in range(20)]] * n]
    engine = LocalEngine(copy.deepcopy(model), TOKENIZER, deterministic=True, returns_experts=True)
    with closing(engine):
        answers = turns(engine, prompts, n=tokens)
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(row := TokenRow(token_array(prompt)))
        row.extend((), answer, tokens)
    return [row.segment() for row in rows]


def batch_of(rows: Sequence[Segment], n: int = 4) -> Batch:
    rewards = [scored([s], float(i % 2)) for i, s in enumerate(rows)]
    return collate([group(*rewards[i : i + n]) for i in range(0, len(rewards), n)])


def learner_of(folder, replay: bool, **keys: Any) -> Learner:
    cfg = config(rollout__router_replay=replay, model__path=str(folder), **keys)
    return Learner(str(folder), cfg, total_steps=1)


def gaps(learner: Learner, batch: Batch) -> Tensor:
    """The differences of the logprobs of engine and learner, in nats."""
    return (learner.logprobs(batch) - batch.rollout_logprobs)[batch.response_mask].abs()


def biased(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that has the same weights, but chooses other experts."""
    other = copy.deepcopy(model)
    for n, bias in other.named_buffers():
        if n.endswith("e_score_correction_bias"):
            bias.add_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    return other


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder of a model, and rows of an engine that has other biases of its choices."""
    folder, model = tmp_path_factory.mktemp("glm"), moe_model("GLM-4.5")
    model.save_pretrained(folder)
    biased(model).save_pretrained(folder / "biased")
    return folder, batch_of(rollouts(biased(model)))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_in_bfloat16(name, tmp_path):
    """Its rounding sends some tokens to other experts: the largest gaps are of these."""
    model = moe_model(name)
    model.save_pretrained(tmp_path)
    batch = batch_of(rollouts(copy.deepcopy(model).bfloat16()))
    before, after = (gaps(learner_of(tmp_path, replay), batch) for replay in (False, True))
    assert before.max() > 0.5 and before.mean() > 0.03
    assert after.max() < 0.3 and after.mean() < 0.03
    assert after.max() < before.max() / 4 and after.mean() < before.mean() / 3


def test_an_engine_that_chooses_other_experts(world):
    """All else is equal, so the gap falls to the rounding of float32, in the gradient too."""
    folder, batch = world
    assert gaps(learner_of(folder, False), batch).mean() > 0.1
    learner = learner_of(folder, True)
    assert gaps(learner, batch).max() < 1e-5
    own = learner_of(folder / "biased", False)
    expected = own.gradient(batch, targets_of(own, batch))
    actual = learner.gradient(batch, targets_of(learner, batch))
    assert actual.keys() == expected.keys()
    for n, gradient in expected.items():
        torch.testing.assert_close(actual[n], gradient, atol=1e-6, rtol=1e-3, msg=n)
    routers = [g for n, g in actual.items() if n.endswith("gate.weight")]
    assert len(routers) == 3 and all(g.any() for g in routers)


@pytest.mark.parametrize("mode", Mode)
def test_each_mode_packs_the_experts_of_each_token(world, mode):
    folder, batch = world
    learner = learner_of(folder, True)
    if mode is Mode.WHOLE:
        mask = batch.response_mask
        packed = make_micro_batch(batch, torch.arange(5), mask, {}, mode).packed
        rows = [torch.nn.functional.pad(e, (0, 0, 0, 1), value=-1) for e in batch.experts[:5]]
        assert torch.equal(packed.experts[0], torch.cat(rows))
        return
    learner.rank.policy.packed_model.mode = mode
    learner._inputs.clear()
    if not mode.is_flat:
        learner.rank.policy.model.set_attn_implementation("sdpa")
    assert gaps(learner, batch).max() < 1e-5


def test_rows_share_a_prompt_if_its_experts_are_equal(world):
    folder, batch = world
    rows = torch.arange(16)
    assert has_new_prompt(batch, rows).tolist() == [True, False, False, False] * 4
    experts = list(batch.experts)
    experts[2] = experts[2].clone()
    experts[2][19, -4:] = torch.tensor([0, 5, 10, 15])
    changed = replace(batch, experts=tuple(experts))
    expected = [True, False, True, True, *[True, False, False, False] * 3]
    assert has_new_prompt(changed, rows).tolist() == expected
    learner = learner_of(folder, True)
    is_other = (learner.logprobs(changed) - learner.logprobs(batch)).abs().amax(1) > 1e-5
    assert is_other.nonzero().flatten().tolist() == [2]


def test_a_micro_batch_may_have_one_row(world):
    folder, batch = world
    assert gaps(learner_of(folder, True, optim__micro_batch_tokens=40), batch).max() < 1e-5


def test_recomputed_layers_run_the_same_experts(world):
    folder, batch = world
    found = []
    for recompute in (False, True):
        learner = learner_of(folder, True, optim__recompute=recompute)
        found.append(learner.gradient(batch, targets_of(learner, batch)))
    assert all(torch.equal(found[1][n], g) for n, g in found[0].items())


def test_only_the_policy_runs_them(world):
    """A reference, a critic and a teacher choose their own."""
    folder, batch = world
    keys = {"model__lora_rank": 4, "algorithm__kl_loss_coef": 0.1}
    learner, other = (learner_of(folder, replay, **keys) for replay in (True, False))
    assert torch.equal(learner.initial_logprobs(batch), other.initial_logprobs(batch))
    assert torch.equal(learner.teacher_logprobs(batch, str(folder)), other.initial_logprobs(batch))
    assert gaps(learner, batch).max() < 1e-5
    gae = keys | {"algorithm__adv_estimator": "gae"}
    values = [learner_of(folder, replay, **gae) for replay in (True, False)]
    for x in values:
        with torch.no_grad():
            x.rank.critic.head.weight.copy_(
                torch.randn(x.rank.critic.head.weight.shape, generator=torch.manual_seed(0))
            )
    mine, theirs = (x.values(batch) for x in values)
    assert torch.equal(mine, theirs) and mine.any()


def test_rows_without_experts_are_refused(world):
    folder, batch = world
    learner = learner_of(folder, True)
    with pytest.raises(RunStopped, match=r"stored without the experts.*router_replay=false"):
        learner.logprobs(replace(batch, experts=None))
    few = tuple(e[:, :8] for e in batch.experts)
    with pytest.raises(RunStopped, match="8 experts for a token"):
        learner.logprobs(replace(batch, experts=few))
    segments = rollouts(moe_model("GLM-4.5"), n=2, tokens=4)[:2]
    without = replace(segments[1], experts=segments[1].experts[:0])
    with pytest.raises(RunStopped, match="experts for some rows of this step only"):
        batch_of([segments[0], without], 2)
    with pytest.raises(ValueError, match="a segment has 3 experts for 23 tokens"):
        replace(segments[0], experts=segments[0].experts[:3])


def test_a_rollout_without_a_turn_needs_none(world):
    """For example because the first message was longer than the budget."""
    folder, _ = world
    learner = learner_of(folder, True)
    [played] = rollouts(moe_model("GLM-4.5"), n=1, tokens=4)[:1]
    names = ("response_ids", "response_mask", "logprobs", "versions")
    unplayed = Segment(played.prompt_ids, *[getattr(played, n)[:0] for n in names])
    learner.update(mixed := batch_of([unplayed, played], 2), targets_of(learner, mixed), 1)
    assert learner.logprobs(mixed)[1].all() and not learner.logprobs(mixed)[0].any()
    none = batch_of([unplayed, unplayed], 2)
    assert not learner.logprobs(none).any()


def test_a_model_without_routers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"router_replay=true: the config of qwen2 has no num"):
        learner_of(tiny_folder(tmp_path), True)


@pytest.fixture(scope="module")
def groups():
    ranks = Processes(2, AnyRank)
    with closing(ranks):
        yield LocalRankGroup(AnyRank()), ranks


@pytest.mark.parametrize(
    "keys", [{}, {"model__lora_rank": 4, "model__lora_target_modules": ["experts.down_proj"]}]
)
def test_two_ranks_do_what_one_does(groups, world, keys):
    folder, batch = world
    cfg = config(
        rollout__router_replay=True, model__path=str(folder), optim__lr=1e-3,
        optim__micro_batch_tokens=150, **keys,
    )  # fmt: skip
    seen = []
    for ranks in groups:
        ranks.open(folder, cfg, torch.float32)
        learner = Learner("", cfg, total_steps=1, group=ranks)
        assert gaps(learner, batch).max() < 1e-5
        metrics, _ = learner.update(batch, targets_of(learner, batch), 1)
        seen.append((metrics["actor/grad_norm"], weights_of(ranks.first_gradients())))
    (norm, one), (norm_2, two) = seen
    assert norm > 1e-3 and norm_2 == pytest.approx(norm, rel=1e-4)
    largest = max(float(g.norm()) for g in one.values())
    for n, g in one.items():
        torch.testing.assert_close(two[n], g, atol=1e-5 * largest, rtol=1e-3, msg=n)


def test_ranks_that_share_rows(groups, tmp_path):
    model = moe_model("Qwen3-MoE")
    model.save_pretrained(tmp_path)
    batch = batch_of(rollouts(copy.deepcopy(model).bfloat16()))
    expected = learner_of(tmp_path, True).logprobs(batch)
    cfg = config(
        rollout__router_replay=True, model__path=str(tmp_path),
        trainer__context_parallel_size=2, trainer__n_gpus_per_node=2,
    )  # fmt: skip
    ranks = groups[1]
    ranks.open(tmp_path, cfg, torch.float32)
    learner = Learner("", cfg, total_steps=1, group=ranks)
    torch.testing.assert_close(learner.logprobs(batch), expected, atol=1e-4, rtol=0)
    assert (learner_of(tmp_path, False).logprobs(batch) - expected).abs().max() > 0.1
