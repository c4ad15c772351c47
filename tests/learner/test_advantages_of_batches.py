"""Estimators on batches: small worlds by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.trainer_fixtures import config, group, scored, segment, turn
from torch import tensor

from agentrl import registry
from agentrl.config import AlgorithmConfig, Config, RewardConfig
from agentrl.config.algorithm import ALGORITHMS
from agentrl.config.checks import without_effect
from agentrl.errors import ConfigError, DataError, RegistryError, RunStopped, UserCodeError
from agentrl.learner.algorithms import (
    dead_groups,
    estimate,
    has_learning_signal,
    make_targets,
    whiten,
)
from agentrl.learner.batch import collate
from agentrl.metrics import rollout_metrics
from agentrl.preflight import make_plan

NAN = float("nan")
PAD = 0


def world(**keys):
    """Two groups of two; the first rollout of each earned 1 in the first of two turns."""

    def two_turns(first: float, total: float):
        row = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5]))
        return scored([row], total, [turn(0, 0, 2, turn=first), turn(0, 3, 4)])

    groups = [
        group(two_turns(1.0, 3.0), two_turns(0.0, 0.0)),
        group(two_turns(1.0, 2.0), two_turns(0.0, 1.0)),
    ]
    return collate(groups, PAD, RewardConfig(turn_weight=1.0)), config(**keys)


def advantages_of(batch, keys, values=None) -> list[list[float]]:
    """The advantages of each row's three chosen tokens."""
    targets = make_targets(batch, keys, None, values, None)
    assert not targets.advantages[~batch.action_mask].any()
    return [[round(a, 5) for a in row] for row in targets.advantages[:, [0, 1, 3]].tolist()]


def test_grpo_rloo_and_the_baseline_of_reinforce_plus_plus():
    batch, keys = world(algorithm__norm_adv_by_std=False)
    of_rollout = [[a] * 3 for a in (1.5, -1.5, 0.5, -0.5)]
    assert advantages_of(batch, keys) == of_rollout
    _, keys = world()
    assert advantages_of(batch, keys) == [[round(a * 0.5**0.5, 5)] * 3 for a in (1, -1, 1, -1)]
    _, keys = world(algorithm__name="rloo")
    assert advantages_of(batch, keys) == [[a] * 3 for a in (3, -3, 1, -1)]
    name = "reinforce_plus_plus_baseline"
    _, keys = world(algorithm__name=name, algorithm__whiten_advantages=False)
    assert advantages_of(batch, keys) == of_rollout
    _, keys = world(algorithm__name=name)
    spread = (3 * (1.5**2 * 2 + 0.5**2 * 2) / 11) ** 0.5
    assert advantages_of(batch, keys) == [
        [round(a / spread, 5)] * 3 for a in (1.5, -1.5, 0.5, -0.5)
    ]


def test_remax_compares_with_the_greedy_rollout():
    batch, keys = world(algorithm__name="remax")
    with pytest.raises(ConfigError, match="greedy rollout of each prompt, but the batch has none"):
        advantages_of(batch, keys)
    batch = replace(batch, baseline=tensor([2.0, 2.0, 1.0, 1.0]))
    assert advantages_of(batch, keys) == [[a] * 3 for a in (1, -2, 1, 0)]


def test_the_greedy_rollouts_reward_comes_from_the_group():
    one, other = (scored([segment([1], ("A", [2]))], r) for r in (1.0, 0.5))
    with_greedy = replace(group(one, other), greedy=scored([segment([1], ("A", [3]))], 0.25))
    batch = collate([with_greedy, with_greedy], PAD)
    assert batch.baseline is not None and batch.baseline.tolist() == [0.25] * 4
    assert len(batch.rewards) == len(batch.rollout) == 4  # it is no rollout of the batch
    assert collate([with_greedy, group(one)], PAD).baseline is None


