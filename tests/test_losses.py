"""Losses and KL estimators against enumeration on a distribution of eight symbols."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from agentrl.trainer.kl import ESTIMATORS, k1, k2, k3
from agentrl.trainer.losses import (
    importance_ratios,
    importance_weights,
    policy_loss,
    ratio,
    value_loss,
)
from agentrl.trainer.model import chosen_logprobs

GENERATOR = torch.Generator().manual_seed(0)
THETA = torch.randn(8, dtype=torch.float64, generator=GENERATOR)
REFERENCE = torch.randn(8, dtype=torch.float64, generator=GENERATOR).log_softmax(-1)


def expected_gradient(loss, sampler=None):
    """sum_a p(a) grad loss(a): what averaging over tokens drawn from `sampler` converges to."""
    theta = THETA.clone().requires_grad_()
    log_p = theta.log_softmax(-1)
    p = (log_p if sampler is None else sampler).detach().exp()
    (p * loss(log_p, REFERENCE)).sum().backward()
    return theta.grad


def exact_gradient(divergence):
    theta = THETA.clone().requires_grad_()
    divergence(theta.log_softmax(-1)).backward()
    return theta.grad


def reverse_kl(log_p):
    return (log_p.exp() * (log_p - REFERENCE)).sum()


def forward_kl(log_p):
    return (REFERENCE.exp() * (REFERENCE - log_p)).sum()


# --- KL -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_value_of_k1_and_k3_is_unbiased(name):
    log_p = THETA.log_softmax(-1)
    value = (log_p.exp() * ESTIMATORS[name](log_p, REFERENCE)).sum()
    torch.testing.assert_close(value, reverse_kl(log_p))


def test_as_losses_each_estimator_follows_the_gradient_its_docstring_says():
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(THETA))
    torch.testing.assert_close(expected_gradient(k2), exact_gradient(reverse_kl))
    torch.testing.assert_close(expected_gradient(k3), exact_gradient(forward_kl))


def test_k1_in_the_reward_follows_the_reverse_kl():
    """The score function times the (gradient-free) estimate, as a policy gradient does it."""
    score = expected_gradient(lambda log_p, ref: log_p * k1(log_p, ref).detach())
    torch.testing.assert_close(score, exact_gradient(reverse_kl))


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_zero_only_where_equal(a, b):
    x, y = tensor(a, dtype=torch.float64), tensor(b, dtype=torch.float64)
    for estimator in (k2, k3):
        assert estimator(x, y) >= 0
        assert estimator(x, x) == 0


# --- policy loss --------------------------------------------------------------------------------


def test_policy_loss_clips_as_the_paper_draws_it():
    """Figure 1: above the clip with a good token and below it with a bad one, no gain."""
    r = tensor([0.5, 0.9, 1.0, 1.1, 1.5])
    zero = torch.zeros(5)
    good, good_clipped = policy_loss(r.log(), zero, torch.ones(5), 0.2, 0.3)
    torch.testing.assert_close(good, -tensor([0.5, 0.9, 1.0, 1.1, 1.3]))
    assert good_clipped.tolist() == [False, False, False, False, True]
    bad, bad_clipped = policy_loss(r.log(), zero, -torch.ones(5), 0.2, 0.3)
    torch.testing.assert_close(bad, tensor([0.8, 0.9, 1.0, 1.1, 1.5]))
    assert bad_clipped.tolist() == [True, False, False, False, False]


def test_policy_loss_at_ratio_one_has_the_policy_gradient():
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    advantages = tensor([0.5, -3.0])
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 3.0]


def test_a_clipped_token_has_no_gradient():
    logprobs = tensor([0.5, -0.5]).requires_grad_()
    loss, clipped = policy_loss(logprobs, torch.zeros(2), tensor([1.0, -1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert clipped.all()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]


def test_ratios_of_broken_policies_stay_finite():
    assert ratio(tensor([0.0]), tensor([-1e9])).isfinite().all()
    assert ratio(tensor([-1e9]), tensor([0.0])).isfinite().all()


# --- importance weights -------------------------------------------------------------------------


def test_importance_ratios_are_one_for_equal_policies():
    logprobs = tensor([-1.0, -5.0])
    assert importance_ratios(logprobs, logprobs).tolist() == [1.0, 1.0]
    together = importance_ratios(logprobs, logprobs, tensor([[True, True]]))
    assert together.tolist() == [1.0, 1.0]


def test_the_cap_is_on_the_ratio_and_not_on_its_logarithm():
    ratios = importance_ratios(tensor([0.4, 2.0, -3.0]), torch.zeros(3))
    expected = tensor([math.exp(0.4), 2.0, math.exp(-3.0)])
    torch.testing.assert_close(importance_weights(ratios, 2.0, "truncate"), expected)
    masked = tensor([math.exp(0.4), 0.0, 0.0])
    torch.testing.assert_close(importance_weights(ratios, 2.0, "mask"), masked)


def test_a_row_has_the_product_of_its_tokens_ratios():
    mask = tensor([[True, False, True], [False, False, False], [False, True, False]])
    ratios = importance_ratios(tensor([2.0, 3.0, 0.7]).log(), torch.zeros(3), mask)
    torch.testing.assert_close(ratios, tensor([6.0, 6.0, 0.7]))


LOGPROBS = st.floats(-12, 0, width=32)
CAPS = st.floats(1, 16) | st.just(math.inf)


@st.composite
def rows_of_tokens(draw):
    """Old and engine logprobs (N,) of the tokens at a mask (b, T)."""
    b, t = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    mask = tensor(draw(st.lists(st.booleans(), min_size=b * t, max_size=b * t))).view(b, t)
    n = int(mask.sum())
    old, engine = (
        tensor(draw(st.lists(LOGPROBS, min_size=n, max_size=n)), dtype=torch.float64)
        for _ in range(2)
    )
    return old, engine, mask


@given(rows_of_tokens(), CAPS)
@settings(max_examples=150, deadline=None)
def test_weights_are_within_the_cap_or_nothing_and_carry_no_gradient(world, cap):
    old, engine, mask = world
    old, engine = old.requires_grad_(), engine.requires_grad_()
    for together in (None, mask):
        ratios = importance_ratios(old, engine, together)
        truncated = importance_weights(ratios, cap, "truncate")
        masked = importance_weights(ratios, cap, "mask")
        assert not truncated.requires_grad and not masked.requires_grad
        assert (truncated <= cap).all() and (truncated > 0).all()
        assert torch.equal(truncated, ratios.minimum(tensor(cap, dtype=ratios.dtype)))
        kept = (1 / cap <= ratios) & (ratios <= cap)
        assert torch.equal(masked, torch.where(kept, ratios, 0.0))


@given(rows_of_tokens())
@settings(max_examples=100, deadline=None)
def test_rows_of_one_token_are_weighted_alike_at_both_levels(world):
    old, engine, mask = world
    alone = torch.zeros(len(old), 3, dtype=torch.bool)
    alone[torch.arange(len(old)), torch.arange(len(old)) % 3] = True
    by_token = importance_ratios(old, engine)
    assert torch.equal(importance_ratios(old, engine, alone), by_token)
    # And all tokens of a row have one ratio, which the other rows do not touch.
    together, at = importance_ratios(old, engine, mask), 0
    for count in mask.sum(1).tolist():
        row = slice(at, at + count)
        product = (old[row] - engine[row]).sum().clamp(-20, 20).exp().expand(count)
        torch.testing.assert_close(together[row], product)
        at += count


def test_off_policy_samples_with_weights_give_the_on_policy_gradient():
    """Tokens drawn from another engine: uncapped weights recover the policy's own gradient."""
    reward = torch.arange(8, dtype=torch.float64)
    engine = (THETA + 0.3 * torch.arange(8)).log_softmax(-1)

    def weighted(mode):
        def loss(log_p, _):
            old = log_p.detach()
            surrogate, _ = policy_loss(log_p, old, reward, 0.2, 0.2)
            return surrogate * importance_weights(importance_ratios(old, engine), math.inf, mode)

        return loss

    def objective(log_p):
        return -(log_p.exp() * reward).sum()

    for mode in ("truncate", "mask"):
        found = expected_gradient(weighted(mode), sampler=engine)
        torch.testing.assert_close(found, exact_gradient(objective))
    wrong = expected_gradient(
        lambda log_p, _: policy_loss(log_p, log_p.detach(), reward, 0.2, 0.2)[0], sampler=engine
    )
    assert (wrong - exact_gradient(objective)).abs().max() > 0.1


