"""docs/verl.md, "Where numbers differ": each row of the table, on a batch of a few tokens.

What verl's own functions return is checked with `make test-verl`, in each version of verl. The
table says in which versions they differ from agentrl's.
"""

import re
from pathlib import Path

import pytest
import torch
from support.installed_verl import VERSIONS
from support.trainer_fixtures import config, group, scored, segment, turn
from torch import tensor

from agentrl.config import AlgorithmConfig, OptimConfig
from agentrl.learner.algorithms import loss_weights, make_targets
from agentrl.learner.batch import collate
from agentrl.learner.losses import importance_ratios, importance_weights, rejected_rows
from agentrl.learner.optimizer import learning_rate
from agentrl.registry import policy_losses

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
NORM = "seq-mean-token-sum-norm"
CORE = "verl.trainer.ppo.core_algos"


def versions_that_differ(case: str) -> tuple[str, ...]:
    """Return the versions in the row of the table whose case begins with a text."""
    table = PAGE.read_text().partition("## Where numbers differ")[2]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {case}"))
    cell = row.split(" | ")[1]
    if cell == "all":
        return VERSIONS
    first, last = re.fullmatch(r"(\S+)(?: to (\S+))?", cell).groups()
    return VERSIONS[VERSIONS.index(first) : VERSIONS.index(last or first) + 1]


def is_close(actual, expected) -> bool:
    a, b = torch.as_tensor(actual).float(), torch.as_tensor(expected).float()
    return torch.allclose(a, b, atol=1e-4, rtol=0)


def check(installed, case: str, theirs, ours, expected) -> None:
    """Check verl's result where it differs by the table, and that it is agentrl's elsewhere."""
    differs = installed.version in versions_that_differ(case)
    assert is_close(theirs, expected if differs else ours), (theirs, ours)
    assert differs != is_close(theirs, ours)


def batch_of(*rewards: float, lengths=None, groups=None):
    """Rollouts of one turn, in groups; by default all in one."""
    rows = [
        scored([segment([1], ("A", [2] * n))], reward, [turn(0, 0, n)])
        for reward, n in zip(rewards, lengths or [1] * len(rewards), strict=True)
    ]
    sizes, made = groups or [len(rows)], []
    for size in sizes:
        made.append(group(*rows[:size]))
        rows = rows[size:]
    return collate(made, 0)


def advantages(batch, **keys):
    """Return the advantages of the tokens that were sampled, row by row."""
    targets = make_targets(batch, config(**keys), None, None, None)
    return targets.advantages[batch.action_mask]


def tensor_of(rows) -> dict:
    return {"tensor": rows}


LOSSES, MASK = [[1.0, 1.0, 0.0, 0.0], [4.0] * 4], [[1, 1, 0, 0], [1, 1, 1, 1]]
"""The losses of the tokens of two rollouts."""


def our_loss(mode: str, scale: int = 10) -> float:
    weights = loss_weights(batch_of(1.0, 0.0, lengths=[2, 4]), mode, 0, scale)
    return (weights * tensor(LOSSES)).sum().item()


def test_our_losses():
    assert our_loss(NORM) == pytest.approx((2 + 16) / 10 / 2)
    assert our_loss("token-mean") == pytest.approx((2 + 16) / 6)


@pytest.mark.verl
def test_a_norm_of_verls(installed):
    args = tensor_of(LOSSES), tensor_of(MASK), NORM
    theirs = installed.call(f"{CORE}:agg_loss", *args, loss_scale_factor=10)
    check(installed, f"`algorithm.loss_agg_mode={NORM}`", theirs, our_loss(NORM), 1.8)


@pytest.mark.verl
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_mean_of_verls_over_one_micro_batch_is_ours(installed, mode):
    theirs = installed.call(f"{CORE}:agg_loss", tensor_of(LOSSES), tensor_of(MASK), mode)
    assert theirs == pytest.approx(our_loss(mode))


@pytest.mark.verl
def test_a_mean_of_verls_over_micro_batches(installed):
    """Until 0.7.1, `dp_actor.py` weights the mean of each micro-batch by its rows."""
    rows = [
        {
            "mask": [1] * n,
            "advantages": [-loss] * n,
            **{key: [-1.0] * n for key in ("log_probs", "old_log_probs", "ref_log_prob")},
            "rollout_is_weights": [1.0] * n,
        }
        for loss, n in ((1.0, 2), (4.0, 4))
    ]
    if (installed.folder / "verl/workers/actor/dp_actor.py").exists():
        means = [
            installed.call(f"{CORE}:agg_loss", tensor_of([row]), tensor_of([mask]), "token-mean")
            for row, mask in zip(LOSSES, MASK, strict=True)
        ]
        theirs = sum(means) / 2
    else:
        theirs = installed.call("ppo_losses", rows)
    check(installed, "all means of losses", theirs, our_loss("token-mean"), (1 + 4) / 2)


