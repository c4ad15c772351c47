"""The advantages of a teacher: by hand in float64, and expected gradients by exact enumeration."""

from __future__ import annotations

import pytest
import torch
from support.exact_rank import ExactRank
from support.processes import Processes
from support.trainer_fixtures import (
    VOCABULARY,
    as_sampled_by,
    config,
    group,
    plain_logprobs,
    random_groups,
    scored,
    segment,
    tiny_folder,
    tiny_model,
)
from support.two_steps import draw, exact_gradient, expected_gradient, logprobs, steps
from transformers import Qwen2ForCausalLM

from agentrl.errors import RunStopped
from agentrl.learner.algorithms import has_learning_signal, make_targets, target_metrics
from agentrl.learner.batch import Batch, collate
from agentrl.learner.dispatch import RankGroup
from agentrl.learner.learner import Learner
from agentrl.learner.rank import LocalRankGroup

OPD = {"algorithm__name": "opd", "teacher__model": "teacher"}


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Rollouts with observed tokens between turns, one of three rows, one masked, one silent."""
    groups = random_groups(5, groups=3, n=3, dead=[1])
    rows = [
        segment([1, 2], ("A", [3, 4]), ("E", [5, 6, 7]), ("A", [8])),
        segment([1, 2, 3, 4, 5], ("A", [9])),
        segment([7], ("E", [1]), ("A", [2, 2, 2])),
    ]
    groups.append(group(scored(rows, 1.0), scored([segment([4], ("A", [1]))], 0.0, masked=True)))
    groups.append(group(scored([segment([4, 4], ("E", [1, 2]))], 0.5)))
    return as_sampled_by(tiny_model(), collate(groups, 31))


def random_logprobs(batch: Batch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -8 * torch.rand(batch.response_mask.shape, generator=generator)


# --- the advantages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "weight", "clip"),
    [({}, 1.0, 10.0), ({"teacher__weight": 0.3, "teacher__clip": 1.5}, 0.3, 1.5)],
)
def test_an_advantage_is_the_clipped_log_ratio(batch, keys, weight, clip):
    old, teacher = random_logprobs(batch, 0), random_logprobs(batch, 1)
    spoiled = torch.where(batch.action_mask, teacher, torch.nan)
    cfg = config(**OPD, **keys)
    targets = make_targets(batch, cfg, old, None, None, teacher_logprobs=spoiled)
    kls, clipped = [], 0
    for b, row in enumerate(batch.action_mask.tolist()):
        for t, is_chosen in enumerate(row):
            expected = 0.0
            if is_chosen:
                ratio = float(teacher[b, t].double()) - float(old[b, t].double())
                kls.append(-ratio)
                clipped += abs(ratio) > clip
                expected = weight * max(-clip, min(clip, ratio))
                assert targets.advantages[b, t].item() == expected
    assert targets.advantages.dtype == torch.float64 and len(kls) > 40
    metrics = target_metrics(batch, targets, cfg.teacher)
    assert metrics["teacher/reverse_kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-12)
    assert metrics["teacher/clipfrac"] == pytest.approx(clipped / len(kls), abs=1e-12)
    assert (clipped > 0) == (clip < 10)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_the_teacher_is_added_to_the_advantages_of_rewards(batch, name):
    old, teacher = random_logprobs(batch, 0), random_logprobs(batch, 1)
    mask = batch.action_mask
    keys = {"algorithm__name": name, "algorithm__kl_reward_coef": 0.1}
    of_rewards = make_targets(batch, config(**keys), old, None, teacher).advantages
    keys |= {"teacher__model": "teacher", "teacher__weight": 0.5}
    both = make_targets(batch, config(**keys), old, None, teacher, teacher_logprobs=teacher)
    expected = of_rewards[mask] + 0.5 * (teacher.double() - old.double())[mask]
    assert torch.equal(both.advantages[mask], expected)
    assert not torch.equal(of_rewards[mask], torch.zeros_like(expected))


def test_a_step_is_dead_only_if_the_policy_is_its_teacher(batch):
    old, cfg = random_logprobs(batch, 0), config(**OPD)
    same = make_targets(batch, cfg, old, None, None, teacher_logprobs=old.clone())
    assert not has_learning_signal(batch, cfg.algorithm, same)
    other = old.clone()
    row, column = batch.action_mask.nonzero()[0].tolist()
    other[row, column] -= 0.1
    targets = make_targets(batch, cfg, old, None, None, teacher_logprobs=other)
    assert has_learning_signal(batch, cfg.algorithm, targets)


THETA, TEACHER = draw(0), logprobs(draw(1))


def held_fixed_kl(log_p: torch.Tensor) -> torch.Tensor:
    """The reverse KL of each token, in states that are visited as they are."""
    (first, second), (first_teacher, second_teacher) = steps(log_p), steps(TEACHER)
    at = first.detach().exp()
    kl = (first.exp() * (first - first_teacher)).sum()
    return kl + (at * (second.exp() * (second - second_teacher)).sum(1)).sum()


def test_the_expected_gradient_is_that_of_the_reverse_kl_of_each_token():
    def loss(log_p, clip=1e9):
        advantages = (TEACHER - log_p.detach()).clamp(-clip, clip)
        return -log_p * advantages

    exact = exact_gradient(held_fixed_kl, THETA)
    torch.testing.assert_close(expected_gradient(loss, THETA), exact, rtol=0, atol=1e-12)
    clipped = expected_gradient(lambda log_p: loss(log_p, 0.2), THETA)
    assert (clipped - exact).abs().max() > 1e-2, "a clip that takes effect biases it"


@pytest.mark.parametrize("renormalized", [False, True])
def test_the_kl_over_the_likely_tokens_of_a_teacher_has_another_minimum(renormalized):
    """Why the teacher's top k is not used, as docs/distillation.md says.

    The sum over these tokens alone has a gradient where the policy is its teacher. Renormalized, it
    is 0 for policies that spend most of their mass elsewhere.
    """
    teacher = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    logits = teacher.clone().requires_grad_()
    if renormalized:
        logits = (teacher + torch.tensor([0.0, 0.0, 3.0, 3.0])).requires_grad_()
    mine, theirs = logits.log_softmax(0)[:2], teacher[:2]
    if renormalized:
        mine, theirs = mine.log_softmax(0), theirs.log_softmax(0)
    kl = (mine.exp() * (mine - theirs)).sum()
    kl.backward()
    assert logits.grad is not None
    whole = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - teacher)).sum()
    if renormalized:
        assert abs(kl) < 1e-12 < 0.5 < whole and logits.grad.abs().max() < 1e-12
    else:
        assert abs(whole) < 1e-12 and logits.grad.abs().max() > 0.05


# --- the logprobs of a teacher -------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"model__lora_rank": 2}])
def test_the_learner_scores_the_same_tokens_as_one_pass_for_each_row(tmp_path, batch, keys):
    student, teacher = tiny_folder(tmp_path / "s"), tiny_folder(tmp_path / "t", seed=1)
    cfg = config(model__path=str(student), optim__micro_batch_tokens=40, **keys)
    learner = Learner(student, cfg, total_steps=1)
    for path, seed in ((teacher, 1), (student, 0)):
        expected = plain_logprobs(tiny_model(seed), batch)
        scores = learner.teacher_logprobs(batch, str(path))
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)
        assert not scores[~batch.response_mask].any()


def test_a_teacher_may_be_another_architecture(tmp_path, batch):
    student, folder = tiny_folder(tmp_path / "s"), tmp_path / "t"
    torch.manual_seed(3)
    larger = tiny_model().config
    larger.hidden_size, larger.intermediate_size, larger.vocab_size = 32, 48, VOCABULARY + 8
    teacher = Qwen2ForCausalLM(larger).eval()
    teacher.save_pretrained(folder)
    learner = Learner(student, config(), total_steps=1)
    expected = plain_logprobs(teacher, batch)
    scores = learner.teacher_logprobs(batch, str(folder))
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)


def test_a_token_that_the_teacher_does_not_have_is_an_error(tmp_path, batch):
    student, folder = tiny_folder(tmp_path / "s"), tmp_path / "t"
    smaller = tiny_model().config
    smaller.vocab_size = 8
    Qwen2ForCausalLM(smaller).save_pretrained(folder)
    learner = Learner(student, config(), total_steps=1)
    with pytest.raises(RunStopped, match="the model has a vocabulary of 8"):
        learner.teacher_logprobs(batch, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"model__lora_rank": 4}], ids=["full", "lora"])
def test_two_ranks_learn_what_one_learns(tmp_path, batch, keys):
    """Over gloo, with sharded weights of policy and teacher."""
    student, teacher = tiny_folder(tmp_path / "s"), tiny_folder(tmp_path / "t", seed=1)
    cfg = config(**OPD | {"teacher__model": str(teacher)}, optim__micro_batch_tokens=60, **keys)

    def run(ranks: RankGroup):
        ranks.begin(cfg)  # type: ignore[attr-defined]
        learner = Learner("", cfg, total_steps=2, group=ranks)  # type: ignore[arg-type]
        for step in (1, 2):
            scores = learner.teacher_logprobs(batch, str(teacher)).float().double()
            old = learner.old_logprobs(batch)
            targets = make_targets(batch, cfg, old, None, None, teacher_logprobs=scores)
            metrics, _ = learner.update(batch, targets, step)
        return scores, metrics["teacher/reverse_kl"], ranks.weights()  # type: ignore

    results = []
    for ranks in (LocalRankGroup(ExactRank(student)), Processes(2, ExactRank, student)):
        try:
            results.append(run(ranks))
        finally:
            ranks.close()
    (scores, kl, weights), (of_two, kl_of_two, weights_of_two) = results
    torch.testing.assert_close(of_two, scores, rtol=0, atol=2e-6)
    assert kl_of_two == pytest.approx(kl, abs=1e-5) and abs(kl) > 0.01
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[name], tensor, rtol=1e-4, atol=1e-5)