@pytest.mark.parametrize(("level", "exact"), [("sequence", True), ("token", False)])
def test_over_two_turns_only_whole_sequences_are_weighted_exactly(level, exact):
    """Every sequence of two tokens of three, drawn from an engine, told a reward of its own."""
    g = torch.Generator().manual_seed(3)
    first, reward = torch.randn(3, generator=g).double(), torch.randn(3, 3, generator=g).double()
    engine_first, engine_second = (torch.randn(s, generator=g).double() for s in (3, (3, 3)))
    theta = torch.randn(3, 3, generator=g).double().requires_grad_()

    def both(first, second):
        """(9, 2): logprobs of both tokens of each sequence."""
        early = first.log_softmax(-1)[:, None].expand(3, 3)
        return torch.stack([early, second.log_softmax(-1)], -1).view(9, 2)

    log_p, engine = both(first, theta), both(engine_first, engine_second)
    (exact_gradient,) = torch.autograd.grad(
        -(log_p.sum(1).exp() * reward.view(9)).sum(), theta, retain_graph=True
    )
    mask = torch.ones(9, 2, dtype=torch.bool) if level == "sequence" else None
    ratios = importance_ratios(log_p.flatten(), engine.flatten(), mask)
    weights = importance_weights(ratios, math.inf, "truncate").view(9, 2)
    surrogate, _ = policy_loss(log_p, log_p.detach(), reward.view(9, 1), 0.2, 0.2)
    loss = (engine.sum(1).exp()[:, None] * weights * surrogate).sum()
    (found,) = torch.autograd.grad(loss, theta)
    assert torch.allclose(found, exact_gradient, atol=1e-12) == exact
    if not exact:
        assert (found - exact_gradient).abs().max() > 1e-2


# --- value loss ---------------------------------------------------------------------------------


def test_value_loss_takes_the_larger_of_free_and_clipped():
    values, old, returns = tensor([2.0, 0.2, -1.0]), torch.zeros(3), tensor([3.0, 1.0, -3.0])
    loss, clipped = value_loss(values, old, returns, clip=0.5)
    torch.testing.assert_close(loss, 0.5 * tensor([2.5**2, 0.8**2, 2.5**2]))
    assert clipped.tolist() == [True, False, True]


# --- logprobs -----------------------------------------------------------------------------------


@given(st.floats(0.2, 3.0), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_temperature_divides_logits_and_never_logprobs(temperature, seed):
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(seed)).double()
    every = torch.stack(
        [chosen_logprobs(logits, torch.full((3,), v), temperature)[0] for v in range(11)], 1
    )
    torch.testing.assert_close(every, torch.log_softmax(logits / temperature, -1))
    torch.testing.assert_close(every.exp().sum(1), torch.ones(3).double())


def test_entropy_is_that_of_the_tempered_distribution():
    logits = torch.zeros(1, 16)
    assert chosen_logprobs(logits, tensor([0]), 0.7)[1].item() == pytest.approx(
        torch.log(tensor(16.0)).item()
    )