def test_reinforce_plus_plus_gets_turn_rewards_at_their_tokens():
    name = "reinforce_plus_plus"
    batch, keys = world(
        algorithm__name=name, algorithm__gamma=0.5, algorithm__whiten_advantages=False
    )
    # Rewards of the chosen tokens: 0 1 2 | 0 0 0 | 0 1 1 | 0 0 1
    expected = [[1, 2, 2], [0, 0, 0], [0.75, 1.5, 1], [0.25, 0.5, 1]]
    assert advantages_of(batch, keys) == expected
    _, keys = world(algorithm__name=name, algorithm__gamma=0.5)
    every = tensor(expected)
    white = (every - every.mean()) / every.std()
    torch.testing.assert_close(tensor(advantages_of(batch, keys)), white, atol=1e-4, rtol=0.0)


def test_ppo_gets_turn_rewards_at_their_tokens():
    batch, keys = world(
        algorithm__name="ppo", algorithm__gamma=0.5, algorithm__whiten_advantages=False
    )
    values = torch.where(batch.action_mask, 1.0, NAN)
    targets = make_targets(batch, keys, None, values, None)
    assert targets.returns is not None
    assert targets.returns[:, [0, 1, 3]].tolist() == [
        [1, 2, 2],
        [0, 0, 0],
        [0.75, 1.5, 1],
        [0.25, 0.5, 1],
    ]
    assert advantages_of(batch, keys, values)[0] == [0, 1, 1]
    with pytest.raises(AssertionError, match="needs the values of a critic"):
        advantages_of(batch, keys)


def test_any_estimator_can_be_whitened():
    batch, keys = world(algorithm__name="turn_rloo", algorithm__whiten_advantages=True)
    advantages = make_targets(batch, keys, None, None, None).advantages
    plain, _ = estimate(batch, keys.algorithm)
    assert not torch.equal(advantages, plain)
    torch.testing.assert_close(advantages, whiten(plain, batch.action_mask))


def test_the_kl_penalty_is_applied_before_rewards_are_compared():
    """A nat at each token of the first rollout, of which it has three."""
    batch, keys = world(
        algorithm__name="rloo", algorithm__kl_reward_coef=0.5, algorithm__kl_type="k1"
    )
    old = torch.where(batch.action_mask, -1.0, NAN)
    reference = old.clone()
    reference[0] -= 1
    advantages = make_targets(batch, keys, old, None, reference).advantages
    assert advantages[:, 0].tolist() == [1.5, -1.5, 1, -1]
    steered = make_targets(batch, keys, old, None, reference, kl_coef=1.0).advantages
    assert steered[:, 0].tolist() == [0, 0, 1, -1]
    _, keys = world(
        algorithm__adv_estimator="reinforce_plus_plus",
        algorithm__kl_reward_coef=0.5,
        algorithm__kl_type="k1",
    )
    advantages = make_targets(batch, keys, old, None, reference).advantages
    assert advantages[0].tolist() == [1.5, 2.0, 0, 1.5]


# --- dead groups ----------------------------------------------------------------------------------


def test_a_dead_group_is_one_whose_advantages_are_all_exactly_zero():
    def rollout(reward: float, masked: bool = False):
        return scored([segment([1], ("A", [2]), ("E", [3]))], reward, masked=masked)

    groups = [
        group(rollout(0.1), rollout(0.1), rollout(0.1)),
        group(rollout(0.1), rollout(0.2)),
        group(),
        group(rollout(1.0), rollout(0.0, masked=True)),
        group(rollout(0.0), rollout(1e-9)),
    ]
    batch = collate(groups, PAD)
    advantages, _ = estimate(batch, AlgorithmConfig(name="rloo"))
    assert dead_groups(batch, advantages).tolist() == [True, False, True, True, False]
    spoilt = torch.where(batch.action_mask, advantages, NAN)  # observed: nobody looks
    assert dead_groups(batch, spoilt).tolist() == [True, False, True, True, False]


def test_different_turn_rewards_make_a_group_live_although_totals_are_equal():
    def rollout(first: float):
        row = segment([1], ("A", [2]), ("E", [3]), ("A", [4]))
        return scored([row], 1.0, [turn(0, 0, 1, turn=first), turn(0, 2, 3)])

    batch = collate([group(rollout(0.0), rollout(1.0))], PAD, RewardConfig(turn_weight=1.0))
    for name, dead in (("rloo", True), ("turn_rloo", False)):
        advantages, _ = estimate(batch, AlgorithmConfig.model_validate({"name": name}))
        assert dead_groups(batch, advantages).tolist() == [dead]


