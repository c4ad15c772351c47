"""Losses: what their papers draw, what must not matter, and the critic's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import tensor

from agentrl.config import AlgorithmConfig, load_config
from agentrl.config.checks import without_effect
from agentrl.errors import UserCodeError
from agentrl.learner.head import Head, chosen_logprobs
from agentrl.learner.losses import (
    cispo,
    clipped_tokens,
    dppo,
    gspo,
    ratio,
    sapo,
    token_losses,
    value_loss,
    vanilla,
)
from agentrl.registry import policy_loss, policy_losses

LOSSES = {"vanilla": vanilla, "gspo": gspo, "cispo": cispo, "sapo": sapo, "dppo": dppo}
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.3)
DUAL = AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
RATIOS = tensor([[0.5, 0.9, 1.0, 1.1, 1.5]])


def apply(loss, ratios, advantages, config=CONFIG):
    """The loss of tokens with these ratios (b, A); its counts; the gradient to their logprobs."""
    logprobs = (ratios.log() - 1).requires_grad_()
    old = torch.full_like(ratios, -1.0)
    advantages = torch.full_like(ratios, advantages)
    losses, counts = loss(logprobs, old, advantages, torch.ones_like(ratios).bool(), config)
    losses.sum().backward()
    return losses.detach(), counts, logprobs.grad


def test_they_are_registered_by_their_names():
    assert {name: policy_losses.get(name) for name in LOSSES} == LOSSES


def test_a_loss_reports_clipped_tokens_by_a_bool_count():
    ratios = tensor([[0.5, 1.0, 1.5, 4.0]])
    for loss in (vanilla, cispo):
        for advantages, clipped in ((1.0, [0, 0, 1, 1]), (-1.0, [1, 0, 0, 0])):
            _, counts, _ = apply(loss, ratios, advantages)
            clipped = [1, 0, 1, 1] if loss is cispo else clipped
            assert clipped_tokens(counts).tolist() == [clipped]
    _, counts, _ = apply(vanilla, ratios, -1.0, DUAL)
    assert clipped_tokens(counts).tolist() == [[True, False, False, True]]
    _, counts, _ = apply(dppo, tensor([[0.5, 1.0, 1.5, 2.0]]), -1.0, DUAL)
    assert clipped_tokens(counts).tolist() == [[False] * 4]  # 0.37 becomes 0.18: less than 0.2
    _, counts, _ = apply(gspo, ratios, 1.0)
    assert clipped_tokens(counts).tolist() == [[True] * 4]  # the row's mean ratio is 1.32
    share = torch.full((1, 4), 0.5)
    assert clipped_tokens({"pg_clipfrac": share}) is clipped_tokens({"far": share > 0}) is None


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (lambda x: -x, r"a tensor of shape \(1, 5\) instead of a pair"),
        (lambda x: (-x, {}, 0), "a tuple of 3 instead of a pair"),
        (lambda x: (-x.mean(), {}), r"a tensor of shape \(\) for the loss"),
        (lambda x: (-x[:, 1:], {}), r"a tensor of shape \(1, 4\) for the loss"),
        (lambda x: (-x, None), "None for the counts"),
        (lambda x: (-x, {"far": 0.5}), "a float for the count 'far'"),
        (lambda x: (-x.detach(), {}), "a loss that does not depend on `logprobs`"),
    ],
)
def test_wrong_return_values_of_a_policy_loss_are_explained(made, wrong):
    policy_loss("mine")(lambda logprobs, old, advantages, mask, config: made(logprobs))
    inputs = (RATIOS.clone().requires_grad_(), RATIOS, RATIOS, torch.ones_like(RATIOS).bool())
    message = f"the policy loss 'mine' returned {wrong}.* It must return .loss, counts.*here .1, 5."
    with pytest.raises(UserCodeError, match=message):
        token_losses(*inputs, AlgorithmConfig(policy_loss="mine"))


def test_an_exception_of_a_custom_loss_is_a_user_code_error():
    policy_loss("mine")(lambda logprobs, old, advantages, mask, config: logprobs @ old)
    inputs = (RATIOS.clone().requires_grad_(), RATIOS, RATIOS, torch.ones_like(RATIOS).bool())
    message = r"the policy loss 'mine' raised RuntimeError: .*\(.*test_losses.py:\d+\)"
    with pytest.raises(UserCodeError, match=message) as raised:
        token_losses(*inputs, AlgorithmConfig(policy_loss="mine"))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_kl_alone_may_learn():
    policy_loss("none")(lambda logprobs, old, advantages, mask, config: (old * 0, {}))
    config = AlgorithmConfig(policy_loss="none", kl_loss_coef=0.1)
    mask = torch.ones_like(RATIOS).bool()
    loss, counts = token_losses(RATIOS.clone().requires_grad_(), RATIOS, RATIOS, mask, config)
    assert not loss.any() and counts == {}


# --- vanilla --------------------------------------------------------------------------------------


def test_vanilla_clips_as_the_paper_draws_it():
    """Figure 1: above the clip with a good token and below it with a bad one, no gain."""
    good, counts, gradient = apply(vanilla, RATIOS, 1.0)
    torch.testing.assert_close(good, -tensor([[0.5, 0.9, 1.0, 1.1, 1.3]]))
    assert counts["pg_clipfrac"].tolist() == [[False, False, False, False, True]]
    torch.testing.assert_close(gradient, -tensor([[0.5, 0.9, 1.0, 1.1, 0.0]]))
    bad, counts, gradient = apply(vanilla, RATIOS, -1.0)
    torch.testing.assert_close(bad, tensor([[0.8, 0.9, 1.0, 1.1, 1.5]]))
    assert counts["pg_clipfrac"].tolist() == [[True, False, False, False, False]]
    torch.testing.assert_close(gradient, tensor([[0.0, 0.9, 1.0, 1.1, 1.5]]))
    assert set(counts) == {"pg_clipfrac"}


def test_dual_clip_holds_bad_tokens_that_became_much_likelier():
    ratios = tensor([[0.5, 1.0, 2.9, 3.1, 50.0]])
    bad, counts, gradient = apply(vanilla, ratios, -2.0, DUAL)
    torch.testing.assert_close(bad, tensor([[1.6, 2.0, 5.8, 6.0, 6.0]]))
    assert counts["pg_clipfrac_lower"].tolist() == [[False, False, False, True, True]]
    assert counts["pg_clipfrac"].tolist() == [[True, False, False, False, False]]
    torch.testing.assert_close(gradient, tensor([[0.0, 2.0, 5.8, 0.0, 0.0]]))
    good, counts, gradient = apply(vanilla, ratios, 2.0, DUAL)
    assert not counts["pg_clipfrac_lower"].any()
    free = apply(vanilla, ratios, 2.0)
    assert torch.equal(good, free[0]) and torch.equal(gradient, free[2])


@given(st.floats(-8, 8), st.floats(-5, 5), st.floats(1.01, 6))
def test_dual_clip_bounds_the_loss_of_every_bad_token(log_ratio, advantage, bound):
    config = AlgorithmConfig(dual_clip=bound)
    ratios = tensor([[log_ratio]], dtype=torch.float64).exp()
    dual, counts, _ = apply(vanilla, ratios, advantage, config)
    free, _, _ = apply(vanilla, ratios, advantage, AlgorithmConfig())
    if advantage < 0:
        assert dual.item() == min(free.item(), -advantage * bound)
    else:
        assert dual.item() == free.item()
    assert counts["pg_clipfrac_lower"].item() == (dual.item() != free.item())


# --- gspo -----------------------------------------------------------------------------------------


def rows(seed, spread):
    """Logprobs, old ones, one advantage a row, mask; rows of 4, 1, 0 and 3 tokens."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(4) < tensor([[4], [1], [0], [3]])
    old = -3 * torch.rand(4, 4, generator=g, dtype=torch.float64)
    logprobs = old + spread * torch.randn(4, 4, generator=g, dtype=torch.float64)
    advantages = torch.randn(4, 1, generator=g, dtype=torch.float64).expand(4, 4)
    return logprobs, old, advantages, mask


