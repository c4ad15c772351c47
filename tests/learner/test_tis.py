"""Importance weights between engine and trainer, in worlds whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.two_steps import MASK, draw, exact_gradient, expected_gradient, logprobs
from torch import tensor

from agentrl.config import AlgorithmConfig
from agentrl.learner.losses import (
    engine_weights,
    importance_ratios,
    importance_weights,
    rejected_rows,
    vanilla,
)
from agentrl.registry import policy_losses

FREE = AlgorithmConfig(clip_low=1.0, clip_high=1e9)
TINY = {"rtol": 0, "atol": 1e-12}

# --- a bandit of two arms -------------------------------------------------------------------------
# The engine pulls both alike, the trainer's policy the first four times of five; only it pays.

ENGINE, POLICY = tensor([[0.5], [0.5]]).log(), tensor([[0.8], [0.2]]).log()
PAYS, ARMS = tensor([[1.0], [0.0]]), torch.ones(2, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("cap", "mode", "gradient"),
    [
        (math.inf, "truncate", 0.5 * 1.6 * 0.2),  # 0.16 = p (1 - p): the policy's own
        (math.inf, "mask", 0.5 * 1.6 * 0.2),
        (1.5, "truncate", 0.5 * 1.5 * 0.2),
        (1.5, "mask", 0.0),
    ],
)
def test_the_gradient_of_a_bandit_is_that_of_its_own_policy(cap, mode, gradient):
    logits = POLICY.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    old = log_p.detach()
    weights = importance_weights(importance_ratios(old, ENGINE, ARMS, "token"), cap, mode)
    loss, _ = vanilla(log_p, old, PAYS, ARMS, FREE)
    (ENGINE.exp() * weights * loss).sum().backward()
    torch.testing.assert_close(logits.grad, tensor([[-gradient], [gradient]]))


def test_the_ratio_is_trainer_over_engine():
    ratios = importance_ratios(POLICY, ENGINE, ARMS, "token")
    torch.testing.assert_close(ratios, tensor([[1.6], [0.4]]))


# --- two turns ------------------------------------------------------------------------------------

OLD, ENGINE_2 = draw(3), logprobs(draw(4))
REWARD = torch.randn(9, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def objective(log_p):
    return -(log_p.sum(1).exp() * REWARD[:, 0]).sum()


def surrogate(name, level, old=None):
    """A weighted policy loss; `old` is the policy at the start of the step, or the one of now."""

    def loss(log_p):
        start = log_p.detach() if old is None else old
        ratios = importance_ratios(start, ENGINE_2, MASK, level)
        advantages = REWARD.expand(9, 2)
        free, _ = policy_losses.get(name)(log_p, start, advantages, MASK, FREE)
        return importance_weights(ratios, math.inf, "truncate") * free

    return loss


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize(("level", "exact"), [("sequence", True), ("token", False)])
def test_over_two_turns_only_whole_sequences_are_weighted_exactly(name, level, exact):
    gradient = expected_gradient(surrogate(name, level), OLD, sampler=ENGINE_2)
    far = (gradient - exact_gradient(objective, OLD)).abs().max()
    assert far < 1e-12 if exact else far > 1e-2


def test_the_second_of_two_turns_is_exact_by_its_own_weight_where_the_first_was_not():
    """The weight of a token does not correct the probability of reaching its state."""
    visits = ENGINE_2.view(3, 3, 2)[:, :1, 0].detach()

    def second_turn(log_p):
        second = log_p.view(3, 3, 2)[:, :, 1]
        return -((visits + second).exp() * REWARD.view(3, 3)).sum()

    gradient = expected_gradient(surrogate("vanilla", "token"), OLD, sampler=ENGINE_2)
    torch.testing.assert_close(gradient[3:], exact_gradient(second_turn, OLD)[3:], **TINY)


def test_weight_times_ratio_is_the_ratio_of_policy_to_engine():
    """Weight times PPO's ratio is the ratio of the policy of now to the engine, and not more."""
    now = draw(6)
    old = logprobs(OLD)
    both = expected_gradient(surrogate("vanilla", "token", old), now, sampler=ENGINE_2)

    def once(log_p):
        return -(log_p - ENGINE_2).exp() * REWARD

    torch.testing.assert_close(both, expected_gradient(once, now, sampler=ENGINE_2), **TINY)

    def twice(log_p):
        return -((log_p - ENGINE_2).exp() * (log_p - ENGINE_2).detach().exp()) * REWARD

    doubled = expected_gradient(twice, now, sampler=ENGINE_2)
    assert (both - doubled).abs().max() > 1e-2


# --- cap, mask, layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_policies_weigh_exactly_one(level):
    equal = tensor([[-1.0, -5.0], [-0.3, float("nan")]])
    mask = tensor([[True, True], [True, False]])
    ratios = importance_ratios(equal, equal.clone(), mask, level)
    for mode in ("truncate", "mask"):
        assert importance_weights(ratios, 1.0, mode).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_the_cap_is_on_the_ratio_and_not_on_its_logarithm():
    old = tensor([[0.4, 2.0, -3.0]])
    ratios = importance_ratios(old, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), "token")
    expected = tensor([[math.exp(0.4), 2.0, math.exp(-3.0)]])
    torch.testing.assert_close(importance_weights(ratios, 2.0, "truncate"), expected)
    masked = tensor([[math.exp(0.4), 0.0, 0.0]])
    torch.testing.assert_close(importance_weights(ratios, 2.0, "mask"), masked)