# --- the registry ---------------------------------------------------------------------------------


def test_shipped_estimators_are_registered_by_their_names():
    kind = registry.advantage_estimators
    for name in kind.shipped:
        assert kind.get(name).__name__ == name


@pytest.mark.parametrize(
    ("returns", "wrong"),
    [
        (lambda r: r, r"a tensor of shape \(4, 4\) instead of a pair"),
        (lambda r: None, "None instead of a pair"),
        (lambda r: (r, None, {}), "a tuple of 3 instead of a pair"),
        (lambda r: (r.tolist(), None), "a list of 4 for the advantages"),
        (lambda r: (r, r[0]), r"a tensor of shape \(4,\) for the returns"),
    ],
)
def test_wrong_return_values_of_an_estimator_are_explained(returns, wrong):
    registry.advantage_estimator("mine")(lambda b, r, v, c: returns(r))
    batch, keys = world(algorithm__adv_estimator="mine")
    message = (
        f"the advantage estimator 'mine' returned {wrong}. It must return .advantages, returns"
    )
    with pytest.raises(UserCodeError, match=message):
        make_targets(batch, keys, None, None, None)


def test_a_custom_estimator():

    @registry.advantage_estimator("half")
    def half(batch, token_rewards, values, config):
        return torch.full_like(token_rewards, 0.5), None

    batch, keys = world(algorithm__adv_estimator="half", algorithm__filter_groups=True)
    targets = make_targets(batch, keys, None, None, None)
    assert targets.advantages[batch.action_mask].unique().tolist() == [0.5]
    registry.advantage_estimator("one a rollout")(lambda b, r, v, c: (b.rewards, None))
    registry.advantage_estimator("infinite")(lambda b, r, v, c: (r / 0, None))
    _, keys = world(algorithm__adv_estimator="one a rollout")
    message = r"a tensor of shape \(4,\) for the advantages. It must .* \(B, T\) .*, here \(4, 4\)"
    with pytest.raises(UserCodeError, match=message):
        make_targets(batch, keys, None, None, None)
    _, keys = world(algorithm__adv_estimator="infinite")
    with pytest.raises(RunStopped, match="estimator 'infinite' is not finite"):
        make_targets(batch, keys, None, None, None)
    with pytest.raises(
        RegistryError, match="has the name of the shipped advantage estimator 'grpo'"
    ):
        registry.advantage_estimator("grpo")(half)
    with pytest.raises(RegistryError, match="needs a name"):
        registry.advantage_estimator(half)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RegistryError, match="Did you mean 'half'"):
        registry.advantage_estimators.get("halve")


def bernoulli(p, n):
    """All outcomes of n independent rollouts that succeed with probability p: (2^n, n), (2^n,)."""
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * n)
    return outcomes, (p**outcomes * (1 - p) ** (1 - outcomes)).prod(1)


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_maxrl_has_the_gradient_of_the_first_terms_of_log_p(n, p):
    """Theorem 5 of arXiv:2602.02710: with n rollouts, n - 1 terms of -sum_k (1 - p)^k / k."""
    theta = torch.tensor(p, dtype=torch.float64).logit().requires_grad_()
    (likelihood,) = torch.autograd.grad(
        -sum((1 - theta.sigmoid()) ** k / k for k in range(1, n)), theta
    )
    outcomes, chances = bernoulli(p, n)
    score = outcomes - p  # of the logit, for each rollout
    expected = 0.0
    for rewards, chance, scores in zip(outcomes, chances, score, strict=True):
        members = [scored([segment([1], ("A", [5]))], float(r), [turn(0, 0, 1)]) for r in rewards]
        batch, c = collate([group(*members)]), config(algorithm__name="maxrl")
        targets = make_targets(batch, c, None, None, None)
        gradient = (targets.weights * targets.advantages)[:, 0]
        expected += chance * (gradient * scores).sum()
    torch.testing.assert_close(expected, likelihood, rtol=1e-12, atol=1e-12)