def test_a_rollout_of_two_rows_is_one_sequence():
    two = scored([segment([1], ("A", [2])), segment([1], ("A", [2]))], 1.0, [turn(0, 0, 1)])
    one = scored([segment([1], ("A", [2]))], 0.0, [turn(0, 0, 1)])
    weights = loss_weights(collate([group(two, one)], 0), "seq-mean-token-mean", 0, 10)
    assert weights[:, 0].tolist() == [0.25, 0.25, 0.5]


@pytest.mark.verl
def test_a_row_of_verls_is_a_sequence(installed):
    mode = "seq-mean-token-mean"
    theirs = [
        installed.call(f"{CORE}:agg_loss", tensor_of(losses), tensor_of([[1]] * 3), mode)
        for losses in ([[1.0], [0.0], [0.0]], [[0.0], [1.0], [0.0]], [[0.0], [0.0], [1.0]])
    ]
    check(installed, "sequence aggregations", theirs, [0.25, 0.25, 0.5], [1 / 3] * 3)


GROUPS = [
    ("grpo", "compute_grpo_outcome_advantage", [7.0, -0.7071, 0.7071]),
    ("rloo", "compute_rloo_outcome_advantage", [7.0, -2.0, 2.0]),
]
ALONE = [7.0, 1.0, 3.0]
"""The rewards of a group of one and a group of two."""


def alone(name: str):
    return advantages(batch_of(*ALONE, groups=[1, 2]), algorithm__name=name)


@pytest.mark.parametrize(("name", "function", "verls"), GROUPS)
def test_a_group_of_one_has_no_advantage(name, function, verls):
    assert is_close(alone(name), [0.0, *verls[1:]])


@pytest.mark.verl
@pytest.mark.parametrize(("name", "function", "verls"), GROUPS)
def test_a_group_of_one_of_verls(installed, name, function, verls):
    rewards, index = tensor_of([[r] for r in ALONE]), {"array": [0, 1, 1]}
    theirs, _ = installed.call(f"{CORE}:{function}", rewards, tensor_of([[1.0]] * 3), index)
    ours = [[a] for a in alone(name).tolist()]
    check(installed, "a group of one rollout", theirs, ours, [[a] for a in verls])


BASELINE = "reinforce_plus_plus_baseline"
FOUR = [1.0, 3.0, 0.0, 8.0]
WHITE = [-0.2970, 0.2970, -1.1882, 1.1882]


def test_whitening_is_a_key_of_its_own():
    batch = batch_of(*FOUR, groups=[2, 2])
    plain = advantages(batch, algorithm__adv_estimator=BASELINE)
    assert plain.tolist() == [-1.0, 1.0, -4.0, 4.0]
    assert is_close(advantages(batch, algorithm__name=BASELINE), WHITE)


@pytest.mark.verl
def test_the_whitening_of_verls(installed):
    theirs, _ = installed.call(
        f"{CORE}:compute_{BASELINE}_outcome_advantage",
        tensor_of([[r] for r in FOUR]),
        tensor_of([[1.0]] * 4),
        {"array": [0, 0, 1, 1]},
    )
    plain = [[-1.0], [1.0], [-4.0], [4.0]]
    case = "`adv_estimator=reinforce_plus_plus_baseline`"
    check(installed, case, theirs, plain, [[w] for w in WHITE])


def over_two_turns(**keys):
    """A rollout of two turns around an observation has reward 1, one of a turn has 0."""
    row = segment([1], ("A", [2, 3]), ("E", [4]), ("A", [5]))
    other = segment([1], ("A", [2, 3, 4, 5]))
    turns = [turn(0, 0, 2), turn(0, 3, 4)]
    batch = collate([group(scored([row], 1.0, turns), scored([other], 0.0, [turn(0, 0, 4)]))], 0)
    return advantages(batch, **keys)


def test_the_return_of_reinforce_plus_plus_passes_over_observations():
    ours = over_two_turns(algorithm__adv_estimator="reinforce_plus_plus")
    assert ours.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.verl
def test_the_return_of_verls_reinforce_plus_plus(installed):
    mask = [[1.0, 1.0, 0.0, 1.0], [1.0] * 4]
    returned, _ = installed.call(
        f"{CORE}:compute_reinforce_plus_plus_outcome_advantage",
        tensor_of([[0.0, 0.0, 0.0, 1.0], [0.0] * 4]),
        tensor_of(mask),
        config={"namespace": {"gamma": 1.0}},
    )
    theirs = tensor(returned)[tensor(mask).bool()]
    ours = over_two_turns(algorithm__name="reinforce_plus_plus")
    # What was 0 before it was whitened is equal again: the first two tokens got no reward.
    reset = [-0.3780, -0.3780, 2.2678, *[-0.3780] * 4]
    check(installed, "`reinforce_plus_plus` over several turns", theirs, ours, reset)