def test_a_row_has_the_product_of_its_tokens_ratios():
    mask = tensor([[True, False, True], [False, False, False], [False, True, False]])
    old = tensor([[2.0, 50.0, 3.0], [9.0, 9.0, 9.0], [9.0, 0.7, 9.0]]).log()
    ratios = importance_ratios(old, torch.zeros(3, 3), mask, "sequence")
    expected = tensor([[6.0, 1.0, 6.0], [1.0, 1.0, 1.0], [1.0, 0.7, 1.0]])
    torch.testing.assert_close(ratios, expected)


def test_a_long_row_does_not_overflow():
    old, engine = torch.zeros(2, 4000), torch.full((2, 4000), -1.0)
    engine[1] = 1.0
    ratios = importance_ratios(old, engine, torch.ones(2, 4000, dtype=torch.bool), "sequence")
    assert ratios.isfinite().all() and (ratios > 0).all()
    assert importance_weights(ratios, 2.0, "truncate")[0].tolist() == [2.0] * 4000


def test_the_lower_bound_of_the_mask_is_a_key():
    """IcePop: a ratio in [low, cap] is the weight, all others give 0."""
    ratios = tensor([[0.4, 0.5, 0.51, 4.9, 5.0, 5.1]])
    weights = importance_weights(ratios, 5.0, "mask", 0.5)
    assert weights.tolist() == tensor([[0.0, 0.5, 0.51, 4.9, 5.0, 0.0]]).tolist()
    assert (
        importance_weights(ratios, 2.0, "mask").tolist()
        == tensor([[0, 0.5, 0.51, 0, 0, 0]]).tolist()
    )
    assert importance_weights(ratios, 5.0, "truncate", 0.5)[0, 0] == ratios[0, 0]


def test_a_row_is_rejected_by_the_geometric_mean_of_its_ratios():
    mask = tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    nan = math.nan
    gaps = tensor([[0.3, nan, 0.0, 0.0], [0.3, 0.0, 0.0, 0.0], [nan] * 4, [-0.09, 9.0, 9.0, 9.0]])
    rejected = rejected_rows(gaps, torch.zeros(4, 4), mask, [math.exp(-0.08), math.exp(0.08)])
    assert rejected.tolist() == [True, False, False, True]


@given(st.integers(0, 2**31), st.integers(1, 40))
@examples(50)
def test_the_weights_of_a_step_are_those_of_the_rows_that_are_kept(seed, width):
    g = torch.Generator().manual_seed(seed)
    old, engine = (torch.randn(3, width, generator=g) for _ in range(2))
    mask = torch.rand(3, width, generator=g) < 0.7
    for cap, mode in ((0.0, "truncate"), (1.5, "truncate"), (1.5, "mask")):
        config = AlgorithmConfig(tis_cap=cap, tis_mode=mode, reject_band=[0.8, 1.3])
        weights = engine_weights(old, engine, mask, config)
        for i in range(3):
            gaps = (old[i] - engine[i])[mask[i]].double()
            mean = gaps.mean().exp() if len(gaps) else 1.0
            free = importance_ratios(old[i : i + 1], engine[i : i + 1], mask[i : i + 1], "token")
            free = importance_weights(free, cap, mode) if cap else torch.ones(1, width)
            expected = free[0] if 0.8 <= mean <= 1.3 else torch.zeros(width)
            assert torch.equal(weights[i], expected)
    assert torch.equal(engine_weights(old, old, mask, config), torch.ones(3, width))


LOGPROBS = st.floats(-12, 0, width=32)
SPOILT = st.sampled_from([0.0, 1e9, math.inf, -math.inf, math.nan])


@st.composite
def rows_of_tokens(draw):
    """The trainer's and the engine's logprobs (b, A), and the mask; anything off it."""
    b, a = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    mask = tensor(draw(st.lists(st.booleans(), min_size=b * a, max_size=b * a)))
    old, engine = (
        tensor([draw(LOGPROBS if on else SPOILT) for on in mask], dtype=torch.float64).view(b, a)
        for _ in range(2)
    )
    return old, engine, mask.view(b, a)


@given(rows_of_tokens(), st.floats(1, 16) | st.just(math.inf))
@examples(150)
def test_weights_are_within_the_cap_or_zero_and_have_no_gradient(world, cap):
    old, engine, mask = world
    old, engine = old.requires_grad_(), engine.requires_grad_()
    for level in ("token", "sequence"):
        ratios = importance_ratios(old, engine, mask, level)
        truncated = importance_weights(ratios, cap, "truncate")
        masked = importance_weights(ratios, cap, "mask")
        assert not truncated.requires_grad and not masked.requires_grad
        assert (ratios[~mask] == 1).all()
        assert (truncated > 0).all()
        assert torch.equal(truncated, ratios.minimum(tensor(cap, dtype=ratios.dtype)))
        kept = (1 / cap <= ratios) & (ratios <= cap)
        assert torch.equal(masked, torch.where(kept, ratios, 0.0))


@given(rows_of_tokens())
@examples(100)
def test_a_row_is_weighted_by_its_own_tokens_at_any_position(world):
    old, engine, mask = world
    for level in ("token", "sequence"):
        ratios = importance_ratios(old, engine, mask, level)
        for i, here in enumerate(mask):
            gaps = (old[i] - engine[i])[here]
            gaps = gaps if level == "token" else gaps.sum().expand(len(gaps))
            torch.testing.assert_close(ratios[i][here], gaps.clamp(-20, 20).exp())