def test_maxrl_counts_rollouts_and_ignores_those_that_do_not_train():
    two_rows = [segment([1], ("A", [5]), ("E", [2])), segment([1], ("A", [6, 7]))]
    batch = collate(
        [
            group(
                scored(two_rows, 1.0, [turn(0, 0, 1), turn(1, 0, 2)]),
                scored([segment([1], ("A", [5]))], 0.0, [turn(0, 0, 1)]),
                scored([segment([1], ("A", [5]))], 0.0, [turn(0, 0, 1)]),
                scored([segment([1], ("A", [5]))], 1.0, [turn(0, 0, 1)], masked=True),
            ),
            group(*[scored([segment([1], ("A", [5]))], 0.0, [turn(0, 0, 1)])] * 2),
            group(scored([segment([1], ("A", [5]))], 1.0, [turn(0, 0, 1)])),
        ]
    )
    advantages, returns = estimate(batch, config(algorithm__name="maxrl").algorithm)
    expected = [[2.0, 0.0], [2.0, 2.0], [-1.0, 0.0], [-1.0, 0.0], *[[0.0, 0.0]] * 4]
    torch.testing.assert_close(advantages, tensor(expected, dtype=torch.float64))
    assert not advantages[4:].any()
    assert returns is None


def test_maxrl_refuses_negative_rewards():
    rows = [scored([segment([1], ("A", [5]))], r, [turn(0, 0, 1)]) for r in (1.0, -0.5)]
    keys = config(algorithm__name="maxrl").algorithm
    with pytest.raises(RunStopped, match=r"has the reward -0\.5: .*Return rewards of 0 and 1"):
        estimate(collate([group(*rows)]), keys)
    for name, value in (("algorithm__kl_reward_coef", 0.1), ("reward__overlong_buffer", 9)):
        with pytest.raises(ValueError, match=f"{name.replace('__', '.')}=.*maxrl"):
            config(algorithm__name="maxrl", **{name: value})


FILE = """
import torch
from agentrl import advantage_estimator, policy_loss

@advantage_estimator("mine_of_batches")
def mine(batch, token_rewards, values, config):
    return torch.ones_like(token_rewards), None

@policy_loss("mine_of_batches")
def loss(logprobs, old_logprobs, advantages, mask, config):
    return -advantages * logprobs, {}
"""


def test_names_are_checked_before_a_model_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "ground_truth": "2"}')
    names = {"adv_estimator": "mine_of_batches", "policy_loss": "mine_of_batches"}
    tree = {
        "data": {"train": str(tmp_path / "rows.jsonl"), "batch_size": 1},
        "reward": {"function": "exact_of_batches"},
        "algorithm": names,
    }
    registry.rewards.add("exact_of_batches", lambda trajectory: 1.0)
    with pytest.raises(DataError) as e:
        make_plan(Config.model_validate(tree))
    estimator, loss = str(e.value).splitlines()
    assert estimator.startswith("algorithm.adv_estimator: no advantage estimator named 'mine_of")
    assert "Registered: gae, grpo, maxrl, opd, reinforce_plus_plus, " in estimator
    assert loss.endswith("Registered: cispo, dppo, gspo, sapo, vanilla")
    make_plan(Config.model_validate(tree | {"files": [str(tmp_path / "mine.py")]}))


@pytest.mark.parametrize(
    "name", sorted(ALGORITHMS.keys() - {"opd"})
)  # with a teacher: test_distillation
def test_every_row_of_the_table_is_a_run(name):
    c = config(algorithm__name=name)
    assert c.algorithm.adv_estimator in registry.advantage_estimators
    assert c.algorithm.policy_loss in registry.policy_losses
    assert c.algorithm.critic == (name == "ppo")
    assert not any("algorithm." in line for line in without_effect(c))
    batch, _ = world()
    batch = replace(batch, baseline=torch.zeros(4))
    values = torch.zeros_like(batch.token_rewards)
    targets = make_targets(batch, c, None, values if c.algorithm.critic else None, None)
    assert targets.advantages[batch.action_mask].any() and targets.weights.any()