@pytest.mark.verl
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_verls_kl_has_no_importance_weight(installed, weight):
    """agentrl's has: `tests/learner/test_tis.py`."""
    row = {
        "mask": [1, 1],
        "advantages": [0.0, 0.0],
        "log_probs": [-1.0, -1.0],
        "old_log_probs": [-1.0, -1.0],
        "ref_log_prob": [-1.5, -1.0],
        "rollout_is_weights": [weight] * 2,
    }
    settings = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k1"}
    theirs = installed.call("ppo_losses", [row], **settings)
    assert theirs == pytest.approx(0.25)
    assert installed.version in versions_that_differ("KL in the loss with importance weights")


def test_the_first_step_of_the_warm_up_has_a_rate():
    rates = [learning_rate(1.0, OptimConfig(lr_warmup_steps=4), 10, step) for step in range(1, 7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.verl
def test_the_first_step_of_verls_warm_up_has_none(installed):
    theirs = installed.call("first_rates", 4, 6)
    ours = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    case = "learning rate of the first warm-up step"
    check(installed, case, theirs, ours, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0])


# --- policy losses and rejected rows --------------------------------------------------------------

NOW = [[-0.5, -1.2, -3.0, -0.1], [-2.0, -0.4, -0.9, 0.0]]
OLD = [[-0.7, -1.0, -4.5, -0.6], [-1.0, -0.4, -2.4, 0.0]]
ADVANTAGES, TOKENS = [[1.0] * 4, [-2.0] * 4], [[1, 1, 1, 1], [1, 1, 1, 0]]


@pytest.mark.verl
@pytest.mark.parametrize(
    ("name", "ours", "keys", "theirs", "mode"),
    [
        ("sapo", "sapo", {"tau_pos": 0.8}, {"tau_pos": 0.8}, "seq-mean-token-mean"),
        ("dppo_tv", "dppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
         {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}, "token-mean"),
    ],
)  # fmt: skip
def test_the_gradient_of_a_policy_loss_is_verls(installed, name, ours, keys, theirs, mode):
    expected = installed.call("policy_gradient", name, NOW, OLD, ADVANTAGES, TOKENS, **theirs)
    if expected is None:
        assert name == "dppo_tv" and installed.version == "0.7.0"
        return
    now, mask = tensor(NOW).requires_grad_(), tensor(TOKENS).bool()
    settings = AlgorithmConfig(policy_loss=ours, **keys)
    loss, _ = policy_losses.get(ours)(now, tensor(OLD), tensor(ADVANTAGES), mask, settings)
    rows = mask.sum(1, keepdim=True) * 2 if mode == "seq-mean-token-mean" else mask.sum()
    (loss * mask / rows).sum().backward()
    torch.testing.assert_close(now.grad, tensor(expected))


@pytest.mark.verl
def test_the_weights_of_icepop_are_verls(installed):
    gaps = [[0.0, -0.69, -0.70, 1.6, 1.62, 5.0]]
    if installed.version.startswith("0.7"):
        return  # without two thresholds
    helper = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_weights"
    theirs, _ = installed.call(helper, tensor_of(gaps), tensor_of([[1.0] * 6]), "token", "0.5_5.0")
    ratios = importance_ratios(tensor(gaps), torch.zeros(1, 6), torch.ones(1, 6).bool(), "token")
    assert is_close(theirs, importance_weights(ratios, 5.0, "mask", 0.5))
    assert theirs[0][1] > 0.5 and theirs[0][2] == 0 == theirs[0][4] == theirs[0][5]


@pytest.mark.verl
def test_the_rows_that_are_rejected_are_verls_seq_mean_k1(installed):
    """verl's thresholds are those of the ratio of engine to trainer."""
    gaps = [[0.3, 0.0, 0.0], [0.31, 0.0, 9.0], [-0.3, 0.0, 0.0], [-0.1, -0.1, -0.1]]
    mask = [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    helper = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_rejection_mask"
    low, high = 0.87, 1.12
    if installed.version == "0.7.0":  # the ratio of trainer to engine
        args = "geometric", high, low
    else:
        args = "seq_mean_k1", f"{1 / high}_{1 / low}"
    theirs, _ = installed.call(helper, tensor_of(gaps), tensor_of(mask), *args)
    ours = rejected_rows(tensor(gaps), torch.zeros(4, 3), tensor(mask).bool(), [low, high])
    assert [not any(row) for row in theirs] == ours.tolist() == [False, True, False, False]