@given(st.integers(0, 2**31), st.floats(0, 2))
@examples(100)
def test_gspo_is_the_papers_sequence_level_objective(seed, spread):
    """Equation 5: the root of a row's likelihood ratio by its length, clipped as a whole."""
    values, old, advantages, mask = rows(seed, spread)
    lengths = mask.sum(1)
    paper, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
    objective = 0.0
    for i in lengths.nonzero()[:, 0].tolist():
        n = int(lengths[i])
        likelihood = (paper[i, :n].sum() - old[i, :n].sum()).exp() ** (1 / n)
        a = advantages[i, 0]
        objective += -torch.minimum(likelihood * a, likelihood.clamp(0.8, 1.3) * a) / 3
    objective.backward()
    loss, _ = gspo(ours, old, advantages, mask, CONFIG)
    weights = mask / lengths.clamp(min=1)[:, None] / 3  # seq-mean-token-mean
    (weights * loss).sum().backward()
    torch.testing.assert_close((weights * loss).sum(), objective)
    torch.testing.assert_close(ours.grad, paper.grad)


def test_gspo_clips_all_tokens_of_a_row_or_none():
    ratios = tensor([[4.0, 0.5, 1.0], [4.0, 1.0, 1.0]])  # roots of 2 and of 4: 1.26 and 1.59
    loss, counts, gradient = apply(gspo, ratios, 1.0)
    assert counts["pg_clipfrac"].tolist() == [[False] * 3, [True] * 3]
    torch.testing.assert_close(loss, -tensor([[2 ** (1 / 3)] * 3, [1.3] * 3]))
    torch.testing.assert_close(gradient, -tensor([[2 ** (1 / 3)] * 3, [0.0] * 3]))