def test_the_guide_has_the_table():
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    table = page.split("| paper |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == list(ALGORITHMS)
    for row, keys in zip(rows, ALGORITHMS.values(), strict=True):
        documented = dict(re.findall(r"`algorithm\.(\w+)=([^`]+)`", row[2]))
        assert documented.keys() == keys.keys()
        assert AlgorithmConfig.model_validate(documented) == AlgorithmConfig.model_validate(keys)


def test_settings_that_an_estimator_does_not_read_are_named():
    def unread(**keys) -> set[str]:
        lines = without_effect(config(**{f"algorithm__{k}": v for k, v in keys.items()}))
        return {line.split("=")[0].removeprefix("algorithm.") for line in lines}

    settings = {"gamma": 0.5, "lam": 0.5, "norm_adv_by_std": False, "loss_scale": 9}
    for estimator, read in (
        ("grpo", {"norm_adv_by_std"}),
        ("gae", {"gamma", "lam"}),
        ("reinforce_plus_plus", {"gamma"}),
        ("rloo", set()),
        ("one_of_mine", {"gamma", "lam", "norm_adv_by_std"}),
    ):
        assert unread(adv_estimator=estimator, **settings) == settings.keys() - read, estimator
    assert not unread(loss_agg_mode="seq-mean-token-sum-norm", loss_scale=9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "turn_rloo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_rollout_are_refused(name):
    keys = {"algorithm__adv_estimator": name, "data__batch_size": 4}
    with pytest.raises(ValueError, match=f"adv_estimator={name} compares the rollouts of a prompt"):
        config(rollout__n=1, **keys)
    config(rollout__n=1, trainer__val_only=True, data__val="rows.jsonl", **keys)
    config(rollout__n=1, algorithm__adv_estimator="remax")


# --- rewards that are large beside their differences, or equal -----------------------------------


LARGE = 1.7e7
"""In float32 the next number after it is 2 further on."""


def pair(first: float, second: float, greedy: float = 0.0, masked: bool = False):
    """A group of two; the first is rewarded in its turn, as far as that goes."""
    rows = [
        scored([segment([1], ("A", [2, 3]))], r, [turn(0, 0, 2, turn=r)], masked)
        for r in (first, second)
    ]
    return replace(group(*rows), greedy=scored([segment([1], ("A", [2]))], greedy))


def targets_of(keys: Config, *groups, kl: float = 0.0):
    """Batch and targets; a critic says 0, and policy and reference are `kl` nats apart."""
    batch = collate(groups, PAD, RewardConfig(turn_weight=1.0))
    zeros = torch.zeros_like(batch.rollout_logprobs)
    values = zeros if keys.algorithm.critic else None
    apart = torch.arange(zeros.numel()).view(zeros.shape) * kl
    return batch, make_targets(batch, keys, zeros + apart, values, zeros)


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "remax", "turn_rloo"]
)
def test_a_small_difference_of_large_rewards_is_learned_from(name):
    keys = config(algorithm__adv_estimator=name)
    _, small = targets_of(keys, pair(32.25, 0.0))
    _, large = targets_of(keys, pair(LARGE + 32.25, LARGE, LARGE))
    assert small.advantages[0, 0] > 0
    torch.testing.assert_close(large.advantages, small.advantages, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_a_small_difference_of_large_rewards_is_learned_from_across_groups(name):
    keys = config(algorithm__name=name, algorithm__lam=1.0)
    _, small = targets_of(keys, pair(0.25, 0.0), pair(0.5, 0.0))
    _, large = targets_of(keys, pair(LARGE + 0.25, LARGE), pair(LARGE + 0.5, LARGE))
    assert small.advantages[0, 0] > small.advantages[1, 0]
    torch.testing.assert_close(large.advantages, small.advantages, atol=1e-6, rtol=1e-6)


def test_penalties_keep_a_small_difference_of_large_rewards():
    """A KL in the reward, and rewards in units of their spread."""
    keys = config(algorithm__norm_adv_by_std=False, algorithm__kl_reward_coef=0.5)
    _, targets = targets_of(keys, pair(LARGE + 32.25, LARGE, LARGE), kl=0.1)
    # The tokens are 0 and 0.1, 0.2 and 0.3 nats away: 0.05 and 0.25 off the rewards.
    assert targets.advantages[:, 0].tolist() == pytest.approx([16.225, -16.225], abs=1e-6)


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "remax", "turn_rloo"]
)
@pytest.mark.parametrize("scale", [1.0, -1e3])
def test_rewards_that_differ_by_rounding_are_equal(name, scale):
    keys = config(algorithm__adv_estimator=name)
    rewards = [scale * r for r in (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1)]
    assert rewards[0] != rewards[1]
    groups = [
        pair(*rewards, greedy=rewards[1]),
        pair(scale, scale * (1 + 9e-7), greedy=scale),
        pair(scale, scale * (1 + 1.2e-6), greedy=scale),
    ]
    batch, targets = targets_of(keys, *groups)
    assert not targets.advantages[:4].any() and targets.advantages[4:].any()
    assert dead_groups(batch, targets.advantages).tolist() == [True, True, False]
    shares = [rollout_metrics([g])["waste/dead_group_frac"] for g in groups]
    assert shares == [1.0, 1.0, 0.0]


