"""The expected gradient of each KL estimator, by enumeration; and its weight in the reward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.two_steps import MASK, draw, exact_gradient, expected_gradient, logprobs, steps
from torch import tensor

from agentrl.config import AlgorithmConfig, load_config
from agentrl.config.checks import without_effect
from agentrl.errors import ConfigError, RunStopped
from agentrl.learner.algorithms import KLController
from agentrl.learner.losses import ESTIMATORS, importance_ratios, k1, k2, k3

THETA = draw(0)
REFERENCE, OTHER = logprobs(draw(1)), logprobs(draw(2))
TINY = {"rtol": 0, "atol": 1e-12}


def reverse(log_p, reference):
    return (log_p.exp() * (log_p - reference)).sum(-1)


def forward(log_p, reference):
    return reverse(reference, log_p)


def sequence_kl(log_p):
    """KL(policy || reference) of whole sequences."""
    return reverse(log_p.sum(1), REFERENCE.sum(1))


def held_fixed(kl, visits=None):
    """Each token's KL, in states that are visited as they are: by `visits` or the policy itself."""

    def objective(log_p):
        (first, second), (first_ref, second_ref) = steps(log_p), steps(REFERENCE)
        at = steps(log_p if visits is None else visits)[0].detach().exp()
        return kl(first, first_ref) + (at * kl(second, second_ref)).sum()

    return exact_gradient(objective, THETA)


def in_loss(name, weights=None):
    def loss(log_p):
        estimate = ESTIMATORS[name](log_p, REFERENCE)
        return estimate if weights is None else weights(log_p) * estimate

    return loss


def in_reward(name, credit):
    """The policy gradient of minus the estimate, each token answering for what `credit` says."""

    def loss(log_p):
        return log_p * credit(ESTIMATORS[name](log_p, REFERENCE).detach())

    return loss


def to_go(costs):
    return costs.flip(1).cumsum(1).flip(1)


def whole(costs):
    return costs.sum(1, keepdim=True)


def own(costs):
    return costs


def is_none_of(gradient, *others):
    return all((gradient - other).abs().max() > 1e-2 for other in others)


EVERY_KL = (exact_gradient(sequence_kl, THETA), held_fixed(reverse), held_fixed(forward))


def test_the_divergences_differ_in_these_tests():
    sequence, token, other_way = EVERY_KL
    assert is_none_of(sequence, token, other_way, torch.zeros(12))
    assert is_none_of(token, other_way, torch.zeros(12))


def test_k1_in_the_loss_has_zero_expected_gradient():
    gradient = expected_gradient(in_loss("k1"), THETA)
    torch.testing.assert_close(gradient, torch.zeros_like(THETA), **TINY)


def test_k2_in_the_loss_is_the_reverse_kl_of_tokens_with_fixed_states():
    gradient = expected_gradient(in_loss("k2"), THETA)
    torch.testing.assert_close(gradient, held_fixed(reverse), **TINY)


def test_k3_in_the_loss_is_the_forward_kl_of_tokens_with_fixed_states():
    gradient = expected_gradient(in_loss("k3"), THETA)
    torch.testing.assert_close(gradient, held_fixed(forward), **TINY)


@pytest.mark.parametrize("credit", [to_go, whole])
def test_k1_in_the_reward_is_the_kl_of_the_sequence(credit):
    gradient = expected_gradient(in_reward("k1", credit), THETA)
    torch.testing.assert_close(gradient, exact_gradient(sequence_kl, THETA), **TINY)


def test_k1_in_the_reward_without_later_tokens_is_k2_in_the_loss():
    gradient = expected_gradient(in_reward("k1", own), THETA)
    torch.testing.assert_close(gradient, held_fixed(reverse), **TINY)


@pytest.mark.parametrize("name", ["k2", "k3"])
@pytest.mark.parametrize("credit", [to_go, own])
def test_k2_and_k3_in_the_reward_are_no_kl(name, credit):
    assert is_none_of(expected_gradient(in_reward(name, credit), THETA), *EVERY_KL)


# --- tokens that another policy sampled -----------------------------------------------------------


def weighted(level):
    return lambda log_p: importance_ratios(log_p, OTHER, MASK, level)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_weights_of_whole_rows_give_the_same_off_policy(name):
    on_policy = expected_gradient(in_loss(name), THETA)
    gradient = expected_gradient(in_loss(name, weighted("sequence")), THETA, sampler=OTHER)
    torch.testing.assert_close(gradient, on_policy, **TINY)
    assert is_none_of(expected_gradient(in_loss(name), THETA, sampler=OTHER), on_policy)