def test_gspo_bounds_a_bad_rows_ratio_with_dual_clip():
    loss, counts, gradient = apply(gspo, tensor([[8.0, 8.0], [2.0, 2.0]]), -1.0, DUAL)
    torch.testing.assert_close(loss, tensor([[3.0, 3.0], [2.0, 2.0]]))
    assert counts["pg_clipfrac_lower"].tolist() == [[True, True], [False, False]]
    torch.testing.assert_close(gradient, tensor([[0.0, 0.0], [2.0, 2.0]]))


# --- cispo ----------------------------------------------------------------------------------------


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """Equations 4 and 5: minus clipped ratio times advantage times log pi."""
    weights = tensor([[0.8, 0.9, 1.0, 1.1, 1.3]])
    for advantage in (1.0, -2.0):
        loss, counts, gradient = apply(cispo, RATIOS, advantage)
        torch.testing.assert_close(loss, -weights * advantage * (RATIOS.log() - 1))
        torch.testing.assert_close(gradient, -weights * advantage)
        assert counts["pg_clipfrac"].tolist() == [[True, False, False, False, True]]


def test_cispo_of_the_table_has_no_bound_from_below():
    config = AlgorithmConfig(name="cispo")
    _, counts, gradient = apply(cispo, tensor([[1e-4, 5.0]]), 1.0, config)
    torch.testing.assert_close(gradient, -tensor([[1e-4, 1.28]]))
    assert counts["pg_clipfrac"].tolist() == [[False, True]]


# --- sapo and dppo --------------------------------------------------------------------------------


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=4), st.floats(-3, 3), st.floats(0.2, 5))
@examples(100)
def test_sapo_has_the_gradient_of_the_paper(log_ratios, advantage, tau):
    """The gradient of a token is -w A r, w = 4 p (1 - p), p = sigmoid(tau (r - 1))."""
    config = AlgorithmConfig(name="sapo", tau_pos=tau, tau_neg=2 * tau)
    ratios = tensor([log_ratios], dtype=torch.float64).exp()
    loss, counts, gradient = apply(sapo, ratios, advantage, config)
    own = tau if advantage > 0 else 2 * tau
    p = 1 / (1 + torch.exp(-own * (ratios - 1)))
    torch.testing.assert_close(loss, -4 / own * p * advantage)
    torch.testing.assert_close(gradient, -4 * p * (1 - p) * ratios * advantage)
    assert counts == {} and config.loss_agg_mode == "seq-mean-token-mean"


def test_sapo_attenuates_far_tokens_and_clips_none():
    config = AlgorithmConfig(name="sapo")
    _, _, gradient = apply(sapo, tensor([[0.5, 1.0, 1.5, 3.0]]), -1.0, config)
    p = torch.sigmoid(1.05 * tensor([[-0.5, 0.0, 0.5, 2.0]]))
    torch.testing.assert_close(gradient, 4 * p * (1 - p) * tensor([[0.5, 1.0, 1.5, 3.0]]))
    _, _, good = apply(sapo, tensor([[3.0]]), 1.0, config)
    p = torch.sigmoid(tensor([[2.0]]))  # another temperature
    torch.testing.assert_close(good, -4 * p * (1 - p) * 3)