def test_the_rest_of_a_reward_after_its_turns_has_no_rounding():
    """Two rollouts that earned the same in the same turns, added up in another order."""
    row = segment([1], ("A", [2]), ("E", [3]), ("A", [4]), ("E", [3]), ("A", [4]))
    earned = [(0, 1, 0.1), (2, 3, 0.2), (4, 5, 0.3)]
    turns = [turn(0, start, end, turn=r) for start, end, r in earned]
    keys = config(algorithm__adv_estimator="turn_rloo")
    rewards = (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1)
    _, targets = targets_of(keys, group(*(scored([row], r, turns) for r in rewards)))
    assert rewards[0] != rewards[1] and not targets.advantages.any()


EQUAL = pair(0.5, 0.5, greedy=0.5)
TEACHES = {
    "nothing is masked, rewards differ": ({}, [pair(1.0, 0.0)], True),
    "one group of two": ({}, [EQUAL, pair(1.0, 0.0)], True),
    "equal": ({}, [EQUAL, pair(1.0, 1.0)], False),
    "masked": ({}, [pair(1.0, 0.0, masked=True)], False),
    "a KL in the loss": ({"kl_loss_coef": 0.1, "kl_type": "k2"}, [EQUAL], False),
    "an entropy bonus": ({"entropy_coef": 0.1}, [EQUAL], False),
    "a KL in the reward": ({"kl_reward_coef": 0.1}, [EQUAL], False),
    "and other rewards": ({"kl_reward_coef": 0.1}, [pair(1.0, 0.0)], True),
    "rloo": ({"name": "rloo"}, [EQUAL], False),
    "turn_rloo": ({"name": "turn_rloo"}, [EQUAL], False),
    "reinforce_plus_plus_baseline": ({"name": "reinforce_plus_plus_baseline"}, [EQUAL], False),
    "as the greedy one": ({"name": "remax"}, [EQUAL], False),
    "better than the greedy one": ({"name": "remax"}, [pair(1.0, 1.0)], True),
    "equal within groups, not between": (
        {"name": "reinforce_plus_plus"}, [EQUAL, pair(1.0, 1.0)], True
    ),
    "equal everywhere": ({"name": "reinforce_plus_plus"}, [EQUAL], False),
    "a critic has values to learn": ({"name": "ppo"}, [EQUAL], True),
    "a critic that is right": ({"name": "ppo"}, [pair(0.0, 0.0)], False),
    "a critic, masked": ({"name": "ppo"}, [pair(1.0, 0.0, masked=True)], False),
}  # fmt: skip


@pytest.mark.parametrize("what", TEACHES)
def test_has_learning_signal(what):
    keys, groups, expected = TEACHES[what]
    keys = config(**{f"algorithm__{name}": value for name, value in keys.items()})
    batch, targets = targets_of(keys, *groups, kl=0.1)
    assert has_learning_signal(batch, keys.algorithm, targets) is expected


def test_a_failed_call_is_a_learning_signal_if_rewards_are_equal():
    batch, targets = targets_of(config(), EQUAL)
    assert not has_learning_signal(batch, config().algorithm, targets)
    costs = torch.where(batch.action_mask, 0.5, 0.0).double()
    batch = replace(batch, call_penalties=costs)
    targets = make_targets(batch, config(), None, None, None)
    assert has_learning_signal(batch, config().algorithm, targets)
