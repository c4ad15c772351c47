"""What each estimator of the KL really optimises, by enumeration; and its weight in the reward."""

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
from agentrl.trainer.algorithms import KLController
from agentrl.trainer.losses import ESTIMATORS, importance_ratios, k1, k2, k3

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


def is_none_of(found, *others):
    return all((found - other).abs().max() > 1e-2 for other in others)


EVERY_KL = (exact_gradient(sequence_kl, THETA), held_fixed(reverse), held_fixed(forward))


def test_the_divergences_can_be_told_apart_here():
    sequence, token, other_way = EVERY_KL
    assert is_none_of(sequence, token, other_way, torch.zeros(12))
    assert is_none_of(token, other_way, torch.zeros(12))


def test_in_the_loss_k1_pulls_nowhere():
    found = expected_gradient(in_loss("k1"), THETA)
    torch.testing.assert_close(found, torch.zeros_like(THETA), **TINY)


def test_in_the_loss_k2_is_the_reverse_kl_of_tokens_with_states_held_fixed():
    found = expected_gradient(in_loss("k2"), THETA)
    torch.testing.assert_close(found, held_fixed(reverse), **TINY)


def test_in_the_loss_k3_is_the_forward_kl_of_tokens_with_states_held_fixed():
    found = expected_gradient(in_loss("k3"), THETA)
    torch.testing.assert_close(found, held_fixed(forward), **TINY)


@pytest.mark.parametrize("credit", [to_go, whole])
def test_in_the_reward_k1_is_the_kl_of_the_sequence(credit):
    found = expected_gradient(in_reward("k1", credit), THETA)
    torch.testing.assert_close(found, exact_gradient(sequence_kl, THETA), **TINY)


def test_in_the_reward_without_what_comes_after_k1_is_k2_in_the_loss():
    found = expected_gradient(in_reward("k1", own), THETA)
    torch.testing.assert_close(found, held_fixed(reverse), **TINY)


@pytest.mark.parametrize("name", ["k2", "k3"])
@pytest.mark.parametrize("credit", [to_go, own])
def test_in_the_reward_the_others_are_no_kl(name, credit):
    assert is_none_of(expected_gradient(in_reward(name, credit), THETA), *EVERY_KL)


# --- tokens that another policy sampled -----------------------------------------------------------


def weighted(level):
    return lambda log_p: importance_ratios(log_p, OTHER, MASK, level)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_weights_of_whole_rows_give_the_same_off_policy(name):
    on_policy = expected_gradient(in_loss(name), THETA)
    found = expected_gradient(in_loss(name, weighted("sequence")), THETA, sampler=OTHER)
    torch.testing.assert_close(found, on_policy, **TINY)
    assert is_none_of(expected_gradient(in_loss(name), THETA, sampler=OTHER), on_policy)


@pytest.mark.parametrize(("name", "kl"), [("k2", reverse), ("k3", forward)])
def test_a_tokens_own_weight_gives_its_divergence_in_the_states_that_were_visited(name, kl):
    found = expected_gradient(in_loss(name, weighted("token")), THETA, sampler=OTHER)
    torch.testing.assert_close(found, held_fixed(kl, visits=OTHER), **TINY)
    assert is_none_of(found, held_fixed(kl))


def test_a_tokens_own_weight_is_enough_for_k1_to_pull_nowhere():
    found = expected_gradient(in_loss("k1", weighted("token")), THETA, sampler=OTHER)
    torch.testing.assert_close(found, torch.zeros_like(THETA), **TINY)


def test_off_policy_k1_in_the_reward_needs_the_weights_of_whole_rows():
    def loss(level):
        free = in_reward("k1", to_go)
        return lambda log_p: weighted(level)(log_p) * free(log_p)

    exact = exact_gradient(sequence_kl, THETA)
    found = expected_gradient(loss("sequence"), THETA, sampler=OTHER)
    torch.testing.assert_close(found, exact, **TINY)
    assert is_none_of(expected_gradient(loss("token"), THETA, sampler=OTHER), exact)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_whose_value_is_unbiased(name, unbiased):
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


def test_a_policy_that_answers_to_the_weight_ends_at_the_target():
    steered = controller(horizon=20)
    for _ in range(200):
        steered.update(0.5 / steered.coef, rollouts=10)
    assert 0.5 / steered.coef == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", [0.0, 2.0])
def test_a_kl_that_is_no_number_stops_the_run(kl, target):
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


def test_what_steers_nothing_is_named():
    assert without_effect(load_config(None, RUN)) == [
        "algorithm.kl_target=2.0 has no effect: algorithm.kl_reward_coef is 0"
    ]
    assert without_effect(load_config(None, ["algorithm.kl_horizon=99"])) == [
        "algorithm.kl_horizon=99 has no effect: algorithm.kl_target is 0"
    ]