def test_dppo_stops_tokens_whose_probability_has_moved():
    """A rare token may become 10 times likelier; a common one may not gain 0.2."""
    old = tensor([[0.01, 0.01, 0.5, 0.5, 0.9, 0.9]]).log()
    now = tensor([[0.1, 0.3, 0.69, 0.71, 0.69, 0.71]]).log()
    mask, config = torch.ones(1, 6).bool(), AlgorithmConfig(clip_low=0.2, clip_high=0.2)
    for advantage, stopped in ((1.0, [0, 1, 0, 1, 0, 0]), (-1.0, [0, 0, 0, 0, 1, 0])):
        logprobs = now.clone().requires_grad_()
        advantages = torch.full_like(old, advantage)
        loss, counts = dppo(logprobs, old, advantages, mask, config)
        loss.sum().backward()
        keep = 1 - tensor([stopped]).float()
        assert counts["pg_clipfrac"].tolist() == [[bool(x) for x in stopped]]
        torch.testing.assert_close(logprobs.grad, -advantage * (now - old).exp() * keep)
        torch.testing.assert_close(loss.detach(), -advantage * (now - old).exp() * keep)
        bounded, counts = dppo(now, old, advantages, mask, DUAL)
        torch.testing.assert_close(bounded[0, 0], tensor(-advantage * 3.0))
        assert counts["pg_clipfrac_lower"][0, 0]


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        (
            ["policy_loss=sapo", "clip_low=0.1", "dual_clip=3", "ppo_epochs=2", "tau_neg=2"],
            ["clip_low", "dual_clip"],
        ),
        (["policy_loss=dppo", "dual_clip=3", "ppo_epochs=2", "tau_pos=2"], ["tau_pos"]),
        (["tis_low=0.5"], ["tis_low"]),
        (["tis_low=0.5", "tis_mode=mask"], []),
        (["policy_loss=cispo", "dual_clip=3", "ppo_epochs=2"], ["dual_clip"]),
        (["policy_loss=gspo", "dual_clip=3", "ppo_epochs=2"], []),
        (["dual_clip=3"], ["dual_clip"]),
        (["value_clip=1", "ppo_epochs=2"], ["value_clip"]),
        (["name=ppo", "value_clip=1"], ["value_clip"]),
        (["name=ppo", "value_clip=1", "mini_batch_size=4"], []),
    ],
)
def test_clips_that_do_nothing_are_named(keys, idle):
    config = load_config(None, [f"algorithm.{k}" for k in keys])
    assert [n.partition("=")[0] for n in without_effect(config)] == [f"algorithm.{k}" for k in idle]


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(st.integers(0, 2**31))
@examples(30)
def test_on_the_first_pass_the_gradient_is_the_plain_policy_gradient(name, seed):
    logprobs, _, _, mask = rows(seed, 0)
    advantages = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).double()
    logprobs.requires_grad_()
    for config in (CONFIG, DUAL):
        (loss, counts) = LOSSES[name](logprobs, logprobs.detach(), advantages, mask, config)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        rounding = 1e-15 if name == "sapo" else 0.0  # tau * (4 / tau)
        expected = torch.where(mask, -advantages, 0.0)
        torch.testing.assert_close(gradient, expected, rtol=rounding, atol=0.0)
        assert not any(count.any() for count in counts.values())


NUMBERS = st.floats(-6, 0, width=32)
SPOILT = st.sampled_from([math.nan, math.inf, -math.inf, 1e9, -1e9, 0.5])


@st.composite
def spoilt_rows(draw):
    """Three tensors (b, A) and a mask, and the same with anything off the mask."""
    b, a = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    on = draw(st.lists(st.booleans(), min_size=b * a, max_size=b * a))
    clean = [[draw(NUMBERS) if x else 0.0 for x in on] for _ in range(3)]
    spoilt = [[v if x else draw(SPOILT) for v, x in zip(row, on, strict=True)] for row in clean]
    mask = tensor(on).view(b, a)
    # Advantages of both signs, beside logprobs that are negative.
    shift = tensor([[0.0], [0.0], [3.0]])
    clean, spoilt = (
        list((tensor(x) + shift * tensor(on)).view(3, b, a).unbind()) for x in (clean, spoilt)
    )
    return clean, spoilt, mask