@pytest.mark.parametrize(("name", "kl"), [("k2", reverse), ("k3", forward)])
def test_a_tokens_own_weight_gives_its_divergence_in_the_states_that_were_visited(name, kl):
    gradient = expected_gradient(in_loss(name, weighted("token")), THETA, sampler=OTHER)
    torch.testing.assert_close(gradient, held_fixed(kl, visits=OTHER), **TINY)
    assert is_none_of(gradient, held_fixed(kl))


def test_with_token_weights_k1_has_zero_expected_gradient():
    gradient = expected_gradient(in_loss("k1", weighted("token")), THETA, sampler=OTHER)
    torch.testing.assert_close(gradient, torch.zeros_like(THETA), **TINY)


def test_off_policy_k1_in_the_reward_needs_the_weights_of_whole_rows():
    def loss(level):
        free = in_reward("k1", to_go)
        return lambda log_p: weighted(level)(log_p) * free(log_p)

    exact = exact_gradient(sequence_kl, THETA)
    gradient = expected_gradient(loss("sequence"), THETA, sampler=OTHER)
    torch.testing.assert_close(gradient, exact, **TINY)
    assert is_none_of(expected_gradient(loss("token"), THETA, sampler=OTHER), exact)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_which_estimators_have_an_unbiased_value(name, unbiased):
    log_p = logprobs(THETA)
    value = (log_p.sum(1).exp() * ESTIMATORS[name](log_p, REFERENCE).sum(1)).sum()
    assert torch.allclose(value, sequence_kl(log_p), **TINY) == unbiased


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_zero_where_equal(a, b):
    x, y = tensor(a, dtype=torch.float64), tensor(b, dtype=torch.float64)
    assert k1(x, y) == a - b
    for estimator in (k2, k3):
        assert estimator(x, y) >= 0
        assert estimator(x, x) == 0


# --- the weight in the reward ---------------------------------------------------------------------


def controller(target=2.0, horizon=100):
    return KLController(AlgorithmConfig(kl_reward_coef=0.1, kl_target=target, kl_horizon=horizon))


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (2.0, 1.0),
        (2.2, 1 + 0.1 * 10 / 100),
        (1.9, 1 - 0.05 * 10 / 100),
        (2.4, 1 + 0.2 * 10 / 100),
        (500.0, 1 + 0.2 * 10 / 100),
        (0.0, 1 - 0.2 * 10 / 100),
        (-3.0, 1 - 0.2 * 10 / 100),
    ],
)
def test_the_weight_follows_the_error_up_to_a_fifth(kl, factor):
    steered = controller()
    steered.update(kl, rollouts=10)
    assert steered.coef == pytest.approx(0.1 * factor, rel=1e-12)


def test_a_fixed_weight_stays():
    fixed = controller(target=0)
    fixed.update(50.0, rollouts=10)
    fixed.load(7.0)
    assert fixed.coef == 0.1


KLS = st.lists(st.floats(-1, 50), max_size=12)


@given(KLS, KLS, st.integers(1, 64))
def test_a_weight_that_was_saved_goes_on_bit_for_bit(before, after, rollouts):
    whole, first, second = controller(), controller(), controller()
    for kl in [*before, *after]:
        whole.update(kl, rollouts)
    for kl in before:
        first.update(kl, rollouts)
    second.load(first.coef)
    for kl in after:
        second.update(kl, rollouts)
    assert second.coef == whole.coef
    assert second.coef > 0


def test_the_kl_weight_converges_to_the_target():
    steered = controller(horizon=20)
    for _ in range(200):
        steered.update(0.5 / steered.coef, rollouts=10)
    assert 0.5 / steered.coef == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", [0.0, 2.0])
def test_a_nan_kl_stops_the_run(kl, target):
    steered = controller(target)
    with pytest.raises(RunStopped, match="KL to the reference"):
        steered.update(kl, rollouts=10)
    assert steered.coef == 0.1


RUN = ["data.batch_size=16", "rollout.n=4", "algorithm.kl_target=2"]


def test_a_horizon_in_which_a_weight_could_turn_negative_is_refused():
    steered = [*RUN, "algorithm.kl_reward_coef=0.1"]
    with pytest.raises(ConfigError, match=r"kl_horizon=12 .* 64 rollouts .* 640 .*or more"):
        load_config(None, [*steered, "algorithm.kl_horizon=12"])
    config = load_config(None, [*steered, "algorithm.kl_horizon=13"])
    worst = KLController(config.algorithm)
    worst.update(0.0, rollouts=64)
    assert worst.coef > 0


def test_kl_controller_settings_without_effect_are_named():
    assert without_effect(load_config(None, RUN)) == [
        "algorithm.kl_target=2.0 has no effect: algorithm.kl_reward_coef is 0"
    ]
    assert without_effect(load_config(None, ["algorithm.kl_horizon=99"])) == [
        "algorithm.kl_horizon=99 has no effect: algorithm.kl_target is 0"
    ]