@pytest.mark.parametrize("name", policy_losses.names())
@pytest.mark.parametrize("config", [CONFIG, DUAL], ids=["clip", "dual"])
@given(spoilt_rows())
@examples(60)
def test_values_outside_the_mask_change_no_bit(name, config, world):
    clean, spoilt, mask = world
    results = []
    for logprobs, old, advantages in (clean, spoilt):
        logprobs = logprobs.clone().requires_grad_()
        loss, counts = policy_losses.get(name)(logprobs, old, advantages, mask, config)
        loss.sum().backward()
        assert (loss[~mask] == 0).all() and (logprobs.grad[~mask] == 0).all()
        assert not any(count[~mask].any() for count in counts.values())
        results.append([loss.detach(), logprobs.grad, *counts.values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "elementwise"), [("vanilla", 1), ("gspo", 0), ("cispo", 1), ("sapo", 1), ("dppo", 1)]
)
def test_which_tokens_a_loss_depends_on(name, elementwise):
    logprobs, old, advantages, mask = rows(1, 0.05)
    moved = logprobs.clone()
    moved[0, 0] += 0.1
    wide = AlgorithmConfig(clip_low=1.0, clip_high=9.0)
    before, after = (LOSSES[name](x, old, advantages, mask, wide)[0] for x in (logprobs, moved))
    changed = before != after
    assert changed[0].tolist() == ([True, False, False, False] if elementwise else [True] * 4)
    assert not changed[1:].any()


@pytest.mark.parametrize("name", LOSSES)
def test_the_position_of_a_token_in_its_row_does_not_matter(name):
    """The loss depends neither on the width of the rows nor on the other rows of the batch."""
    logprobs, old, advantages, mask = rows(2, 0.3)
    whole, _ = LOSSES[name](logprobs, old, advantages, mask, CONFIG)
    for i in (0, 1, 3):
        n = int(mask[i].sum())
        spots = tensor([5, 0, 3, 6])[:n]
        at = torch.zeros(1, 8, dtype=torch.bool).index_fill(1, spots, True)
        spread = [
            torch.full((1, 8), math.nan, dtype=torch.float64).index_copy(1, spots, x[i : i + 1, :n])
            for x in (logprobs, old, advantages)
        ]
        loss, _ = LOSSES[name](*spread, at, CONFIG)
        torch.testing.assert_close(loss[0, spots], whole[i, :n])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("far", [-1e9, 1e9])
def test_extreme_ratios_give_finite_losses(name, far):
    logprobs = tensor([[far, -1.0]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for sign in (1.0, -1.0):
        loss, _ = LOSSES[name](logprobs, torch.zeros(1, 2), tensor([[sign, sign]]), mask, CONFIG)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all() and gradient.isfinite().all()
    assert ratio(tensor([far, -far])).isfinite().all()


# --- value loss -----------------------------------------------------------------------------------

VALUES, OLD_VALUES, RETURNS = tensor([2.0, 0.2, -1.0]), torch.zeros(3), tensor([3.0, 1.0, -3.0])


def test_value_loss_takes_the_larger_of_free_and_clipped():
    values = VALUES.clone().requires_grad_()
    loss, clipped = value_loss(values, OLD_VALUES, RETURNS, clip=0.5)
    loss.sum().backward()
    torch.testing.assert_close(loss, 0.5 * tensor([2.5**2, 0.8**2, 2.5**2]))
    assert clipped.tolist() == [True, False, True]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, tensor([0.0, -0.8, 0.0]))


def test_value_loss_without_a_clip_is_half_the_squared_error():
    values = VALUES.clone().requires_grad_()
    loss, clipped = value_loss(values, OLD_VALUES, RETURNS, clip=0)
    loss.sum().backward()
    torch.testing.assert_close(loss, 0.5 * tensor([1.0, 0.8**2, 4.0]))
    assert not clipped.any()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, VALUES - RETURNS)


# --- logprobs -------------------------------------------------------------------------------------


@given(st.floats(0.2, 3.0), st.integers(0, 2**31))
@examples(50)
def test_temperature_divides_logits_and_never_logprobs(temperature, seed):
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(seed)).double()
    layer = torch.eye(11).double()
    every = torch.stack(
        [
            chosen_logprobs(logits, Head(layer), torch.full((3,), v), temperature)[0]
            for v in range(11)
        ],
        1,
    )
    torch.testing.assert_close(every, torch.log_softmax(logits / temperature, -1))
    torch.testing.assert_close(every.exp().sum(1), torch.ones(3).double())


def test_entropy_is_that_of_the_tempered_distribution():
    logits = tensor([[0.0, 0.7 * math.log(3.0)]])  # at 0.7 the second is three times likelier
    _, entropy = chosen_logprobs(logits, Head(torch.eye(2)), tensor([0]), 0.7)
    expected = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropy.item() == pytest.approx(expected, rel=1e-5)
